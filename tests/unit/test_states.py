import ast
import inspect

import pytest

from brainlaned import states
from brainlaned.states import FINAL, MOVES, Evidence, Verdict
from brainlaned.wire import AttemptStatus, Reason, Status


def test_every_status_has_its_moves() -> None:
    assert set(MOVES) == {None, *Status}


def test_a_job_begins_queued_and_nowhere_else() -> None:
    assert MOVES[None] == {Status.QUEUED}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (Status.QUEUED, {Status.RUNNING, Status.CANCELLED, Status.HELD}),
        (Status.RUNNING, {Status.QUEUED, Status.HELD, Status.DONE, Status.FAILED, Status.CANCELLED}),
        (Status.HELD, {Status.QUEUED, Status.DONE, Status.FAILED, Status.CANCELLED}),
        (Status.FAILED, {Status.QUEUED}),
        (Status.DONE, set()),
        (Status.CANCELLED, set()),
    ],
)
def test_the_moves_are_those_of_the_diagram(old: Status, new: set[Status]) -> None:
    assert MOVES[old] == new


def test_no_status_moves_to_itself() -> None:
    assert not [status for status, moves in MOVES.items() if status in moves]


def test_every_status_can_be_reached_and_every_job_can_come_to_an_end() -> None:
    assert {status for moves in MOVES.values() for status in moves} == set(Status)
    for status in set(Status) - FINAL:
        assert MOVES[status] & FINAL


def test_what_is_final_stays_unless_a_person_retries_what_failed() -> None:
    assert set(FINAL) == {Status.DONE, Status.FAILED, Status.CANCELLED}
    assert {status: MOVES[status] for status in FINAL if MOVES[status]} == {Status.FAILED: {Status.QUEUED}}


def test_only_a_claim_leads_to_running() -> None:
    assert [status for status, moves in MOVES.items() if Status.RUNNING in moves] == [Status.QUEUED]


def test_the_diagram_above_the_table_names_every_status() -> None:
    diagram = ast.get_docstring(ast.parse(inspect.getsource(states))) or ""
    assert all(status in diagram for status in Status)


def test_texts_of_people_and_brains_stand_in_no_repr() -> None:
    canary = "CANARY-text"
    evidence = Evidence(body_start=canary.encode())
    verdict = Verdict(
        job=Status.DONE,
        attempt=AttemptStatus.SUCCEEDED,
        reason=Reason.ANSWERED,
        detail="complete",
        text=canary,
        response=canary,
        raw=canary.encode(),
    )
    assert canary not in repr(evidence) + repr(verdict)


def test_nothing_is_known_of_an_attempt_until_it_was_seen() -> None:
    blank = Evidence()
    seen = [getattr(blank, name) for name in Evidence.__dataclass_fields__ if name.endswith(("_at", "status", "_id"))]
    assert len(seen) >= 7
    assert not any(seen)
    assert (blank.whole, blank.spooled, dict(blank.headers)) == (False, False, {})
