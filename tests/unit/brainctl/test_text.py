"""Nothing that a stranger wrote moves the cursor, turns the line around or widens it."""

import json
import unicodedata

import pytest
from hypothesis import given
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
