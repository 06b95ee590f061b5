"""Clients that send or take too slowly, or are too many: each is dropped by its deadline and hinders nobody else.

The deadlines of the daemon are shortened by an entry point of its own, since the real ones are too long to sit out.
"""

import http.client
import os
import pwd
import resource
import select
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from brainlaned import server as server_module
from brainlaned import wire
from brainlaned.wire import PROTOCOL, PROTOCOL_HEADER
from tests.brainserver import BrainServer
from tests.lane import Answer, Lane, config_for, living, wait_until

IMPATIENT = """
import sys
from brainlaned import __main__ as program, server

server.REQUEST_S, server.ANSWER_S, server.KEEP_ALIVE_S = (int(sys.argv.pop(1)) for _ in range(3))
program.main()
"""
REQUEST_S = 3
ANSWER_S = 3
KEEP_ALIVE_S = 4
PATIENCE_S = 60.0
"""How long anything may take that must happen sooner or later."""

FEW = 160
"""So few files may be open in a daemon whose connections are to be few."""

ME = os.geteuid()


class ImpatientLane(Lane):
    """A lane whose daemon waits for seconds only, and may have only so many files open."""

    def __init__(self, directory: Path, config: str, most_files: int | None = None) -> None:
        super().__init__(directory, config)
        self._most_files = most_files

    def command(self, *, cut: str | None = None, times: int = 1) -> list[str]:
        _, _, _, *options = super().command(cut=cut, times=times)
        limited = [] if self._most_files is None else ["prlimit", f"--nofile={self._most_files}:{self._most_files}"]
        return [*limited, sys.executable, "-c", IMPATIENT, *map(str, (REQUEST_S, ANSWER_S, KEEP_ALIVE_S)), *options]


@pytest.fixture
def lane(tmp_path: Path, server: BrainServer) -> Iterator[Lane]:
    yield from impatient(tmp_path, config_for(server.base_url))


def impatient(directory: Path, config: str, most_files: int | None = None) -> Iterator[Lane]:
    with living(ImpatientLane(directory / "lane", config, most_files)) as lane:
        yield lane


def connected(lane: Lane, sent: bytes = b"") -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(PATIENCE_S)
    client.connect(os.fspath(lane.socket))
    client.sendall(sent)
    return client


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: lane\r\n\r\n".encode()


def answer_on(client: socket.socket) -> Answer:
    response = http.client.HTTPResponse(client)
    response.begin()
    return Answer(response.status, response.headers, response.read())


def is_dropped(client: socket.socket) -> bool:
    """Read on until the other side closes, which it must."""
    try:
        while client.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


def check_too_slow(answered: Answer) -> None:
    assert (answered.status, answered.error["kind"], answered.error["retry_safe"]) == (408, "too-slow", True)
    assert set(answered.error) == {"kind", "message", "next_action", "retry_safe"}
    assert answered.headers[PROTOCOL_HEADER] == PROTOCOL
    assert answered.headers["connection"] == "close"


def connections_of(lane: Lane) -> int:
    """Count the daemon's open sockets, its listener and others that are always there included."""
    assert lane.process is not None
    found = 0
    for each in Path(f"/proc/{lane.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found += os.fspath(each.readlink()).startswith("socket:")
    return found


def dropped_lines(lane: Lane) -> list[str]:
    return [line for line in lane.log.read_text().splitlines() if "closed the connection of" in line]


def first_dropped(lane: Lane) -> str:
    """Wait for a line, since the journal is written a moment after what it tells."""
    wait_until(lambda: bool(dropped_lines(lane)))
    return dropped_lines(lane)[0]


# Who sends too slowly


def test_two_hundred_silent_connections_are_dropped_and_meanwhile_the_lane_lists_and_works(
    lane: Lane, server: BrainServer
) -> None:
    held = server.hold()
    server.script(held)
    job = lane.submit()
    assert held.arrived.wait(PATIENCE_S)
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(lane)) for _ in range(200)]
        assert [each["id"] for each in lane.get("/v1/jobs").json["jobs"]] == [job["id"]]
        held.release()
        assert lane.wait(job["id"])["status"] == "done"
        for client in silent:
            check_too_slow(answer_on(client))
            assert client.recv(1) == b""
    wait_until(lambda: connections_of(lane) < 100)
    assert (
        first_dropped(lane)
        == f"<4>closed the connection of uid {ME} pid {os.getpid()}: its request was not whole within 3 s"
    )
    assert len(dropped_lines(lane)) == 1


def drip(client: socket.socket, sent: bytes, stop: threading.Event) -> None:
    for number in range(len(sent)):
        with suppress(OSError):
            client.sendall(sent[number : number + 1])
        if stop.wait(0.3):  # for a moment in which the daemon could take it for a sign of life
            return


@pytest.mark.parametrize("before", [b"", get("/v1/healthz")], ids=["at once", "after another request"])
def test_a_head_that_trickles_in_is_not_waited_for_longer_than_one_that_does_not(lane: Lane, before: bytes) -> None:
    stop = threading.Event()
    with connected(lane, before) as client:
        if before:
            assert answer_on(client).status == 200
        began = time.monotonic()
        dripping = threading.Thread(target=drip, args=(client, b"GET /v1/jobs HTTP/1.1\r\nX: " + b"x" * 1000, stop))
        dripping.start()
        try:
            check_too_slow(answer_on(client))
        finally:
            stop.set()
            dripping.join()
        # A deadline that every byte moved on would last for as long as there are bytes.
        assert time.monotonic() - began < 1000 * 0.3
        assert is_dropped(client)
    assert f"uid {ME} pid {os.getpid()}" in first_dropped(lane)


def test_a_body_that_nobody_wants_and_that_does_not_come_ends_the_connection(lane: Lane) -> None:
    sent = b"GET /v1/healthz HTTP/1.1\r\nHost: lane\r\nContent-Length: 100\r\n\r\nhalf"
    with connected(lane, sent) as client:
        assert answer_on(client).status == 200
        assert is_dropped(client)
    assert lane.get("/v1/healthz").status == 200


@pytest.mark.parametrize(
    ("framing", "rest"),
    [("Content-Length: 5", b"aaaaa"), ("Transfer-Encoding: chunked", b"zz\r\n")],
    ids=["whole", "broken"],
)
def test_the_rest_of_a_body_that_nobody_wanted_does_not_keep_the_connection(
    lane: Lane, framing: str, rest: bytes
) -> None:
    with closing(connected(lane, f"POST /nowhere HTTP/1.1\r\nHost: lane\r\n{framing}\r\n\r\n".encode())) as client:
        assert answer_on(client).status == 404
        with suppress(OSError):
            client.sendall(rest)
        assert is_dropped(client)
    # That nothing went wrong inside is seen in the log when the lane has ended.
    assert lane.get("/v1/healthz").status == 200


def test_who_only_waits_for_a_job_is_not_too_slow(lane: Lane, server: BrainServer) -> None:
    held = server.hold()
    server.script(held)
    job = lane.submit()
    assert held.arrived.wait(PATIENCE_S)
    with (
        connected(lane, get(f"/v1/jobs/{job['id']}?wait=60")) as waiting,
        connected(lane, get(f"/v1/jobs/{job['id']}/stream")) as following,
        connected(lane) as silent,
        connected(lane) as later,
    ):
        # By the time that these two are dropped, one after the other, the deadline of the others is long over.
        check_too_slow(answer_on(silent))
        check_too_slow(answer_on(later))
        with connected(lane) as last:
            check_too_slow(answer_on(last))
        held.release()
        assert answer_on(waiting).json["status"] == "done"
        assert b"event: end" in answer_on(following).body


# Who takes too slowly


@pytest.fixture
def long_answer(lane: Lane, server: BrainServer) -> str:
    """The path of a stored output that no buffer between us holds."""
    return stored(lane, 5_000_000)


def stored(lane: Lane, size: int) -> str:
    lane.post("/v1/lane/pause")
    job = lane.submit()
    lane.post(f"/v1/jobs/{job['id']}/cancel")
    # Written by hand, since it has to be of a certain length.
    with closing(sqlite3.connect(lane.database, timeout=PATIENCE_S)) as foreign, foreign:
        foreign.execute("insert into job_outputs values (?, ?, null)", [job["id"], "x" * size])
    lane.post("/v1/lane/resume")
    return f"/v1/jobs/{job['id']}/output"


def test_who_reads_a_byte_a_second_is_dropped_and_holds_up_nobody(
    lane: Lane, server: BrainServer, long_answer: str
) -> None:
    held = server.hold()
    server.script(held)
    job = lane.submit()
    assert held.arrived.wait(PATIENCE_S)
    with connected(lane, get(long_answer)) as client:
        taken = b""
        deadline = time.monotonic() + PATIENCE_S
        while not dropped_lines(lane):
            assert time.monotonic() < deadline
            taken += client.recv(1)
            assert lane.get("/v1/jobs").status == 200
            time.sleep(1)  # so slowly does it read
        held.release()
        assert lane.wait(job["id"])["status"] == "done"
        rest = 0
        with suppress(ConnectionResetError):
            while part := client.recv(65536):
                rest += len(part)
    assert taken.startswith(b"HTT") and rest < 5_000_000
    assert dropped_lines(lane) == [
        f"<4>closed the connection of uid {ME} pid {os.getpid()}: it did not take its answer within 3 s"
    ]


def test_who_reads_slowly_but_steadily_gets_it_all(lane: Lane, long_answer: str) -> None:
    with connected(lane, get(long_answer)) as client:
        response = http.client.HTTPResponse(client)
        response.begin()
        taken = 0
        while part := response.read(500_000):
            taken += len(part)
            time.sleep(0.9 * ANSWER_S / 3)  # so slowly does it read, three times as long in all as it may stand still
    assert taken == 5_000_000
    assert dropped_lines(lane) == []


IN_KERNEL = int(Path("/proc/sys/net/core/wmem_default").read_text())
"""How much of an answer the kernel takes before anybody has read it, at the most."""


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(IN_KERNEL + 20_000, id="a little"),
        pytest.param(IN_KERNEL + 50_000, id="a little more"),
        pytest.param(IN_KERNEL + 100_000, id="more"),
        pytest.param(IN_KERNEL + 1_000_000, id="much"),
    ],
)
def test_who_takes_nothing_of_an_answer_of_any_length_is_dropped(lane: Lane, size: int) -> None:
    with connected(lane, get(stored(lane, size))) as client:
        gone = select.poll()
        gone.register(client, 0)  # a hang-up always reports, unread bytes or not
        # What is written as far as a buffer counts as answered, and then a keep-alive begins.
        assert gone.poll((3 * ANSWER_S + KEEP_ALIVE_S) * 1000)
    assert lane.get("/v1/healthz").status == 200


# Who is one too many

HOLDING = """
import os, socket, sys
os.setgroups([]), os.setgid(int(sys.argv[1])), os.setuid(int(sys.argv[1]))
clients = []
for _ in range(int(sys.argv[2])):
    clients.append(socket.socket(socket.AF_UNIX))
    clients[-1].connect("s")
    clients[-1].sendall(b"GET /v1/healthz HTTP/1.1\\r\\nHost: lane\\r\\n\\r\\n")
for client in clients:
    print(client.recv(65536).split()[1].decode(), flush=True)
print("end", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_above_the_cap_a_connection_is_refused_and_whoever_keeps_the_lane_gets_in(
    tmp_path: Path, server: BrainServer
) -> None:
    nobody = pwd.getpwnam("nobody")
    most = FEW - server_module.OTHER_DESCRIPTORS
    ours = impatient(tmp_path, config_for(server.base_url, more='[access]\nsubmit = ["nobody"]'), FEW)
    lane = next(ours)
    lane.directory.chmod(0o711)
    lane.socket.chmod(0o666)
    command: list[Any] = [sys.executable, "-c", HOLDING, str(nobody.pw_uid), str(most + 10)]
    with subprocess.Popen(
        command, cwd=lane.directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holding:
        assert holding.stdout is not None
        said = [line.strip() for line in iter(holding.stdout.readline, "end\n")]
        assert said[:most] == ["200"] * most
        assert set(said[most:]) == {"503"}
        assert lane.get("/v1/jobs").status == 200
        job = lane.submit()
        assert lane.wait(job["id"])["status"] == "done"
        with ExitStack() as stack:
            clients = [stack.enter_context(connected(lane)) for _ in range(server_module.KEPT_CONNECTIONS)]
            refused = answer_on(stack.enter_context(connected(lane)))
            assert (refused.status, refused.error["kind"], refused.error["retry_safe"]) == (503, "busy", True)
            assert set(refused.error) == {"kind", "message", "next_action", "retry_safe"}
            assert wire.PROTOCOL_HEADER in refused.headers
            assert clients
        holding.communicate("")
    # And all of them are forgotten when they have left.
    with ExitStack() as stack:
        again = [stack.enter_context(connected(lane, get("/v1/healthz"))) for _ in range(most)]
        assert {answer_on(client).status for client in again} == {200}
    line = f"refused a connection of uid {nobody.pw_uid} pid {holding.pid}: there are {most} already"
    wait_until(lambda: f"<4>{line}" in lane.log.read_text().splitlines())
    assert next(ours, None) is None


def test_the_cap_is_what_is_meant_where_there_is_room_for_it() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert server_module.most_connections() <= min(
        server_module.MOST_CONNECTIONS, soft - server_module.OTHER_DESCRIPTORS
    )
    assert hard == resource.RLIM_INFINITY or soft <= hard
