"""How far a reader of a job's text has come, over everything that may happen to the job meanwhile."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from brainlaned import config, decisions, errors, queries, store, streams
from brainlaned.db import Database
from brainlaned.spool import Spool
from brainlaned.states import Evidence, Verdict
from brainlaned.streams import Follower, Streams
from brainlaned.wire import AttemptStatus, Decision, Reason, Status

ALICE = store.Caller(uid=1000, user="alice", pid=7)
ROUTE = config.Route("near", "http://127.0.0.1:1/v1", "small")
HELD = Verdict(Status.HELD, AttemptStatus.UNKNOWN, Reason.ANSWER_INCOMPLETE, "cut")
PIECES = 3


class Held:
    """A lane with one held job, whose part is longer than one look gives."""

    def __init__(self, directory: Path) -> None:
        self.database = Database(directory / "brainlane.db")
        self.database.open()
        spool = Spool(directory / "spool")
        spool.open()
        self.streams = Streams(self.database, spool, {"near": ROUTE})
        self.part = "n\u00e9" * (PIECES * streams.PIECE_BYTES // 3)
        with self.database.write() as tx:
            store.begin_run(tx, "run", 1, "brainctl", ["near"])
            store.accept(tx, store.Submission("{}", "d", "near", "small", False, 3), ALICE, 0, 100)
            store.claim_next(tx, [config.OpenRoute(ROUTE, is_probe=False)], "run")
            store.finish(tx, 1, 1, Evidence(armed_at=tx.now), replace(HELD, text=self.part))

    def decide(self, decision: Decision, text: str | None = None) -> None:
        with self.database.write() as tx:
            decisions.decide(tx, 1, None, decision, text, None, ALICE)

    def forget(self) -> None:
        with self.database.write() as tx:
            decisions.forget(tx, 1, None, None, ALICE)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    made = Held(tmp_path)
    yield made
    made.database.close()


def text_of(events: list[bytes]) -> str:
    """What the text events of a look say."""
    texts = []
    for event in events:
        fields = dict(line.split(": ", 1) for line in event.decode().splitlines() if line)
        if fields["event"] == "text":
            texts.append(json.loads(fields["data"])["text"])
    return "".join(texts)


def read_on(follower: Follower) -> tuple[str, int]:
    """Look until there is nothing more to be had at once; return the text, and how many looks it took."""
    text, looks = "", 0
    while True:
        text += text_of(follower.look())
        looks += 1
        if not follower.has_more:
            return text, looks


def test_a_long_text_comes_in_pieces_and_whole(held: Held) -> None:
    follower = held.streams.follow(1, 0, 0)
    text, looks = read_on(follower)
    assert (text == held.part, follower.is_over) == (True, True)
    assert looks >= PIECES


@pytest.mark.parametrize("start", [1, 100_000, 300_000])
def test_a_reader_who_comes_back_gets_the_rest(held: Held, start: int) -> None:
    assert read_on(held.streams.follow(1, 1, start))[0] == held.part[start:]


def test_a_reader_of_what_is_asked_again_waits_for_the_new_answer(held: Held) -> None:
    follower = held.streams.follow(1, 0, 0)
    follower.look()
    assert follower.has_more
    held.decide(Decision.RESEND)
    assert (follower.look(), follower.has_more, follower.is_over) == ([], False, False)


def test_a_reader_of_a_part_reads_it_to_its_end_though_another_answer_is_given_meanwhile(held: Held) -> None:
    follower = held.streams.follow(1, 0, 0)
    begun = text_of(follower.look())
    held.decide(Decision.COMPLETE, "by hand")
    assert begun + read_on(follower)[0] == held.part
    assert read_on(held.streams.follow(1, 0, 0))[0] == "by hand"


def test_what_is_erased_while_it_is_read_has_no_end(held: Held) -> None:
    held.decide(Decision.ACCEPT)
    follower = held.streams.follow(1, 0, 0)
    follower.look()
    held.forget()
    with pytest.raises(errors.Refused, match="erased"):
        read_on(follower)
    assert not follower.is_over
    with pytest.raises(errors.Refused):
        held.streams.partial(1)


def test_the_part_as_a_whole_is_what_is_stored(held: Held) -> None:
    assert held.streams.partial(1) == held.part
    with held.database.read() as connection:
        assert queries.latest(connection, 1) == (1, Status.HELD, "part")
