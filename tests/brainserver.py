"""A brain that misbehaves on command: an OpenAI-compatible endpoint of plain sockets, one thread per connection.

It owns the tests' oracle: what arrived, when, how much of it, how many at once, and when the client left. A request
is recorded when its head is complete, before anything is answered; a head that never became complete is recorded with
the method "". One connection carries one request. A `Step` is what happens to one request: a function of the
`Exchange`, built by the factories below and nestable where they take a `then`. Sends and pauses notice a client that
hangs up and end the step by raising `ClientGone`.

Where it is hard: a client may start its next call before our thread has noticed that the last one is over. So an
exchange counts as concurrent only while it is neither answered (noted before the last bytes leave) nor hung up on
(asked from the kernel at the moment of the next arrival), and `max_concurrent` never accuses a client that waits.

As a process, `python -m tests.brainserver`, it is told what to do by `POST /__control__` (see `BrainServer.control`),
lets its held requests go by `POST /__release__` and shows its records by `GET /__requests__`.
"""

import argparse
import base64
import contextlib
import fcntl
import functools
import gzip
import inspect
import itertools
import json
import select
import signal
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self

EVENT_TICK_S = 0.002
"""How late a step may notice that its event was set; a client that leaves is noticed at once,"""

UNREAD_TICK_S = 0.05
"""but so late if it leaves in the middle of an upload that the step does not read."""

SIOCOUTQNSD = 0x894B
"""Ask how many bytes have not yet been sent (linux/sockios.h)."""

LAST_CHUNK = b"0\r\n\r\n"


class ClientGone(Exception):
    """The client closed or reset the connection (or the server is being stopped), so the step is over."""


@dataclass
class Record:
    """What the server saw of one request. Times are time.monotonic() seconds, but for `received_wall`."""

    method: str
    path: str
    headers: dict[str, str]
    number: int = -1
    """Its index in `requests`."""
    received_at: float = field(default_factory=time.monotonic)
    received_wall: float = field(default_factory=time.time)
    concurrency: int = 0
    """How many chat requests were being worked on when it arrived, itself included."""
    body: bytes = b""
    whole: bool = False
    """Whether every byte that Content-Length promised has arrived."""
    ended_at: float | None = None
    """When the last bytes of the answer were about to leave, or the step ended in another way."""
    hung_up_at: float | None = None
    """When the client was seen to have left before it had the whole answer."""

    @property
    def json(self) -> Any:
        """The body, parsed; None if it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def prompt(self) -> str | None:
        """The content of the last message; None if there is none."""
        try:
            return str(self.json["messages"][-1]["content"])
        except (TypeError, LookupError):
            return None

    def on_the_wire(self) -> dict[str, Any]:
        return asdict(self) | {"body": self.body.decode(errors="replace"), "prompt": self.prompt}


# Bytes


def encode(value: object) -> bytes:
    """Return bytes as they are, text as UTF-8, anything else as JSON in UTF-8 (escaped where UTF-8 cannot say it)."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half a surrogate pair, on purpose
        return json.dumps(value).encode()


def head(
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    *,
    content_type: str = "text/event-stream",
    length: int | None = None,
    chunked: bool = False,
) -> bytes:
    """Return the status line and headers; with neither length nor chunked the body ends where the connection does."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Unassigned"
    fields = {"Content-Type": content_type, "Connection": "close"}
    if chunked:
        fields["Transfer-Encoding"] = "chunked"
    elif length is not None:
        fields["Content-Length"] = str(length)
    fields |= headers or {}
    lines = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def completion(choices: object, *, kind: str = "chat.completion", **more: object) -> dict[str, Any]:
    return {"id": "chatcmpl-fake", "object": kind, "created": 1, "model": "fake", "choices": choices, **more}


def event(data: object) -> bytes:
    return b"data: %b\n\n" % encode(data)


def delta(content: object, finish: str | None = None) -> bytes:
    """Return one server-sent event; a dict is the delta itself, anything else its content."""
    body = content if isinstance(content, dict) else {"content": content}
    return event(completion([{"index": 0, "delta": body, "finish_reason": finish}], kind="chat.completion.chunk"))


def words(text: str) -> list[str]:
    return [word + " " for word in text.split(" ")[:-1]] + [text.split(" ")[-1]]


def sse(
    text: str = "hello world",
    *,
    tokens: Iterable[object] | None = None,
    usage: dict[str, int] | None = None,
    finish: str | None = "stop",
    done: bool = True,
) -> list[bytes]:
    """Return the events of a streamed answer; `tokens` (text, or dicts as whole deltas) stand in for the words."""
    events = [delta({"role": "assistant", "content": ""})]
    events += [delta(token) for token in (words(text) if tokens is None else tokens)]
    if finish is not None:
        events.append(delta({}, finish))
    if usage is not None:
        events.append(event(completion([], kind="chat.completion.chunk", usage=usage)))
    if done:
        events.append(event("[DONE]"))
    return events


# One request and its connection


class Exchange:
    """One connection with the request on it: what a step works with."""

    def __init__(self, server: "BrainServer", sock: socket.socket, peer_port: int) -> None:
        self.server = server
        self.sock = sock
        self.record = Record("", "", {})
        self.rest = b""
        """What has been received after the head."""
        self.over = False
        self._ports = f":{peer_port:04X}", f":{server.port:04X}"

    def gone(self, timeout_s: float = 0) -> bool:
        """Say whether the client has left, waiting up to `timeout_s` for it to do so."""
        descriptor = self.sock.fileno()
        if descriptor < 0:
            return True
        poll = select.poll()
        # RDHUP is the peer's FIN, seen even behind bytes that nobody has read; errors and hang-ups always report.
        poll.register(descriptor, select.POLLRDHUP)
        return bool(poll.poll(timeout_s * 1000)) or (not self.record.whole and self._peer_has_closed())

    def _peer_has_closed(self) -> bool:
        """Ask the kernel about the client's end: its FIN cannot reach us behind an upload that we do not read."""
        rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines())
        return any((row[1][-5:], row[2][-5:]) == self._ports and row[3] != "01" for row in rows)

    def pause(self, seconds: float | None = None, *, until: threading.Event | None = None) -> None:
        """Wait for the time to pass or the event to be set; with neither, for the client to leave."""
        deadline = None if seconds is None else time.monotonic() + seconds
        longest = 3600.0 if self.record.whole else UNREAD_TICK_S
        while until is None or not until.is_set():
            left = longest if deadline is None else min(longest, deadline - time.monotonic())
            if left <= 0:
                return
            if self.gone(left if until is None else min(left, EVENT_TICK_S)):
                raise ClientGone

    def receive(self, limit: int = 65536) -> bytes:
        try:
            return self.sock.recv(limit)
        except OSError:
            return b""

    def read_body(self, limit: int | None = None) -> None:
        """Read the body, or its first `limit` bytes; what has been read already is not asked for again."""
        declared = int(self.record.headers.get("content-length", 0))
        wanted = declared if limit is None else min(limit, declared)
        body = bytearray(self.record.body or self.rest)
        try:
            while len(body) < wanted:
                data = self.receive(min(65536, wanted - len(body)))
                if not data:
                    raise ClientGone
                body += data
        finally:
            with self.server.changed:
                self.record.body = bytes(body)
                self.record.whole = len(body) >= declared
                self.server.changed.notify_all()

    def send(self, data: bytes) -> None:
        if self.gone():
            raise ClientGone
        try:
            self.sock.sendall(data)
        except OSError:
            raise ClientGone from None

    def send_segment(self, byte: bytes) -> None:
        """Send, and wait until it has left: what still queues when more comes would share a segment with it."""
        self.send(byte)
        while struct.unpack("i", fcntl.ioctl(self.sock, SIOCOUTQNSD, b"0000"))[0]:
            self.pause(0.001)

    def stream(
        self,
        parts: Iterable[bytes],
        *,
        gap_s: float = 0,
        framing: str = "chunked",
        headers: Mapping[str, str] | None = None,
        status: int = 200,
        content_type: str = "text/event-stream",
    ) -> None:
        """Answer, framed as "chunked", "length" or "close"; the end of the body leaves together with its last part."""
        if framing == "length":
            parts = list(parts)
        length = sum(map(len, parts)) if isinstance(parts, list) and framing == "length" else None
        chunked = framing == "chunked"
        pending = head(status, headers, content_type=content_type, length=length, chunked=chunked)
        for number, part in enumerate(parts):
            if (gap_s and number) or len(pending) > 65536:
                self.send(pending)
                self.pause(gap_s)
                pending = b""
            pending += chunk(part) if chunked else part
        self.end()
        self.send(pending + (LAST_CHUNK if chunked else b""))

    def whole(self, body: object, *, status: int = 200, headers: Mapping[str, str] | None = None, **more: Any) -> None:
        """Answer with one body of known length, JSON unless told otherwise."""
        more = {"content_type": "application/json"} | more
        self.stream([encode(body)], framing="length", status=status, headers=headers, **more)

    def reset(self) -> None:
        """Leave with a RST instead of a FIN."""
        self.end()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def end(self) -> None:
        """Note that the server's part is over; the first call counts."""
        if not self.over:
            self.over = True
            self.record.ended_at = time.monotonic()


# Steps: what may happen to a request

Step = Callable[[Exchange], None]
Data = bytes | str | dict[str, Any] | list[Any]
P = ParamSpec("P")

STEPS: dict[str, Callable[..., Step]] = {}
"""What the control side knows by name; "hold" comes on top of these."""


def step(act: Callable[Concatenate[Exchange, P], None], reads: bool = True) -> Callable[P, Step]:
    """Turn `act(x, …)` into a factory of steps: `act(…)` is a step that reads the whole body first, then acts."""

    @functools.wraps(act)
    def factory(*args: P.args, **kwargs: P.kwargs) -> Step:
        inspect.signature(act).bind(None, *args, **kwargs)  # a wrong argument is the caller's error, here and now

        def run(x: Exchange) -> None:
            if reads:
                x.read_body()
            act(x, *args, **kwargs)

        return run

    STEPS[act.__name__] = factory
    return factory


early_step = functools.partial(step, reads=False)


@step
def answer(
    x: Exchange,
    /,
    text: str = "hello world",
    *,
    tokens: list[Any] | None = None,
    usage: dict[str, int] | bool = True,
    finish: str | None = "stop",
    done: bool = True,
    delay_s: float = 0,
    **more: Any,
) -> None:
    """Stream a whole answer, or give it as JSON to a request without `stream`.

    Usage True means: counted in words, if it was asked for. More: `gap_s`, `framing`, `headers` of `Exchange.stream`.
    """
    x.pause(delay_s)
    request = x.record.json or {}
    if not request.get("stream"):
        return json_answer(text, finish=finish, headers=more.get("headers"))(x)
    counted = usage if isinstance(usage, dict) else None
    if usage is True and (request.get("stream_options") or {}).get("include_usage"):
        asked, said = len((x.record.prompt or "").split()), len(text.split() if tokens is None else tokens)
        counted = {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}
    return x.stream(sse(text, tokens=tokens, usage=counted, finish=finish, done=done), **more)


@step
def json_answer(x: Exchange, /, text: str | None = "hello world", *, finish: str | None = "stop", **more: Any) -> None:
    """Answer with one JSON completion, whatever `stream` says."""
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    x.whole(completion([{"index": 0, "message": message, "finish_reason": finish}], usage=usage), **more)


@step
def status(x: Exchange, /, code: int, body: Data | None = None, *, delay_s: float = 0, **more: Any) -> None:
    """Answer with a status and, by default, an error object; more: `headers`, `content_type`."""
    x.pause(delay_s)
    error = {"message": f"made to answer {code}", "type": "fake_error", "code": code}
    x.whole({"error": error} if body is None else body, status=code, **more)


@early_step
def early_status(x: Exchange, /, code: int = 413, body: Data | None = None, **more: Any) -> None:
    """Answer before the body is read, and close on the upload: the client is reset while it sends."""
    x.read_body(0)
    x.whole({"error": {"message": "too early", "code": code}} if body is None else body, status=code, **more)


@step
def error_in_200(x: Exchange, error: Data | None = None) -> None:
    """Answer 200 with an error object in it, by default a rate limit."""
    x.whole({"error": error or {"code": 429, "message": "rate limited", "type": "rate_limit_error"}})


@step
def html_page(x: Exchange) -> None:
    """Answer 200 with the page of a captive portal."""
    x.whole("<!doctype html><title>Sign in</title><p>Please sign in.</p>", content_type="text/html")


@step
def redirect(x: Exchange, url: str, code: int = 307) -> None:
    """Point elsewhere."""
    x.whole("", status=code, headers={"Location": url})


@step
def raw(x: Exchange, *parts: bytes | str | float) -> None:
    """Send the bytes as they are, nothing around them, then close; a number is a pause in seconds."""
    for part in parts:
        if isinstance(part, bytes | str):
            x.send(encode(part))
        else:
            x.pause(part)


@step
def raw_events(x: Exchange, /, events: list[Any], **more: Any) -> None:
    """Answer 200 with these events: bytes as they are, anything else as the data of one event; more: `gap_s`, ..."""
    x.stream([each if isinstance(each, bytes) else event(each) for each in events], **more)


@step
def drip(x: Exchange, data: bytes | str, gap_s: float = 0.1, *, after: bytes | str = b"") -> None:
    """Send `after` at once, then the data one byte per segment and gap: a slow head, or behind a head a slow body."""
    x.send(encode(after))
    for byte in encode(data):
        x.send_segment(bytes([byte]))
        x.pause(gap_s)


@step
def bytewise(x: Exchange, events: bytes | str) -> None:
    """Answer 200 with this event stream, one byte per TCP segment."""
    drip(events, 0, after=head(length=len(encode(events))))(x)


@step
def silence(x: Exchange) -> None:
    """Never answer, wait for the client to leave."""
    x.pause()


@step
def close_before_answer(x: Exchange) -> None:
    """Close politely without a word."""


@step
def reset_before_answer(x: Exchange) -> None:
    """Close with a RST without a word."""
    x.reset()


@step
def informational(
    x: Exchange, code: int = 103, *, count: int | None = 3, gap_s: float = 0.1, then: Step | None = None
) -> None:
    """Send 1xx answers, for ever if count is None, then do `then` (answer)."""
    for _ in itertools.count() if count is None else range(count):
        x.send(f"HTTP/1.1 {code} {HTTPStatus(code).phrase}\r\n\r\n".encode())
        x.pause(gap_s)
    (then or answer())(x)


@step
def cut(
    x: Exchange, after_bytes: int, how: str = "close", *, body: Data | None = None, framing: str = "chunked"
) -> None:
    """Answer 200 with a body (an event stream) framed as "chunked" or "length", and stop after so many bytes of it.

    "close" ends the connection politely without the promised rest, "reset" with a RST, "chunk" with a broken chunk.
    """
    whole = b"".join(sse()) if body is None else encode(body)
    part = whole[:after_bytes]
    framed = chunk(part) if part and framing == "chunked" else part  # an empty chunk would be the regular end
    x.send(head(chunked=True) + framed if framing == "chunked" else head(length=len(whole)) + framed)
    if how == "reset":
        x.reset()
    elif how == "chunk":
        x.send(b"this is no chunk size\r\n")


@early_step
def stop_reading(x: Exchange, after_bytes: int = 65536, how: str = "reset", *, buffer_bytes: int = 4096) -> None:
    """Read so much of an upload and no more; then "reset", "close", or "wait" until the client leaves."""
    x.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    x.read_body(after_bytes)
    if how == "reset":
        x.reset()
    elif how == "wait":
        x.pause()


@step
def stream_then_error(x: Exchange, tokens: list[Any], error: Data | None = None) -> None:
    """Stream the text, then an error event (overloaded, unless told otherwise), and end as if all were well."""
    said = {"error": error or {"code": 529, "message": "overloaded", "type": "overloaded_error"}}
    x.stream([*map(delta, tokens), event(said)])


@step
def gzip_bomb(x: Exchange, size: int = 64 * 1024 * 1024) -> None:
    """Answer 200 with `Content-Encoding: gzip`: small on the wire, `size` bytes of spaces once unpacked."""
    x.whole(gzip.compress(b" " * size), headers={"Content-Encoding": "gzip"})


@step
def endless(x: Exchange, word: str = "again ", *, gap_s: float = 0.001) -> None:
    """Stream the word for ever; without a gap it is a flood."""
    x.stream(itertools.repeat(delta(word)), gap_s=gap_s)


@step
def gate(x: Exchange, opened: threading.Event, then: Step | None = None) -> None:
    """Read everything, wait for the event, then do `then` (answer)."""
    x.pause(until=opened)
    (then or answer())(x)


@step
def busy_after_hangup(x: Exchange, seconds: float, then: Step | None = None) -> None:
    """Do `then` (endless); if the client hangs up, whoever comes next waits so long for the only slot."""
    try:
        (then or endless(gap_s=0.01))(x)
    except ClientGone:
        x.server.busy_until = time.monotonic() + seconds
        raise


class Held:
    """A step that says when it was reached (`arrived`) and goes on when it is told to (`release`)."""

    def __init__(self, then: Step) -> None:
        self.arrived = threading.Event()
        self._released = threading.Event()
        self._then = gate(self._released, then)

    def __call__(self, x: Exchange) -> None:
        x.read_body()
        self.arrived.set()
        self._then(x)

    def release(self) -> None:
        self._released.set()


@contextlib.contextmanager
def refuse() -> Iterator[str]:
    """Give a base URL whose port is taken but not listened to, so that every connection is refused."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/v1"


# The server


class BrainServer:
    """Listens on loopback from `start` to `close`; as a context manager it also raises what broke in a step."""

    def __init__(self, *, port: int = 0, log: Path | None = None, default: Step | None = None) -> None:
        self.default = default or answer()
        self.models: Step = lambda x: x.whole({"object": "list", "data": [{"id": "fake", "object": "model"}]})
        """What is said to whoever asks which models there are."""
        self.requests: list[Record] = []
        self.max_concurrent = 0
        self.connections = 0
        self.busy_until = 0.0
        self.failures: list[Exception] = []
        self.port = port
        self._log = log
        self._script: deque[Step] = deque()
        self._chooser: Callable[[str | None], Step | None] | None = None
        self._held: list[Held] = []
        self.changed = threading.Condition()
        """Guards all of the above and says when a request was recorded, was read or ended."""
        self._open: dict[Exchange, threading.Thread] = {}
        self._working: set[Exchange] = set()
        self._closing = False

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def script(self, *steps: Step) -> None:
        """Queue steps for the next chat requests, in the order in which these arrive."""
        with self.changed:
            self._script.extend(steps)

    def by_prompt(self, choose: Callable[[str | None], Step | None] | None) -> None:
        """Choose by the content of the last message, once the script is used up; None falls back to `default`."""
        self._chooser = choose

    def hold(self, then: Step | None = None) -> Held:
        """Make a step that waits for its `release`, to be given to `script`, `default` or `by_prompt`."""
        held = Held(then or answer())
        self._held.append(held)
        return held

    def release(self) -> None:
        """Release everything that `hold` has made so far."""
        for held in self._held:
            held.release()

    def count(self, prompt: str | None = None, *, whole: bool | None = None) -> int:
        """Count the POSTs seen (of one prompt; only the whole, or only the incomplete ones)."""
        with self.changed:
            posts = [each for each in self.requests if each.method == "POST"]
        return sum(1 for each in posts if prompt in (None, each.prompt) and whole in (None, each.whole))

    def wait_for(self, is_so: "Callable[[BrainServer], bool]", timeout_s: float = 5) -> bool:
        """Wait until it is so, looking again whenever a request arrives, has been read or ends."""
        with self.changed:
            return self.changed.wait_for(lambda: is_so(self), timeout_s)

    def start(self) -> Self:
        """Listen, on the same port again after a `close`; what was recorded and scripted stays."""
        self._closing = False
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=512)
        self.port = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="brainserver", daemon=True)
        self._acceptor.start()
        return self

    def close(self) -> None:
        """Stop listening (connections are refused from now on) and drop the connections that are open."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._acceptor.join()
        self._listener.close()
        with self.changed:
            left = dict(self._open)
        for exchange, thread in left.items():
            with contextlib.suppress(OSError):
                exchange.sock.shutdown(socket.SHUT_RDWR)
            thread.join(5)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, *_: object) -> None:
        self.close()
        if self.failures and kind is None:
            raise self.failures[0]

    def _accept(self) -> None:
        while True:
            try:
                sock, (_, peer_port) = self._listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            exchange = Exchange(self, sock, peer_port)
            thread = threading.Thread(target=self._serve, args=[exchange], daemon=True)
            with self.changed:
                self.connections += 1
                self._open[exchange] = thread
            thread.start()

    def _serve(self, x: Exchange) -> None:
        try:
            if self._receive_head(x):
                self._handle(x)
        except ClientGone:
            if not self._closing:
                x.record.hung_up_at = time.monotonic()
        except Exception as error:
            self.failures.append(error)
        finally:
            x.end()
            x.sock.close()
            self._note("ended", x.record)
            with self.changed:
                self._working.discard(x)
                self._open.pop(x, None)
                self.changed.notify_all()

    def _receive_head(self, x: Exchange) -> bool:
        """Read up to the empty line; say no, and record what there was of it, if the client leaves before that."""
        data = b""
        while b"\r\n\r\n" not in data:
            more = x.receive()
            if not more:
                x.record.body = data
                if data:
                    self._recorded(x)
                    raise ClientGone
                return False
            data += more
        top, _, x.rest = data.partition(b"\r\n\r\n")
        first, *lines = top.decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ", 2)
        pairs = (line.partition(":") for line in lines)
        x.record = Record(method, path, {name.strip().lower(): value.strip() for name, _, value in pairs})
        return True

    def _recorded(self, x: Exchange) -> Step | None:
        """Record the request and, if it is a chat request, take the next step of the script for it."""
        chosen = None
        with self.changed:
            x.record.number = len(self.requests)
            self.requests.append(x.record)
            if x.record.method == "POST":
                self._working = {each for each in self._working if not each.over and not each.gone()} | {x}
                x.record.concurrency = len(self._working)
                self.max_concurrent = max(self.max_concurrent, x.record.concurrency)
                chosen = self._script.popleft() if self._script else None
            self.changed.notify_all()
        self._note("arrived", x.record)
        return chosen

    def _handle(self, x: Exchange) -> None:
        if x.record.path.startswith("/__"):
            return self._control_side(x)
        chosen = self._recorded(x)
        if x.record.path.endswith("/models"):
            return self.models(x)
        if x.record.method != "POST":
            return x.whole({"status": "ok"})
        if chosen is None and self._chooser is not None:
            x.read_body()
            chosen = self._chooser(x.record.prompt)
        if self.busy_until > time.monotonic():
            x.read_body()
            x.pause(self.busy_until - time.monotonic())
        return (chosen or self.default)(x)

    def _note(self, what: str, record: Record) -> None:
        if self._log is not None and record.number >= 0:
            with self.changed, self._log.open("a") as log:
                log.write(json.dumps({"event": what, **record.on_the_wire()}) + "\n")

    # The control side

    def control(self, orders: dict[str, Any]) -> None:
        """Obey {"script": [step, …], "default": step, "by_prompt": {prompt: step}, "reset": true}, each optional.

        A step is the name of its factory, or {"step": name, "args": [positional, …], keyword: value, …}; wherever a
        value is such an object it is a step, and {"base64": text} is bytes. "reset" forgets script and records first.
        """
        script = [self._build(each) for each in orders.get("script", [])]
        default = self._build(orders["default"]) if "default" in orders else self.default
        prompts = {prompt: self._build(each) for prompt, each in orders.get("by_prompt", {}).items()}
        with self.changed:
            if orders.get("reset"):
                self._script.clear()
                self.requests.clear()
                self.max_concurrent = self.connections = 0
                self.busy_until = 0.0
            self._script.extend(script)
            self.default = default
            if "by_prompt" in orders:
                self._chooser = lambda prompt: prompts.get(prompt or "")

    def _build(self, order: str | dict[str, Any]) -> Step:
        order = {"step": order} if isinstance(order, str) else order
        values = {name: self._value(each) for name, each in order.items() if name not in ("step", "args")}
        positional = [self._value(each) for each in order.get("args", [])]
        return (self.hold if order["step"] == "hold" else STEPS[order["step"]])(*positional, **values)

    def _value(self, value: Any) -> Any:
        if isinstance(value, dict) and "step" in value:
            return self._build(value)
        if isinstance(value, dict) and set(value) == {"base64"}:
            return base64.b64decode(value["base64"])
        return value

    def _control_side(self, x: Exchange) -> None:
        x.read_body()
        match x.record.path:
            case "/__control__":
                try:
                    self.control(x.record.json)
                except (AttributeError, LookupError, TypeError, ValueError) as error:
                    return x.whole({"error": repr(error)}, status=400)
            case "/__release__":
                self.release()
            case "/__requests__":
                with self.changed:
                    records = [each.on_the_wire() for each in self.requests]
                    seen = {"max_concurrent": self.max_concurrent, "connections": self.connections}
                return x.whole({"requests": records, **seen})
            case _:
                return x.whole({"error": "no such control"}, status=404)
        return x.whole({})


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description="The tests' misbehaving brain.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument(
        "--script", type=json.loads, default={}, help="what POST /__control__ takes, or a list of steps"
    )
    parser.add_argument("--log", type=Path, help="append one JSON line when a request arrives and one when it ends")
    options = parser.parse_args()
    stops = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)  # before any thread starts, so that all inherit it
    with BrainServer(port=options.port, log=options.log) as server:
        server.control({"script": options.script} if isinstance(options.script, list) else options.script)
        print(f"listening on {server.base_url}", flush=True)
        signal.sigwait(stops)


if __name__ == "__main__":
    main()
