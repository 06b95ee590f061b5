"""After a crash: each row of the table of recovery.py, and what holds for every combination of evidence.

A lane here is a real database and a real spool directory in the state in which a vanished process left them.
"""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from brainlaned import config, decisions, errors, recovery, store, wire
from brainlaned.db import Database
from brainlaned.gate import Gates
from brainlaned.spool import Spool
from brainlaned.states import MOVES
from brainlaned.store import Caller, Submission
from brainlaned.wire import AttemptStatus, Priority, Reason, Status

ROUTE = config.Route("near", "http://127.0.0.1:1/v1", "small")
ALICE = Caller(uid=1000, user="alice", pid=77)
AT = "2026-03-01T12:00:01.000000Z"
ARMED = {"armed_at": AT, "sent_at": AT}
REQUEST = json.dumps({"messages": [{"role": "user", "content": "hello"}]})


def answer_bytes(*words: str, finish: str | None = "stop", done: bool = True) -> bytes:
    events: list[Any] = [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in words]
    if finish is not None:
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    return body + (b"data: [DONE]\n\n" if done else b"")


WHOLE = answer_bytes("one ", "two")
PART = answer_bytes("one ", finish=None, done=False)
ERROR = json.dumps({"error": {"message": "no"}}).encode()


def spool_file(status: object, body: bytes = b"", headers: object = None, headers_at: object = AT) -> bytes:
    head = {"status": status, "headers": {} if headers is None else headers, "headers_at": headers_at}
    return json.dumps(head).encode() + b"\n" + body


@dataclass
class Left:
    """What a vanished process left of one attempt."""

    marks: dict[str, Any] = field(default_factory=dict)
    """Columns of its row."""
    spool: bytes | None = None
    """The bytes of its spool file; None: there is none."""
    whole: bool = False
    """The file had got its last name."""
    cancel: bool = False
    may_run_twice: bool = False
    max_attempts: int = 3
    deaths: int = 1
    route: str = "near"


class Place:
    """A lane at rest, in whose database and spool evidence is put."""

    def __init__(self, directory: Path) -> None:
        self.spool_path = directory / "spool"
        self.database = Database(directory / "brainlane.db")
        self.database.open()
        self.spool = Spool(self.spool_path)
        self.spool.open()
        with self.database.write() as tx:
            store.begin_run(tx, "old", 1, "brainctl", ["near"])

    def submit(self, left: Left | None = None) -> int:
        left = left or Left()
        submission = Submission(
            request=REQUEST,
            digest="d",
            key=None,
            route="near",
            model=None,
            names_model=False,
            priority=Priority.NORMAL,
            not_before=None,
            labels={},
            max_attempts=left.max_attempts,
            may_run_twice=left.may_run_twice,
            require_complete=False,
        )
        with self.database.write() as tx:
            return store.accept(tx, submission, ALICE, 0, 1000)[0]

    def leave(self, left: Left) -> int:
        """Claim a new job and leave its attempt as `left` says. Return the job's id."""
        job_id = self.submit(left)
        with self.database.write() as tx:
            claim = store.claim_next(tx, [config.OpenRoute(ROUTE, is_probe=False)], "old")
            assert claim is not None and claim.job_id == job_id
            for column, value in left.marks.items():
                tx.execute(f"update job_attempts set {column} = :value", {"value": value})  # noqa: S608
            tx.execute("update jobs set unclean_deaths = :deaths", {"deaths": left.deaths})
            if left.cancel:
                decisions.cancel(tx, job_id, None, None, ALICE)
        if left.spool is not None:
            (self.spool_path / f"{job_id}-1.{'whole' if left.whole else 'part'}").write_bytes(left.spool)
        return job_id

    def recover(self, routes: dict[str, config.Route] | None = None, crash_limit: int = 2) -> None:
        routes = {"near": ROUTE} if routes is None else routes
        recovery.recover(self.database, self.spool, Gates(routes), routes, crash_limit, "new")

    def execute(self, sql: str, **params: Any) -> None:
        with self.database.write() as tx:
            tx.execute(sql, params)

    def rows(self, sql: str, **params: Any) -> list[dict[str, Any]]:
        with self.database.read() as connection:
            return [dict(row) for row in connection.execute(sql, params)]

    def job(self, job_id: int) -> dict[str, Any]:
        return self.rows("select * from jobs where id = :id", id=job_id)[0]

    def attempt(self, job_id: int) -> dict[str, Any]:
        return self.rows("select * from job_attempts where job_id = :id", id=job_id)[0]

    def part(self, job_id: int) -> str | None:
        found = self.rows("select text from attempt_parts where job_id = :id", id=job_id)
        return found[0]["text"] if found else None

    def output(self, job_id: int) -> str:
        text: str = self.rows("select text from job_outputs where job_id = :id", id=job_id)[0]["text"]
        return text

    def everything(self) -> tuple[list[str], list[str]]:
        """Return the whole database, dumped, and the names in the spool."""
        with self.database.read() as connection:
            return list(connection.iterdump()), sorted(path.name for path in self.spool_path.iterdir())


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.database.close()


TABLE: list[tuple[str, Left, Status, Reason, AttemptStatus]] = [
    ("a recorded cancel", Left(ARMED, cancel=True), Status.CANCELLED, Reason.CANCEL_REQUESTED, AttemptStatus.CANCELLED),
    (
        "a recorded cancel, and a whole answer",
        Left(ARMED, spool_file(200, WHOLE), whole=True, cancel=True),
        Status.CANCELLED,
        Reason.CANCEL_REQUESTED,
        AttemptStatus.CANCELLED,
    ),
    (
        "an answer without leave to send",
        Left({}, spool_file(200, WHOLE), whole=True),
        Status.HELD,
        Reason.EVIDENCE_CONTRADICTS,
        AttemptStatus.UNKNOWN,
    ),
    (
        "headers without leave to send",
        Left({"headers_at": AT, "http_status": 200}),
        Status.HELD,
        Reason.EVIDENCE_CONTRADICTS,
        AttemptStatus.UNKNOWN,
    ),
    ("no leave to send", Left({}, b""), Status.QUEUED, Reason.NOT_SENT, AttemptStatus.INTERRUPTED),
    (
        "2xx headers without a spool",
        Left({**ARMED, "headers_at": AT, "http_status": 200}),
        Status.HELD,
        Reason.ANSWER_INCOMPLETE,
        AttemptStatus.UNKNOWN,
    ),
    (
        "4xx headers without a spool",
        Left({**ARMED, "headers_at": AT, "http_status": 400}),
        Status.HELD,
        Reason.EVIDENCE_CONTRADICTS,
        AttemptStatus.UNKNOWN,
    ),
    (
        "a complete answer",
        Left(ARMED, spool_file(200, WHOLE), whole=True),
        Status.DONE,
        Reason.ANSWERED,
        AttemptStatus.SUCCEEDED,
    ),
    (
        "a complete answer whose last name was lost",
        Left(ARMED, spool_file(200, WHOLE)),
        Status.DONE,
        Reason.ANSWERED,
        AttemptStatus.SUCCEEDED,
    ),
    (
        "a complete answer that was filtered",
        Left(ARMED, spool_file(200, answer_bytes("one", finish="content_filter")), whole=True),
        Status.FAILED,
        Reason.FILTERED,
        AttemptStatus.FAILED,
    ),
    (
        "an answered 400",
        Left(ARMED, spool_file(400, ERROR), whole=True),
        Status.FAILED,
        Reason.BAD_REQUEST,
        AttemptStatus.FAILED,
    ),
    ("an answered 429", Left(ARMED, spool_file(429)), Status.QUEUED, Reason.ASKED_TO_WAIT, AttemptStatus.FAILED),
    ("an answered 401", Left(ARMED, spool_file(401)), Status.QUEUED, Reason.ROUTE_REFUSED, AttemptStatus.FAILED),
    ("an answered 500", Left(ARMED, spool_file(500)), Status.QUEUED, Reason.UPSTREAM_ERROR, AttemptStatus.FAILED),
    (
        "an answered 500, and no attempt left",
        Left(ARMED, spool_file(500), max_attempts=1),
        Status.FAILED,
        Reason.ATTEMPTS_EXHAUSTED,
        AttemptStatus.FAILED,
    ),
    (
        "an answered 502",
        Left(ARMED, spool_file(502)),
        Status.HELD,
        Reason.SENT_OUTCOME_UNKNOWN,
        AttemptStatus.UNKNOWN,
    ),
    (
        "2xx, the answer not whole",
        Left(ARMED, spool_file(200, PART)),
        Status.HELD,
        Reason.ANSWER_INCOMPLETE,
        AttemptStatus.UNKNOWN,
    ),
    (
        "2xx, and nothing after it",
        Left(ARMED, spool_file(200)),
        Status.HELD,
        Reason.ANSWER_INCOMPLETE,
        AttemptStatus.UNKNOWN,
    ),
    (
        "an upload known to have failed",
        Left({"armed_at": AT, "send_failed_at": AT}, b""),
        Status.QUEUED,
        Reason.NOT_EXECUTED,
        AttemptStatus.INTERRUPTED,
    ),
    (
        "armed, and no answer",
        Left({"armed_at": AT}),
        Status.HELD,
        Reason.SENT_OUTCOME_UNKNOWN,
        AttemptStatus.UNKNOWN,
    ),
    (
        "armed, and a torn first line",
        Left(ARMED, spool_file(200)[:20]),
        Status.HELD,
        Reason.SENT_OUTCOME_UNKNOWN,
        AttemptStatus.UNKNOWN,
    ),
    (
        "no answer, with leave to run twice",
        Left(ARMED, may_run_twice=True),
        Status.QUEUED,
        Reason.ASKED_AGAIN,
        AttemptStatus.UNKNOWN,
    ),
    (
        "a part, with leave to run twice",
        Left(ARMED, spool_file(200, PART), may_run_twice=True),
        Status.QUEUED,
        Reason.ASKED_AGAIN,
        AttemptStatus.UNKNOWN,
    ),
    (
        "no answer, with leave to run twice, and no attempt left",
        Left(ARMED, may_run_twice=True, max_attempts=1),
        Status.HELD,
        Reason.SENT_OUTCOME_UNKNOWN,
        AttemptStatus.UNKNOWN,
    ),
    (
        "never armed, and died for the second time",
        Left({}, deaths=2),
        Status.HELD,
        Reason.CRASHED_WORKER,
        AttemptStatus.INTERRUPTED,
    ),
    (
        "asked again, and died for the second time",
        Left(ARMED, may_run_twice=True, deaths=2),
        Status.HELD,
        Reason.CRASHED_WORKER,
        AttemptStatus.UNKNOWN,
    ),
]


@pytest.mark.parametrize(
    ("left", "status", "reason", "attempt"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_each_row_of_the_table_gives_its_verdict(
    place: Place, left: Left, status: Status, reason: Reason, attempt: AttemptStatus
) -> None:
    job_id = place.leave(left)
    before = place.job(job_id)
    place.recover()
    job, ended = place.job(job_id), place.attempt(job_id)
    assert (job["status"], job["reason"], ended["status"]) == (status, reason, attempt)
    assert "run old" in job["detail"] and job["detail"] == ended["detail"]
    assert job["place_at"] == before["place_at"]
    # It kept count of the death, so that the next one is not the first again.
    assert job["unclean_deaths"] == left.deaths
    assert list(place.spool_path.iterdir()) == []


def test_a_complete_answer_is_delivered(place: Place) -> None:
    job_id = place.leave(Left(ARMED, spool_file(200, WHOLE), whole=True))
    place.recover()
    assert place.output(job_id) == "one two"


@pytest.mark.parametrize("torn", range(0, PART.index(b"\n"), 7))
def test_a_part_is_kept_wherever_it_was_torn(place: Place, torn: int) -> None:
    job_id = place.leave(Left(ARMED, spool_file(200, PART + PART[:torn])))
    place.recover()
    assert place.job(job_id)["reason"] == Reason.ANSWER_INCOMPLETE
    assert place.part(job_id) == "one "


def test_the_first_line_of_the_spool_outranks_the_row(place: Place) -> None:
    job_id = place.leave(Left(ARMED, spool_file(400, ERROR)))
    place.recover()
    assert (place.attempt(job_id)["http_status"], place.attempt(job_id)["headers_at"]) == (400, AT)


def test_an_attempt_that_was_never_armed_uses_up_nothing(place: Place) -> None:
    job_id = place.leave(Left({}, max_attempts=1))
    place.recover()
    assert (place.job(job_id)["status"], place.job(job_id)["attempts_used"]) == ("queued", 0)


def test_a_job_of_a_route_that_is_configured_no_more_is_decided_all_the_same(place: Place) -> None:
    job_id = place.leave(Left(ARMED, spool_file(429)))
    place.recover(routes={})
    assert place.job(job_id)["reason"] == Reason.ASKED_TO_WAIT


def test_a_running_job_without_its_attempt_is_held(place: Place) -> None:
    job_id = place.leave(Left(ARMED))
    place.execute("delete from job_attempts")
    place.recover()
    assert (place.job(job_id)["status"], place.job(job_id)["reason"]) == ("held", Reason.EVIDENCE_CONTRADICTS)


def test_a_running_job_whose_attempt_is_of_another_number_is_held(place: Place) -> None:
    job_id = place.leave(Left(ARMED))
    place.execute("update jobs set attempt_count = 2")
    place.recover()
    assert (place.job(job_id)["status"], place.attempt(job_id)["status"]) == ("held", "unknown")


@pytest.mark.parametrize("elsewhere", ["queued", "held", "done"])
def test_a_running_attempt_whose_job_is_elsewhere_ends_unknown_and_the_job_stays(place: Place, elsewhere: str) -> None:
    job_id = place.leave(Left(ARMED))
    place.execute(
        "update jobs set status = :status, finished_at = case when :status = 'done' then :at end",
        status=elsewhere,
        at=AT,
    )
    before = place.job(job_id)
    place.recover()
    assert place.job(job_id) == before
    assert (place.attempt(job_id)["status"], place.attempt(job_id)["reason"]) == ("unknown", "evidence-contradicts")


def test_what_still_waits_is_not_looked_at(place: Place) -> None:
    place.leave(Left({}))
    waiting = place.submit()
    before = place.job(waiting)
    place.recover()
    assert place.job(waiting) == before


def test_a_spool_file_of_an_ended_attempt_is_removed(place: Place) -> None:
    job_id = place.leave(Left(ARMED, spool_file(200, WHOLE), whole=True))
    place.recover()
    (place.spool_path / f"{job_id}-1.whole").write_bytes(spool_file(200, WHOLE))
    place.recover()
    assert list(place.spool_path.iterdir()) == []


@pytest.mark.parametrize("name", ["99-1.part", "99-1.whole"])
def test_a_spool_file_of_no_attempt_we_know_is_set_aside_with_its_bytes(place: Place, name: str) -> None:
    (place.spool_path / name).write_bytes(b"somebody's answer")
    place.recover()
    place.recover()
    assert [path.name for path in place.spool_path.iterdir()] == [f"{name}-orphan-new"]
    assert (place.spool_path / f"{name}-orphan-new").read_bytes() == b"somebody's answer"


def test_a_file_that_is_no_spool_file_is_left_alone(place: Place) -> None:
    (place.spool_path / "notes.txt").write_bytes(b"mine")
    place.recover()
    assert [path.name for path in place.spool_path.iterdir()] == ["notes.txt"]


def test_a_row_that_cannot_be_written_refuses_the_start_and_is_named(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_PAUSES_S", (0.0,))
    job_id = place.leave(Left(ARMED))
    place.execute("create trigger broken before update on jobs begin select raise(abort, 'cannot be written'); end")
    with pytest.raises(errors.StartRefused, match=f"job {job_id} attempt 1"):
        place.recover()


def maybe(value: object) -> st.SearchStrategy[Any]:
    return st.sampled_from([None, value])


ANY_STATUS = st.sampled_from([0, 100, 200, 204, 299, 301, 400, 401, 402, 404, 408, 409, 422, 429, 500, 502, 503, 529])
BODIES = st.sampled_from([b"", WHOLE, PART, PART[:9], ERROR, answer_bytes("", finish="length"), b"\xff\x00{", b"[1]"])
HEADERS = st.sampled_from([{}, {"retry-after": "3"}, {"retry-after": "Sun, 01 Mar 2026 12:00:09 GMT"}])
SPOOLS = st.one_of(
    st.none(),
    st.just(b""),
    st.binary(max_size=40),
    st.builds(spool_file, ANY_STATUS, BODIES, HEADERS),
    st.builds(lambda made, end: made[:end], st.builds(spool_file, ANY_STATUS, BODIES), st.integers(0, 60)),
)
LEFT = st.builds(
    Left,
    marks=st.fixed_dictionaries(
        {
            "armed_at": maybe(AT),
            "sent_at": maybe(AT),
            "send_failed_at": maybe(AT),
            "headers_at": maybe(AT),
            "http_status": st.one_of(st.none(), ANY_STATUS),
            "upstream_id": maybe("id-1"),
            "first_byte_at": maybe(AT),
        }
    ),
    spool=SPOOLS,
    whole=st.booleans(),
    cancel=st.booleans(),
    may_run_twice=st.booleans(),
    max_attempts=st.integers(1, 3),
    deaths=st.integers(1, 3),
)
ANSWERED_AGAIN = {Reason.ASKED_TO_WAIT, Reason.ROUTE_REFUSED, Reason.UPSTREAM_ERROR}
"""What a job is queued for only by the brain's own word."""


def check_whatever_was_left(left: Left) -> None:
    with TemporaryDirectory() as directory:
        place = Place(Path(directory))
        try:
            job_id = place.leave(left)
            first = place.spool.find(job_id, 1)
            answered = first is not None and first.status is not None
            place.recover()
            job, attempt = place.job(job_id), place.attempt(job_id)
            once = place.everything()
            assert Status(job["status"]) in MOVES[Status.RUNNING]
            assert attempt["status"] != "running" and attempt["ended_at"] is not None and job["detail"]
            if job["status"] == "queued" and left.marks.get("armed_at") is not None and not left.may_run_twice:
                known_failed = left.marks.get("send_failed_at") is not None and job["reason"] == Reason.NOT_EXECUTED
                assert known_failed or (answered and job["reason"] in ANSWERED_AGAIN)
            if left.marks.get("armed_at") is None:
                assert job["status"] in {"queued", "held", "cancelled"}
            if left.cancel:
                assert job["status"] == "cancelled"
            assert once[1] == []
            place.recover()
            assert place.everything() == once
        finally:
            place.database.close()


@settings(max_examples=1000, deadline=None)
@given(LEFT)
def test_every_combination_of_evidence_gives_a_legal_verdict_once(left: Left) -> None:
    check_whatever_was_left(left)


FOREIGN = [
    pytest.param(spool_file(10**30), id="a status that no integer of the database holds"),
    pytest.param(
        spool_file(429, b"", {"retry-after": "Sun, 01 Mar 2026 12:00:09 GMT"}, "noon"), id="a time that is none"
    ),
    pytest.param(spool_file(400, ERROR, None, "\ud800"), id="a time that is no text"),
    pytest.param(b'{"status": 200, "headers": [], "headers_at": 1}\n', id="headers of another kind"),
    pytest.param(b"[" * 50_000 + b"\n", id="a deep nest"),
    pytest.param(b"1" * 5_000 + b"\n", id="a long number"),
    pytest.param(b"\x00" * 4096, id="zeros after a power cut"),
    pytest.param(b"\xff\xfe\n", id="bytes that are no text"),
]


@pytest.mark.parametrize("spool", FOREIGN)
def test_a_first_line_that_was_not_written_by_us_never_stops_a_start(spool: bytes) -> None:
    check_whatever_was_left(Left(ARMED, spool))


@settings(max_examples=300, deadline=None)
@example(left=Left(ARMED, may_run_twice=True, deaths=2))
@given(LEFT)
def test_the_same_evidence_gives_the_same_verdict_whatever_the_clock_says(left: Left) -> None:
    evidence = recovery.states.Evidence(**left.marks)
    terms = recovery.verdicts.Terms(
        may_run_twice=left.may_run_twice,
        attempts_left=left.max_attempts,
        names_model=False,
        require_complete=False,
        retry_first_s=2,
        retry_cap_s=600,
        cancel_requested=left.cancel,
    )
    case = recovery.Case(evidence, None, terms, left.deaths, 2, "old")
    verdict = recovery.decide(case)
    assert verdict == recovery.decide(case)
    assert verdict.job in MOVES[Status.RUNNING]
    assert len(verdict.detail.splitlines()) == 1
    if verdict.reason is Reason.CRASHED_WORKER:
        assert left.deaths >= 2 and verdict.job is Status.HELD and verdict.closes is None
    assert wire.Reason(verdict.reason) is verdict.reason


# Local commands.


HERE = config.Route("near", "", "sh", command=("sh",), secret_environment={"KEY": config.Secret("CANARY-123")})
GONE = "4194305 1 boot"
"""An identity that no process has, or ever had."""


def leave_command(place: Place, left: Left, files: dict[str, bytes]) -> int:
    """Leave an attempt by a command, with the files that it and its runner had written, by their names."""
    job_id = place.leave(dataclasses.replace(left, spool=b""))
    for name, content in files.items():
        (place.spool_path / f"{job_id}-1.{name}").write_bytes(content)
    return job_id


def files_of(*, out: bytes = b"", err: bytes = b"", identity: str | None = GONE, status: str = "") -> dict[str, bytes]:
    found = {"stdin": b"hello", "stdout": out, "stderr": err}
    for name, text in (("identity", identity), ("status", status)):
        if text:
            found[name] = text.encode()
    return found


COMMAND_ROWS: list[tuple[str, Left, dict[str, bytes], Status, Reason, AttemptStatus]] = [
    (
        "a recorded cancel",
        Left(ARMED, cancel=True),
        files_of(out=b"one", status="exit 0"),
        Status.CANCELLED,
        Reason.CANCEL_REQUESTED,
        AttemptStatus.CANCELLED,
    ),
    (
        "no leave to start",
        Left({}),
        files_of(identity=None),
        Status.QUEUED,
        Reason.NOT_SENT,
        AttemptStatus.INTERRUPTED,
    ),
    (
        "no identity",
        Left({"armed_at": AT}),
        files_of(identity=None),
        Status.QUEUED,
        Reason.NOT_EXECUTED,
        AttemptStatus.INTERRUPTED,
    ),
    (
        "no identity, for the second time",
        Left({"armed_at": AT}, deaths=2),
        files_of(identity=None),
        Status.HELD,
        Reason.CRASHED_WORKER,
        AttemptStatus.INTERRUPTED,
    ),
    (
        "a program that could not be started",
        Left(ARMED),
        files_of(status="spawn 2"),
        Status.QUEUED,
        Reason.NOT_EXECUTED,
        AttemptStatus.INTERRUPTED,
    ),
    (
        "an identity and nothing else",
        Left({"armed_at": AT}),
        files_of(),
        Status.HELD,
        Reason.SENT_OUTCOME_UNKNOWN,
        AttemptStatus.UNKNOWN,
    ),
    (
        "an identity and a part",
        Left(ARMED),
        files_of(out=b"one"),
        Status.HELD,
        Reason.ANSWER_INCOMPLETE,
        AttemptStatus.UNKNOWN,
    ),
    (
        "an identity and a part, with leave to run twice",
        Left(ARMED, may_run_twice=True),
        files_of(out=b"one"),
        Status.QUEUED,
        Reason.ASKED_AGAIN,
        AttemptStatus.UNKNOWN,
    ),
    (
        "exit status 0 and a text",
        Left(ARMED),
        files_of(out=b"one", status="exit 0"),
        Status.DONE,
        Reason.ANSWERED,
        AttemptStatus.SUCCEEDED,
    ),
    (
        "exit status 0 and no text",
        Left(ARMED),
        files_of(status="exit 0"),
        Status.HELD,
        Reason.ANSWER_UNREADABLE,
        AttemptStatus.UNKNOWN,
    ),
    (
        "exit status 75",
        Left(ARMED, max_attempts=1),
        files_of(status="exit 75"),
        Status.QUEUED,
        Reason.ASKED_TO_WAIT,
        AttemptStatus.FAILED,
    ),
    (
        "exit status 2",
        Left(ARMED),
        files_of(status="exit 2"),
        Status.FAILED,
        Reason.BAD_REQUEST,
        AttemptStatus.FAILED,
    ),
    (
        "another exit status",
        Left(ARMED),
        files_of(status="exit 3"),
        Status.QUEUED,
        Reason.UPSTREAM_ERROR,
        AttemptStatus.FAILED,
    ),
    (
        "a signal, and no attempt left",
        Left(ARMED, max_attempts=1),
        files_of(out=b"one", status="exit -9"),
        Status.FAILED,
        Reason.ATTEMPTS_EXHAUSTED,
        AttemptStatus.FAILED,
    ),
]


@pytest.mark.parametrize(
    ("left", "files", "status", "reason", "attempt"),
    [row[1:] for row in COMMAND_ROWS],
    ids=[row[0] for row in COMMAND_ROWS],
)
def test_each_end_of_a_command_gives_its_verdict(
    place: Place, left: Left, files: dict[str, bytes], status: Status, reason: Reason, attempt: AttemptStatus
) -> None:
    job_id = leave_command(place, left, files)
    place.recover({"near": HERE})
    job, ended = place.job(job_id), place.attempt(job_id)
    assert (job["status"], job["reason"], ended["status"]) == (status, reason, attempt)
    word, _, number = files.get("status", b"").decode().partition(" ")
    assert ended["exit_status"] == (int(number) if word == "exit" else None)
    if files["stdout"]:
        assert (place.output(job_id) if status is Status.DONE else place.part(job_id)) == "one"
    assert "run old" in job["detail"]
    assert list(place.spool_path.iterdir()) == []


@pytest.mark.parametrize("status", ["", "exit 0"])
def test_a_command_that_ran_without_leave_is_held_as_a_contradiction(place: Place, status: str) -> None:
    job_id = leave_command(place, Left({}), files_of(out=b"one", status=status))
    place.recover({"near": HERE})
    assert (place.job(job_id)["status"], place.job(job_id)["reason"]) == ("held", "evidence-contradicts")


def test_what_a_command_complained_of_is_quoted_without_secrets(place: Place) -> None:
    job_id = leave_command(place, Left(ARMED), files_of(out=b"a CANARY-123", err=b"no CANARY-123", status="exit 2"))
    place.recover({"near": HERE})
    assert "exit status 2: no [removed]" in place.job(job_id)["detail"]
    assert place.part(job_id) == "a [removed]"


def test_a_program_that_could_not_be_started_closes_its_gate(place: Place) -> None:
    leave_command(place, Left(ARMED), files_of(status="spawn 2"))
    place.recover({"near": HERE})
    (gate,) = place.rows("select closed_at, reason, detail from gates")
    assert gate["closed_at"] is not None and gate["reason"] == "unreachable"
    assert "sh: No such file or directory" in gate["detail"]


def test_a_command_of_a_route_that_is_configured_no_more_is_decided_all_the_same(place: Place) -> None:
    job_id = leave_command(place, Left(ARMED), files_of(out=b"one", status="exit 0"))
    place.recover(routes={})
    assert (place.job(job_id)["status"], place.output(job_id)) == ("done", "one")


def test_bytes_of_a_command_that_are_no_text_are_kept_as_they_came(place: Place) -> None:
    job_id = leave_command(place, Left(ARMED), files_of(out=b"one\xff CANARY-123", status="exit 0"))
    place.recover({"near": HERE})
    assert place.output(job_id) == "one\ufffd [removed]"
    (row,) = place.rows("select raw from attempt_parts where job_id = :id", id=job_id)
    assert row["raw"] == b"one\xff [removed]"


def check_whatever_a_command_left(left: Left, files: dict[str, bytes]) -> None:
    with TemporaryDirectory() as directory:
        place = Place(Path(directory))
        try:
            job_id = leave_command(place, left, files)
            place.recover({"near": HERE})
            job, attempt = place.job(job_id), place.attempt(job_id)
            once = place.everything()
            assert Status(job["status"]) in MOVES[Status.RUNNING]
            assert attempt["status"] != "running" and attempt["ended_at"] is not None and job["detail"]
            status = files.get("status", b"").decode()
            may_have_run = "identity" in files and not status.startswith("spawn")
            if left.marks.get("armed_at") is not None and may_have_run and job["status"] == "queued":
                said_so = status not in {"", "exit 0"} and job["reason"] in ANSWERED_AGAIN
                assert said_so or left.may_run_twice
            if job["status"] == "done":
                assert status == "exit 0" and files["stdout"]
            if left.cancel:
                assert job["status"] == "cancelled"
            assert once[1] == []
            place.recover({"near": HERE})
            assert place.everything() == once
        finally:
            place.database.close()


COMMAND_FILES = st.builds(
    files_of,
    out=st.sampled_from([b"", b"one", b"\xff\x00"]),
    err=st.sampled_from([b"", b"why"]),
    identity=st.just(GONE),
    status=st.sampled_from(["", "exit 0", "exit 1", "exit 2", "exit 75", "exit -9", "spawn 2"]),
) | st.just(files_of(identity=None))


@settings(max_examples=100, deadline=None)
@given(LEFT, COMMAND_FILES)
def test_every_combination_of_a_command_s_files_gives_a_legal_verdict_once(left: Left, files: dict[str, bytes]) -> None:
    marks = {name: left.marks[name] for name in ("armed_at", "sent_at", "first_byte_at")}
    check_whatever_a_command_left(dataclasses.replace(left, marks=marks), files)


@pytest.mark.parametrize(
    ("name", "content"),
    [("status", b"exit"), ("status", b"exit \xff"), ("status", b"spawn many"), ("identity", b"me"), ("identity", b" ")],
)
def test_what_was_not_written_by_a_runner_never_stops_a_start(place: Place, name: str, content: bytes) -> None:
    job_id = leave_command(place, Left(ARMED), {**files_of(out=b"one"), name: content})
    place.recover({"near": HERE})
    assert (place.job(job_id)["status"], place.part(job_id)) == ("held", "one")
