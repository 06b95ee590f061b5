"""Each promise that is looked at: kept it is "ok", broken by hand it is named with the rows that break it."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from brainlaned import config, gate, store, verify
from brainlaned.db import Database
from brainlaned.spool import Spool
from brainlaned.states import Evidence, Verdict
from brainlaned.wire import AttemptStatus, Reason, Status

MARK = "2026-03-01T12:00:01.000000Z"
DONE = Verdict(Status.DONE, AttemptStatus.SUCCEEDED, Reason.ANSWERED, "HTTP 200", text="hi", response="{}")
HELD = Verdict(Status.HELD, AttemptStatus.UNKNOWN, Reason.SENT_OUTCOME_UNKNOWN, "no answer came")


class Lane:
    """A stopped lane in which one job is done, one held, one was running and one is queued."""

    def __init__(self, directory: Path) -> None:
        self.database = Database(directory / "brainlane.db")
        self.database.open()
        self.spool_directory = directory / "spool"
        self.spool = Spool(self.spool_directory)
        self.spool.open()
        routes = {"near": config.Route("near", "http://127.0.0.1:1", "small")}
        gates = gate.Gates(routes)
        asked = store.Submission("{}", "d", "near", "small", False, 3)
        with self.database.write() as tx:
            store.begin_run(tx, "run", 1, "brainctl", list(routes))
            for verdict in (DONE, HELD, None):
                store.accept(tx, asked, store.Caller(uid=1000), 0, 1_000_000)
                claim = store.claim_next(tx, gates.open_routes(tx), "run")
                assert claim is not None
                if verdict is not None:
                    store.finish(tx, claim.job_id, claim.attempt, Evidence(armed_at=MARK), verdict)
            store.accept(tx, asked, store.Caller(uid=1000), 0, 1_000_000)
        with self.spool.create(3, 1) as writer:
            writer.head(200, {}, MARK)

    def spoil(self, *statements: str) -> None:
        """Do to the rows what the program never would."""
        connection = sqlite3.connect(self.database.path, isolation_level=None)
        connection.execute("pragma foreign_keys = off")
        connection.execute("pragma ignore_check_constraints = on")
        for statement in statements:
            connection.execute(statement)
        connection.close()

    def wrong(self) -> list[str]:
        return [line for is_well, line in verify.look(self.database, self.spool) if not is_well]


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[Lane]:
    made = Lane(tmp_path)
    yield made
    made.database.close()


def test_of_a_sound_lane_every_line_is_well(lane: Lane) -> None:
    found = list(verify.look(lane.database, lane.spool))
    assert all(is_well for is_well, _ in found)
    *looks, counts = [line for _, line in found]
    assert len(looks) >= 7 and all(line.endswith(": ok") for line in looks)
    assert counts == "4 jobs, 3 attempts"


SPOILED = {
    "a running job without its running attempt": (
        ["update job_attempts set status = 'unknown', ended_at = started_at where job_id = 3"],
        "a running job has",
        "3",
    ),
    "a running attempt of a held job": (
        ["update jobs set status = 'held' where id = 3"],
        "a running job has",
        "3",
    ),
    "a running attempt that is not the latest": (
        ["update jobs set attempt_count = 2 where id = 3"],
        "a running job has",
        "3",
    ),
    "a done job without its answer": (["delete from job_outputs where job_id = 1"], "what is done has", "1"),
    "a queued job without its prompt": (["delete from job_requests where job_id = 4"], "what is not erased has", "4"),
    "a count too high": (["update job_counts set jobs = 9 where status = 'held'"], "what is counted", "near held"),
    "a count of nothing": (
        ["insert into job_counts values ('far', 'done', 2)"],
        "what is counted",
        "far done",
    ),
    "a missing count": (["delete from job_counts where status = 'done'"], "what is counted", "near done"),
    "an attempt of no job": (
        ["insert into attempt_parts values (77, 1, 'x', null, null)"],
        "foreign key check",
        "attempt_parts",
    ),
}


@pytest.mark.parametrize(("statements", "promise", "names"), SPOILED.values(), ids=SPOILED)
def test_a_promise_that_is_broken_is_named_with_what_breaks_it(
    lane: Lane, statements: list[str], promise: str, names: str
) -> None:
    lane.spoil(*statements)
    (line,) = lane.wrong()
    assert line.startswith(promise)
    assert line.endswith(f": WRONG: {names}")


def test_what_was_erased_needs_neither_prompt_nor_answer(lane: Lane) -> None:
    lane.spoil(
        "delete from job_requests where job_id = 1",
        "delete from job_outputs where job_id = 1",
        "update jobs set erased_at = finished_at where id = 1",
    )
    assert lane.wrong() == []


def test_a_file_of_the_spool_that_no_attempt_has_is_named(lane: Lane) -> None:
    for name in ("3-2.part", "99-1.whole"):
        (lane.spool_directory / name).touch()
    (line,) = lane.wrong()
    assert line.startswith("every file of the spool")
    assert sorted(line.split("WRONG: ")[1].split(", ")) == ["3-2", "99-1"]


def test_of_many_rows_that_break_a_promise_the_first_few_are_named(lane: Lane) -> None:
    for number in range(20):
        (lane.spool_directory / f"{100 + number}-1.part").touch()
    (line,) = lane.wrong()
    assert line.count(",") == 5 and line.endswith(", ...")


def test_a_copy_that_was_put_in_place_without_a_spool_directory_is_sound(lane: Lane) -> None:
    (lane.spool_directory / "3-1.part").unlink()
    lane.spool_directory.rmdir()
    assert lane.wrong() == []


def test_a_damaged_page_is_told_and_raises_nothing(lane: Lane) -> None:
    lane.database.cut_log()
    lane.database.close()
    with lane.database.path.open("r+b") as file:
        content = file.read()
        page = int.from_bytes(content[16:18]) or 65536
        for start in range(page, len(content), page):
            file.seek(start)
            file.write(b"\xff" * 64)
    wrong = lane.wrong()
    assert wrong and all("WRONG: " in line for line in wrong)


def test_every_promise_that_is_looked_at_is_broken_above() -> None:
    named = {promise for _, promise, _ in SPOILED.values()}
    assert {promise for promise in verify._PROMISES if not any(promise.startswith(each) for each in named)} == set()
