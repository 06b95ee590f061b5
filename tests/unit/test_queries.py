import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from brainlaned import config, decisions, errors, gate, queries, store, wire
from brainlaned.db import Database, Transaction
from brainlaned.queries import Selection
from brainlaned.states import Closing, Evidence, Verdict
from brainlaned.wire import AttemptStatus, ErrorKind, GateReason, Reason, Status, Waiting

ROUTES = {name: config.Route(name, f"http://127.0.0.1:1/{name}", "small") for name in ("near", "far")}
ALICE = store.Caller(uid=1000, user="alice", pid=77)
TOMORROW = datetime.now(UTC) + timedelta(days=1)
MARK = "2026-03-01T12:00:01.000000Z"
DONE = Verdict(Status.DONE, AttemptStatus.SUCCEEDED, Reason.ANSWERED, "HTTP 200", text="hi", response="{}")
FAILED = Verdict(Status.FAILED, AttemptStatus.FAILED, Reason.BAD_REQUEST, "HTTP 400")
HELD = Verdict(Status.HELD, AttemptStatus.UNKNOWN, Reason.SENT_OUTCOME_UNKNOWN, "no answer came")
AGAIN = Verdict(Status.QUEUED, AttemptStatus.FAILED, Reason.UPSTREAM_ERROR, "HTTP 500")
CANCELLED = Verdict(Status.CANCELLED, AttemptStatus.CANCELLED, Reason.CANCEL_REQUESTED, "cancelled")
AT_ONCE = {
    Status.QUEUED: AGAIN,
    Status.DONE: DONE,
    Status.FAILED: FAILED,
    Status.HELD: HELD,
    Status.CANCELLED: CANCELLED,
}

Answer = TypeVar("Answer")


class Lane:
    """A database with two routes, whose clock is the real one, since the view asks SQLite for the time."""

    def __init__(self, path: Path) -> None:
        self.database = Database(path)
        self.database.open()
        self.gates = gate.Gates(ROUTES)
        self.write(lambda tx: store.begin_run(tx, "run", 1, "brainctl", list(ROUTES)))

    def write(self, change: Callable[[Transaction], Answer]) -> Answer:
        with self.database.write() as tx:
            return change(tx)

    def read(self, query: Callable[[sqlite3.Connection], Answer]) -> Answer:
        with self.database.read() as connection:
            return query(connection)

    def submit(self, **fields: Any) -> int:
        usual = {"request": "{}", "digest": "d", "route": "near", "model": "small", "names_model": False}
        asked = store.Submission(**{**usual, "max_attempts": 3, **fields})
        return self.write(lambda tx: store.accept(tx, asked, ALICE, 0, 1_000_000)[0])

    def claim(self) -> store.Claim:
        claim = self.write(lambda tx: store.claim_next(tx, self.gates.open_routes(tx), "run"))
        assert claim is not None
        return claim

    def finish(self, claim: store.Claim, verdict: Verdict, evidence: Evidence | None = None) -> None:
        seen = evidence or Evidence(armed_at=MARK)
        self.write(lambda tx: store.finish(tx, claim.job_id, claim.attempt, seen, verdict))

    def put(self, status: Status, **fields: Any) -> int:
        """Make a job that stands where it is told to. Nothing else may be queued."""
        job_id = self.submit(**fields)
        claim = self.claim()
        assert claim.job_id == job_id
        if status is not Status.RUNNING:
            self.finish(claim, AT_ONCE[status])
        return job_id

    def close(self, route: str, *, operator_only: bool = False) -> None:
        closing = Closing(GateReason.UNREACHABLE, "refused", operator_only=operator_only, wait_s=3600)
        self.write(lambda tx: self.gates.close(tx, route, closing))

    def set(self, sql: str) -> None:
        self.write(lambda tx: tx.execute(sql))

    def view(self, job_id: int) -> sqlite3.Row:
        """What an operator with nothing but sqlite3 sees."""
        row = self.read(lambda c: c.execute("select * from operator_view where id = :id", {"id": job_id}).fetchone())
        assert row["next_action"] is not None
        return row

    def job(self, job_id: int, **options: Any) -> dict[str, Any]:
        return self.read(lambda source: queries.job(source, job_id, **options))


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[Lane]:
    made = Lane(tmp_path / "brainlane.db")
    yield made
    made.database.close()


def refused(lane: Lane, query: Callable[[queries.Executes], object]) -> errors.Refused:
    with pytest.raises(errors.Refused) as found:
        lane.read(query)
    return found.value


# What the operator sees.


@pytest.mark.parametrize(
    ("status", "action"),
    [
        (Status.QUEUED, "brainctl wait {}"),
        (Status.RUNNING, "brainctl follow {}"),
        (Status.HELD, "brainctl recover {}"),
        (Status.DONE, "brainctl output {}"),
        (Status.FAILED, "brainctl show {}"),
        (Status.CANCELLED, "brainctl show {}"),
    ],
)
def test_every_status_has_a_next_action_of_its_own_that_can_be_pasted(lane: Lane, status: Status, action: str) -> None:
    job_id = lane.put(status)
    row = lane.view(job_id)
    assert (row["status"], row["next_action"]) == (status, action.format(job_id))
    assert (row["attempts"], row["route"]) == (1, "near")
    assert 0 <= row["age_s"] < 300
    assert (row["waiting"] is None) == (status is not Status.QUEUED)


def test_one_query_tells_all_of_them_apart(lane: Lane) -> None:
    for status in (Status.DONE, Status.FAILED, Status.HELD, Status.CANCELLED, Status.RUNNING):
        lane.put(status)
    lane.submit()
    rows = lane.read(lambda c: c.execute("select status, next_action from operator_view order by id", {}).fetchall())
    assert [row["status"] for row in rows] == ["done", "failed", "held", "cancelled", "running", "queued"]
    assert all(row["next_action"] for row in rows)


def test_the_next_action_begins_with_the_command_that_reaches_this_lane(lane: Lane) -> None:
    lane.set("update lane set client = 'brainctl --lane gpu'")
    job_id = lane.submit()
    assert lane.view(job_id)["next_action"] == f"brainctl --lane gpu wait {job_id}"


def turn(lane: Lane) -> int:
    return lane.submit()


def pause(lane: Lane) -> int:
    lane.write(lambda tx: store.pause(tx, "night", ALICE))
    return lane.submit()


def probe_later(lane: Lane) -> int:
    lane.close("near")
    return lane.submit()


def ask_the_operator(lane: Lane) -> int:
    lane.close("near", operator_only=True)
    return lane.submit()


def forget_the_route(lane: Lane) -> int:
    lane.set("update gates set configured = 0 where route = 'near'")
    return lane.submit()


def never_knew_the_route(lane: Lane) -> int:
    return lane.submit(route="gone")


def retry_later(lane: Lane) -> int:
    job_id = lane.submit()
    lane.finish(lane.claim(), replace(AGAIN, wait_s=3600))
    return job_id


def begin_later(lane: Lane) -> int:
    return lane.submit(not_before=TOMORROW)


def begin_later_and_retry_later(lane: Lane) -> int:
    job_id = lane.submit(not_before=datetime.now(UTC) - timedelta(days=1))
    lane.finish(lane.claim(), replace(AGAIN, wait_s=3600))
    return job_id


def fill_the_disk(lane: Lane) -> int:
    lane.set("update lane set disk_low_since = '2026-03-01T12:00:00.000000Z'")
    return lane.submit()


CAUSES: list[tuple[Callable[[Lane], int], Waiting, str]] = [
    (turn, Waiting.WAITING_TURN, "brainctl wait {}"),
    (pause, Waiting.LANE_PAUSED, "brainctl resume"),
    (probe_later, Waiting.ROUTE_GATED, "brainctl wait {}"),
    (ask_the_operator, Waiting.ROUTE_GATED, "brainctl resume --route near"),
    (forget_the_route, Waiting.ROUTE_MISSING, "brainctl wait {}"),
    (never_knew_the_route, Waiting.ROUTE_MISSING, "brainctl wait {}"),
    (retry_later, Waiting.RETRY_WAIT, "brainctl wait {}"),
    (begin_later, Waiting.NOT_BEFORE, "brainctl wait {}"),
    (begin_later_and_retry_later, Waiting.RETRY_WAIT, "brainctl wait {}"),
    (fill_the_disk, Waiting.DISK_RESERVE, "brainctl wait {}"),
]


@pytest.mark.parametrize(("make", "waiting", "action"), CAUSES, ids=lambda value: getattr(value, "__name__", None))
def test_every_cause_of_waiting_is_told_with_what_may_be_done(
    lane: Lane, make: Callable[[Lane], int], waiting: Waiting, action: str
) -> None:
    job_id = make(lane)
    row = lane.view(job_id)
    assert (row["status"], row["waiting"], row["next_action"]) == ("queued", waiting, action.format(job_id))
    shown = lane.job(job_id)
    assert (shown["waiting"], shown["next_action"]) == (row["waiting"], row["next_action"])


def test_every_cause_that_the_view_can_give_is_in_the_table_above() -> None:
    assert {waiting for _, waiting, _ in CAUSES} == set(Waiting) - {Waiting.ANSWER_WAITING}


def test_a_time_that_has_come_is_no_cause_of_waiting_any_more(lane: Lane) -> None:
    job_id = lane.submit(not_before=TOMORROW)
    lane.set("update jobs set due_at = '2026-03-01T12:00:00.000000Z', not_before = due_at")
    assert lane.view(job_id)["waiting"] == Waiting.WAITING_TURN


def test_a_pause_is_the_nearest_cause(lane: Lane) -> None:
    ask_the_operator(lane)
    fill_the_disk(lane)
    job_id = begin_later(lane)
    pause(lane)
    assert lane.view(job_id)["waiting"] == Waiting.LANE_PAUSED
    lane.write(store.resume)
    assert lane.view(job_id)["waiting"] == Waiting.DISK_RESERVE


def test_the_gate_of_one_route_is_no_cause_for_another(lane: Lane) -> None:
    lane.close("far")
    assert lane.view(lane.submit(route="near"))["waiting"] == Waiting.WAITING_TURN
    assert lane.view(lane.submit(route="far"))["waiting"] == Waiting.ROUTE_GATED


def test_what_the_database_cannot_say_of_itself_is_told_by_whoever_knows_it(lane: Lane) -> None:
    queued, running = lane.submit(), None
    running = lane.claim().job_id
    queued = lane.submit()
    for stuck in (Waiting.ANSWER_WAITING, Waiting.DISK_RESERVE):
        assert lane.job(queued, stuck=stuck)["waiting"] == stuck
        assert lane.job(running, stuck=stuck)["waiting"] is None
        listed = lane.read(lambda source: queries.jobs(source, Selection(), stuck=stuck))["jobs"]  # noqa: B023
        assert [job["waiting"] for job in listed] == [stuck, None]


def test_pausing_and_gating_rewrite_no_job(lane: Lane) -> None:
    lane.submit()
    before = lane.read(lambda c: [tuple(row) for row in c.execute("select * from jobs", {})])
    lane.write(lambda tx: store.pause(tx, None, ALICE))
    lane.close("near")
    assert lane.read(lambda c: [tuple(row) for row in c.execute("select * from jobs", {})]) == before


# One job.


def test_a_job_is_shown_with_the_names_of_the_contract(lane: Lane) -> None:
    job_id = lane.submit(key="k", labels={"team": "blue"}, priority=wire.Priority.HIGH, may_run_twice=True)
    job = lane.job(job_id)
    assert json.loads(json.dumps(job)) == job
    assert (job["id"], job["key"], job["status"], job["reason"]) == (job_id, "k", "queued", "submitted")
    assert (job["final"], job["route"], job["model"], job["priority"]) == (False, "near", "small", "high")
    assert (job["labels"], job["flags"], job["usage"]) == ({"team": "blue"}, [], None)
    assert (job["may_run_twice"], job["require_complete"], job["max_attempts"]) == (True, False, 3)
    assert job["submitter"] == {"uid": 1000, "user": "alice", "pid": 77}
    for name in ("created_at", "started_at", "finished_at", "waiting", "next_action", "position", "attempt_count"):
        assert name in job
    assert wire.parse_time(job["created_at"])


@pytest.mark.parametrize("status", list(Status))
def test_final_says_that_the_lane_is_done_with_it(lane: Lane, status: Status) -> None:
    final = {Status.DONE, Status.FAILED, Status.CANCELLED}
    job = lane.job(lane.put(status))
    assert job["final"] == (status in final) == (job["finished_at"] is not None)


@pytest.mark.parametrize(
    "query",
    [
        lambda source: queries.job(source, 99),
        lambda source: queries.job_with_attempts(source, 99),
        lambda source: queries.job_status(source, 99),
        lambda source: queries.submitter_uid(source, 99),
        lambda source: queries.stored_piece(source, 99, "request", 0, 10),
        lambda source: queries.stored_piece(source, 99, "text", 0, 10),
        lambda source: queries.stored_piece(source, 99, "part", 0, 10),
        lambda source: queries.response_frame(source, 99),
        lambda source: queries.latest(source, 99),
    ],
)
def test_a_job_that_never_was_is_told_as_such(lane: Lane, query: Callable[[queries.Executes], object]) -> None:
    assert refused(lane, query).kind is ErrorKind.NO_SUCH_JOB


def test_every_attempt_is_shown_with_its_evidence(lane: Lane) -> None:
    job_id = lane.submit(may_run_twice=True)
    whole = Evidence(
        armed_at=MARK, sent_at=MARK, headers_at=MARK, http_status=502, upstream_id="req-7", first_byte_at=MARK
    )
    lane.finish(lane.claim(), replace(AGAIN, text="half an \u00e9"), whole)
    lane.finish(lane.claim(), DONE)
    shown = lane.read(lambda source: queries.job_with_attempts(source, job_id))
    first, second = shown["attempts"]
    for name in ("armed_at", "sent_at", "headers_at", "first_byte_at"):
        assert first[name] == MARK
    assert (first["send_failed_at"], first["http_status"], first["upstream_id"]) == (None, 502, "req-7")
    assert (first["attempt"], first["status"], first["reason"]) == (1, "failed", "upstream-error")
    assert (first["endpoint"], first["model"], first["run"]) == ("http://127.0.0.1:1/near", "small", "run")
    assert (first["may_run_twice"], first["part_bytes"]) == (True, len("half an \u00e9".encode()))
    assert (second["attempt"], second["status"], second["part_bytes"]) == (2, "succeeded", None)
    assert shown["decisions"] == []


def test_what_people_decided_is_shown(lane: Lane) -> None:
    job_id = lane.submit()
    lane.write(lambda tx: decisions.cancel(tx, job_id, None, "not needed", ALICE))
    (decision,) = lane.read(lambda source: queries.job_with_attempts(source, job_id))["decisions"]
    assert (decision["action"], decision["reason"], decision["attempt"]) == ("cancel", "not needed", 0)
    assert (decision["uid"], decision["user"], decision["pid"]) == (1000, "alice", 77)
    assert wire.parse_time(decision["at"])


@pytest.mark.parametrize(
    ("evidence", "billed"),
    [
        (Evidence(), "no"),
        (Evidence(armed_at=MARK, send_failed_at=MARK), "no"),
        (Evidence(armed_at=MARK), "possibly"),
        (Evidence(armed_at=MARK, sent_at=MARK), "possibly"),
        (Evidence(armed_at=MARK, headers_at=MARK, http_status=200), "yes"),
        (Evidence(armed_at=MARK, send_failed_at=MARK, headers_at=MARK, http_status=413), "no"),
        (Evidence(armed_at=MARK, headers_at=MARK, http_status=307), "no"),
        (Evidence(armed_at=MARK, headers_at=MARK, http_status=400), "no"),
        (Evidence(armed_at=MARK, headers_at=MARK, http_status=500), "possibly"),
        (Evidence(armed_at=MARK, headers_at=MARK, http_status=502), "possibly"),
    ],
)
def test_whether_an_attempt_may_have_cost_something_follows_from_its_evidence(
    lane: Lane, evidence: Evidence, billed: str
) -> None:
    job_id = lane.submit()
    lane.finish(lane.claim(), HELD, evidence)
    (attempt,) = lane.read(lambda source: queries.job_with_attempts(source, job_id))["attempts"]
    assert attempt["billed"] == billed


# Answers.


def stored(lane: Lane, job_id: int, what: queries.Stored, offset: int = 0, size: int = 1000) -> tuple[bytes, int]:
    return lane.read(lambda source: queries.stored_piece(source, job_id, what, offset, size))


def test_the_output_of_a_done_job_is_its_text_and_its_response_the_object(lane: Lane) -> None:
    job_id = lane.submit(request='{"messages":[]}')
    text = "h\u00e9 \u0000 \U0001f30d"
    lane.finish(lane.claim(), replace(DONE, text=text, response='{"id":"x"}'))
    assert stored(lane, job_id, "text") == (text.encode(), len(text.encode()))
    assert stored(lane, job_id, "request") == (b'{"messages":[]}', 15)
    assert lane.read(lambda source: queries.response_frame(source, job_id)) == ('{"id":"x"}', None)


def test_the_completion_object_has_a_place_for_the_text(lane: Lane) -> None:
    job_id = lane.submit()
    frame = '{"id": "\\"content\\": \\"\\"", "choices": [{"message": {"content": ""}}], "content": ""}'
    lane.finish(lane.claim(), replace(DONE, response=frame))
    before, after = lane.read(lambda source: queries.response_frame(source, job_id))
    assert before + '""' + (after or "") == frame
    assert after == '}}], "content": ""}'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10, 11, 4096])
def test_a_text_is_read_in_pieces_of_any_size_and_nothing_is_missing(lane: Lane, size: int) -> None:
    job_id = lane.submit()
    whole = ("n\u00e9 \u597d \u0000 \U0001f30d" * 11).encode()
    lane.finish(lane.claim(), replace(DONE, text=whole.decode()))
    pieces = []
    while piece := stored(lane, job_id, "text", offset=sum(map(len, pieces)), size=size)[0]:
        assert len(piece) <= max(size, len(whole) // 64)
        pieces.append(piece)
    assert b"".join(pieces) == whole
    assert stored(lane, job_id, "text", offset=len(whole) + 5) == (b"", len(whole))


def read_of(source: sqlite3.Connection, job_id: int, what: Any) -> object:
    """Read what stands in the database of a job, by whichever way it has."""
    if what == "response":
        return queries.response_frame(source, job_id)
    return queries.stored_piece(source, job_id, what, 0, 10)


@pytest.mark.parametrize("what", ["text", "response"])
@pytest.mark.parametrize("status", sorted(set(Status) - {Status.DONE}))
def test_a_job_without_an_output_says_where_it_stands(lane: Lane, what: str, status: Status) -> None:
    job_id = lane.put(status)
    refusal = refused(lane, lambda source: read_of(source, job_id, what))
    assert refusal.kind is ErrorKind.NO_OUTPUT
    assert f"the job is {status}" in str(refusal)


def test_a_text_by_hand_has_no_completion_object(lane: Lane) -> None:
    job_id = lane.put(Status.HELD)
    lane.write(lambda tx: decisions.decide(tx, job_id, None, wire.Decision.COMPLETE, "by hand", None, ALICE))
    assert stored(lane, job_id, "text")[0] == b"by hand"
    refusal = refused(lane, lambda source: queries.response_frame(source, job_id))
    assert refusal.kind is ErrorKind.NO_OUTPUT


@pytest.mark.parametrize("what", ["request", "text", "response"])
def test_what_was_erased_says_since_when(lane: Lane, what: str) -> None:
    job_id = lane.put(Status.DONE)
    lane.write(lambda tx: decisions.forget(tx, job_id, None, None, ALICE))
    refusal = refused(lane, lambda source: read_of(source, job_id, what))
    assert refusal.kind is ErrorKind.NO_OUTPUT
    erased_at = lane.job(job_id)["erased_at"]
    assert f"was erased at {erased_at}" in str(refusal)


def test_an_empty_output_is_an_output(lane: Lane) -> None:
    job_id = lane.submit()
    lane.finish(lane.claim(), replace(DONE, text=""))
    assert stored(lane, job_id, "text") == (b"", 0)


def test_the_part_that_arrived_belongs_to_the_latest_attempt(lane: Lane) -> None:
    job_id = lane.submit()
    lane.finish(lane.claim(), replace(AGAIN, text="first half"))
    assert lane.read(lambda source: queries.latest(source, job_id)) == (1, Status.QUEUED, "part")
    assert lane.read(lambda source: queries.stored_piece(source, job_id, "part", 0, 99, 1)) == (b"first half", 10)
    claim = lane.claim()
    assert lane.read(lambda source: queries.latest(source, job_id)) == (2, Status.RUNNING, None)
    lane.finish(claim, replace(HELD, text="second half"))
    assert lane.read(lambda source: queries.latest(source, job_id)) == (2, Status.HELD, "part")
    assert lane.read(lambda source: queries.stored_piece(source, job_id, "part", 0, 99, 2)) == (b"second half", 11)


# Lists.


def listed(lane: Lane, **selection: Any) -> list[int]:
    return [job["id"] for job in lane.read(lambda source: queries.jobs(source, Selection(**selection)))["jobs"]]


def test_a_list_is_newest_first(lane: Lane) -> None:
    ids = [lane.submit() for _ in range(3)]
    assert listed(lane) == ids[::-1]


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8])
def test_pages_show_every_job_once(lane: Lane, limit: int) -> None:
    ids = [lane.submit() for _ in range(7)]
    seen: list[int] = []
    after: int | None = None
    while True:
        page = lane.read(lambda source: queries.jobs(source, Selection(after=after, limit=limit)))  # noqa: B023
        assert 0 < len(page["jobs"]) <= limit
        seen += [job["id"] for job in page["jobs"]]
        after = page["next"]
        if after is None:
            break
    assert seen == ids[::-1]


def test_a_list_may_be_of_one_status_one_route_one_label_or_one_user(lane: Lane) -> None:
    done = lane.put(Status.DONE, labels={"team": "blue"})
    held = lane.put(Status.HELD, labels={"team": "red"})
    far = lane.submit(route="far", labels={"team": "blue", "other": "x"})
    assert listed(lane, status=Status.DONE) == [done]
    assert listed(lane, status=Status.HELD) == [held]
    assert listed(lane, status=Status.RUNNING) == []
    assert listed(lane, route="far") == [far]
    assert listed(lane, label=("team", "blue")) == [far, done]
    assert listed(lane, label=("team", "blue"), route="near", status=Status.DONE) == [done]
    assert listed(lane, label=("team", "%")) == []
    assert listed(lane, submitter_uid=1000) == [far, held, done]
    assert listed(lane, submitter_uid=1001) == []
    for status in Status:
        both = (
            set(listed(lane, status=status)) & set(listed(lane, route="near")) & set(listed(lane, submitter_uid=1000))
        )
        assert set(listed(lane, status=status, route="near", submitter_uid=1000)) == both


def test_a_list_may_be_of_a_span_of_time_that_holds_its_beginning_and_not_its_end(lane: Lane) -> None:
    ids = [lane.submit() for _ in range(3)]
    lane.set("update jobs set created_at = '2026-03-0' || id || 'T12:00:00.000000Z'")
    times = [wire.format_time(datetime(2026, 3, job_id, 12, tzinfo=UTC)) for job_id in ids]
    assert listed(lane, since=times[1]) == ids[:0:-1]
    assert listed(lane, until=times[1]) == ids[:1]
    assert listed(lane, since=times[1], until=times[2]) == [ids[1]]
    assert listed(lane, since=times[1], until=times[1]) == []


PRIVATE = {"job_requests", "job_outputs", "attempt_parts"}


def tables_read(lane: Lane, query: Callable[[sqlite3.Connection], object]) -> set[str]:
    """Ask SQLite itself which tables a query reads."""
    read: set[str] = set()

    def authorize(action: int, table: str | None, *_: object) -> int:
        if action == sqlite3.SQLITE_READ and table:
            read.add(table)
        return sqlite3.SQLITE_OK

    connection = sqlite3.connect(lane.database.path)
    connection.row_factory = sqlite3.Row
    connection.set_authorizer(authorize)
    query(connection)
    connection.set_authorizer(None)
    connection.close()
    return read


@pytest.mark.parametrize(
    "query",
    [
        lambda source: queries.jobs(source, Selection()),
        lambda source: queries.jobs(
            source, Selection(status=Status.DONE, label=("a", "b"), route="near", submitter_uid=1, since=MARK)
        ),
        lambda source: queries.lane(source),
        lambda source: queries.job(source, 1),
    ],
    ids=["list", "selection", "status", "job"],
)
def test_no_list_reads_prompts_or_answers(lane: Lane, query: Callable[[sqlite3.Connection], object]) -> None:
    lane.put(Status.DONE)
    read = tables_read(lane, query)
    assert "jobs" in read
    assert not read & PRIVATE


def test_what_shows_an_answer_does_read_it(lane: Lane) -> None:
    lane.put(Status.DONE)
    assert tables_read(lane, lambda source: queries.stored_piece(source, 1, "text", 0, 10)) & PRIVATE == {"job_outputs"}


# Places in line.


def places(lane: Lane, *ids: int) -> list[int | None]:
    """The places of jobs as each of them shows it, which is what a list says of them too."""
    shown = [lane.read(partial(queries.job_with_attempts, job_id=job_id))["position"] for job_id in ids]
    listed = {job["id"]: job["position"] for job in lane.read(lambda source: queries.jobs(source, Selection()))["jobs"]}
    assert [listed.get(job_id, shown[0]) for job_id in ids] == shown
    return shown


def test_the_place_in_line_counts_from_one_and_those_of_other_routes_as_well(lane: Lane) -> None:
    ids = [lane.submit(route=route) for route in ("near", "far", "near")]
    assert places(lane, *ids) == [1, 2, 3]
    lane.claim()
    assert places(lane, *ids) == [None, 1, 2]


def test_who_waits_for_a_time_has_no_place_in_line_yet(lane: Lane) -> None:
    assert places(lane, begin_later(lane)) == [None]
    assert places(lane, lane.submit()) == [1]


def test_a_place_is_told_to_those_who_are_not_far_back(lane: Lane) -> None:
    asked = store.Submission("{}", "d", "near", "small", False, 3)
    with lane.database.write() as tx:
        ids = [store.accept(tx, asked, ALICE, 0, 1_000_000)[0] for _ in range(queries.POSITION_BOUND + 1)]
    assert places(lane, ids[-2], ids[-1]) == [queries.POSITION_BOUND, None]


# The lane at a glance.


def glance(lane: Lane) -> dict[str, Any]:
    return lane.read(queries.lane)


def test_an_empty_lane_is_shown_with_every_status_at_nothing(lane: Lane) -> None:
    shown = glance(lane)
    assert json.loads(json.dumps(shown)) == shown
    assert shown["counts"] == dict.fromkeys(Status, 0)
    assert (shown["running"], shown["oldest_queued"], shown["needs_person"]) == (None, None, [])
    assert (shown["lane"]["state"], shown["lane"]["disk_reserve"], shown["last_run"]) == ("open", False, None)
    assert [(route["route"], route["open"], route["queued"]) for route in shown["routes"]] == [
        ("far", True, 0),
        ("near", True, 0),
    ]


def test_the_counts_are_those_of_the_rows(lane: Lane) -> None:
    for status in (Status.DONE, Status.DONE, Status.FAILED, Status.HELD, Status.CANCELLED, Status.RUNNING):
        lane.put(status)
    for _ in range(3):
        lane.submit(route="far")
    lane.submit()
    shown = glance(lane)
    assert shown["counts"] == {"done": 2, "failed": 1, "held": 1, "cancelled": 1, "running": 1, "queued": 4}
    assert {route["route"]: route["queued"] for route in shown["routes"]} == {"far": 3, "near": 1}


def test_the_running_job_and_the_oldest_wait_are_shown(lane: Lane) -> None:
    running, oldest = lane.submit(), lane.submit()
    lane.submit()
    lane.claim()
    lane.write(lambda tx: store.arm(tx, running, 1))
    shown = glance(lane)
    assert (shown["running"]["id"], shown["running"]["attempt"], shown["running"]["route"]) == (running, 1, "near")
    assert shown["running"]["armed_at"] and shown["running"]["elapsed_s"] >= 0
    assert shown["oldest_queued"]["id"] == oldest
    assert shown["oldest_queued"]["age_s"] >= 0


def test_what_needs_a_person_is_shown_with_what_to_do(lane: Lane) -> None:
    held = lane.put(Status.HELD)
    lane.put(Status.FAILED)
    assert glance(lane)["needs_person"] == [
        {
            "id": held,
            "status": "held",
            "reason": "sent-outcome-unknown",
            "detail": "no answer came",
            "next_action": f"brainctl recover {held}",
        }
    ]


def test_a_pause_and_a_closed_gate_are_shown_with_their_reasons(lane: Lane) -> None:
    pause(lane)
    lane.close("near", operator_only=True)
    lane.close("far")
    shown = glance(lane)
    assert (shown["lane"]["state"], shown["lane"]["paused_by"], shown["lane"]["paused_reason"]) == (
        "paused",
        "alice",
        "night",
    )
    far, near = shown["routes"]
    assert (near["open"], near["reason"], near["detail"], near["next_probe_at"]) == (
        False,
        "unreachable",
        "refused",
        None,
    )
    assert wire.parse_time(near["since"]) <= datetime.now(UTC) < wire.parse_time(far["next_probe_at"])


def test_a_route_that_is_configured_no_more_is_not_shown(lane: Lane) -> None:
    lane.write(lambda tx: store.begin_run(tx, "second", 2, "brainctl", ["far"]))
    assert [route["route"] for route in glance(lane)["routes"]] == ["far"]


def test_how_the_run_before_this_one_ended_is_shown(lane: Lane) -> None:
    lane.write(lambda tx: store.end_run(tx, "run", "stopped by SIGTERM"))
    lane.write(lambda tx: store.begin_run(tx, "second", 2, "brainctl", ["near"]))
    assert (glance(lane)["last_run"]["run"], glance(lane)["last_run"]["ending"]) == ("run", "stopped by SIGTERM")
    lane.write(lambda tx: store.begin_run(tx, "third", 3, "brainctl", ["near"]))
    assert (glance(lane)["last_run"]["run"], glance(lane)["last_run"]["ended_at"]) == ("second", None)


# What the worker and a start ask.


def test_the_next_time_to_wake_is_the_nearest_of_due_jobs_and_probes(lane: Lane) -> None:
    def wake() -> str | None:
        return lane.write(lambda tx: queries.next_wake(tx, tx.now))

    assert wake() is None
    lane.submit()
    assert wake() is None
    lane.submit(not_before=TOMORROW + timedelta(hours=1))
    lane.submit(not_before=TOMORROW)
    assert wake() == wire.format_time(TOMORROW)
    lane.close("near")
    probe = lane.read(lambda c: c.execute("select next_probe_at from gates where route = 'near'", {}).fetchone()[0])
    assert wake() == probe < wire.format_time(TOMORROW)


def test_a_gate_that_only_the_operator_opens_wakes_nobody(lane: Lane) -> None:
    lane.close("near", operator_only=True)
    assert lane.write(lambda tx: queries.next_wake(tx, tx.now)) is None


def steps_of(lane: Lane, query: Callable[[sqlite3.Connection], object]) -> int:
    """Count the steps of SQLite's machine, which no busy computer can change."""
    connection = sqlite3.connect(lane.database.path)
    connection.row_factory = sqlite3.Row
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    connection.set_progress_handler(count, 1)
    query(connection)
    connection.set_progress_handler(None, 1)
    connection.close()
    return steps


def fill(lane: Lane, count: int, **fields: Any) -> None:
    asked = store.Submission("{}", "d", "near", "small", False, 3, **fields)
    with lane.database.write() as tx:
        for _ in range(count):
            store.accept(tx, asked, ALICE, 0, 1_000_000)


LOOKS: dict[str, Callable[[sqlite3.Connection], object]] = {
    "next_wake": lambda source: queries.next_wake(source, wire.format_time(datetime.now(UTC))),
    "lane": queries.lane,
    "left_running": queries.left_running,
    "list": lambda source: queries.jobs(source, Selection(limit=5)),
    "list of one status": lambda source: queries.jobs(source, Selection(limit=5, status=Status.DONE)),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_thousand_more_jobs_for_later_cost_a_look_nothing(lane: Lane, look: str) -> None:
    fill(lane, 10, not_before=TOMORROW)
    few = steps_of(lane, LOOKS[look])
    fill(lane, 1000, not_before=TOMORROW)
    assert steps_of(lane, LOOKS[look]) <= few + 50


@pytest.mark.parametrize("look", sorted(set(LOOKS) - {"list"}))
def test_a_thousand_more_jobs_in_line_cost_a_look_nothing(lane: Lane, look: str) -> None:
    fill(lane, 10)
    few = steps_of(lane, LOOKS[look])
    fill(lane, 1000)
    assert steps_of(lane, LOOKS[look]) <= few + 50


def test_the_places_in_a_list_are_counted_up_to_the_bound_and_no_further(lane: Lane) -> None:
    fill(lane, queries.POSITION_BOUND + 10)
    few = steps_of(lane, LOOKS["list"])
    fill(lane, 1000)
    assert steps_of(lane, LOOKS["list"]) <= few + 50


def test_all_that_says_it_is_running_is_found_from_either_side(lane: Lane) -> None:
    assert lane.read(queries.left_running) == []
    job_id = lane.put(Status.RUNNING)
    both = [(job_id, 1, "near")]
    assert [tuple(row) for row in lane.read(queries.left_running)] == both
    lane.set("update jobs set status = 'held'")
    assert [tuple(row) for row in lane.read(queries.left_running)] == both
    found = lane.read(lambda source: queries.running_attempt(source, job_id, 1))
    assert (found.job, found.attempt is not None) == (None, True)
    lane.set("update jobs set status = 'running'")
    lane.set("delete from job_attempts")
    assert [tuple(row) for row in lane.read(queries.left_running)] == both
    found = lane.read(lambda source: queries.running_attempt(source, job_id, 1))
    assert (found.job is not None, found.attempt) == (True, None)


def test_the_state_of_an_attempt_is_known_or_it_is_not_one_of_ours(lane: Lane) -> None:
    job_id = lane.put(Status.DONE)
    known = lane.read(lambda source: queries.attempt_states(source, [(job_id, 1), (job_id, 2), (99, 1)]))
    assert known == {(job_id, 1): AttemptStatus.SUCCEEDED, (job_id, 2): None, (99, 1): None}
