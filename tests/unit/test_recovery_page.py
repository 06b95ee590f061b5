"""The man page about recovery holds the same table as the module that carries it out."""

import re
from itertools import zip_longest
from pathlib import Path

import pytest

from brainlaned import recovery
from brainlaned.wire import Decision

PAGE = Path(__file__).parents[2] / "man" / "brainlane-recovery.7"
SECTIONS = ["NAME", "DESCRIPTION", "THE TABLE", "WHAT AN OPERATOR MAY DO", "SEE ALSO"]


def plain(text: str) -> str:
    """Take the markup of either document away: quotes of code there, fonts and escapes here."""
    return re.sub(r"\\f[BIRP]|`", "", text).replace(r"\-", "-").strip()


def rows_of_module() -> list[tuple[str, str]]:
    lines = [line for line in (recovery.__doc__ or "").splitlines() if line.startswith("|")]
    rows = [tuple(plain(cell) for cell in line.strip("|").split("|")) for line in lines[2:]]
    return [(evidence, verdict) for evidence, verdict in rows]


def section(name: str) -> str:
    return PAGE.read_text().partition(f".SH {name}\n")[2].partition("\n.SH ")[0]


def rows_of_page() -> list[tuple[str, str]]:
    entries = section("THE TABLE").split(".TP\n")[1:]
    return [(plain(evidence), plain(verdict)) for evidence, _, verdict in (each.partition("\n") for each in entries)]


ROWS = list(zip_longest(rows_of_module(), rows_of_page()))


def test_there_is_a_table() -> None:
    assert len(rows_of_module()) >= 15


@pytest.mark.parametrize(("module", "page"), ROWS, ids=range(1, len(ROWS) + 1))
def test_each_row_of_the_page_is_that_of_the_module(module: tuple[str, str], page: tuple[str, str]) -> None:
    assert page == module


def test_the_page_has_its_sections_in_order() -> None:
    assert re.findall(r"^\.SH (.+)$", PAGE.read_text(), re.MULTILINE) == SECTIONS


@pytest.mark.parametrize("decision", list(Decision))
def test_each_decision_of_an_operator_is_explained(decision: Decision) -> None:
    assert f"--{decision}" in plain(section("WHAT AN OPERATOR MAY DO"))
