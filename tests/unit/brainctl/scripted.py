"""A Unix socket that answers what it is told to: the other side of the command line, without a daemon.

One thread, one connection after another; each connection gets the next act of the script and the last one for ever.
An act is the bytes to answer with after the request has been read, or a function of the connected socket that does
whatever it likes and may read nothing at all.
"""

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from brainlaned.wire import PROTOCOL, PROTOCOL_HEADER

Act = bytes | Callable[[socket.socket], None]


def http(status: int, body: bytes, *, protocol: str | None = PROTOCOL, more: str = "") -> bytes:
    """A whole answer, with a length."""
    spoken = "" if protocol is None else f"{PROTOCOL_HEADER}: {protocol}\r\n"
    return f"HTTP/1.1 {status} X\r\n{spoken}{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


def answered(document: Any, status: int = 200) -> bytes:
    return http(status, json.dumps(document).encode())


def refused(kind: str, status: int, *, retry_safe: bool = False) -> bytes:
    error = {
        "kind": kind,
        "message": f"cannot do it: {kind}",
        "next_action": "brainctl status",
        "retry_safe": retry_safe,
    }
    return answered({"error": error}, status)


def stream(*pieces: bytes) -> bytes:
    """A stream that ends after these pieces, each a chunk of its own."""
    head = f"HTTP/1.1 200 OK\r\n{PROTOCOL_HEADER}: {PROTOCOL}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def sse(name: str, data: Any, identity: int | None = None) -> bytes:
    prefix = "" if identity is None else f"id: {identity}\n"
    return f"{prefix}event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def read_request(connection: socket.socket) -> bytes:
    """Read one request whole."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return data
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length")), 0)
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def hang_up(connection: socket.socket) -> None:
    """Take the request and end the connection without a word."""
    read_request(connection)


class ScriptedLane:
    """Listens at `path` until closed; `requests` are the whole requests that its acts of bytes have read."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.requests: list[bytes] = []
        self.connections = 0
        self._script: list[Act] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(16)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def script(self, *acts: Act) -> None:
        self._script = list(acts)

    @property
    def targets(self) -> list[str]:
        """What was asked for: "GET /v1/status"."""
        return [request.split(b" HTTP/", 1)[0].decode() for request in self.requests]

    def bodies(self) -> list[Any]:
        return [json.loads(request.partition(b"\r\n\r\n")[2]) for request in self.requests]

    def close(self) -> None:
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                if self._closing.is_set():
                    return
                self.connections += 1
                act = self._script.pop(0) if len(self._script) > 1 else self._script[0]
                try:
                    if isinstance(act, bytes):
                        self.requests.append(read_request(connection))
                        connection.sendall(act)
                    else:
                        act(connection)
                except OSError:
                    pass
