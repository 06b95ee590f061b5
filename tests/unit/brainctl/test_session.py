"""Whoever pastes what he is told to try meets the lane that told him."""

import pytest

from brainctl.session import Session


@pytest.mark.parametrize(
    ("command", "pasted"),
    [
        ("brainctl list", "brainctl --lane gpu list"),
        ("brainctl submit --key=a '--lane of it'", "brainctl --lane gpu submit --key=a '--lane of it'"),
        ("look, or brainctl --answer-within 60 ...", "look, or brainctl --lane gpu --answer-within 60 ..."),
        # What names a lane already is left alone, wherever before the verb that stands.
        ("brainctl --lane other show 5", "brainctl --lane other show 5"),
        ("brainctl --json --lane=other show 5", "brainctl --json --lane=other show 5"),
        ("brainctl --answer-within 9 --socket /s show 5", "brainctl --answer-within 9 --socket /s show 5"),
        ("systemctl status brainctl x", "systemctl status brainctl x"),
        ("man brainctl", "man brainctl"),
    ],
)
def test_a_command_to_paste_names_the_lane_that_was_meant(command: str, pasted: str) -> None:
    session = Session([])
    session.choose(None, "gpu", by_hand=False)
    assert session.here(command) == pasted


def test_a_lane_that_was_not_named_is_not_named_to_anybody() -> None:
    session = Session([])
    session.choose("/from/the/environment", None, by_hand=False)
    assert session.here("brainctl list") == "brainctl list"
    session.choose("/by hand", None, by_hand=True)
    assert session.here("brainctl list") == "brainctl --socket '/by hand' list"
