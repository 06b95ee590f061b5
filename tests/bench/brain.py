"""A brain that answers at once, in a process of its own: `python -m tests.bench.brain`.

It owns the clock of the lane's gap: when a whole request had arrived, and when the last bytes of its answer were about
to leave, on the monotonic clock, which all processes of a machine share. Small on purpose: what it takes is taken from
every lane and worker alike. What a prompt begins with says how it is answered: `hold S` waits first, `trickle S` sends
a piece every 20 ms for so long, `bytes N` sends about N bytes of small pieces.

`GET /seen` lists what was asked, `POST /forget` begins a new list.
"""

import contextlib
import json
import signal
import socket
import threading
import time
from typing import Any

THREADS = 8
TRICKLE_S = 0.02
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def _event(document: object) -> bytes:
    line = b"data: " + (document if isinstance(document, bytes) else json.dumps(document).encode()) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(line), line)


def _piece(text: str, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    return _event({"id": "1", "object": "chat.completion.chunk", "model": "bench", "choices": [choice]})


WORDS = _piece("fine words ")
END = _piece("", "stop") + _event(b"[DONE]") + LAST_CHUNK


class Brain:
    """Serves on a port of the kernel's choice; a few threads accept, so that one held answer holds up nobody."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: list[dict[str, Any]] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.base_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"

    def start(self) -> None:
        for _ in range(THREADS):
            threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            line, _ = self._listener.accept()
            # Whoever was killed in the middle of a call is what some of the measurements are about.
            with line, contextlib.suppress(OSError):
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._answer(line)

    def _answer(self, line: socket.socket) -> None:
        head, _, body = _until(line, b"", b"\r\n\r\n").partition(b"\r\n\r\n")
        first, *fields = head.decode("latin-1").lower().split("\r\n")
        sizes = [int(field.partition(":")[2]) for field in fields if field.startswith("content-length:")]
        while len(body) < sum(sizes):
            more = line.recv(65536)
            if not more:
                return
            body += more
        received = time.monotonic()
        method, path, _ = first.split(" ", 2)
        if path.endswith("/chat/completions"):
            prompt = str(json.loads(body)["messages"][-1]["content"])
            seen: dict[str, Any] = {"prompt": prompt, "received": received, "ended": None}
            with self._lock:
                self._seen.append(seen)
            self._complete(line, prompt, seen)
            return
        with self._lock:
            if method == "post":
                self._seen = []
            found = json.dumps(self._seen).encode()
        line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(found), found))

    def _complete(self, line: socket.socket, prompt: str, seen: dict[str, Any]) -> None:
        match prompt.split():
            case ["hold", seconds, *_]:
                time.sleep(float(seconds))  # what was asked for
                line.sendall(HEAD + WORDS)
            case ["trickle", seconds, *_]:
                line.sendall(HEAD)
                until = time.monotonic() + float(seconds)
                while time.monotonic() < until:
                    line.sendall(WORDS)
                    time.sleep(TRICKLE_S)  # what was asked for
            case ["bytes", size, *_]:
                line.sendall(HEAD)
                block = WORDS * 512
                for _ in range(int(size) // len(block)):
                    line.sendall(block)
            case _:
                line.sendall(HEAD + WORDS)
        seen["ended"] = time.monotonic()
        line.sendall(END)


def _until(line: socket.socket, data: bytes, mark: bytes) -> bytes:
    while mark not in data:
        more = line.recv(65536)
        if not more:
            raise ConnectionError
        data += more
    return data


def main() -> None:
    """Serve until SIGTERM."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before the threads start, so that all inherit it
    brain = Brain()
    brain.start()
    print(f"listening on {brain.base_url}", flush=True)
    signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    main()
