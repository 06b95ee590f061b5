"""Nothing that a stranger wrote moves the cursor, turns the line around or widens it."""

import json
import shlex
import subprocess
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brainctl import text

ANY_TEXT = st.text(st.characters(exclude_categories=()))


@given(ANY_TEXT)
def test_safe_text_holds_no_control_and_no_bidirectional_character(words: str) -> None:
    shown = text.safe(words)
    assert not [c for c in shown if unicodedata.category(c) in {"Cc", "Cs", "Zl", "Zp"} and c not in "\t\n"]
    assert not [c for c in shown if unicodedata.bidirectional(c) in {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI"}]


@given(ANY_TEXT)
def test_one_line_is_one_line(words: str) -> None:
    assert len(text.one_line(words).splitlines()) <= 1


@given(ANY_TEXT)
def test_escaped_json_means_the_same(words: str) -> None:
    document = json.dumps({"text": words, "n": [1, None]}, ensure_ascii=False)
    escaped = text.safe_json(document)
    assert json.loads(escaped) == json.loads(document)
    assert not text.UNSAFE.search(escaped)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("plain né 好 🌍", "plain né 好 🌍"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("nul\x00", "nul\\x00"),
        ("c1 \x9b2J", "c1 \\x9b2J"),
        ("over\rwritten", "over\\x0dwritten"),
        ("turned \u202earound", "turned \\u202earound"),
        ("line\u2028break", "line\\u2028break"),
        ("noncharacter \uffff", "noncharacter \\uffff"),
        ("tag \U000e0041", "tag \\U000e0041"),
        ("kept\n\tas it is", "kept\n\tas it is"),
        ("👩\u200d🚀", "👩\u200d🚀"),
    ],
)
def test_what_a_terminal_would_obey_is_shown_instead(words: str, shown: str) -> None:
    assert text.safe(words) == shown


@given(ANY_TEXT, st.integers(0, 30))
def test_a_cut_line_fits(words: str, columns: int) -> None:
    assert text.width(text.cut(text.one_line(words), columns)) <= columns


def test_wide_and_combining_characters_are_measured_in_columns() -> None:
    assert text.width("né") == 2
    assert text.width("ne\u0301") == 2
    assert text.width("好🌍") == 4
    assert text.cut("好好好", 5) == "好好…"
    assert text.pad("好", 4) == "好  "


def as_a_shell_reads(lines: list[str]) -> list[str]:
    done = subprocess.run(
        ["/bin/sh", "-c", "printf '%s\\n' " + "\n".join(lines).removeprefix("next: ")],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


WORD = st.text(st.characters(categories=("L", "N"), include_characters=" '\"$\\/-_.=*"), min_size=1, max_size=100)


@settings(max_examples=25, deadline=None)
@given(st.lists(WORD, max_size=4), st.integers(20, 100), st.sampled_from([None, "next: "]))
def test_a_command_that_is_set_in_lines_is_still_the_same_command(
    words: list[str], columns: int, first: str | None
) -> None:
    lines = text.command(shlex.join(["brainctl", *words]), columns, "    ", first)
    assert as_a_shell_reads(lines) == ["brainctl", *words]


@settings(deadline=None)
@given(st.lists(st.text("abc/-.0", min_size=1, max_size=120), max_size=6), st.integers(20, 100))
def test_a_command_of_plain_words_fits_the_line_however_long_they_are(words: list[str], columns: int) -> None:
    assert all(len(line) <= columns for line in text.command(" ".join(["brainctl", *words]), columns, "    "))


@settings(deadline=None)
@given(ANY_TEXT, st.integers(20, 100))
def test_wrapped_words_fit_the_line_and_none_is_lost(words: str, columns: int) -> None:
    lines = text.wrapped(words, columns, "  ", "first ")
    assert all(text.width(line) <= columns for line in lines)
    shown = "".join([lines[0].removeprefix("first "), *(line.removeprefix("  ") for line in lines[1:])])
    assert shown.replace(" ", "") == text.one_line(words).replace(" ", "")


def test_every_mark_that_turns_hides_or_breaks_a_line_is_escaped() -> None:
    bidirectional = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
    unseen = [0x00AD, 0x200B, 0x2060, 0x2063, 0x3164, 0xFEFF, 0xE0001, 0xE0100]
    controls = [*range(0x00, 0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), 0x2028, 0x2029]
    for code in bidirectional + unseen + controls:
        assert text.safe(f"a{chr(code)}b").isascii(), hex(code)
        assert json.loads(text.safe_json(json.dumps(chr(code), ensure_ascii=False))) == chr(code)
