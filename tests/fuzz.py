"""Answers that no brain should give, given all the same: `python -m tests.fuzz --examples N [--seed S]`.

hypothesis makes up the bytes of an answer, from the status line on. A real worker asks a real socket, which answers
with them and closes. At the moment when the answer is in the spool and not yet in the database, what is on the disk is
copied to a second lane, where the process is taken to have died, and recovery decides. `Bench.check` says what must
hold of every answer: nothing is raised, the brain is asked once, a job is done only for a reason that can be found in
the bytes, both lanes come to the same end, and the key that the brain echoes is written nowhere.
"""

import argparse
import io
import itertools
import json
import logging
import os
import re
import shutil
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import hypothesis
from hypothesis import HealthCheck
from hypothesis import strategies as st

from brainlaned import config, events, filesystem, recovery, store
from brainlaned.brains import Ended, Marks
from brainlaned.brains.http import HttpBrain, HttpCall
from brainlaned.db import Database, Transaction
from brainlaned.gate import Gates
from brainlaned.spool import Spool
from brainlaned.states import MOVES
from brainlaned.wire import Status
from brainlaned.worker import Worker

KEY = "CANARY-5fd1-of-the-fuzz"
ASKER = store.Caller(uid=1000, user="alice", pid=77)
PATIENCE_S = 30.0


@dataclass(frozen=True)
class Case:
    """One answer, in the pieces in which it is sent, and what was agreed about the job that gets it."""

    pieces: list[bytes]
    may_run_twice: bool = False
    max_attempts: int = 3
    require_complete: bool = False

    @property
    def sent(self) -> bytes:
        return b"".join(self.pieces)


# The bytes


def event(value: object, *, ascii_only: bool = True) -> bytes:
    return b"data: " + encoded(value, ascii_only) + b"\n\n"


def encoded(value: object, ascii_only: bool = True) -> bytes:
    """Return JSON; half a surrogate pair that is not escaped becomes bytes that are no UTF-8."""
    return json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")


def delta(content: object, finish: object = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": finish}]})


def completion(content: object, finish: object = "stop") -> bytes:
    message = {"role": "assistant", "content": content}
    return encoded({"choices": [{"index": 0, "message": message, "finish_reason": finish}]})


WHOLE_STREAM = delta("one ") + delta("two") + delta(None, "stop") + b"data: [DONE]\n\n"

GOOD_STATUS_LINES = st.one_of(
    st.just(b"HTTP/1.1 200 OK"),
    st.just(b"HTTP/1.1 200 OK"),
    st.sampled_from([400, 401, 402, 403, 404, 408, 409, 413, 422, 425, 429, 500, 502, 503, 504, 524, 529]).map(
        lambda code: b"HTTP/1.1 %d Said so" % code
    ),
)
BAD_STATUS_LINES = st.one_of(
    st.integers(0, 1200).map(lambda code: b"HTTP/1.1 %03d" % code),
    st.sampled_from(
        [
            b"HTTP/1.1 200 " + KEY.encode(),
            b"HTTP/1.1 4" + KEY.encode(),
            b"HTTP/1.0 200 OK",
            b"HTTP/1.1 200",
            b"http/1.1 200 OK",
            b"HTTP/2 200 OK",
            b"HTTP/1.1 200 \xff\xfe",
            b"HTTP/1.1 2e2 OK",
            b"ICY 200 OK",
            b"",
            b"220 mail.example ESMTP",
            b"HTTP/1.1 200 " + b"x" * 70_000,
        ]
    ),
)

GOOD_HEADER_LINES = st.sampled_from(
    [
        b"Content-Type: text/event-stream",
        b"Content-Type: application/json; charset=utf-16",
        b"Content-Type: text/html",
        b"Content-Encoding: identity",
        b"Retry-After: 3",
        b"Retry-After: 99999999999999999999",
        b"Retry-After: Sun, 01 Mar 2026 12:00:09 GMT",
        b"Location: http://elsewhere.example/?key=" + KEY.encode(),
        b"X-Request-Id: " + KEY.encode() * 30,
        b"X-Generation-Id: " + b"i" * 2000,
        b"Connection: keep-alive",
    ]
)
BAD_HEADER_LINES = st.one_of(
    st.sampled_from(
        [
            b"Content-Type: \xff\xfe",
            b"Content-Encoding: gzip",
            b"Content-Length: 5",
            b"Content-Length: 5, 7",
            b"Content-Length: -1",
            b"Content-Length: 1" + b"0" * 25,
            b"Content-Length: 0x10",
            b"Transfer-Encoding: chunked",
            b"Transfer-Encoding: gzip, chunked",
            b"Transfer-Encoding: identity",
            b"Retry-After: -1",
            b"Retry-After: Mon, 32 Foo 99999 99:99:99 +9999",
            b"Retry-After-Ms: 1e309",
            b"Date: Sun, 01 Mar 0001 00:00:00 +2359",
            b"Date: never",
            b"Connection: upgrade",
            b"Upgrade: websocket",
            b"Request-Id: \xe9\x80\x80",
            b"X-LiteLLM-Call-Id:",
            b" folded: " + KEY.encode(),
            b"no colon " + KEY.encode(),
            b": no name",
            b"Sp ace: x",
            b"Nul: a\x00b",
            b"Cr: a\rb",
            b"Big: " + b"x" * 120_000,
        ]
    ),
    st.binary(max_size=30),
    st.tuples(
        st.sampled_from([b"Retry-After", b"Date", b"X-Request-Id", b"Content-Type", b"Location"]),
        st.text(st.characters(max_codepoint=255), max_size=30),
    ).map(lambda pair: pair[0] + b": " + pair[1].encode("latin-1")),
)

INFORMATIONAL = st.sampled_from(
    [
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nLink: <" + KEY.encode() + b">\r\n\r\n",
        b"HTTP/1.1 199\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
        b"\r\n",
    ]
)

FIELDS = st.sampled_from(
    [
        "choices",
        "index",
        "delta",
        "message",
        "content",
        "text",
        "finish_reason",
        "error",
        "code",
        "type",
        "message",
        "refusal",
        "reasoning",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "usage",
        "id",
        "model",
        "created",
        "object",
        "innererror",
    ]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.text(st.characters(), max_size=8),
    st.sampled_from(["stop", "length", "content_filter", "tool_calls", "error", "assistant", KEY, "a" + KEY + "b"]),
    st.sampled_from(["insufficient_quota", "429", "503", 429, 401, 500, "content_filter", "\ud83d", "\ude00", "\x00"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=8,
)
CHOICE = st.fixed_dictionaries(
    {},
    optional={
        "index": st.sampled_from([0, 1, None, "0"]) | VALUES,
        "delta": st.fixed_dictionaries({"content": VALUES}) | VALUES,
        "message": st.fixed_dictionaries({"content": VALUES}) | VALUES,
        "finish_reason": SCALARS,
        "error": VALUES,
    },
)
OBJECTS = st.fixed_dictionaries(
    {"choices": st.lists(CHOICE, max_size=2) | VALUES},
    optional={"error": VALUES, "usage": VALUES, "id": VALUES, "model": VALUES, "created": VALUES, "object": VALUES},
)
ERRORS = st.fixed_dictionaries(
    {"error": st.dictionaries(st.sampled_from(["code", "type", "message", "innererror"]), VALUES) | VALUES}
)

DEEP_BODY = b'{"choices": ' + b"[" * 100_000
ODD_FRAGMENTS = st.sampled_from(
    [
        b"event: error\ndata: " + KEY.encode() + b"\n\n",
        b"event: ping\n\n",
        b": still here\n\n",
        b"id: 1\nretry: 99999999999999999999999\n\n",
        b'data: {"choices": [\ndata: {"delta": {"content": "in two lines"}}]}\n\n',
        b'{"choices": [], "choices": [{"message": {"content": "twice"}, "finish_reason": "stop"}]}',
        b'{"choices": [{"message": {"content": NaN}, "finish_reason": "stop"}], "usage": {"total_tokens": NaN}}',
        b'data: {"usage": {"total_tokens": 1e999, "prompt_tokens": ' + b"9" * 5000 + b"}}\n\n",
        b'data: {"choices": [{"delta": {"content": "\xff\xc3"}}]}\n\n',
        b'{"choices": [{"message": {"content": "\\ud800"}, "finish_reason": "\\udc00"}]}',
        DEEP_BODY,
        b"data: " + DEEP_BODY + b"\n\n",
        b'{"choices": [{"message": {"content": "deep"}}], "usage": {"a": ' + b"[" * 200 + b"]" * 200 + b"}}",
        b"<!doctype html><title>" + KEY.encode() + b"</title>",
        b"\xef\xbb\xbf",
        b"\x1f\x8b\x08\x00",
        b"\x00",
        KEY.encode(),
        KEY.encode()[:9],
        b"\r",
        b"\n",
    ]
)

FRAGMENTS = st.one_of(
    st.just(WHOLE_STREAM),
    st.sampled_from(["one ", "two", "", KEY, "n\u00e9 \U0001f30d"]).map(delta),
    st.sampled_from(["stop", "length", "content_filter", "refusal", "error", "abort", "", 1, ["stop"]]).map(
        lambda finish: delta(None, finish)
    ),
    st.sampled_from([b"data: [DONE]\n\n", b"data:[DONE]\r\n\r\n", b"data: [DONE]", b"[DONE]"]),
    st.builds(completion, VALUES, SCALARS),
    st.just(completion("one two")),
    st.builds(event, OBJECTS, ascii_only=st.booleans()),
    st.builds(encoded, OBJECTS, ascii_only=st.booleans()),
    st.builds(event, ERRORS, ascii_only=st.booleans()),
    st.builds(encoded, ERRORS, ascii_only=st.booleans()),
    st.builds(encoded, VALUES, ascii_only=st.booleans()),
    ODD_FRAGMENTS,
    st.binary(max_size=20),
)


def framed(body: bytes, framing: str, cuts: list[int]) -> tuple[list[bytes], bytes]:
    """Return the header lines that announce a body, and the body as they say, or as they should not say."""
    match framing:
        case "length":
            return [b"Content-Length: %d" % len(body)], body
        case "short length":
            return [b"Content-Length: %d" % max(0, len(body) - 3)], body
        case "long length":
            return [b"Content-Length: %d" % (len(body) + 3)], body
        case "close":
            return [], body
    parts = [b"%x\r\n%b\r\n" % (len(part), part) for part in cut(body, cuts) if part]
    ends = {
        "chunked": b"0\r\n\r\n",
        "trailers": b"0\r\nX-Request-Id: late\r\n\r\n",
        "no last chunk": b"",
        "no chunk": b"zz\r\nno chunk\r\n",
        "endless chunk": b"ffffffff\r\nno end",
    }
    return [b"Transfer-Encoding: chunked"], b"".join(parts) + ends[framing]


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    """Cut bytes into pieces, none of them empty."""
    places = sorted({place % (len(data) + 1) for place in cuts} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


FAULTY_FRAMINGS = ["close", "short length", "long length", "trailers", "no last chunk", "no chunk", "endless chunk"]
PLACES = st.lists(st.integers(0, 5000), max_size=4)


def rarely(one_in: int) -> st.SearchStrategy[bool]:
    return st.sampled_from([False] * (one_in - 1) + [True])


@st.composite
def structured(draw: st.DrawFn) -> bytes:
    """Return an answer that is nearly one: each kind of fault is rare, so that what lies behind it is met as well."""
    some = st.lists(ODD_FRAGMENTS, min_size=1, max_size=2) if draw(rarely(6)) else st.lists(FRAGMENTS, max_size=6)
    body = b"".join(draw(some))
    framing = draw(st.sampled_from(FAULTY_FRAMINGS) if draw(rarely(4)) else st.sampled_from(["length", "chunked"]))
    announced, payload = framed(body, framing, draw(PLACES))
    lines = [draw(BAD_STATUS_LINES if draw(rarely(8)) else GOOD_STATUS_LINES), *announced]
    lines += draw(st.lists(GOOD_HEADER_LINES, max_size=2))
    lines += draw(st.lists(BAD_HEADER_LINES, min_size=1, max_size=2)) if draw(rarely(6)) else []
    before = b"".join(draw(st.lists(INFORMATIONAL, min_size=1, max_size=2))) if draw(rarely(8)) else b""
    end = draw(st.sampled_from([b"\n", b"\r"])) if draw(rarely(12)) else b"\r\n"
    whole = before + end.join([*lines, b"", b""]) + payload
    if draw(rarely(6)):
        place = draw(st.integers(0, len(whole)))
        whole = whole[:place] + draw(st.binary(max_size=4)) + whole[place + draw(st.integers(0, 6)) :]
    if draw(rarely(8)):
        whole = whole[: draw(st.integers(0, len(whole)))]
    return whole


CASES = st.builds(
    Case,
    pieces=st.builds(cut, st.one_of(structured(), structured(), structured(), st.binary(max_size=300)), PLACES),
    may_run_twice=st.booleans(),
    max_attempts=st.integers(1, 3),
    require_complete=st.booleans(),
)


# What may be believed of them, said once more and as simply as can be


def may_be_done(sent: bytes) -> bool:
    """Say whether the bytes hold a finish reason, an end marker or a whole JSON answer, wherever the body begins."""
    return any(
        _says_it_is_complete(body)
        for start in [blank.end() for blank in re.finditer(rb"\n\r?\n", sent)]
        for body in (sent[start:], _unchunked(sent[start:]))
    )


def _says_it_is_complete(body: bytes) -> bool:
    text = re.sub("\r\n|\r", "\n", body.decode("utf-8", "replace")).removeprefix("\ufeff")
    whole = _leading_json(text)
    if isinstance(whole, dict) and whole.get("choices"):
        return True
    for one in text.split("\n\n"):
        lines = [line.removeprefix("data:").strip() for line in one.split("\n") if line.startswith("data:")]
        if any(line.startswith("[DONE]") for line in lines) or _has_finish_reason(_leading_json("\n".join(lines))):
            return True
    return False


def _leading_json(text: str) -> Any:
    # What follows is allowed, since a length may have cut it off.
    try:
        return json.JSONDecoder(strict=False, parse_int=float).raw_decode(text.strip())[0]
    except (ValueError, RecursionError):
        return None


def _has_finish_reason(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_finish_reason, value))
    if not isinstance(value, dict):
        return False
    reason = value.get("finish_reason")
    return (isinstance(reason, str) and reason != "") or any(map(_has_finish_reason, value.values()))


def _unchunked(data: bytes) -> bytes:
    body = b""
    while found := re.match(rb"([0-9A-Fa-f]{1,20})[^\n]*\n", data):
        size = int(found[1], 16)
        body += data[found.end() : found.end() + size]
        data = re.sub(rb"\A\r?\n", b"", data[found.end() + size :])
    return body


# The two lanes


class Line:
    """A server for one request at a time: it reads it whole, answers with the bytes it was given, and closes."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread: threading.Thread | None = None
        self._has_client = threading.Event()
        self.requests = 0
        self.more = b""
        """What came on the line after the request."""

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"

    def answer(self, pieces: list[bytes]) -> None:
        """Begin to wait for a request."""
        self.requests, self.more = 0, b""
        self._has_client.clear()
        self._listener.settimeout(PATIENCE_S)
        self._thread = threading.Thread(target=self._serve, args=[pieces])
        self._thread.start()

    def connections(self) -> int:
        """Return how often we were connected to, now that whoever was to connect has done so."""
        assert self._thread is not None
        ours = 0
        if self._thread.is_alive() and not self._has_client.is_set():
            # Either the client still waits in the line before us, or there will never be one.
            socket.create_connection(self._listener.getsockname()).close()
            ours = 1
        self._thread.join(PATIENCE_S)
        self._listener.setblocking(False)
        count = 1
        while True:
            try:
                self._listener.accept()[0].close()
            except BlockingIOError:
                return count - ours
            count += 1

    def close(self) -> None:
        self._listener.close()

    def _serve(self, pieces: list[bytes]) -> None:
        line, _ = self._listener.accept()
        self._has_client.set()
        with line:
            line.settimeout(PATIENCE_S)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                head, _, body = self._read(line, until=rb"\r\n\r\n").partition(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: (\d+)", head)
                if length is None:
                    return  # nobody, or no request of ours
                size = int(length[1])
                body += self._read(line, until=rb"(?s)\A.{%d}" % max(0, size - len(body)))
                self.requests += 1
                self.more = body[size:]
                for piece in pieces:
                    line.sendall(piece)
                line.shutdown(socket.SHUT_WR)
                while more := line.recv(65536):
                    self.more += more
            except OSError:
                return  # the client has left, with or without a part of the answer unread

    @staticmethod
    def _read(line: socket.socket, until: bytes) -> bytes:
        """Read until the pattern is found, or the client has left."""
        data = b""
        while re.search(until, data) is None and (more := line.recv(65536)):
            data += more
        return data


@dataclass
class Seen:
    """What came out of the brain, beside what it told its marks."""

    raised: list[BaseException] = field(default_factory=list)


class WatchedCall:
    """A call whose exceptions are seen before the worker makes the best of them."""

    def __init__(self, call: HttpCall, seen: Seen) -> None:
        self._call = call
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def run(self, marks: Marks) -> Ended:
        try:
            return self._call.run(marks)
        except BaseException as error:
            self._seen.raised.append(error)
            raise


class WatchedBrain(HttpBrain):
    def __init__(self, route: config.Route, seen: Seen) -> None:
        super().__init__(route)
        self._seen = seen

    def begin(self, *asked: Any) -> WatchedCall:  # type: ignore[override]
        return WatchedCall(super().begin(*asked), self._seen)


class Place:
    """A lane's database, spool and gates."""

    def __init__(self, directory: Path, route: config.Route) -> None:
        self.directory = directory
        self.route = route
        directory.mkdir()
        self.database = Database(directory / "brainlane.db")
        self.database.open()
        self.spool_path = directory / "spool"
        self.spool = Spool(self.spool_path)
        self.spool.open()
        self.gates = Gates({route.name: route})
        with self.database.write() as tx:
            store.begin_run(tx, "run", os.getpid(), "brainctl", [route.name])

    def submit(self, tx: Transaction, case: Case) -> int:
        """Accept the next job, whose end must not depend on the one before it."""
        self.gates.open(tx, self.route.name)
        store.resume(tx)
        tx.execute("delete from jobs")
        submission = store.Submission(
            request=json.dumps({"messages": [{"role": "user", "content": "hello"}]}),
            digest="d",
            route=self.route.name,
            model=self.route.model,
            names_model=False,
            max_attempts=case.max_attempts,
            may_run_twice=case.may_run_twice,
            require_complete=case.require_complete,
        )
        return store.accept(tx, submission, ASKER, 0, 1000)[0]

    def rows(self, sql: str, **params: Any) -> list[dict[str, Any]]:
        with self.database.read() as connection:
            return [dict(row) for row in connection.execute(sql, params)]

    def outcome(self, job_id: int) -> dict[str, Any]:
        """Return all that a person can tell by, but for times and for the sentence that quotes them.

        When all was sent is left out too: it decides nothing, and a quick answer is there before it is written.
        """
        asked = {
            "job": "select status, reason, flags, usage, finish_reason, attempts_used, strikes "
            "from jobs where id = :id",
            "attempt": "select status, uses_attempt, http_status, upstream_id, flags, usage, finish_reason, "
            "armed_at is null, send_failed_at is null, headers_at is null "
            "from job_attempts where job_id = :id",
            "output": "select text, response from job_outputs where job_id = :id",
            "part": "select text, response, raw from attempt_parts where job_id = :id",
            "gates": "select route, reason, closed_at is null, next_probe_at is null from gates",
        }
        return {what: self.rows(sql, id=job_id) for what, sql in asked.items()}

    def holds(self, text: bytes) -> list[str]:
        return [str(path) for path in self.directory.rglob("*") if path.is_file() and text in path.read_bytes()]


class Bench:
    """A lane that asks, a lane that recovers, and the line between them and the made-up brain."""

    def __init__(self, directory: Path) -> None:
        self.line = Line()
        route = config.Route(
            "near",
            self.line.base_url,
            "small",
            connect_s=PATIENCE_S,
            first_byte_s=PATIENCE_S,
            idle_s=PATIENCE_S,
            total_s=PATIENCE_S,
            max_output_mib=1,
            api_key=config.Secret(KEY),
        )
        self.living, self.dead = Place(directory / "living", route), Place(directory / "dead", route)
        self.seen = Seen()
        self.brain = WatchedBrain(route, self.seen)
        self.worker = Worker(
            database=self.living.database,
            spool_directory=self.living.spool,
            reserve=filesystem.Reserve(directory, 1),
            gates=self.living.gates,
            routes={route.name: route},
            brains={route.name: self.brain},
            run="run",
            moved=lambda ids: None,
            grew=lambda ids: None,
            cut=self._passed,
        )
        self.ends: Counter[str] = Counter()
        """How often each pair of status and reason was met."""
        self._case = Case([])
        self._job_id = self._dead_id = 0
        self._spooled: list[str] = []
        self._logger = logging.getLogger("brainlaned")
        self._log = io.StringIO()

    def __enter__(self) -> Self:
        self._before = self._logger.handlers, self._logger.level, self._logger.propagate
        events.start(self._log)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        events.stop()
        self._logger.handlers, self._logger.propagate = self._before[0], self._before[2]
        self._logger.setLevel(self._before[1])
        self.brain.close()
        self.line.close()
        self.living.database.close()
        self.dead.database.close()
        assert KEY not in self._log.getvalue()
        assert "Traceback" not in self._log.getvalue(), self._log.getvalue()

    def check(self, case: Case) -> tuple[str, str]:
        """Answer one job with these bytes, say what must be true, and return the job's status and reason."""
        self.line.answer(case.pieces)
        self._case = case
        with self.living.database.write() as tx:
            self._job_id = self.living.submit(tx, case)
        try:
            assert self.worker.run_one()
            assert (self.line.connections(), self.line.requests, self.line.more) == (1, 1, b"")
            assert self.seen.raised == []

            outcome = self.living.outcome(self._job_id)
            status, reason = outcome["job"][0]["status"], outcome["job"][0]["reason"]
            assert Status(status) in MOVES[Status.RUNNING]
            assert reason not in {"not-sent", "evidence-contradicts", "cancel-requested"}
            assert status != "done" or may_be_done(case.sent)
            assert outcome["attempt"][0]["armed_at is null"] == 0
            assert list(self.living.spool_path.iterdir()) == []

            if b"\0" in case.sent:
                # After a crash a NUL may be where a page was lost, so nothing behind it counts.
                return status, reason
            recovery.recover(
                self.dead.database, self.dead.spool, self.dead.gates, {self.dead.route.name: self.dead.route}, 2, "next"
            )
            assert self.dead.outcome(self._dead_id) == outcome
            assert self._spooled == [] == self.living.holds(KEY.encode()) + self.dead.holds(KEY.encode())
        finally:
            self.line.connections()
            self.seen.raised.clear()
            for place in (self.living, self.dead):
                for file in place.spool_path.iterdir():
                    file.unlink()
        self.ends[f"{status} ({reason})"] += 1
        return status, reason

    def _passed(self, cut: str) -> None:
        if cut == "answered":
            self._spooled = self.living.holds(KEY.encode())
            self._die()

    def _die(self) -> None:
        """Put what is on the living lane's disk at this moment on the dead one's."""
        marks = self.living.rows("select * from job_attempts where job_id = :id", id=self._job_id)[0]
        with self.dead.database.write() as tx:
            self._dead_id = self.dead.submit(tx, self._case)
            claim = store.claim_next(tx, [config.OpenRoute(self.dead.route, is_probe=False)], "run")
            assert claim is not None and claim.job_id == self._dead_id
            tx.execute(
                """
                update job_attempts set armed_at = :armed_at, sent_at = :sent_at, send_failed_at = :send_failed_at,
                    headers_at = :headers_at, http_status = :http_status, upstream_id = :upstream_id,
                    first_byte_at = :first_byte_at
                where job_id = :dead_id
                """,
                {**marks, "dead_id": self._dead_id},
            )
        for file in self.living.spool_path.iterdir():
            shutil.copy(file, self.dead.spool_path / f"{self._dead_id}-1{file.suffix}")


def fuzz(examples: int, seed: int | None, directory: Path) -> Iterator[str]:
    """Check so many made-up answers. Yield what came of them; raises AssertionError, with the smallest case."""
    with Bench(directory) as bench:

        @hypothesis.settings(
            max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False
        )
        @hypothesis.given(CASES)
        def each(case: Case) -> None:
            bench.check(case)

        (each if seed is None else hypothesis.seed(seed)(each))()
        yield f"{bench.ends.total()} answers"
        yield from (f"{number:7} {end}" for end, number in bench.ends.most_common())


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer a worker with made-up bytes, and check what comes of it.")
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        for line in fuzz(options.examples, options.seed, Path(directory)):
            print(line)


if __name__ == "__main__":
    main()
