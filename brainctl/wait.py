"""Waiting for jobs: until they are final or held, or until the time is up, with live text where it is wanted.

Owns the loops over `?wait=` and over the stream, the progress line, and what is borne meanwhile: a lane that restarts
under a waiting client is asked again for `OUTAGE_S`, for the job is durable and asking does nothing. The first answer
gets no such patience: who starts to wait for a lane that is down learns it at once.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from brainlaned.wire import EXIT_OF_STATUS, ErrorKind, Exit

from . import render, text
from .client import Answer, Lane
from .errors import Problem, say

STEP_S = 30.0
SHOWN_STEP_S = 5.0
"""While a person watches, his place in line is asked for this often."""
OUTAGE_S = 30.0
OUTAGE_PAUSE_S = 0.5

AWAY = (ErrorKind.NO_ANSWER, ErrorKind.NO_SOCKET, ErrorKind.DEAD_SOCKET, ErrorKind.BUSY, ErrorKind.TOO_MANY_WAITERS)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Waited:
    """A job as it stood when the waiting ended."""

    body: bytes
    job: Json

    @property
    def exit_status(self) -> Exit:
        """Return the exit status of having waited for it."""
        return EXIT_OF_STATUS.get(self.job["status"], Exit.WAITED_LONG_ENOUGH)

    @property
    def settled(self) -> bool:
        """Return whether it stands where it stays unless a person moves it."""
        return self.exit_status is not Exit.WAITED_LONG_ENOUGH


class ProgressLine:
    """One line on a terminal's standard error that is rewritten in place; nothing in a pipe."""

    def __init__(self) -> None:
        self.visible = text.is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"
        self._columns = 0
        """How much of the line is to be wiped: with spaces, as not every terminal wants escape sequences."""

    def show(self, words: str) -> None:
        """Replace the line."""
        if self.visible:
            words = text.cut(words, text.columns() - 1)
            sys.stderr.write(f"\r{text.pad(words, self._columns)}")
            sys.stderr.flush()
            self._columns = text.width(words)

    def clear(self) -> None:
        """Take the line away."""
        if self._columns:
            sys.stderr.write(f"\r{' ' * self._columns}\r")
            sys.stderr.flush()
            self._columns = 0


class _Outage:
    """How long the lane has been away since it last answered."""

    def __init__(self) -> None:
        self._since: float | None = None

    def over(self) -> None:
        self._since = None

    def bear(self, problem: Problem) -> None:
        """Pause for the lane to come back, or raise the problem when it is another one or has lasted too long."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if problem.kind not in AWAY or now - self._since > OUTAGE_S:
            raise problem
        time.sleep(OUTAGE_PAUSE_S)


def until_settled(lane: Lane, job_id: int, deadline: float) -> Waited:
    """Wait until a job is final or held, or until the deadline (monotonic)."""
    line, outage, started = ProgressLine(), _Outage(), time.monotonic()
    waited = _waited(lane.show(job_id))
    step = SHOWN_STEP_S if line.visible else STEP_S

    def tick() -> None:
        line.show(render.progress(waited.job, time.monotonic() - started))

    lane.tick = tick if line.visible else None
    try:
        while not waited.settled and (left := deadline - time.monotonic()) > 0:
            tick()
            asked_at = time.monotonic()
            try:
                waited = _waited(lane.wait(job_id, min(step, left)))
                outage.over()
            except Problem as problem:
                outage.bear(problem)
            else:
                # A lane that is about to stop lets its waiters go early; it is not asked again in a rush.
                if not waited.settled and time.monotonic() - asked_at < min(step, left) / 2:
                    time.sleep(OUTAGE_PAUSE_S)
        return waited
    finally:
        lane.tick = None
        line.clear()


def follow(lane: Lane, job_id: int, deadline: float, write: Callable[[str], None]) -> Waited:
    """Pass on a job's text as it arrives, until it is final or held or the deadline (monotonic) has come.

    Where the lane has no stream, waits and passes on the whole text at the end.
    """
    line, outage, started = ProgressLine(), _Outage(), time.monotonic()
    beside = Lane(lane.path, lane.answer_within_s)
    waited = _waited(lane.show(job_id))
    asked_at, silent_so_far = started, True

    def tick() -> None:
        nonlocal waited, asked_at
        now = time.monotonic()
        if now >= deadline:
            raise _Enough
        if not (line.visible and silent_so_far):
            return
        if now - asked_at > SHOWN_STEP_S:
            asked_at = now
            # Where the lane is away, the stream itself will tell.
            with contextlib.suppress(Problem):
                waited = _waited(beside.show(job_id))
        line.show(render.progress(waited.job, now - started))

    lane.tick = tick
    start = "0"
    try:
        while True:
            try:
                for event in lane.stream(job_id, start):
                    outage.over()
                    line.clear()
                    match event.name:
                        case "text":
                            silent_so_far = False
                            write(json.loads(event.data)["text"])
                            start = event.id or start
                        case "restart":
                            start = "0"
                            say(f"attempt {json.loads(event.data)['attempt']} begins: the text starts again")
                        case "end":
                            return Waited(event.data.encode(), json.loads(event.data))
                        case _:
                            pass  # a newer lane may say more
                    if time.monotonic() >= deadline:
                        raise _Enough
                outage.bear(Problem(ErrorKind.NO_ANSWER, f"cannot follow job {job_id}: its stream ended too early"))
            except Problem as problem:
                if problem.kind == ErrorKind.NO_SUCH_PATH:
                    return _whole(lane, job_id, deadline, write)
                outage.bear(problem)
    except _Enough:
        return _waited(beside.show(job_id))
    finally:
        lane.tick = None
        line.clear()


class _Enough(Exception):
    """The deadline has come."""


def _whole(lane: Lane, job_id: int, deadline: float, write: Callable[[str], None]) -> Waited:
    waited = until_settled(lane, job_id, deadline)
    if waited.exit_status is Exit.OK:
        write(lane.output(job_id).body.decode("utf-8", "replace"))
    return waited


def _waited(answer: Answer) -> Waited:
    return Waited(answer.body, answer.object())
