"""Copies of a running lane, lanes set up from one, what is looked at in a stopped lane, and a lane without database."""

import hashlib
import http.client
import itertools
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from brainlaned.wire import DaemonExit
from tests.brainserver import BrainServer
from tests.lane import Lane, wait_until


def hashes(directory: Path) -> dict[str, str]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {os.fspath(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def verified(lane: Lane) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "brainlaned", "--verify", "--state-dir", os.fspath(lane.state_dir)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


# A copy


def test_a_copy_under_load_is_whole_and_the_lane_set_up_from_it_asks_nothing_until_somebody_says_so(
    make_lane: Any, server: BrainServer, tmp_path: Path
) -> None:
    lane = make_lane()
    stop = threading.Event()

    def keep_submitting() -> int:
        for number in itertools.count():
            lane.submit("x" * 20_000)
            if stop.is_set():
                return number + 1
        raise AssertionError

    with ThreadPoolExecutor(3) as clients:
        load = [clients.submit(keep_submitting) for _ in range(3)]
        try:
            wait_until(lambda: lane.get("/v1/status").json["counts"]["done"] >= 20)
            answers = [lane.get("/v1/backup") for _ in range(3)]
        finally:
            stop.set()
        submitted = sum(each.result(60) for each in load)
    assert all(answer.status == 200 for answer in answers)
    assert all(int(answer.headers["content-length"]) == len(answer.body) for answer in answers)
    assert [path.name for path in lane.state_dir.glob(".brainlane-copy-*")] == []
    wait_until(lambda: lane.log.read_text().count("a backup of ") == 3)
    assert lane.get("/v1/status").json["lane"]["state"] == "open"
    lane.post("/v1/lane/pause")

    second = make_lane(start=False)
    second.state_dir.mkdir(mode=0o700)
    second.database.write_bytes(answers[-1].body)
    (second.state_dir / "spool").mkdir()
    with closing(sqlite3.connect(second.database)) as copy:
        assert copy.execute("pragma integrity_check").fetchall() == [("ok",)]
        (count,) = copy.execute("select count(*) from jobs").fetchone()
        assert 20 <= count <= submitted
        unanswered = (
            "select count(*) from jobs left join job_outputs on job_id = id where status = 'done' and text is null"
        )
        assert copy.execute(unanswered).fetchone() == (0,)
        counted = copy.execute("select status, jobs from job_counts where jobs <> 0 order by 1").fetchall()
        assert counted == copy.execute("select status, count(*) from jobs group by 1 order by 1").fetchall()

    asked = server.count()
    second.start()
    shown = second.get("/v1/status").json["lane"]
    assert (shown["state"], shown["paused_by"]) == ("paused", "brainlaned")
    assert shown["paused_reason"].startswith("restored from the backup of ")
    job = second.submit("new", priority="high")
    assert second.get(f"/v1/jobs/{job['id']}").json["waiting"] == "lane-paused"
    assert server.count() == asked
    second.post("/v1/lane/resume")
    assert second.wait(job["id"], 60)["status"] == "done"
    second.post("/v1/lane/pause")


def test_what_a_killed_daemon_left_of_a_copy_is_gone_after_the_next_start(lane: Lane) -> None:
    lane.submit()
    lane.kill()
    left = [lane.state_dir / f".brainlane-copy-2026-03-01T12:00:00.000000Z.db{suffix}" for suffix in ("", "-journal")]
    for path in left:
        path.write_bytes(b"half a copy")
    lane.start()
    assert not any(path.exists() for path in left)
    assert len(lane.get("/v1/jobs").json["jobs"]) == 1


def test_a_second_copy_at_the_same_time_is_refused_and_the_first_one_is_whole(lane: Lane) -> None:
    lane.post("/v1/lane/pause")
    for _ in range(4):
        lane.submit("x" * 7_000_000)
    with ThreadPoolExecutor(8) as clients:
        for _ in range(10):
            answers = list(clients.map(lambda _: lane.get("/v1/backup"), range(8)))
            refused = [answer for answer in answers if answer.status != 200]
            if refused:
                break
    assert {(answer.status, answer.error["kind"], answer.error["retry_safe"]) for answer in refused} == {
        (503, "busy", True)
    }
    whole = [answer for answer in answers if answer.status == 200]
    assert whole and all(answer.body.startswith(b"SQLite format 3\0") for answer in whole)
    assert all(len(answer.body) == int(answer.headers["content-length"]) > 28_000_000 for answer in whole)


def test_a_reader_who_leaves_in_the_middle_of_a_copy_leaves_nothing_behind(lane: Lane) -> None:
    lane.post("/v1/lane/pause")
    for _ in range(2):
        lane.submit("x" * 7_000_000)
    assert lane.process is not None
    files = Path(f"/proc/{lane.process.pid}/fd")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(60)
        client.connect(os.fspath(lane.socket))
        client.sendall(b"GET /v1/backup HTTP/1.1\r\nHost: lane\r\n\r\n")
        response = http.client.HTTPResponse(client)
        response.begin()
        assert response.read(100_000).startswith(b"SQLite format 3\0")
        assert any("brainlane-copy-" in link_of(each) for each in files.iterdir())
        response.close()
    wait_until(lambda: not any("brainlane-copy-" in link_of(each) for each in files.iterdir()))
    assert lane.get("/v1/backup").status == 200


def link_of(path: Path) -> str:
    try:
        return os.fspath(path.readlink())
    except OSError:
        return ""


# A lane whose database is gone


@pytest.mark.parametrize("left", ["nothing", "an empty file"])
def test_a_lane_whose_database_is_missing_or_empty_is_refused_and_nothing_is_created(lane: Lane, left: str) -> None:
    lane.submit()
    assert lane.stop() == 0
    for path in lane.state_dir.glob("brainlane.db*"):
        path.unlink()
    if left != "nothing":
        lane.database.touch()
    before = sorted(path.name for path in lane.state_dir.iterdir())
    lane.start(wait=False)
    assert lane.process is not None and lane.process.wait(30) == DaemonExit.DATABASE == 65
    lane.process = None
    assert sorted(path.name for path in lane.state_dir.iterdir()) == before
    assert not lane.database.exists() or lane.database.stat().st_size == 0
    assert "it is missing or empty, and a lane has lived here" in lane.log.read_text()
    (lane.state_dir / "spool").rmdir()
    assert lane.start().submit()["id"] == 1


# What is looked at in a stopped lane


def test_a_stopped_lane_that_is_sound_is_verified_and_left_as_it_is(lane: Lane) -> None:
    for _ in range(3):
        lane.wait(lane.submit()["id"])
    assert lane.stop() == 0
    before = hashes(lane.state_dir)
    done = verified(lane)
    assert (done.returncode, done.stderr) == (0, "")
    *looks, counts = done.stdout.splitlines()
    assert looks and all(line.endswith(": ok") for line in looks)
    assert counts == "3 jobs, 3 attempts"
    assert hashes(lane.state_dir) == before


def test_a_lane_that_was_killed_in_a_call_is_sound_too_and_goes_on(lane: Lane, server: BrainServer) -> None:
    held = server.hold()
    server.script(held)
    job = lane.submit()
    assert held.arrived.wait(30)
    lane.kill()
    done = verified(lane)
    assert done.returncode == 0, done.stdout
    assert any(path.suffix == ".part" for path in (lane.state_dir / "spool").iterdir())
    held.release()
    lane.start()
    assert lane.get(f"/v1/jobs/{job['id']}").json["status"] == "held"


def test_a_promise_that_is_broken_fails_the_verification(lane: Lane) -> None:
    job = lane.wait(lane.submit()["id"])
    assert lane.stop() == 0
    with closing(sqlite3.connect(lane.database)) as foreign, foreign:
        foreign.execute("delete from job_outputs")
    done = verified(lane)
    assert done.returncode == DaemonExit.DATABASE == 65
    assert f"what is done has its answer: WRONG: {job['id']}" in done.stdout.splitlines()


def test_a_damaged_file_fails_the_verification(lane: Lane) -> None:
    lane.wait(lane.submit()["id"])
    assert lane.stop() == 0
    content = bytearray(lane.database.read_bytes())
    page = int.from_bytes(content[16:18]) or 65536
    for start in range(page, len(content), page):
        content[start : start + 64] = b"\xff" * 64
    lane.database.write_bytes(content)
    done = verified(lane)
    assert done.returncode == DaemonExit.DATABASE == 65
    assert "WRONG: " in done.stdout
    assert "Traceback" not in done.stderr
    assert lane.database.read_bytes() == content


def test_a_lane_that_runs_is_not_looked_at(lane: Lane) -> None:
    done = verified(lane)
    assert done.returncode == DaemonExit.LANE_TAKEN == 69
    assert (done.stdout, "another brainlaned holds it" in done.stderr) == ("", True)
    assert lane.get("/v1/healthz").status == 200


def test_a_newer_lane_is_left_as_it_is(lane: Lane) -> None:
    assert lane.stop() == 0
    with closing(sqlite3.connect(lane.database)) as foreign:
        foreign.execute("pragma user_version = 99")
    before = hashes(lane.state_dir)
    done = verified(lane)
    assert done.returncode == DaemonExit.DATABASE == 65
    assert "version 99" in done.stderr
    assert hashes(lane.state_dir) == before


@pytest.mark.parametrize("there", [False, True])
def test_where_no_lane_is_nothing_is_created(tmp_path: Path, there: bool) -> None:
    lane = Lane(tmp_path / "lane", "")
    if there:
        lane.state_dir.mkdir()
    done = verified(lane)
    assert done.returncode == (DaemonExit.DATABASE if there else DaemonExit.CONFIGURATION)
    assert done.returncode == (65 if there else 78)
    assert lane.state_dir.exists() == there
    assert not there or list(lane.state_dir.iterdir()) == []


def test_a_verification_holds_the_lane_so_that_no_daemon_starts_meanwhile(lane: Lane) -> None:
    assert lane.stop() == 0
    command = [sys.executable, "-c", STOPPING, "--verify", "--state-dir", os.fspath(lane.state_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as looking:
        try:
            assert os.WIFSTOPPED(os.waitpid(looking.pid, os.WUNTRACED)[1])
            lane.start(wait=False)
            assert lane.process is not None and lane.process.wait(30) == DaemonExit.LANE_TAKEN
        finally:
            looking.send_signal(signal.SIGCONT)
        looking.communicate(timeout=60)
    assert looking.returncode == 0
    lane.start()


STOPPING = """
import os, signal
from brainlaned import __main__ as program, verify
look = verify.look

def stopping(*given):
    os.kill(os.getpid(), signal.SIGSTOP)
    yield from look(*given)

verify.look = stopping
program.main()
"""
