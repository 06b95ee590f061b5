"""Starts that take longer than systemd would give them: every real step asks for more time, one that hangs does not.

The steps are those of a new version, whose migration the tests plant, and of the recovery after a death in a call. All
is slowed down by tests.systemd.hanging, which takes the place of brainlaned in these machines alone.
"""

import pytest

from brainlaned import events
from brainlaned.wire import Reason
from tests.systemd.hanging import LOOK_S, MAY_HANG, START_SILENCE_S, TAKES
from tests.systemd.installed import TESTS_INSIDE, InstalledLane, only_debian13
from tests.systemd.machine import wait_until

START_LIMIT_S = START_SILENCE_S
"""The same as a step asks for, so that neither the limit nor the first step can carry the whole start."""

STOP_LIMIT_S = 3
STEPS = 40
PAUSE_S = 0.5
RECOVERY_S = 5.0
NEXT_VERSION = 9000
STARTING = "7d4958e842da4a758f6c1cdc7b36dcc5"
"""What systemd says when it begins to start a unit (sd-messages.h)."""

SLOWLY = "\n".join(
    [
        "create table numbers (number integer) strict;",
        *[f"insert into numbers values (1) {TAKES.format(PAUSE_S)};"] * STEPS,  # noqa: S608 - of constants
    ]
)
HANGING = f"create table numbers (number integer) strict;\ninsert into numbers values (0) {MAY_HANG};\n"


@pytest.fixture
def lane(lane: InstalledLane) -> InstalledLane:
    """A lane that runs, and whose next start can be made slow, or hang."""
    lane.drop_in(
        "[Service]",
        f"TimeoutStartSec={START_LIMIT_S}",
        f"TimeoutStopSec={STOP_LIMIT_S}",
        f"Environment=PYTHONPATH=/usr/lib/brainlane {LOOK_S}={RECOVERY_S}",
        "ExecStart=",
        f"ExecStart=/usr/bin/python3 -P {TESTS_INSIDE}/systemd/hanging.py",
    )
    return lane.start()


def upgrade(lane: InstalledLane, migration: str) -> None:
    """Install a version with a new schema, which the next start brings the database to."""
    lane.machine.put(f"/usr/lib/brainlane/brainlaned/migrations/{NEXT_VERSION}_next.sql", migration)


def die(lane: InstalledLane) -> None:
    """Have the daemon vanish, and systemd notice it."""
    pid = lane.main_pid()
    lane.machine.systemctl("kill", "--kill-whom=main", "--signal=KILL", "brainlaned")
    wait_until(lambda: lane.main_pid() != pid, "systemd has noticed it")


def in_the_database(lane: InstalledLane, sql: str) -> str:
    """Ask the database itself, which answers whether or not the lane does."""
    database = f"{lane.state}/brainlane.db"
    return lane.machine.run("sqlite3", "-readonly", database, sql, user="brainlane").stdout.strip()


def moment(entry: dict[str, str]) -> float:
    return int(entry["__MONOTONIC_TIMESTAMP"]) / 1_000_000


@only_debian13
def test_a_start_of_many_real_steps_may_outlast_its_limit_and_is_ready_when_all_is_decided(
    lane: InstalledLane,
) -> None:
    job = lane.call_in_flight()
    upgrade(lane, SLOWLY)
    die(lane)
    lane.machine.systemctl("start", "brainlaned", timeout=300)
    # Now it is ready. Not asked of the lane, which might decide something between being ready and the answer.
    assert in_the_database(lane, "pragma user_version") == str(NEXT_VERSION)
    assert in_the_database(lane, "select count(*) from numbers") == str(STEPS)
    assert in_the_database(lane, "select status from jobs") == "held"
    assert in_the_database(lane, "select count(*) from job_attempts where ended_at is null") == "0"
    assert lane.show("ActiveState", "Result") == {"ActiveState": "active", "Result": "success"}
    # One start has done it all.
    _, began = lane.journal(f"MESSAGE_ID={STARTING}")
    _, ready = lane.journal(f"MESSAGE_ID={events.IDS['ready']}")
    assert moment(ready) - moment(began) > 2 * START_LIMIT_S
    assert "timed out" not in lane.said()
    held = lane.get(f"/v1/jobs/{job['id']}").json
    assert (held["status"], held["reason"]) == ("held", Reason.SENT_OUTCOME_UNKNOWN)
    assert lane.answered()["id"] == job["id"] + 1
    assert lane.brain.prompts() == ["long", "still there?"]


def hang_at(lane: InstalledLane, cut: str) -> None:
    lane.machine.put(f"{lane.state}/hang-at", cut, 0o600, owner="brainlane:brainlane")


def is_there_again(lane: InstalledLane) -> None:
    """Wait until systemd has given up the second start, and the third has succeeded."""
    wait_until(lambda: "start operation timed out" in lane.said(), "systemd gives up the start", 120)
    wait_until(lambda: len(lane.journal(f"MESSAGE_ID={STARTING}")) == 3, "systemd tries again", 120)
    lane.machine.systemctl("start", "brainlaned", timeout=300)


@pytest.mark.parametrize("cut", ["migrating", "recovering"])
@only_debian13
def test_a_step_that_hangs_is_ended_by_systemd_and_the_next_start_does_it_anew(lane: InstalledLane, cut: str) -> None:
    job = lane.call_in_flight()
    upgrade(lane, HANGING)
    hang_at(lane, cut)
    die(lane)
    is_there_again(lane)
    _, hung, _ = lane.journal(f"MESSAGE_ID={STARTING}")
    (ended,) = [entry for entry in lane.journal("_PID=1") if "start operation timed out" in entry["MESSAGE"]]
    # Nothing asked for more time after the last step that was made.
    assert moment(ended) - moment(hung) < 2 * START_LIMIT_S + STOP_LIMIT_S
    # What was begun by the start that hung left nothing behind, or is whole.
    assert in_the_database(lane, "pragma user_version") == str(NEXT_VERSION)
    assert in_the_database(lane, "select group_concat(number) from numbers") == "0"
    held = lane.get(f"/v1/jobs/{job['id']}").json
    assert (held["status"], held["reason"], held["attempt_count"]) == ("held", Reason.SENT_OUTCOME_UNKNOWN, 1)
    assert lane.answered()["id"] == job["id"] + 1
    assert lane.brain.prompts() == ["long", "still there?"]


@only_debian13
def test_the_start_after_one_that_hung_says_so(lane: InstalledLane) -> None:
    upgrade(lane, HANGING)
    hang_at(lane, "migrating")
    lane.machine.systemctl("restart", "brainlaned", check=False)
    is_there_again(lane)
    words = "systemd killed it, since it took too long to start or to stop"
    told = [entry["MESSAGE"] for entry in lane.journal(f"MESSAGE_ID={events.IDS['last_run_died']}")]
    told.append(" ".join(lane.brainctl("status").stdout.split()))
    assert any(words in each for each in told), told
