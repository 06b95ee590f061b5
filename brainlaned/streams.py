"""What of an answer has arrived: its text while it grows, read from the spool, so that a slow reader blocks nobody.

Owns how far each reader has come. It opens a file for each look and keeps none open; it never writes. What it returns
are server-sent events, ready to be sent.
"""

import codecs
import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from . import config, errors, queries
from .brains import reply
from .brains.scrub import Scrubber
from .db import Database
from .spool import Part, Spool
from .wire import ErrorKind, Status

PIECE_BYTES = 256 * 1024
"""So much of a text is in memory for one reader at a time."""


class Streams:
    """The answers of one lane, as far as they have come."""

    def __init__(self, database: Database, spool: Spool, routes: Mapping[str, config.Route]) -> None:
        self._database = database
        self._spool = spool
        self._routes = routes

    def follow(self, job_id: int, attempt: int, start: int) -> "Follower":
        """Follow a job's text from character `start` of an attempt on; 0: of whichever there is."""
        return Follower(self, job_id, attempt, start)

    def partial(self, job_id: int) -> str:
        """Return what has arrived so far. Raises Refused (no-output) where nothing has."""
        job, attempt, where, stored = self.look(job_id)
        text = None
        if stored is not None:
            text = "".join(self.stored(job_id, attempt, stored))
        elif where is Status.RUNNING and (part := self.spooled(job_id, attempt)) is not None:
            reader = self.reader(part, job["route"])
            text = "".join([*(reader.feed(chunk) for chunk in body(part)), reader.close()]) or None
        if text is None:
            raise errors.Refused(
                ErrorKind.NO_OUTPUT,
                f"cannot read a part of job {job_id}: it is {where} and nothing has arrived",
                next_action=f"brainctl show {job_id}",
                retry_safe=True,
            )
        return text

    def look(self, job_id: int) -> tuple[dict[str, Any], int, Status, queries.Stored | None]:
        """Return the job object, its latest attempt, its status, and what text of it is stored."""
        with self._database.read() as connection:
            return queries.job(connection, job_id), *queries.latest(connection, job_id)

    def stored(self, job_id: int, attempt: int, what: queries.Stored) -> Iterator[str]:
        """Read a text that is stored, piece by piece. Raises Refused (no-output) when it is erased meanwhile."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        offset = 0
        while True:
            with self._database.read() as connection:
                piece, _ = queries.stored_piece(connection, job_id, what, offset, PIECE_BYTES, attempt)
            if not piece:
                return
            offset += len(piece)
            yield decoder.decode(piece)

    def spooled(self, job_id: int, attempt: int) -> Part | None:
        """Return what is on the disk of an attempt; None where it is not there, or not any more."""
        # It may get its other name, or be stored and gone, at any time: the next look tells.
        with contextlib.suppress(FileNotFoundError):
            return self._spool.find(job_id, attempt)
        return None

    def reader(self, part: Part, route: str) -> "Reader":
        """Return what makes text of an attempt's bytes."""
        known = self._routes.get(route)
        return Reader(part, known.secrets() if known else ())


class Reader:
    """The text of an answer that is still arriving, secrets removed once more: a key may be cut across two deltas."""

    def __init__(self, part: Part, secrets: tuple[str, ...]) -> None:
        self._reader = reply.TextReader(secrets) if part.is_command else reply.ReplyReader()
        self._scrubber = Scrubber(secrets)

    def feed(self, chunk: bytes) -> str:
        """Take the next bytes and return the text that they made certain."""
        # Secrets are ASCII, so no character is cut in two.
        return self._scrubber.feed(self._reader.feed(chunk).encode()).decode()

    def close(self) -> str:
        """Return what was held back, where nothing more follows for now."""
        return self._scrubber.flush().decode()


class Follower:
    """How far one reader has come. `look` runs in the thread pool, one call at a time."""

    def __init__(self, streams: Streams, job_id: int, attempt: int, start: int) -> None:
        self._streams = streams
        self._job_id = job_id
        self._attempt = attempt
        self._reader: Reader | None = None
        self._bytes_read = 0
        self._position = 0
        self._skip = start
        self._stored: Iterator[str] | None = None
        self.has_more = False
        """There is more to be had at once, though nothing moves."""
        self.is_over = False

    def look(self) -> list[bytes]:
        """Return the events that have become due."""
        job, attempt, where, stored = self._streams.look(self._job_id)
        found: list[bytes] = []
        if attempt != self._attempt:
            if self._attempt and (self._position or self._skip):
                found.append(_event("restart", {"attempt": attempt}))
                self._skip = 0
            self._attempt, self._reader, self._bytes_read, self._position = attempt, None, 0, 0
            self._stored = None
        self.has_more = False
        if where is Status.QUEUED:
            self._stored = None
        elif where is Status.RUNNING:
            found += self._arrived(job["route"])
        else:
            more = self._next_stored(stored)
            if more is not None:
                self.has_more = True
                return [*found, *self._text(more)]
            found.append(_event("end", job))
            self.is_over = True
        return found

    def _next_stored(self, what: queries.Stored | None) -> str | None:
        """Return the next piece; None: there is no more. Raises Refused for what is erased in the middle."""
        if self._stored is None and what is not None:
            # What was told while it arrived is passed over in what is stored.
            self._skip, self._position = max(self._skip, self._position), 0
            self._stored = self._streams.stored(self._job_id, self._attempt, what)
        return next(self._stored, None) if self._stored is not None else None

    def _arrived(self, route: str) -> list[bytes]:
        part = self._streams.spooled(self._job_id, self._attempt)
        if part is None:
            return []
        self._reader = self._reader or self._streams.reader(part, route)
        found: list[bytes] = []
        taken = 0
        for chunk in body(part, self._bytes_read):
            taken += len(chunk)
            self._bytes_read += len(chunk)
            found += self._text(self._reader.feed(chunk))
            if taken >= PIECE_BYTES:
                self.has_more = True
                break
        return found

    def _text(self, text: str) -> list[bytes]:
        skipped = min(len(text), max(0, self._skip - self._position))
        self._position += len(text)
        position = f"{self._attempt}-{self._position}"
        return [_event("text", {"text": text[skipped:]}, position)] if text[skipped:] else []


def body(part: Part, start: int = 0) -> Iterator[bytes]:
    """Read the body from a byte on; what is stored and gone meanwhile ends it."""
    with contextlib.suppress(FileNotFoundError):
        yield from part.body(start)


def _event(name: str, data: Any, position: str | None = None) -> bytes:
    # JSON without raw line ends, so the data is always one line.
    prefix = "" if position is None else f"id: {position}\n"
    return f"{prefix}event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode()
