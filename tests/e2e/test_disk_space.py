"""A disk that fills up: nothing is sent that could not be stored, nothing that came is lost, and all goes on by itself.

The state stands on a small file system of its own, which takes root to mount.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.brainserver import BrainServer, Held
from tests.lane import Lane, config_for, living, wait_until

SIZE_MIB = 48
RESERVE_MIB = 16
MIB = 2**20
PATIENCE_S = 60.0
JOBS = 20


@pytest.fixture
def lane(tmp_path: Path, server: BrainServer) -> Iterator[Lane]:
    """A running lane with one small file system for its state."""
    if os.geteuid() != 0:
        pytest.skip("mounting takes root")
    lane = Lane(tmp_path / "lane", config_for(server.base_url, lane=f"disk_reserve_mib = {RESERVE_MIB}"))
    lane.state_dir.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", os.fspath(lane.state_dir)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")
    try:
        with living(lane, server.release):
            yield lane
    finally:
        subprocess.run(["umount", os.fspath(lane.state_dir)], check=True)


def fill(lane: Lane, left: int) -> Path:
    """Leave only so many bytes free."""
    ballast = lane.state_dir / "ballast"
    found = os.statvfs(lane.state_dir)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - left)
    return ballast


def in_flight(lane: Lane, server: BrainServer) -> tuple[dict[str, Any], Held]:
    held = server.hold()
    server.script(held)
    job = lane.submit("in flight", key="first")
    assert held.arrived.wait(PATIENCE_S)
    return job, held


def lines_of(lane: Lane, words: str) -> list[str]:
    return [line for line in lane.log.read_text().splitlines() if words in line]


def body_of(prompt: str, key: str) -> dict[str, Any]:
    return {"request": {"messages": [{"role": "user", "content": prompt}]}, "key": key}


def all_end(lane: Lane, server: BrainServer, jobs: list[dict[str, Any]]) -> None:
    pid = lane.process.pid if lane.process is not None else None
    for job in jobs:
        assert lane.wait(job["id"], PATIENCE_S)["status"] == "done"
    assert server.count() == len(jobs)
    assert {server.count(record.prompt) for record in server.requests} == {1}
    assert [row["attempt_count"] for row in lane.rows("select attempt_count from jobs")] == [1] * len(jobs)
    assert lane.get("/v1/status").json["pid"] == pid
    assert len(lines_of(lane, "is ready")) == 1


def test_below_the_reserve_nothing_is_sent_or_accepted_and_all_goes_on_when_there_is_room(
    lane: Lane, server: BrainServer
) -> None:
    first, held = in_flight(lane, server)
    jobs = [lane.submit(f"job {number}", key=f"{number}") for number in range(JOBS)]
    ballast = fill(lane, (RESERVE_MIB - 4) * MIB)
    held.release()

    # The answer of the call in flight is stored: that is what the reserve is for.
    assert lane.wait(first["id"], PATIENCE_S)["status"] == "done"
    wait_until(lambda: lane.get(f"/v1/jobs/{jobs[0]['id']}").json["waiting"] == "disk-reserve")
    assert server.count() == 1
    listed = lane.get("/v1/jobs?status=queued").json["jobs"]
    assert [job["id"] for job in listed] == [job["id"] for job in jobs[::-1]]
    assert {job["waiting"] for job in listed} == {"disk-reserve"}
    assert {row["waiting"] for row in lane.rows("select waiting from operator_view where status = 'queued'")} == {
        "disk-reserve"
    }
    shown = lane.get("/v1/status").json["lane"]
    assert (shown["state"], shown["disk_reserve"], shown["answer_waiting"]) == ("open", True, False)
    assert 0 < shown["disk_free_bytes"] < RESERVE_MIB * MIB

    refused = lane.post("/v1/jobs", body_of("one more", key="new"))
    assert (refused.status, refused.error["kind"], refused.error["retry_safe"]) == (507, "disk-reserve", True)
    replayed = lane.post("/v1/jobs", body_of("in flight", key="first"))
    assert (replayed.status, replayed.json["id"], replayed.json["replayed"]) == (200, first["id"], True)
    conflict = lane.post("/v1/jobs", body_of("in flight, but otherwise", key="first"))
    assert (conflict.status, conflict.error["kind"]) == (409, "key-conflict")
    refused = lane.get("/v1/backup")
    assert (refused.status, refused.error["kind"]) == (507, "disk-reserve")
    # A cancel is no more than a short row.
    assert lane.post(f"/v1/jobs/{lane.wait(first['id'])['id']}/cancel").status == 409
    wait_until(lambda: bool(lines_of(lane, "nothing is claimed or accepted")))
    (line,) = lines_of(lane, "nothing is claimed or accepted")
    assert line.startswith("<3>") and f"disk_reserve_mib is {RESERVE_MIB}" in line
    assert server.count() == 1

    ballast.unlink()
    all_end(lane, server, [first, *jobs])
    assert lane.submit("one more", key="new")["replayed"] is False
    shown = lane.get("/v1/status").json["lane"]
    assert (shown["disk_reserve"], shown["disk_free_bytes"] > RESERVE_MIB * MIB) == (False, True)
    wait_until(lambda: len(lines_of(lane, "jobs are claimed and accepted again")) == 1)
    assert lane.wait(jobs[-1]["id"] + 1)["status"] == "done"


def test_an_answer_that_comes_to_a_full_disk_is_kept_and_stored_when_there_is_room(
    lane: Lane, server: BrainServer, halting: Any
) -> None:
    rest = "and the rest " * 50_000
    step, held = halting(server, "the first half, ", rest)
    server.script(step)
    first = lane.submit("in flight", key="first")
    wait_until(lambda: server.count() == 1)
    wait_until(lambda: lane.get(f"/v1/jobs/{first['id']}/output?partial=1").status == 200)
    jobs = [lane.submit(f"job {number}", key=f"{number}") for number in range(JOBS)]
    ballast = fill(lane, 0)
    while os.statvfs(lane.state_dir).f_bavail:
        with (lane.state_dir / "rest").open("ab", buffering=0) as file:
            file.write(b"x" * os.statvfs(lane.state_dir).f_bsize)
    held.release()

    wait_until(lambda: bool(lines_of(lane, "the answer is waiting to be stored")))
    for _ in range(5):
        assert lane.get("/v1/jobs?limit=500").status == 200
        refused = lane.post("/v1/jobs", body_of("one more", key="new"))
        assert (refused.status, refused.error["kind"]) == (507, "disk-reserve")
        assert {job["waiting"] for job in lane.get("/v1/jobs?status=queued").json["jobs"]} == {"answer-waiting"}
        shown = lane.get("/v1/status").json
        assert (shown["lane"]["disk_reserve"], shown["lane"]["answer_waiting"]) == (True, True)
        assert shown["running"]["id"] == first["id"]
        time.sleep(0.5)  # for the store to be tried again
    assert server.count() == 1
    for words in ("waiting to be stored", "nothing is claimed", "nothing can be claimed", "spool failed"):
        assert len(lines_of(lane, words)) <= 1, lane.log.read_text()

    ballast.unlink()
    all_end(lane, server, [first, *jobs])
    assert lane.get(f"/v1/jobs/{first['id']}/output").body.decode() == f"the first half, {rest}"
    assert lane.submit("one more", key="new")["replayed"] is False
