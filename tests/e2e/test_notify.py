"""What systemd is told: readiness, the status line, signs of life and their end; and how it passes the socket.

Here the tests themselves are systemd: a datagram socket hears what the daemon says, and a listening socket is passed to
it. What a booted systemd makes of it is shown in tests/systemd.
"""

import contextlib
import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.brainserver import BrainServer, Held
from tests.lane import Lane

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Heard:
    """One datagram: when it came (monotonic, s), from which pid, and what it said."""

    at: float
    pid: int
    words: dict[str, str]


class Manager:
    """A notify socket that hears everything, and the daemons that were told of it."""

    def __init__(self, directory: Path) -> None:
        self.heard: list[Heard] = []
        self._changed = threading.Condition()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(os.fspath(directory / "notify"))
        self._path = directory / "notify"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                data, extra, _, _ = self._socket.recvmsg(65536, 128)
                pid = struct.unpack("3i", extra[0][2][:12])[0]
                words = dict(line.partition("=")[::2] for line in data.decode("ascii").splitlines())
                with self._changed:
                    self.heard.append(Heard(time.monotonic(), pid, words))
                    self._changed.notify_all()

    def start(self, lane: Lane, *, cut: str | None = None, times: int = 1, **environment: str) -> Lane:
        with lane.log.open("ab") as log:
            lane.process = subprocess.Popen(
                lane.command(cut=cut, times=times),
                stdout=log,
                stderr=log,
                env={**os.environ, "NOTIFY_SOCKET": os.fspath(self._path), **environment},
            )
        return lane

    def wait_for(self, is_so: Callable[[list[Heard]], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: is_so(self.heard), PATIENCE_S), self.heard

    def times(self, word: str) -> list[float]:
        with self._changed:
            return [each.at for each in self.heard if word in each.words]

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(tmp_path)
    yield made
    made.close()


def said(word: str, value: str) -> Callable[[list[Heard]], bool]:
    return lambda heard: any(value in each.words.get(word, "") for each in heard)


def test_ready_is_said_when_it_answers_and_the_status_line_follows_the_jobs(
    manager: Manager, make_lane: Any, server: BrainServer
) -> None:
    held = server.hold()
    server.script(held)
    lane = manager.start(make_lane(start=False))
    manager.wait_for(said("READY", "1"))
    assert lane.get("/v1/healthz").status == 200
    job, _ = lane.submit("a"), lane.submit("b")
    manager.wait_for(said("STATUS", f"Running job {job['id']}, 1 waiting, 0 held."))
    held.release()
    manager.wait_for(lambda heard: "Waiting for work, 0 waiting, 0 held." in heard[-1].words.get("STATUS", ""))
    assert lane.stop() == 0
    manager.wait_for(said("STOPPING", "1"))
    assert {each.pid for each in manager.heard} == {lane.process.pid}
    # Nobody expects a sign of life where no watchdog is set.
    assert not any("WATCHDOG" in each.words for each in manager.heard)


def test_a_start_asks_for_more_time_with_each_step_of_a_migration(manager: Manager, make_lane: Any) -> None:
    manager.start(make_lane(start=False))
    manager.wait_for(said("READY", "1"))
    steps = [each for each in manager.heard if "EXTEND_TIMEOUT_USEC" in each.words]
    assert len(steps) > 10
    assert steps[-1].at <= manager.times("READY")[0]


def test_a_start_asks_for_more_time_before_each_attempt_that_it_decides(
    manager: Manager, make_lane: Any, server: BrainServer
) -> None:
    held = server.hold()
    server.script(held)
    lane = make_lane()
    lane.submit()
    assert held.arrived.wait(PATIENCE_S)
    lane.kill()
    manager.start(lane)
    manager.wait_for(said("READY", "1"))
    # There is no migration, but one attempt with one file in the spool, and then the run begins.
    asked = manager.times("EXTEND_TIMEOUT_USEC")
    assert len(asked) == 3
    assert asked[-1] <= manager.times("READY")[0]


def test_a_short_watchdog_is_fed_in_time(manager: Manager, make_lane: Any) -> None:
    manager.start(make_lane(start=False), WATCHDOG_USEC="500000")
    manager.wait_for(lambda heard: sum("WATCHDOG" in each.words for each in heard) >= 12)
    fed = manager.times("WATCHDOG")
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(fed))
    # Half the period is what sd_watchdog_enabled(3) advises; the median leaves a busy machine out of it.
    assert gaps[len(gaps) // 2] <= 0.25


def test_a_watchdog_that_is_meant_for_another_process_is_not_fed(manager: Manager, make_lane: Any) -> None:
    lane = manager.start(make_lane(start=False), WATCHDOG_USEC="300000", WATCHDOG_PID="1")
    manager.wait_for(said("READY", "1"))
    lane.wait(lane.submit()["id"])
    assert lane.stop() == 0
    assert manager.times("WATCHDOG") == []


def test_a_call_that_is_silent_within_its_limits_is_alive(
    manager: Manager, make_lane: Any, server: BrainServer
) -> None:
    held = server.hold()
    server.script(held)
    lane = manager.start(make_lane(start=False), WATCHDOG_USEC="600000")
    manager.wait_for(said("READY", "1"))
    job = lane.submit()
    assert held.arrived.wait(PATIENCE_S)
    began = len(manager.times("WATCHDOG"))
    manager.wait_for(lambda heard: sum("WATCHDOG" in each.words for each in heard) >= began + 9)
    held.release()
    assert lane.wait(job["id"])["status"] == "done"


HANGING = """
import sys
from brainlaned import worker
from brainlaned.brains import http
worker.STEP_S = http.RESOLVE_S = 0.5
from tests import observed
observed.main()
"""


def test_a_worker_that_hangs_beyond_what_it_declared_is_given_up_though_the_lane_answers(
    manager: Manager, make_lane: Any, server: BrainServer
) -> None:
    lane = make_lane(start=False, route="connect_s = 0.5\ntotal_s = 1")
    words = [sys.executable, "-c", HANGING, "stored:1:hang", str(lane.directory / "vanishing"), *lane.command()[3:]]
    lane.command = lambda **_: words
    (lane.directory / "vanishing").touch()
    manager.start(lane, WATCHDOG_USEC="600000")
    manager.wait_for(said("READY", "1"))
    manager.wait_for(said("WATCHDOG", "1"))
    lane.submit()
    deadline = time.monotonic() + PATIENCE_S
    while "no sign of life is given any more" not in lane.log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)  # for the declared silence to end
    fed = len(manager.times("WATCHDOG"))
    assert "the worker has been silent for" in lane.log.read_text()
    assert lane.get("/v1/status").status == 200
    time.sleep(1)  # five periods of signs that must not come
    assert len(manager.times("WATCHDOG")) == fed
    lane.kill()


# Passing the socket.


@contextlib.contextmanager
def passed_socket(lane: Lane) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(os.fspath(lane.socket))
        listener.listen(64)
        yield listener


def activate(lane: Lane, *descriptors: int, names: str, pid: str = "$$") -> subprocess.Popen[bytes]:
    """Start the daemon as systemd does, with these descriptors as 3, 4, ..."""
    moves = " ".join(f"{3 + index}<&{descriptor}" for index, descriptor in enumerate(descriptors))
    words = [word if word != os.fspath(lane.socket) else "/nowhere/s" for word in lane.command()]
    script = f'LISTEN_PID={pid} LISTEN_FDS={len(descriptors)} LISTEN_FDNAMES={names} exec "$@" {moves}'
    with lane.log.open("ab") as log:
        lane.process = subprocess.Popen(
            ["bash", "-c", script, "bash", *words], pass_fds=descriptors, stdout=log, stderr=log
        )
    return lane.process


def test_a_passed_socket_is_found_by_its_name_and_outlives_the_daemon(make_lane: Any) -> None:
    lane = make_lane(start=False)
    with passed_socket(lane) as listener, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(os.fspath(lane.directory / "other"))
        other.listen()
        inode = lane.socket.stat().st_ino
        activate(lane, other.fileno(), listener.fileno(), names="metrics:control")
        job = lane.wait(lane.submit()["id"])
        assert job["status"] == "done"
        assert lane.stop() == 0
        assert lane.socket.stat().st_ino == inode
        # Whoever connects while nothing runs is answered by the next start.
        waiting = threading.Thread(target=lambda: found.append(lane.get(f"/v1/jobs/{job['id']}").json))
        found: list[dict[str, Any]] = []
        waiting.start()
        activate(lane, listener.fileno(), names="control")
        waiting.join(PATIENCE_S)
        assert found == [job]
        lane.stop()


@pytest.mark.parametrize("kind", [socket.SOCK_DGRAM, socket.SOCK_STREAM], ids=["a datagram socket", "not listening"])
def test_passed_descriptors_of_which_none_fits_are_refused(make_lane: Any, kind: int) -> None:
    lane = make_lane(start=False)
    with socket.socket(socket.AF_UNIX, kind) as wrong:
        wrong.bind(os.fspath(lane.directory / "wrong"))
        assert activate(lane, wrong.fileno(), names="control").wait(PATIENCE_S) == 78
    assert "none is a listening stream socket named 'control'" in lane.log.read_text()
    assert not lane.database.exists()
    lane.process = None


def test_every_client_that_waits_at_a_refused_start_is_told_why(make_lane: Any) -> None:
    lane = make_lane(start=False)
    lane.config.write_text("[lane]\nno_such_key = 1\n", encoding="utf-8")
    answers: list[Any] = []

    def ask() -> None:
        answers.append(lane.post("/v1/jobs", {"request": {"messages": [{"role": "user", "content": "x" * 100_000}]}}))

    with passed_socket(lane) as listener:
        clients = [threading.Thread(target=ask) for _ in range(10)]
        for client in clients:
            client.start()
        # An idle one and one that hangs up must not keep the others from their answers.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as idle:
            idle.connect(os.fspath(lane.socket))
            deadline = time.monotonic() + PATIENCE_S
            while len(Path("/proc/net/unix").read_text().split(os.fspath(lane.socket))) < 13:
                assert time.monotonic() < deadline
                time.sleep(0.01)  # for all of them to be connected
            assert activate(lane, listener.fileno(), names="control").wait(PATIENCE_S) == 78
        for client in clients:
            client.join(PATIENCE_S)
        assert [(answer.status, answer.error["kind"], answer.error["retry_safe"]) for answer in answers] == [
            (503, "start-refused", True)
        ] * 10
        assert "lane.no_such_key is not a key of the configuration" in answers[0].error["message"]
        assert answers[0].headers["Brainlane-Protocol"] == "1"
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    lane.process = None


def killed_in_a_call(make_lane: Any, server: BrainServer) -> tuple[Lane, dict[str, Any], Held]:
    """A lane whose daemon was killed while its brain thought, the job, and what holds the brain's answer."""
    held = server.hold()
    server.script(held)
    lane = make_lane()
    job = lane.submit()
    assert held.arrived.wait(PATIENCE_S)
    lane.kill()
    return lane, job, held


def test_what_systemd_knows_of_the_end_of_a_run_is_told_by_the_next(make_lane: Any, server: BrainServer) -> None:
    lane, job, held = killed_in_a_call(make_lane, server)
    words = [sys.executable, "-m", "brainlaned", "--state-dir", str(lane.state_dir), "--record-stop"]
    told = {"SERVICE_RESULT": "watchdog", "EXIT_CODE": "killed", "EXIT_STATUS": "ABRT"}
    subprocess.run(words, env={**os.environ, **told}, check=True, timeout=PATIENCE_S)
    # A refused start in between must not make the truth forgotten.
    subprocess.run(words, env={**os.environ, "SERVICE_RESULT": "exit-code", "EXIT_STATUS": "78"}, check=True)
    lane.start()
    last_run = lane.get("/v1/status").json["last_run"]
    assert last_run["ending"] == "the watchdog killed it, since it gave no sign of life"
    assert last_run["ended_at"] is not None
    assert "the watchdog killed it" in lane.log.read_text()
    found = lane.get(f"/v1/jobs/{job['id']}").json
    assert (found["status"], found["reason"]) == ("held", "sent-outcome-unknown")
    assert "the watchdog killed it" in found["detail"]
    held.release()
    assert lane.stop() == 0
    lane.start()
    assert lane.get("/v1/status").json["last_run"]["ending"] == "stopped by SIGTERM"


DYING_IN_RECOVERY = """
import os, signal
from brainlaned import __main__ as program, spool
spool.Spool.find = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
program.main()
"""


def test_a_start_that_dies_while_it_decides_does_not_change_how_the_run_before_it_ended(
    make_lane: Any, server: BrainServer
) -> None:
    lane, job, _ = killed_in_a_call(make_lane, server)
    note = [sys.executable, "-m", "brainlaned", "--state-dir", str(lane.state_dir), "--record-stop"]
    subprocess.run(note, env={**os.environ, "SERVICE_RESULT": "signal", "EXIT_STATUS": "KILL"}, check=True)
    again = subprocess.run([sys.executable, "-c", DYING_IN_RECOVERY, *lane.command()[3:]], timeout=PATIENCE_S)
    assert again.returncode == -signal.SIGKILL
    subprocess.run(note, env={**os.environ, "SERVICE_RESULT": "timeout", "EXIT_STATUS": "TERM"}, check=True)
    lane.start()
    found = lane.get(f"/v1/jobs/{job['id']}").json
    assert (found["status"], found["reason"]) == ("held", "sent-outcome-unknown")
    # The run that made the call was killed by a signal; only the start after it took too long.
    assert "(signal KILL ended it)" in found["detail"]
