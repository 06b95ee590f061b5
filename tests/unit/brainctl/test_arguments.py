"""Words of the command line become values, or are refused by name."""

from datetime import UTC, datetime, timedelta

import pytest
import typer
from freezegun import freeze_time

from brainctl import arguments
from brainlaned.wire import format_time

NOW = datetime(2026, 1, 31, 22, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("word", "before"),
    [
        ("0s", timedelta()),
        ("90s", timedelta(seconds=90)),
        ("30m", timedelta(minutes=30)),
        ("2h", timedelta(hours=2)),
        ("7d", timedelta(days=7)),
        ("2w", timedelta(days=14)),
    ],
)
def test_an_age_is_a_moment_so_long_ago(word: str, before: timedelta) -> None:
    with freeze_time(NOW):
        assert arguments.moment(word) == format_time(NOW - before)


@pytest.mark.parametrize("word", ["2026-01-31T22:00:00Z", "2026-01-31T22:00:00+00:00", "2026-02-01T03:30:00+05:30"])
def test_a_time_with_its_offset_is_taken_as_the_lane_would(word: str) -> None:
    assert arguments.moment(word) == "2026-01-31T22:00:00.000000Z"


@pytest.mark.parametrize(
    "word", ["", "2", "h", "-2h", "1.5h", "2 h", "2y", "2h30m", "2026-01-31", "2026-01-31T22:00:00", "999999999w", "٣h"]
)
def test_what_is_neither_is_refused_by_name(word: str) -> None:
    with pytest.raises(typer.BadParameter, match="neither an age"):
        arguments.moment(word)
