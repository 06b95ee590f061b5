"""The power goes at every sync of a recorded run, and a lane is started in what it left (tests/powercut.py).

A failure names the seed, the cut and the recording; `python -m tests.powercut --run DIRECTORY --seed SEED` goes on from
there. POWER_CUT_SEED gives the seed.
"""

import logging
import os
import random
from pathlib import Path

import pytest

from tests.powercut import (
    PAGE,
    Call,
    Replay,
    TracedLane,
    faults_of_a_start,
    read_traces,
    reason_not_to_trace,
    record,
    replay,
)

SEED = int(os.environ.get("POWER_CUT_SEED") or random.randrange(2**32))
STARTS = 8
"""In so many states a real daemon is started, which costs about a second each."""

REASON = reason_not_to_trace()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

Recorded = tuple[TracedLane, list[Call]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    lane = record(tmp_path_factory.mktemp("recorded"))
    return lane, read_traces(lane.traces)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="brainlaned")  # hundreds of recoveries in this process


def test_whatever_a_power_cut_leaves_holds_every_promise(recorded: Recorded) -> None:
    lane, calls = recorded
    # What is lost between the pages of a spool has a test of its own.
    report = replay(lane, None, SEED, calls=calls)
    assert not report.faults, str(report)
    # The run was worth it: SQLite's log was copied back while the lane ran and at both ends.
    cuts = list(Replay(calls, lane.state_dir, lane.config).cuts())
    assert cuts.count("after the fdatasync of brainlane.db") >= 3 and len(cuts) > 200


def test_a_lane_started_after_a_power_cut_asks_nothing_again(recorded: Recorded) -> None:
    lane, calls = recorded
    report = replay(lane, STARTS, SEED, calls=calls, check=faults_of_a_start)
    assert not report.faults, str(report)


@pytest.mark.parametrize("what", ["brainlane.db-wal", "spool", ".part"])
def test_a_lane_that_left_out_a_sync_would_be_found_out(what: str, recorded: Recorded) -> None:
    lane, calls = recorded
    unsynced = [call for call in calls if not (call.name.endswith("sync") and call.where.endswith(what))]
    assert len(unsynced) < len(calls)
    assert replay(lane, None, SEED, calls=unsynced, most_faults=1).faults


def test_an_answer_that_lost_a_page_is_not_taken_for_a_complete_one(recorded: Recorded) -> None:
    lane, calls = recorded
    tried = set()

    def faults(moving: Replay, found: Path) -> list[str]:
        for number, file in moving.spools.items():
            part = found / "spool" / f"{number}-1.part"
            content = file.live()
            if part.exists() and len(file.durable) <= PAGE and len(content) > 2 * PAGE:
                tried.add(number)
                part.write_bytes(content[:PAGE] + bytes(PAGE) + content[2 * PAGE :])
                return moving.faults(found)
        return []

    report = replay(lane, None, SEED, calls=calls, check=faults, most_faults=10**6)
    if not tried:
        pytest.skip("every long answer was synced in its middle")
    assert not report.faults, str(report)
