"""HTTP/1.1 over the lane's Unix socket: one connection, one request, one answer, each within its time.

Owns the bytes on the socket and the limits in time; knows nothing of jobs. The little of HTTP that it speaks is
written out because `http.client` takes with it `email` and `ssl`, twice what an empty Python takes to start, and
because a limit has to hold for the whole head of an answer and not for each read. `Connection: close` on every request
leaves three ends of a body: a length, a last chunk, the end of the connection.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from brainlaned.wire import PROTOCOL, PROTOCOL_HEADER, VERSION

MAX_HEAD_BYTES = 64 * 1024
PIECE_BYTES = 64 * 1024
TICK_S = 1.0
FULL_BACKLOG_PAUSE_S = 0.05
LONGEST_S = 3600.0
"""What the kernel is asked to wait for at once; who waits without a limit asks again."""


class Lost(Exception):
    """The connection ended before a whole answer had come."""


class NotHttp(Exception):
    """What answered does not speak HTTP."""


@dataclass(frozen=True, slots=True)
class Head:
    """The first lines of an answer; the names of its headers are in lower case."""

    status: int
    headers: dict[str, str]


def connect(path: str, deadline: float) -> socket.socket:
    """Connect to the socket at path, or raise the OSError that says why not (TimeoutError: nothing accepts)."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        while True:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection.connect(os.fsencode(path))
            except BlockingIOError:
                # Linux says so at once when the listener's queue is full; a place in it is what is waited for.
                if time.monotonic() >= deadline:
                    raise TimeoutError from None
                time.sleep(FULL_BACKLOG_PAUSE_S)
            else:
                return connection
    except BaseException:
        connection.close()
        raise


def request_bytes(method: str, target: str, body: bytes | None) -> bytes:
    """Write a request; target is already percent-encoded."""
    lines = [
        f"{method} {target} HTTP/1.1",
        "Host: brainlane",
        f"User-Agent: brainctl/{VERSION}",
        f"{PROTOCOL_HEADER}: {PROTOCOL}",
        "Connection: close",
    ]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + (body or b"")


class Exchange:
    """One request and its answer on one connection.

    `deadline` (monotonic) is for everything up to the end of the answer's head; then each read may take `silence_s`.
    `tick`, where given, is called about once a second while nothing comes. Both may be infinite.
    """

    def __init__(
        self, connection: socket.socket, deadline: float, silence_s: float, tick: Callable[[], None] | None = None
    ) -> None:
        self._connection = connection
        self._deadline = deadline
        self._silence_s = silence_s
        self._tick = tick
        self._received = bytearray()
        self.sent = False
        """Whether the kernel has taken the whole request: until then the lane cannot have acted on it."""

    def send(self, data: bytes) -> None:
        """Send a request. A peer that stops reading may have answered already, so its hang-up is no error yet."""
        self._connection.settimeout(min(max(0.001, self._deadline - time.monotonic()), LONGEST_S))
        try:
            self._connection.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return
        self.sent = True

    def head(self) -> Head:
        """Read the head of the answer, passing over interim ones (1xx)."""
        while True:
            version, _, rest = self._line().partition(" ")
            code = rest[:3]
            if not version.startswith("HTTP/1.") or not (code.isascii() and code.isdigit() and len(code) == 3):
                raise NotHttp
            headers: dict[str, str] = {}
            while line := self._line():
                name, _, value = line.partition(":")
                headers[name.strip().lower()] = value.strip()
            if int(code) >= 200:
                return Head(int(code), headers)

    def body(self, head: Head, *, silence_s: float | None = None) -> Iterator[bytes]:
        """Yield the body as it comes; raise Lost where it ends early. `silence_s`: from here on another one."""
        self._silence_s = self._silence_s if silence_s is None else silence_s
        # From here on only silence counts: a long answer may take its time, and a stream has no end to wait for.
        self._deadline = float("inf")
        if head.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := _number(self._line().partition(";")[0], 16):
                yield from self._exactly(size)
                self._line()
            while self._line():
                pass
        elif "content-length" in head.headers:
            yield from self._exactly(_number(head.headers["content-length"], 10))
        else:
            while self._received or self._more():
                yield self._take(len(self._received))

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def _line(self) -> str:
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > MAX_HEAD_BYTES:
                raise NotHttp
            if not self._more():
                raise Lost
        return self._take(end + 1).rstrip(b"\r\n").decode("latin-1")

    def _exactly(self, size: int) -> Iterator[bytes]:
        while size:
            if not self._received and not self._more():
                raise Lost
            piece = self._take(min(size, len(self._received)))
            size -= len(piece)
            yield piece

    def _take(self, size: int) -> bytes:
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken

    def _more(self) -> bool:
        """Wait for bytes; return whether any came before the end of the connection."""
        until = min(self._deadline, time.monotonic() + self._silence_s)
        while True:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._connection.settimeout(min(left, TICK_S if self._tick else LONGEST_S))
            try:
                piece = self._connection.recv(PIECE_BYTES)
            except TimeoutError:
                if self._tick:
                    self._tick()
                continue
            except ConnectionResetError:
                return False
            self._received += piece
            return bool(piece)


def _number(digits: str, base: int) -> int:
    try:
        return int(digits, base)
    except ValueError:
        raise NotHttp from None
