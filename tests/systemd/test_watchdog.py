"""Lanes that hang: systemd ends them, their threads say where they were, and the next start decides by evidence.

The hangs are planted by tests.systemd.hanging, which takes the place of brainlaned in these machines alone.
"""

import time

import pytest

from brainlaned import events
from brainlaned.wire import Reason
from tests.systemd.installed import MEMBER, TESTS_INSIDE, InstalledLane, only_debian13
from tests.systemd.machine import wait_until

WATCHDOG_S = 3
KILLED_WITHIN_S = WATCHDOG_S + 2
LIMITS = "connect_s = 0.5\nfirst_byte_s = 1\nidle_s = 1\ntotal_s = 1"
LONG_LIMITS = "total_s = 600"


@pytest.fixture
def lane(lane: InstalledLane) -> InstalledLane:
    """A lane that can be made to hang, watched closely; its calls may not take long."""
    lane.drop_in(
        "[Service]",
        f"WatchdogSec={WATCHDOG_S}",
        "Environment=PYTHONPATH=/usr/lib/brainlane",
        "ExecStart=",
        f"ExecStart=/usr/bin/python3 -P {TESTS_INSIDE}/systemd/hanging.py",
    )
    lane.configure(route=LIMITS)
    return lane.start()


def hang_at(lane: InstalledLane, cut: str) -> None:
    lane.machine.put(f"{lane.state}/hang-at", cut, 0o600, owner="brainlane:brainlane")


def moment(entry: dict[str, str]) -> float:
    return int(entry["__REALTIME_TIMESTAMP"]) / 1_000_000


def killed_by_the_watchdog(lane: InstalledLane) -> dict[str, str]:
    """Wait until the watchdog has ended it once, and return systemd's word about it."""

    def found() -> list[dict[str, str]]:
        return [entry for entry in lane.journal("_PID=1") if "Watchdog timeout" in entry["MESSAGE"]]

    wait_until(lambda: bool(found()), "the watchdog kills it", 60)
    wait_until(
        lambda: lane.show("NRestarts", "ActiveState") == {"NRestarts": "1", "ActiveState": "active"}, "it is back"
    )
    (kill,) = found()
    return kill


def tells_of_the_watchdog(lane: InstalledLane) -> None:
    """See that everybody who looks learns how the last run ended."""
    words = "the watchdog killed it, since it gave no sign of life"
    assert words in " ".join(lane.brainctl("status", user=MEMBER).stdout.split())
    assert words in lane.get("/v1/status").json["last_run"]["ending"]
    (died,) = lane.journal(f"MESSAGE_ID={events.IDS['last_run_died']}")
    assert words in died["MESSAGE"]
    said = lane.said()
    assert "Fatal Python error: Aborted" in said
    assert said.count("most recent call first") > 2  # the main thread, the worker, the acceptor and more
    assert "hanging.py" in said


@pytest.mark.parametrize(
    ("cut", "status", "reason", "asked"),
    [
        ("claimed", "done", Reason.ANSWERED, 1),
        ("sent", "held", Reason.SENT_OUTCOME_UNKNOWN, 1),
    ],
    ids=["before-anything-was-sent", "after-the-request-was-sent"],
)
def test_a_worker_that_hangs_is_ended_while_the_lane_still_answers(
    lane: InstalledLane, cut: str, status: str, reason: Reason, asked: int
) -> None:
    hang_at(lane, cut)
    job = lane.submit("unlucky")
    lane.wait_for_status(job["id"], "running")
    assert lane.get("/v1/healthz").status == 200
    later = lane.submit("later")
    kill = killed_by_the_watchdog(lane)
    (starved,) = lane.journal(f"MESSAGE_ID={events.IDS['watchdog_starved']}")
    assert "longer than it declared" in starved["MESSAGE"]
    assert moment(kill) - moment(starved) < KILLED_WITHIN_S
    tells_of_the_watchdog(lane)
    assert "brainlane-worker" in lane.said() or "worker.py" in lane.said()
    found = lane.has_moved(job["id"], status)
    assert found["reason"] == reason
    first = lane.get(f"/v1/jobs/{job['id']}").json["attempts"][0]
    assert "the watchdog killed it" in first["detail"]
    lane.has_moved(later["id"], "done")
    assert lane.brain.prompts().count("unlucky") == asked


def test_an_event_loop_that_hangs_is_ended(lane: InstalledLane) -> None:
    job = lane.answered("before")
    lane.machine.systemctl("kill", "--kill-whom=main", "--signal=USR1", "brainlaned")
    killed_by_the_watchdog(lane)
    tells_of_the_watchdog(lane)
    assert lane.answered("after")["id"] == job["id"] + 1


@only_debian13
def test_a_process_that_is_stopped_is_ended(lane: InstalledLane) -> None:
    hang_at(lane, "sent")
    job = lane.submit("unlucky")
    lane.wait_for_status(job["id"], "running")
    lane.machine.systemctl("kill", "--kill-whom=main", "--signal=STOP", "brainlaned")
    killed_by_the_watchdog(lane)
    tells_of_the_watchdog(lane)
    assert lane.has_moved(job["id"], "held")["reason"] == Reason.SENT_OUTCOME_UNKNOWN


@only_debian13
def test_a_call_that_is_silent_within_its_limits_is_left_alone(lane: InstalledLane) -> None:
    lane.configure(route=LONG_LIMITS)
    lane.machine.systemctl("restart", "brainlaned")
    pid = lane.main_pid()
    job = lane.call_in_flight()
    time.sleep(3 * WATCHDOG_S + 1)  # for a watchdog that does not know what the worker has declared
    assert (lane.main_pid(), lane.show("NRestarts")) == (pid, {"NRestarts": "0"})
    lane.brain.release()
    assert lane.has_moved(job["id"], "done")["attempt_count"] == 1
    assert lane.journal(f"MESSAGE_ID={events.IDS['watchdog_starved']}") == []
