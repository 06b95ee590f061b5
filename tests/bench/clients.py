"""Clients that submit as fast as they can over kept-alive connections: `python -m tests.bench.clients SOCKET ...`.

One process holds several of them, and several processes are started together: they say `ready`, are told `go` when all
are, and print their latencies. So the clients are not what is measured, as far as two cores allow; what they could do
against a server that does nothing is measured beside.
"""

import argparse
import contextlib
import http.client
import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.results import Latencies
from tests.bench.stand import connected

TIMEOUT_S = 120.0

BODY = {"request": {"messages": [{"role": "user", "content": "Name the seas around Denmark."}]}}


def opened(path: Path) -> http.client.HTTPConnection:
    """Return a kept-alive connection over the Unix socket at `path`."""
    connection = http.client.HTTPConnection("lane", timeout=TIMEOUT_S)
    connection.sock = connected(path, TIMEOUT_S)
    return connection


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: object = None) -> bytes:
    """Make one request and return the body of its answer, which must be a good one."""
    data = None if body is None else json.dumps(body).encode()
    connection.request(method, path, data, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    if response.status >= 400:
        raise RuntimeError(f"{method} {path} was answered {response.status}: {answer[:300]!r}")
    return answer


def submit_repeatedly(path: Path, count: int, *, cancel_each: int = 0) -> list[float]:
    """Submit `count` jobs over one connection and return how long each took, in seconds; cancel every so manieth."""
    connection = opened(path)
    taken = []
    for number in range(count):
        since = time.perf_counter()
        answer = ask(connection, "POST", "/v1/jobs", BODY)
        taken.append(time.perf_counter() - since)
        if cancel_each and number % cancel_each == 0:
            ask(connection, "POST", f"/v1/jobs/{json.loads(answer)['id']}/cancel", {})
    connection.close()
    return taken


def crowd(path: Path, *, clients: int, processes: int, total: int, cancel_each: int = 0) -> tuple[float, Latencies]:
    """Let `clients` in `processes` submit `total` jobs. Return (jobs per second, latencies)."""
    each = total // clients
    command = [sys.executable, "-m", "tests.bench.clients", str(path)]
    command += ["--clients", str(clients // processes), "--count", str(each), "--cancel-each", str(cancel_each)]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    for process in running:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    since = time.perf_counter()
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    taken = list(itertools.chain.from_iterable(json.loads(process.communicate()[0]) for process in running))
    elapsed = time.perf_counter() - since
    if any(process.returncode for process in running) or len(taken) != each * clients:
        raise RuntimeError("a client broke")
    return len(taken) / elapsed, Latencies(taken)


def nothing_doing(path: Path, answer: bytes) -> subprocess.Popen[str]:
    """Start a server that answers every request with the same bytes, to learn what the clients can do."""
    command = [sys.executable, "-m", "tests.bench.clients", str(path), "--serve"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(answer.decode())
    process.stdin.close()
    assert process.stdout.readline() == "ready\n"
    return process


def _serve(path: Path) -> None:
    body = sys.stdin.buffer.read()
    head = f"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(128)
    print("ready", flush=True)

    def answer(line: socket.socket) -> None:
        # One request is one piece here: the clients wait for each answer, and a Unix socket does not split so little.
        with line, contextlib.suppress(OSError):
            while line.recv(65536):
                line.sendall(head.encode() + body)

    for line in _accepted(listener):
        threading.Thread(target=answer, args=(line,), daemon=True).start()


def _accepted(listener: socket.socket) -> Iterator[socket.socket]:
    while True:
        yield listener.accept()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Submit jobs as fast as the lane takes them.")
    parser.add_argument("socket", type=Path)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--cancel-each", type=int, default=0, metavar="N", help="cancel one of N jobs")
    parser.add_argument("--serve", action="store_true", help="be the server that does nothing")
    options = parser.parse_args()
    if options.serve:
        return _serve(options.socket)
    taken: list[float] = []

    def run() -> None:
        taken.extend(submit_repeatedly(options.socket, options.count, cancel_each=options.cancel_each))

    threads = [threading.Thread(target=run) for _ in range(options.clients)]
    print("ready", flush=True)
    sys.stdin.readline()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    json.dump(taken, sys.stdout)
    return None


if __name__ == "__main__":
    main()
