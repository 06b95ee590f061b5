"""How brainlaned starts, refuses to start, and stops: exit statuses, what it says, and what it leaves alone."""

import hashlib
import itertools
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.brainserver import BrainServer
from tests.lane import Lane, config_for

REPOSITORY = Path(__file__).parents[2]
NOBODY = 65534
PAGE = 4096


def run(lane: Lane, *more: str) -> subprocess.CompletedProcess[str]:
    """Start a daemon that is expected to refuse, and return how it ended."""
    return finished([*lane.command(), *more])


def finished(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=False, **options
    )


def refused(ended: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    """Check a refusal: its status, and one line on stderr that has all the words."""
    assert "Traceback" not in ended.stderr, ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    for word in words:
        assert word in ended.stderr
    assert ended.stdout == ""
    assert ended.returncode == status, ended.stderr


def files_in(directory: Path) -> dict[str, str]:
    """The digest of every file, by its name."""
    return {
        os.fspath(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }


def identity_of(path: Path) -> tuple[int, int, int, int]:
    """What tells a file from another one of the same name; the number alone is given again at once."""
    found = path.lstat()
    return found.st_dev, found.st_ino, found.st_mode, found.st_ctime_ns


# A second one


def test_a_second_daemon_is_refused_and_changes_nothing(lane: Lane, tmp_path: Path) -> None:
    job = lane.wait(lane.submit("before")["id"])
    files, there = files_in(lane.state_dir), identity_of(lane.socket)
    refused(run(lane), 69, os.fspath(lane.state_dir))
    refused(run(lane, "--socket", os.fspath(tmp_path / "another")), 69, os.fspath(lane.state_dir))
    assert not (tmp_path / "another").exists()
    assert files_in(lane.state_dir) == files
    assert identity_of(lane.socket) == there
    assert lane.get(f"/v1/jobs/{job['id']}").json == job
    assert lane.wait(lane.submit("afterwards")["id"])["status"] == "done"


def test_a_second_lane_does_not_take_the_socket_of_the_first(lane: Lane, tmp_path: Path) -> None:
    there = identity_of(lane.socket)
    refused(run(lane, "--state-dir", os.fspath(tmp_path / "second")), 69, os.fspath(lane.socket))
    assert identity_of(lane.socket) == there
    assert lane.get("/v1/healthz").status == 200


def test_after_a_death_a_new_start_succeeds_at_once(lane: Lane) -> None:
    job = lane.wait(lane.submit("before")["id"])
    lane.kill()
    dead = identity_of(lane.socket)
    lane.start()
    assert identity_of(lane.socket) != dead
    assert lane.get(f"/v1/jobs/{job['id']}").json == job
    last_run = lane.get("/v1/status").json["last_run"]
    assert last_run["ended_at"] is None and "vanished without a word" in last_run["ending"]


# The place


def test_a_file_in_place_of_the_socket_is_left_alone(make_lane: Any) -> None:
    lane = make_lane(start=False)
    lane.socket.write_text("somebody's work")
    there = identity_of(lane.socket)
    refused(run(lane), 78, os.fspath(lane.socket))
    assert identity_of(lane.socket) == there
    assert lane.socket.read_text() == "somebody's work"


def test_a_socket_path_may_have_107_bytes(make_lane: Any, tmp_path: Path) -> None:
    lane = make_lane(start=False)
    room = 107 - len(os.fsencode(tmp_path)) - 1
    assert room > 0, f"the tests need a shorter temporary directory than {tmp_path}"
    lane.socket = tmp_path / ("s" * room)
    lane.start()
    assert lane.wait(lane.submit()["id"])["status"] == "done"


def test_a_socket_path_of_108_bytes_is_refused(make_lane: Any, tmp_path: Path) -> None:
    lane = make_lane(start=False)
    lane.socket = tmp_path / ("s" * (108 - len(os.fsencode(tmp_path)) - 1))
    refused(run(lane), 78, os.fspath(lane.socket), "108", "107")
    assert not lane.socket.exists()


def test_a_file_in_place_of_the_state_directory_is_refused(make_lane: Any) -> None:
    lane = make_lane(start=False)
    lane.state_dir.write_text("somebody's work")
    refused(run(lane), 78, os.fspath(lane.state_dir))
    assert lane.state_dir.read_text() == "somebody's work"


def run_as_nobody(lane: Lane) -> subprocess.CompletedProcess[str]:
    """Start a daemon as a user without rights, which as root means: import all of it, then give up root.

    Paths are relative to the lane's directory, since the way to it is not for everybody.
    """
    if os.geteuid() != 0:
        return finished(lane.command(), cwd=REPOSITORY)
    lane.directory.chmod(0o777)
    lane.config.chmod(0o644)
    # All is imported while it may still be read: what nobody may read is not what is looked at here.
    program = "import os, sys; from brainlaned import __main__ as program, check, daemon; os.setgroups([])"
    program += "; import logging_journald"
    program += f"; os.setgid({NOBODY}); os.setuid({NOBODY}); program.main()"
    options = ["--config", lane.config.name, "--state-dir", lane.state_dir.name, "--socket", lane.socket.name]
    path = {**os.environ, "PYTHONPATH": os.fspath(REPOSITORY)}
    return finished([sys.executable, "-c", program, *options], cwd=lane.directory, env=path)


@pytest.mark.parametrize("mode", [0o555, 0o500], ids=["may be read", "may not be read"])
def test_a_state_directory_that_may_not_be_written_is_refused(make_lane: Any, mode: int) -> None:
    lane = make_lane(start=False)
    lane.state_dir.mkdir(mode=mode)
    refused(run_as_nobody(lane), 77, f"{lane.state_dir.name}'")
    assert files_in(lane.state_dir) == {}
    assert not lane.socket.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can leave files that another user may not write")
@pytest.mark.parametrize("name", ["brainlane.db", "brainlane.db-wal", "brainlane.db-shm"])
def test_a_database_file_that_may_not_be_written_is_refused(make_lane: Any, database: bytes, name: str) -> None:
    lane = make_lane(start=False)
    lane.state_dir.mkdir(mode=0o700)
    lane.database.write_bytes(database)
    for path in (lane.state_dir, lane.database):
        os.chown(path, NOBODY, NOBODY)
    foreign = lane.state_dir / name
    foreign.touch()
    os.chown(foreign, 0, 0)
    foreign.chmod(0o644)
    files = files_in(lane.state_dir)
    refused(run_as_nobody(lane), 77, lane.database.name)
    assert files_in(lane.state_dir) == files


# The configuration and the command line


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[lane]\nstop_grace = 5", "lane.stop_grace"),
        ("[lane]\ncrash_limit = 0", "lane.crash_limit"),
        ("[lane]\nstop_grace_s = nan", "lane.stop_grace_s"),
        ("[lane]\ndefault_route = 'nowhere'", "lane.default_route"),
        ("[bogus]", "bogus"),
        ("[routes.a]\nmodel = 'm'", "routes.a.base_url"),
        ("[routes.a]\nbase_url = 'http://x/v1'\nmodel = 'm'\napi_key = 'none'", "routes.a.api_key"),
        ("[routes.a]\nbase_url = 'https://x/v1'\nmodel = 'm'\nca_file = '/no/such/file'", "routes.a.ca_file"),
        ("[lane]\nstop_grace_s = soon\n", "line 2"),
        ("\xff", "UTF-8"),
    ],
    ids=itertools.count(),
)
def test_a_configuration_that_cannot_be_used_is_refused_by_the_name_of_its_key(
    make_lane: Any, config: str, words: str
) -> None:
    lane = make_lane(start=False)
    lane.config.write_bytes(config.encode("latin-1"))
    refused(run(lane), 78, os.fspath(lane.config), words)
    assert not lane.state_dir.exists()
    assert not lane.socket.exists()


def test_a_configuration_that_is_not_there_is_refused(make_lane: Any) -> None:
    lane = make_lane(start=False)
    lane.config.unlink()
    refused(run(lane), 78, os.fspath(lane.config))


@pytest.mark.parametrize("more", [["--bogus"], ["bogus"], ["--socket"]])
def test_a_command_line_that_cannot_be_understood_is_refused(make_lane: Any, more: list[str]) -> None:
    lane = make_lane(start=False)
    refused(run(lane, *more), 64, more[0])
    assert not lane.state_dir.exists()


# The database


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The database file of a lane that has done two jobs and was stopped."""
    with BrainServer() as server:
        lane = Lane(tmp_path_factory.mktemp("made"), config_for(server.base_url)).start()
        for _ in range(2):
            lane.wait(lane.submit("x" * 5000)["id"])
        assert lane.stop() == 0
    assert not list(lane.state_dir.glob("*-wal"))
    return lane.database.read_bytes()


def with_version(database: bytes, version: int) -> bytes:
    return database[:60] + version.to_bytes(4, "big") + database[64:]


def lane_with(make_lane: Any, database: bytes) -> tuple[Lane, dict[str, str]]:
    lane: Lane = make_lane(start=False)
    lane.state_dir.mkdir(mode=0o700)
    lane.database.write_bytes(database)
    return lane, files_in(lane.state_dir)


def test_a_newer_database_is_refused_and_left_alone(make_lane: Any, database: bytes) -> None:
    version = int.from_bytes(database[60:64], "big")
    lane, files = lane_with(make_lane, with_version(database, version + 1))
    refused(run(lane), 65, os.fspath(lane.database), f"version {version + 1}", f"knows {version}")
    assert files_in(lane.state_dir) == files


def test_a_newer_database_whose_version_stands_in_the_log_alone_is_left_alone_too(
    make_lane: Any, database: bytes
) -> None:
    lane, _ = lane_with(make_lane, database)
    version = int.from_bytes(database[60:64], "big")
    dying = f"import os, sqlite3; c = sqlite3.connect({os.fspath(lane.database)!r}, isolation_level=None)"
    dying += f"; c.execute('pragma user_version = {version + 1}'); os.kill(os.getpid(), 9)"
    assert finished([sys.executable, "-c", dying]).returncode == -9
    files = files_in(lane.state_dir)
    assert "brainlane.db-wal" in files
    refused(run(lane), 65, f"version {version + 1}", f"knows {version}")
    kept = {name: digest for name, digest in files_in(lane.state_dir).items() if not name.endswith("-shm")}
    assert kept == {name: digest for name, digest in files.items() if not name.endswith("-shm")}


DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "something else": lambda _: b"something else entirely\n" * 1000,
    "half of it": lambda good: good[: len(good) // 2],
    "a broken schema": lambda good: good[:100] + b"\xff" * (PAGE - 100) + good[PAGE:],
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_database_is_refused_and_left_alone(
    make_lane: Any, database: bytes, damage: Callable[[bytes], bytes]
) -> None:
    lane, files = lane_with(make_lane, damage(database))
    refused(run(lane), 65, os.fspath(lane.database))
    assert files_in(lane.state_dir) == files


@pytest.mark.parametrize("table", ["one_running_attempt", "runs", "gates"])
def test_a_database_with_a_damaged_page_that_the_start_needs_is_refused(
    make_lane: Any, database: bytes, tmp_path: Path, table: str
) -> None:
    copy = tmp_path / "copy.db"
    copy.write_bytes(database)
    with closing(sqlite3.connect(copy)) as connection:
        query = "select rootpage from sqlite_schema where name = ?"
        (page,) = connection.execute(query, (table,)).fetchone()
    damaged = database[: (page - 1) * PAGE] + b"\xff" * PAGE + database[page * PAGE :]
    lane, files = lane_with(make_lane, damaged)
    refused(run(lane), 65, os.fspath(lane.database))
    assert files_in(lane.state_dir) == files


# The end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_lane_at_rest_ends_at_once_and_takes_its_socket_with_it(make_lane: Any, number: int) -> None:
    lane = make_lane()
    job = lane.wait(lane.submit()["id"])
    lane.process.send_signal(number)
    assert lane.process.wait(20) == 0
    assert not lane.socket.exists()
    lane.start()
    last_run = lane.get("/v1/status").json["last_run"]
    assert last_run["ending"] == f"stopped by {signal.Signals(number).name}"
    assert lane.get(f"/v1/jobs/{job['id']}").json == job


def test_a_socket_that_took_the_place_of_its_own_is_not_removed(lane: Lane) -> None:
    lane.socket.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(os.fspath(lane.socket))
        there = identity_of(lane.socket)
        assert lane.stop() == 0
        assert identity_of(lane.socket) == there


def test_a_hangup_signal_changes_nothing(lane: Lane) -> None:
    assert lane.process is not None
    lane.process.send_signal(signal.SIGHUP)
    assert lane.wait(lane.submit()["id"])["status"] == "done"
    assert lane.process.poll() is None


def wait_until_stopping(lane: Lane) -> None:
    deadline = time.monotonic() + 20
    while lane.get("/v1/status").json["lane"]["state"] != "stopping":
        assert time.monotonic() < deadline
        time.sleep(0.02)  # for the signal to be handled


def test_a_stop_lets_the_call_in_flight_finish_and_goes_on_answering(lane: Lane, server: BrainServer) -> None:
    assert lane.process is not None
    held = server.hold()
    server.script(held)
    running = lane.submit("first")
    assert held.arrived.wait(20)
    waits: list[dict[str, Any]] = []
    lane.process.send_signal(signal.SIGTERM)
    wait_until_stopping(lane)
    queued = lane.submit("second")
    waiter = threading.Thread(target=lambda: waits.append(lane.get(f"/v1/jobs/{queued['id']}?wait=60").json))
    waiter.start()
    assert [job["id"] for job in lane.get("/v1/jobs").json["jobs"]] == [queued["id"], running["id"]]
    assert lane.get("/v1/healthz").json == {"status": "stopping"}
    assert lane.process.poll() is None
    held.release()
    assert lane.process.wait(20) == 0
    waiter.join(20)
    assert [job["status"] for job in waits] == ["queued"]
    assert not lane.socket.exists()
    rows = lane.rows("select id, status, reason, attempt_count from jobs order by id")
    assert [tuple(row.values()) for row in rows] == [
        (running["id"], "done", "answered", 1),
        (queued["id"], "queued", "submitted", 0),
    ]
    assert server.count() == 1
    lane.start()
    assert lane.get(f"/v1/jobs/{running['id']}/output").body == b"hello world"
    assert lane.wait(queued["id"])["status"] == "done"
    assert server.count() == 2


@pytest.mark.parametrize("end", ["a second signal", "the end of its grace"])
def test_a_call_that_is_abandoned_leaves_its_job_held_with_the_part(
    make_lane: Any, server: BrainServer, halting: Any, end: str
) -> None:
    lane = make_lane(lane="stop_grace_s = 1" if end == "the end of its grace" else "")
    step, held = halting(server, "a part ", "the rest")
    server.script(step)
    job = lane.submit()
    assert held.arrived.wait(20)
    deadline = time.monotonic() + 20
    while lane.get(f"/v1/jobs/{job['id']}/output?partial=1").body != b"a part ":
        assert time.monotonic() < deadline
        time.sleep(0.02)  # for the part to arrive in the spool
    lane.process.send_signal(signal.SIGTERM)
    if end == "a second signal":
        wait_until_stopping(lane)
        lane.process.send_signal(signal.SIGTERM)
    assert lane.process.wait(20) == 0
    assert not lane.socket.exists()
    lane.start()
    shown = lane.get(f"/v1/jobs/{job['id']}").json
    assert (shown["status"], shown["reason"]) == ("held", "answer-incomplete")
    (attempt,) = shown["attempts"]
    assert (attempt["status"], attempt["reason"]) == ("unknown", "daemon-stopped")
    assert lane.get(f"/v1/jobs/{job['id']}/output?partial=1").body == b"a part "
    assert lane.wait(lane.submit("next")["id"])["status"] == "done"
    assert server.count() == 2


def test_the_program_says_its_version_and_its_options() -> None:
    version = finished([sys.executable, "-m", "brainlaned", "--version"])
    assert (version.returncode, version.stderr) == (0, "")
    assert version.stdout.strip()
    helped = finished([sys.executable, "-m", "brainlaned", "--help"])
    assert helped.returncode == 0
    for option in ("--config", "--state-dir", "--socket", "--version"):
        assert option in helped.stdout
