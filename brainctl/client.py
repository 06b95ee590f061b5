"""The lane, as brainctl asks it: one method per verb, named like the command and the path.

Owns which request a verb makes, and when a request may be repeated: at most once, only while its time lasts, and only
where that cannot do anything twice, which is a GET, or a submit, for that carries a key. Whether an unanswered request
may have been carried out all the same is never guessed: it is `Exchange.sent` of every try.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from brainlaned.wire import MAX_SOCKET_PATH_BYTES, PROTOCOL, PROTOCOL_HEADER, ErrorKind

from . import unreachable
from .errors import Problem, usage
from .transport import Exchange, Head, Lost, NotHttp, connect, request_bytes

ANSWER_WITHIN_S = 4.0
"""How long a lane may take to answer by default; with the start of Python every command ends within 5 s."""
REPEAT_PAUSE_S = 0.2
WORTH_REPEATING = (ErrorKind.NO_ANSWER, ErrorKind.BUSY, ErrorKind.OUTCOME_UNKNOWN)
"""What may be over in a moment, if the answer also calls asking again safe."""
STREAM_SILENCE_S = 45.0
"""A stream says something every 15 s; after three times that the line is dead."""

FOREVER = float("inf")

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer that is not an error."""

    body: bytes

    def object(self) -> Json:
        """Return the body as the JSON object that it is by contract."""
        try:
            document = json.loads(self.body)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise Problem(ErrorKind.NOT_A_LANE, "cannot read the answer: it is not a JSON object")
        return document


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event of a stream, its data as it came."""

    name: str
    id: str
    data: str


@dataclass(slots=True)
class Lane:
    """A lane behind its socket."""

    path: str
    answer_within_s: float = ANSWER_WITHIN_S
    tick: Callable[[], None] | None = None
    """Called about once a second while an answer is waited for."""

    def __post_init__(self) -> None:
        length = len(os.fsencode(self.path))
        if length > MAX_SOCKET_PATH_BYTES:
            usage(
                f"cannot use the socket '{self.path}': its path is {length} bytes long, "
                f"the limit is {MAX_SOCKET_PATH_BYTES}"
            )

    # The verbs.

    def submit(self, submission: Json) -> Answer:
        """Submit a job. The submission carries a key, so that it may be sent again."""
        return self._ask("POST", "/v1/jobs", submission, repeatable=True)

    def list(self, **wanted: str | int | None) -> Answer:
        """List jobs, newest first."""
        query = urlencode({name: value for name, value in wanted.items() if value is not None})
        return self._ask("GET", f"/v1/jobs?{query}" if query else "/v1/jobs")

    def show(self, job_id: int) -> Answer:
        """Return one job with its attempts and decisions."""
        return self._ask("GET", f"/v1/jobs/{job_id}")

    def wait(self, job_id: int, wait_s: float) -> Answer:
        """Return one job as soon as it is final or held, or after `wait_s`."""
        return self._ask("GET", f"/v1/jobs/{job_id}?wait={wait_s:g}", beyond_s=wait_s)

    def request(self, job_id: int) -> Answer:
        """Return the prompt of a job, as the JSON that was asked."""
        return self._ask("GET", f"/v1/jobs/{job_id}/request")

    def output(self, job_id: int, *, partial: bool = False) -> Answer:
        """Return the text of a job, or what has arrived of it."""
        return self._ask("GET", f"/v1/jobs/{job_id}/output" + ("?partial=1" if partial else ""))

    def response(self, job_id: int) -> Answer:
        """Return the assembled completion object of a job."""
        return self._ask("GET", f"/v1/jobs/{job_id}/response")

    def cancel(self, job_id: int) -> Answer:
        """Cancel a job."""
        return self._ask("POST", f"/v1/jobs/{job_id}/cancel", {})

    def retry(self, job_id: int, attempt: int) -> Answer:
        """Queue a failed job again, if `attempt` is still its last."""
        return self._ask("POST", f"/v1/jobs/{job_id}/retry", {"attempt": attempt})

    def recover(self, job_id: int, decision: Json) -> Answer:
        """Decide about a held job."""
        return self._ask("POST", f"/v1/jobs/{job_id}/recover", decision)

    def forget(self, job_id: int, reason: str | None) -> Answer:
        """Erase prompt and answer of a job that is over."""
        return self._ask("POST", f"/v1/jobs/{job_id}/forget", {} if reason is None else {"reason": reason})

    def status(self) -> Answer:
        """Return the lane at a glance."""
        return self._ask("GET", "/v1/status")

    def pause(self, reason: str | None) -> Answer:
        """Stop claiming."""
        return self._ask("POST", "/v1/lane/pause", {} if reason is None else {"reason": reason})

    def resume(self, route: str | None) -> Answer:
        """Claim again, or open the gate of one route."""
        return self._ask("POST", "/v1/lane/resume", {} if route is None else {"route": route})

    def stream(self, job_id: int, start: str) -> Iterator[Event]:
        """Yield the events of a job's stream after `start`. Raises Problem (no-answer) where the line breaks."""
        with self._call(time.monotonic() + self.answer_within_s, STREAM_SILENCE_S) as exchange:
            head = _exchange_heads(exchange, "GET", f"/v1/jobs/{job_id}/stream?from={start}", None)
            if head.status != 200:
                raise _refusal(head, b"".join(exchange.body(head)))
            yield from _events(exchange.body(head))

    @contextmanager
    def backup(self) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Lend how long a copy of the database is and its bytes as they come.

        The copy is made before the answer begins, which takes as long as it takes. Raises Problem, and so do the bytes
        where they end too early.
        """
        # Whether anybody answers at all is found out in the usual time.
        self.status()
        with self._call(time.monotonic() + self.answer_within_s, FOREVER, head_within_s=FOREVER) as exchange:
            head = _exchange_heads(exchange, "GET", "/v1/backup", None)
            if head.status != 200:
                raise _refusal(head, b"".join(exchange.body(head, silence_s=STREAM_SILENCE_S)))
            length = head.headers.get("content-length", "")
            if not (length.isascii() and length.isdecimal()):
                raise Problem(ErrorKind.INTERNAL, "cannot read the backup: the lane did not say how long it is")
            size = int(length)
            yield size, _all_of(exchange.body(head, silence_s=STREAM_SILENCE_S), size)

    # How they are asked.

    def _ask(
        self, method: str, target: str, body: Json | None = None, *, repeatable: bool = False, beyond_s: float = 0.0
    ) -> Answer:
        data = None if body is None else encode(body)
        within_s = self.answer_within_s + beyond_s
        deadline = time.monotonic() + within_s
        repeatable = repeatable or method == "GET"
        may_repeat, maybe_done = repeatable, False
        while True:
            try:
                return self._ask_once(method, target, data, deadline, within_s)
            except Problem as problem:
                if problem.kind == ErrorKind.NO_ANSWER:
                    problem.retry_safe = repeatable
                # What an earlier try may have done, no later refusal takes back.
                maybe_done = problem.maybe_done = maybe_done or problem.maybe_done
                worth_it = problem.retry_safe and problem.kind in WORTH_REPEATING
                if not (may_repeat and worth_it and time.monotonic() + REPEAT_PAUSE_S < deadline):
                    raise
            # A lane that is just restarting, or a database that another process holds, is given a moment, once.
            may_repeat = False
            time.sleep(REPEAT_PAUSE_S)

    def _ask_once(self, method: str, target: str, data: bytes | None, deadline: float, silence_s: float) -> Answer:
        with self._call(deadline, silence_s) as exchange:
            head = _exchange_heads(exchange, method, target, data)
            body = b"".join(exchange.body(head))
        if not 200 <= head.status < 300:
            raise _refusal(head, body)
        return Answer(body)

    @contextmanager
    def _call(self, deadline: float, silence_s: float, *, head_within_s: float | None = None) -> Iterator[Exchange]:
        """Connect for one request, and turn what goes wrong into what a person can act on.

        `head_within_s`: where the head of the answer may take longer than the connection.
        """
        try:
            connection = connect(self.path, deadline)
        except OSError as error:
            raise unreachable.not_connected(self.path, error, self.answer_within_s) from error
        if head_within_s is not None:
            deadline = time.monotonic() + head_within_s
        exchange = Exchange(connection, deadline, silence_s, self.tick)
        try:
            yield exchange
        except TimeoutError as error:
            raise unreachable.silent(self.path, self.answer_within_s, maybe_done=exchange.sent) from error
        except (Lost, OSError) as error:
            raise unreachable.hung_up(self.path, maybe_done=exchange.sent) from error
        except NotHttp as error:
            raise unreachable.not_a_lane(self.path) from error
        finally:
            exchange.close()


def encode(body: Json) -> bytes:
    """Write a request's body."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _exchange_heads(exchange: Exchange, method: str, target: str, data: bytes | None) -> Head:
    exchange.send(request_bytes(method, target, data))
    head = exchange.head()
    protocol = head.headers.get(PROTOCOL_HEADER.lower())
    if protocol is None:
        raise NotHttp
    if protocol != PROTOCOL:
        raise Problem(
            ErrorKind.NOT_A_LANE,
            f"cannot talk to the lane: it speaks protocol '{protocol}', this brainctl speaks '{PROTOCOL}'",
            "install brainctl and brainlaned from one release",
        )
    return head


def _refusal(head: Head, body: bytes) -> Problem:
    """Read an error object. An answer that should hold one and does not is the lane's own fault."""
    try:
        error = json.loads(body)["error"]
        kind, message = str(error["kind"]), str(error["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return Problem(ErrorKind.INTERNAL, f"cannot read the answer: HTTP {head.status} without an error object")
    return Problem(
        kind,
        message,
        error.get("next_action"),
        retry_safe=error.get("retry_safe") is True,
        maybe_done=kind == ErrorKind.OUTCOME_UNKNOWN,
        body=body,
    )


def _all_of(pieces: Iterator[bytes], size: int) -> Iterator[bytes]:
    """Pass on a body; one that breaks off is an incomplete answer, whatever cut it."""
    received = 0
    try:
        for piece in pieces:
            received += len(piece)
            yield piece
    except (Lost, NotHttp, OSError) as error:
        raise Problem(
            ErrorKind.INTERNAL,
            f"cannot read the whole answer: it broke off after {received} of {size} bytes",
            "brainctl status",
            retry_safe=True,
        ) from error


def _events(pieces: Iterator[bytes]) -> Iterator[Event]:
    """Split a stream into its events. Only LF and CRLF end a line: the text inside may hold every other break."""
    name, identity, data = "", "", list[str]()
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for raw in lines:
            field, _, value = raw.removesuffix(b"\r").decode("utf-8", "replace").partition(":")
            value = value.removeprefix(" ")
            match field:
                case "event":
                    name = value
                case "id":
                    identity = value
                case "data":
                    data.append(value)
                case "" if not value and data and not raw.startswith(b":"):
                    yield Event(name, identity, "\n".join(data))
                    name, data = "", []
                case _:
                    pass
    # A stream that ends without its `end` event is for the caller to notice: it counts what it was told.
