import itertools
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import freezegun
import pytest

from brainlaned import config, record, store, wire
from brainlaned.db import Database, Transaction
from brainlaned.gate import JITTER, Gates
from brainlaned.states import Closing, Evidence, Verdict
from brainlaned.wire import AttemptStatus, GateReason, Reason, Status

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
ROUTES = {
    "near": config.Route("near", "http://127.0.0.1:1/v1", "small"),
    "far": config.Route("far", "http://brain.example/v1", "large", retry_first_s=10, retry_cap_s=100),
}
ALICE = store.Caller(uid=1000)
MARK = "2026-03-01T12:00:01.000000Z"

UNREACHABLE = Closing(GateReason.UNREACHABLE, "connection refused")
KEY_REFUSED = Closing(GateReason.KEY_REFUSED, "HTTP 401", operator_only=True)
DONE = Verdict(Status.DONE, AttemptStatus.SUCCEEDED, Reason.ANSWERED, "HTTP 200", text="hi", response="{}", opens=True)
NO_WAY = Verdict(
    Status.QUEUED, AttemptStatus.INTERRUPTED, Reason.NOT_SENT, "refused", uses_attempt=False, closes=UNREACHABLE
)

Answer = TypeVar("Answer")


def put_off(*, strike: bool = True, wait_s: float | None = 30) -> Verdict:
    closing = Closing(GateReason.ASKED_TO_WAIT, "HTTP 429", wait_s=wait_s, strike=strike)
    return Verdict(
        Status.QUEUED, AttemptStatus.FAILED, Reason.ASKED_TO_WAIT, "HTTP 429", uses_attempt=False, closes=closing
    )


class Lane:
    """A database with two routes and their gates. `jitter` answers with what the test says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.factor: float | None = None
        self.asked: list[tuple[float, float]] = []
        self.open()
        self.write(lambda tx: store.begin_run(tx, "run", 1, "brainctl", list(ROUTES)))

    def open(self) -> None:
        self.database = Database(self.path)
        self.database.open()
        self.gates = Gates(ROUTES, self.jitter)

    def jitter(self, low: float, high: float) -> float:
        self.asked.append((low, high))
        return low if self.factor is None else self.factor

    def write(self, change: Callable[[Transaction], Answer]) -> Answer:
        with self.database.write() as tx:
            return change(tx)

    def close(self, route: str = "near", closing: Closing = UNREACHABLE) -> float | None:
        """Close a gate and return after how many seconds it is to be probed."""
        probe = self.write(lambda tx: self.gates.close(tx, route, closing))
        return None if probe is None else (wire.parse_time(probe) - datetime.now(UTC)).total_seconds()

    def doors(self) -> dict[str, bool]:
        """The routes that may be asked now, and whether that is a probe."""
        return {route.route.name: route.is_probe for route in self.write(self.gates.open_routes)}

    def row(self, route: str = "near") -> dict[str, Any]:
        with self.database.read() as connection:
            return dict(connection.execute("select * from gates where route = :r", {"r": route}).fetchone())

    def submit(self, route: str = "near") -> int:
        asked = store.Submission("{}", "d", route, "small", False, 3)
        return self.write(lambda tx: store.accept(tx, asked, ALICE, 0, 1000)[0])

    def try_one(self, verdict: Verdict) -> int | None:
        """Claim the next job and end it so. Return its id."""
        claim = self.write(lambda tx: store.claim_next(tx, self.gates.open_routes(tx), "run"))
        if claim is None:
            return None
        seen = Evidence() if verdict.attempt is AttemptStatus.INTERRUPTED else Evidence(armed_at=MARK)
        place = (claim.job_id, claim.attempt, claim.route)
        self.moved = self.write(lambda tx: record.record(tx, self.gates, *place, seen, verdict)).moved
        return claim.job_id

    def job(self, job_id: int) -> dict[str, Any]:
        with self.database.read() as connection:
            return dict(connection.execute("select * from jobs where id = :id", {"id": job_id}).fetchone())


Clock = Any


@pytest.fixture
def clock() -> Iterator[Clock]:
    with freezegun.freeze_time(NOON, ignore=["_pytest"]) as frozen:
        yield frozen


@pytest.fixture
def lane(tmp_path: Path, clock: Clock) -> Iterator[Lane]:
    made = Lane(tmp_path / "brainlane.db")
    yield made
    made.database.close()


# Closing and probing.


def test_every_route_begins_with_an_open_door(lane: Lane) -> None:
    assert lane.doors() == {"far": False, "near": False}


def test_a_closed_gate_is_not_asked_before_its_time_and_then_as_a_probe(lane: Lane, clock: Clock) -> None:
    assert lane.close(closing=Closing(GateReason.ASKED_TO_WAIT, "HTTP 429", wait_s=30)) == 30
    assert lane.doors() == {"far": False}
    clock.tick(29.9)
    assert lane.doors() == {"far": False}
    clock.tick(0.1)
    assert lane.doors() == {"far": False, "near": True}


def test_a_closed_gate_tells_why_and_since_when(lane: Lane, clock: Clock) -> None:
    lane.close()
    clock.tick(60)
    lane.close(closing=Closing(GateReason.ASKED_TO_WAIT, "HTTP 429", wait_s=30))
    row = lane.row()
    assert (row["reason"], row["detail"], row["refusals"]) == ("asked-to-wait", "HTTP 429", 2)
    assert row["closed_at"] == wire.format_time(NOON)
    assert row["next_probe_at"] == wire.format_time(NOON + timedelta(seconds=90))


def test_waits_that_nobody_named_double_up_to_the_cap(lane: Lane) -> None:
    assert [lane.close("far") for _ in range(6)] == [10, 20, 40, 80, 100, 100]
    assert [lane.close("near") for _ in range(11)] == [2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600]


def test_no_number_of_refusals_is_too_large_to_count_with(lane: Lane) -> None:
    lane.write(lambda tx: tx.execute("update gates set refusals = 1000000000"))
    assert lane.close("near") == 600


def test_jitter_lengthens_a_growing_wait_by_up_to_a_fifth_and_never_shortens_it(lane: Lane) -> None:
    lane.factor = 1.2
    assert lane.close("far") == 12
    assert lane.asked == [(1.0, 1.0 + JITTER)]
    assert JITTER == 0.2


def test_real_jitter_stays_within_its_bounds(lane: Lane) -> None:
    lane.gates = Gates(ROUTES)
    for _ in range(50):
        wait_s = lane.close("far")
        assert wait_s is not None and 10 <= wait_s <= 12
        lane.write(lambda tx: lane.gates.open(tx, "far"))


def test_a_wait_that_the_brain_named_is_kept_to_the_letter(lane: Lane) -> None:
    lane.factor = 1.2
    assert lane.close(closing=Closing(GateReason.ASKED_TO_WAIT, "HTTP 429", wait_s=45.5)) == 45.5
    assert lane.asked == []


def test_after_the_first_minute_a_dead_endpoint_is_asked_once_in_thirty_seconds_at_most(
    lane: Lane, clock: Clock
) -> None:
    lane.submit()
    asked_at = []
    for _ in range(14):
        assert lane.try_one(NO_WAY) is not None
        asked_at.append((datetime.now(UTC) - NOON).total_seconds())
        clock.move_to(wire.parse_time(lane.row()["next_probe_at"]))
    late = [(one, other) for one, other in itertools.pairwise(asked_at) if one >= 60]
    assert len(late) > 5
    assert all(other - one >= 30 for one, other in late)
    assert lane.job(1)["attempts_used"] == 0


@pytest.mark.parametrize("wait_s", [0.0, 0.001])
def test_a_brain_that_always_names_no_wait_at_all_is_not_asked_in_a_circle(lane: Lane, wait_s: float) -> None:
    closing = Closing(GateReason.ASKED_TO_WAIT, "HTTP 503", wait_s=wait_s)
    for _ in range(8):
        next_s = lane.close(closing=closing)
    assert next_s is not None and next_s >= ROUTES["near"].retry_first_s


def test_a_gate_of_a_route_that_nobody_knows_is_not_closed(lane: Lane) -> None:
    assert lane.close("gone") is None
    with lane.database.read() as connection:
        assert connection.execute("select count(*) from gates").fetchone()[0] == 2


def test_a_route_that_left_the_configuration_is_not_asked_and_keeps_its_gate(lane: Lane) -> None:
    lane.close("near", KEY_REFUSED)
    lane.write(lambda tx: store.begin_run(tx, "second", 2, "brainctl", ["far"]))
    assert lane.doors() == {"far": False}
    lane.write(lambda tx: store.begin_run(tx, "third", 3, "brainctl", ["far", "near"]))
    assert lane.doors() == {"far": False}
    assert lane.row()["reason"] == "key-refused"


# Opening.


def test_a_gate_that_only_the_operator_opens_is_never_probed(lane: Lane, clock: Clock) -> None:
    assert lane.close(closing=KEY_REFUSED) is None
    clock.tick(timedelta(days=3650))
    assert lane.doors() == {"far": False}
    assert lane.row()["next_probe_at"] is None
    assert lane.write(lambda tx: lane.gates.open(tx, "near")) is True
    assert lane.doors() == {"far": False, "near": False}


def test_an_opened_gate_has_forgotten_its_refusals(lane: Lane) -> None:
    lane.close()
    lane.close()
    assert lane.write(lambda tx: lane.gates.open(tx, "near")) is True
    row = lane.row()
    assert [row[name] for name in ("reason", "detail", "closed_at", "next_probe_at", "refusals")] == [None] * 4 + [0]
    assert lane.write(lambda tx: lane.gates.open(tx, "near")) is False
    assert lane.close() == 2


def test_a_real_answer_opens_the_gate(lane: Lane, clock: Clock) -> None:
    lane.submit()
    lane.submit()
    lane.try_one(NO_WAY)
    clock.tick(5)
    assert lane.try_one(DONE) == 1
    assert lane.doors()["near"] is False


def test_what_is_no_real_answer_does_not_open_it(lane: Lane, clock: Clock) -> None:
    held = Verdict(Status.HELD, AttemptStatus.UNKNOWN, Reason.SENT_OUTCOME_UNKNOWN, "no answer came")
    lane.submit()
    lane.try_one(NO_WAY)
    clock.tick(5)
    assert lane.try_one(held) == 1
    assert lane.row()["reason"] == "unreachable"


@pytest.mark.parametrize("closing", [UNREACHABLE, KEY_REFUSED], ids=["probed", "operator"])
def test_a_gate_survives_a_restart(lane: Lane, clock: Clock, closing: Closing) -> None:
    lane.close()
    lane.close(closing=closing)
    before = lane.row()
    lane.database.close()
    lane.open()
    lane.write(lambda tx: store.begin_run(tx, "second", 2, "brainctl", list(ROUTES)))
    assert lane.row() == before
    assert lane.doors() == {"far": False}
    if not closing.operator_only:
        clock.tick(4)
        assert lane.doors() == {"far": False, "near": True}
        assert lane.close() == 8


def test_the_jobs_behind_a_closed_gate_stay_queued_and_lose_no_attempt(lane: Lane) -> None:
    jobs = [lane.submit() for _ in range(3)]
    refused = Verdict(
        Status.QUEUED, AttemptStatus.FAILED, Reason.ROUTE_REFUSED, "HTTP 401", uses_attempt=False, closes=KEY_REFUSED
    )
    assert lane.try_one(refused) == jobs[0]
    assert lane.try_one(DONE) is None
    assert [(lane.job(job)["status"], lane.job(job)["attempts_used"]) for job in jobs] == [("queued", 0)] * 3
    other = lane.submit("far")
    assert lane.try_one(DONE) == other


# Suspects: one job that its brain will not have cannot wedge the lane.


def put_off_until_suspect(lane: Lane, clock: Clock) -> tuple[int, int]:
    """Submit two jobs and let the first be put off three times in a row."""
    first, second = lane.submit(), lane.submit()
    for _ in range(3):
        assert lane.try_one(put_off()) == first
        clock.tick(30)
    return first, second


def test_after_the_third_put_off_in_a_row_the_probe_is_made_with_the_next_job(lane: Lane, clock: Clock) -> None:
    first, second = lane.submit(), lane.submit()
    for _ in range(2):
        assert lane.try_one(put_off()) == first
        clock.tick(30)
    assert lane.try_one(put_off()) == first
    clock.tick(30)
    assert lane.try_one(DONE) == second


def test_when_the_next_job_is_served_the_suspect_is_held(lane: Lane, clock: Clock) -> None:
    first, second = put_off_until_suspect(lane, clock)
    assert lane.try_one(DONE) == second
    job = lane.job(first)
    assert (job["status"], job["reason"], job["strikes"]) == ("held", "refused-repeatedly", 0)
    assert "3 times" in job["detail"] and f"job {second}" in job["detail"]
    assert lane.moved == [second, first]
    assert lane.doors()["near"] is False


def test_when_the_next_job_is_put_off_as_well_the_suspect_is_cleared(lane: Lane, clock: Clock) -> None:
    first, second = put_off_until_suspect(lane, clock)
    assert lane.try_one(put_off()) == second
    assert lane.job(first)["strikes"] == 0
    clock.tick(30)
    assert lane.try_one(DONE) == first
    assert lane.job(second)["status"] == "queued"


def test_a_suspect_that_is_alone_in_line_is_probed_with_itself_and_may_still_be_served(
    lane: Lane, clock: Clock
) -> None:
    only = lane.submit()
    for _ in range(4):
        assert lane.try_one(put_off()) == only
        clock.tick(30)
    assert lane.try_one(DONE) == only
    assert lane.job(only)["status"] == "done"


def test_a_brain_that_loads_its_model_makes_nobody_a_suspect(lane: Lane, clock: Clock) -> None:
    first, _ = lane.submit(), lane.submit()
    for _ in range(5):
        assert lane.try_one(put_off(strike=False)) == first
        clock.tick(30)


def test_an_endpoint_that_is_down_makes_nobody_a_suspect(lane: Lane, clock: Clock) -> None:
    first, _ = lane.submit(), lane.submit()
    for _ in range(5):
        assert lane.try_one(NO_WAY) == first
        clock.tick(700)


def test_a_suspect_of_one_route_is_not_held_for_the_service_of_another(lane: Lane, clock: Clock) -> None:
    first = lane.submit("near")
    for _ in range(3):
        assert lane.try_one(put_off()) == first
        clock.tick(1)
        other = lane.submit("far")
        assert lane.try_one(DONE) == other
        clock.tick(29)
    assert (lane.job(first)["status"], lane.job(first)["strikes"]) == ("queued", 3)


def test_a_suspect_goes_first_again_once_the_operator_opens_the_gate(lane: Lane, clock: Clock) -> None:
    first, _ = put_off_until_suspect(lane, clock)
    lane.write(lambda tx: lane.gates.open(tx, "near"))
    assert lane.try_one(DONE) == first
