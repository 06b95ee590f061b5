"""The gates: whoever waits behind a closed door loses nothing, keeps its place, and hinders no other route.

The first part asks real lanes. The second lets the real worker ask a real server under a clock that is moved by hand,
from one time to wake to the next, because an outage of ten minutes is too long to sit out.
"""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import freezegun
import httpx
import pytest

from brainlaned import config, filesystem, queries, store, wire
from brainlaned.brains.http import HttpBrain
from brainlaned.db import Database
from brainlaned.gate import Gates
from brainlaned.spool import Spool
from brainlaned.worker import Worker
from tests.brainserver import BrainServer, Step, answer, status
from tests.lane import Lane

TWO_HOURS = status(503, headers={"Retry-After": "7200"})
CLOSINGS = {"until somebody opens it": (status(401), "key-refused"), "for two hours": (TWO_HOURS, "asked-to-wait")}
closings = pytest.mark.parametrize(("step", "reason"), CLOSINGS.values(), ids=CLOSINGS.keys())


def gate_of(lane: Lane, route: str = "local") -> dict[str, Any]:
    return {gate["route"]: gate for gate in lane.get("/v1/status").json["routes"]}[route]


def closed_gate(lane: Lane, route: str = "local") -> dict[str, Any]:
    """Wait until the gate is closed, and return it."""
    deadline = time.monotonic() + 20
    while (gate := gate_of(lane, route))["open"]:
        assert time.monotonic() < deadline, f"the gate of {route} stays open"
        time.sleep(0.02)  # for the answer to be judged
    return gate


@pytest.fixture
def two_routes(make_lane: Any, server: BrainServer) -> Lane:
    """A running lane with the routes `local` and `other` to the same brain."""
    lane: Lane = make_lane(more=f'[routes.other]\nbase_url = "{server.base_url}"\nmodel = "other-model"')
    return lane


def other_job_runs(lane: Lane) -> None:
    """Run a job of the other route: by then the worker has looked at every job that stood before it, and passed it."""
    assert lane.wait(lane.submit("another way", route="other")["id"])["status"] == "done"


def used_attempts(lane: Lane) -> set[int]:
    return {row["attempts_used"] for row in lane.rows("select attempts_used from jobs where route = 'local'")}


# What a closed gate is to others, and to a restart


@closings
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_closed_gate_survives_a_restart_and_nobody_behind_it_loses_an_attempt(
    two_routes: Lane, server: BrainServer, step: Step, reason: str, end: str
) -> None:
    lane = two_routes
    server.script(step)
    jobs = [lane.submit(f"job {number}")["id"] for number in range(3)]
    before = closed_gate(lane)
    assert (before["reason"], before["since"] is not None, before["queued"]) == (reason, True, 3)
    if step is TWO_HOURS:
        wait = wire.parse_time(before["next_probe_at"]) - wire.parse_time(before["since"])
        assert wait == timedelta(hours=2)
    else:
        assert before["next_probe_at"] is None

    getattr(lane, end)()
    lane.start()
    assert gate_of(lane) == before
    other_job_runs(lane)
    assert gate_of(lane) == before
    assert [record.prompt for record in server.requests] == ["job 0", "another way"]
    assert [lane.get(f"/v1/jobs/{job}").json["waiting"] for job in jobs] == ["route-gated"] * 3
    assert used_attempts(lane) == {0}

    assert lane.post("/v1/lane/resume", {"route": "local"}).status == 200
    assert [lane.wait(job)["status"] for job in jobs] == ["done"] * 3
    assert [record.prompt for record in server.requests[2:]] == ["job 0", "job 1", "job 2"]
    assert used_attempts(lane) == {1}


def test_a_wait_that_began_before_a_restart_ends_after_it_and_no_sooner(two_routes: Lane, server: BrainServer) -> None:
    lane = two_routes
    server.script(status(429, headers={"Retry-After": "2"}))
    job = lane.submit("patience")["id"]
    closed_gate(lane)
    lane.stop()
    lane.start()
    assert lane.wait(job)["status"] == "done"
    first, second = server.requests
    assert first.ended_at is not None and second.received_at - first.ended_at >= 2
    assert gate_of(lane)["open"]


@closings
def test_a_job_of_one_route_never_waits_for_the_gate_of_another(
    two_routes: Lane, server: BrainServer, step: Step, reason: str
) -> None:
    lane = two_routes
    server.script(step)
    behind = [lane.submit("behind the gate", priority="high")["id"] for _ in range(5)]
    assert closed_gate(lane)["reason"] == reason
    beside = [lane.submit("beside it", route="other", priority="low")["id"] for _ in range(5)]
    assert {lane.wait(job)["status"] for job in beside} == {"done"}
    assert {lane.get(f"/v1/jobs/{job}").json["status"] for job in behind} == {"queued"}
    assert (server.count("behind the gate"), server.count("beside it")) == (1, 5)
    assert gate_of(lane, "other")["open"]


# What opens a gate, and what does not


@closings
def test_a_green_health_endpoint_does_not_open_a_gate(
    two_routes: Lane, server: BrainServer, step: Step, reason: str
) -> None:
    lane = two_routes
    server.script(step)
    lane.submit()
    before = closed_gate(lane)
    for path in ("/models", "/../health"):
        assert httpx.get(server.base_url + path, trust_env=False).status_code == 200
    other_job_runs(lane)
    assert gate_of(lane) == before
    assert [record.method for record in server.requests] == ["POST", "GET", "GET", "POST"]


@closings
def test_resuming_the_lane_opens_no_gate(two_routes: Lane, server: BrainServer, step: Step, reason: str) -> None:
    lane = two_routes
    server.script(step)
    lane.submit()
    before = closed_gate(lane)
    lane.post("/v1/lane/pause")
    assert lane.post("/v1/lane/resume").json["lane"]["state"] == "open"
    other_job_runs(lane)
    assert (gate_of(lane), server.count("hello")) == (before, 1)


@closings
def test_brainctl_resume_with_a_route_opens_its_gate_and_no_other(
    two_routes: Lane, server: BrainServer, step: Step, reason: str
) -> None:
    lane = two_routes
    server.by_prompt(lambda prompt: step)
    jobs = {route: lane.submit(route=route)["id"] for route in ("local", "other")}
    for route in jobs:
        closed_gate(lane, route)
    server.by_prompt(None)
    command = [sys.executable, "-m", "brainctl", "--socket", os.fspath(lane.socket), "resume", "--route", "local"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert lane.wait(jobs["local"])["status"] == "done"
    assert gate_of(lane)["open"]
    assert gate_of(lane, "other")["reason"] == reason
    assert lane.get(f"/v1/jobs/{jobs['other']}").json["status"] == "queued"


def test_a_gate_opened_in_vain_closes_again_after_one_request(two_routes: Lane, server: BrainServer) -> None:
    lane = two_routes
    server.script(status(401), status(401))
    jobs = [lane.submit()["id"] for _ in range(3)]
    first = closed_gate(lane)
    lane.post("/v1/lane/resume", {"route": "local"})
    second = closed_gate(lane)
    assert second["since"] > first["since"]
    other_job_runs(lane)
    assert (server.count("hello"), used_attempts(lane)) == (2, {0})
    lane.post("/v1/lane/resume", {"route": "local"})
    assert {lane.wait(job)["status"] for job in jobs} == {"done"}


def test_the_order_within_a_route_is_kept_when_its_gate_opens(two_routes: Lane, server: BrainServer) -> None:
    lane = two_routes
    server.script(status(401))
    jobs = [lane.submit("first")["id"]]
    closed_gate(lane)
    for prompt, priority in (("second", "normal"), ("last", "low"), ("third", "normal"), ("before all", "high")):
        jobs.append(lane.submit(prompt, priority=priority)["id"])
    lane.post("/v1/lane/resume", {"route": "local"})
    for job in jobs:
        lane.wait(job)
    asked = [record.prompt for record in server.requests]
    assert asked == ["first", "before all", "first", "second", "third", "last"]


def test_a_job_that_waits_behind_a_gate_can_be_cancelled(two_routes: Lane, server: BrainServer) -> None:
    lane = two_routes
    server.script(status(401))
    first, second = lane.submit("first")["id"], lane.submit("second")["id"]
    closed_gate(lane)
    assert lane.post(f"/v1/jobs/{first}/cancel").json["status"] == "cancelled"
    lane.post("/v1/lane/resume", {"route": "local"})
    assert lane.wait(second)["status"] == "done"
    assert (server.count("first"), server.count("second")) == (1, 1)


# One job that its brain will not have


@pytest.mark.parametrize("code", [429, 503])
def test_a_job_that_is_refused_three_times_is_held_once_another_is_served(
    make_lane: Any, server: BrainServer, code: int
) -> None:
    lane = make_lane()
    server.by_prompt(lambda prompt: status(code) if prompt == "unwanted" else None)
    unwanted, wanted = lane.submit("unwanted")["id"], lane.submit("wanted")["id"]
    assert lane.wait(wanted)["status"] == "done"
    job = lane.wait(unwanted)
    assert (job["status"], job["reason"], job["attempts_used"]) == ("held", "refused-repeatedly", 0)
    assert [(one["status"], one["reason"]) for one in job["attempts"]] == [("failed", "asked-to-wait")] * 3
    assert job["next_action"] == f"brainctl recover {unwanted}"
    assert f"job {wanted}" in job["detail"]
    assert [record.prompt for record in server.requests] == ["unwanted"] * 3 + ["wanted"]
    assert gate_of(lane)["open"]
    server.by_prompt(None)
    assert lane.post(f"/v1/jobs/{unwanted}/recover", {"action": "resend"}).status == 200
    assert lane.wait(unwanted)["status"] == "done"


# Long outages, under a clock that is moved by hand

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
JOBS = 200
Clock = Any


class Inside:
    """The real worker with a real database, spool and server; whoever uses it is the loop that wakes it."""

    def __init__(self, directory: Path, server: BrainServer, clock: Clock) -> None:
        self.clock = clock
        self.server = server
        self.database = Database(directory / "brainlane.db")
        self.database.open()
        spool = Spool(directory / "spool")
        spool.open()
        routes = config.parse({"routes": {"local": {"base_url": server.base_url, "model": "m"}}}).routes
        with self.database.write() as tx:
            store.begin_run(tx, "run", 1, "brainctl", routes)
        self.brain = HttpBrain(routes["local"])
        gates = Gates(routes)
        self.worker = Worker(
            database=self.database,
            spool_directory=spool,
            reserve=filesystem.Reserve(directory, 1),
            gates=gates,
            routes=routes,
            brains={"local": self.brain},
            run="run",
            moved=lambda job_ids: None,
            grew=lambda job_ids: None,
            cut=lambda name: None,
        )

    def close(self) -> None:
        self.brain.close()
        self.database.close()

    def submit(self, prompts: list[str]) -> None:
        with self.database.write() as tx:
            for prompt in prompts:
                request = json.dumps({"messages": [{"role": "user", "content": prompt}]})
                asked = store.Submission(request, "digest", "local", "m", False, 3)
                store.accept(tx, asked, store.Caller(uid=1000), 0, 1_000_000)

    def run_until(self, moment: datetime | None = None) -> None:
        """Work, and jump from one time to wake to the next, until that moment or until nothing is left to wake for."""
        while True:
            while self.worker.run_one():
                pass
            with self.database.read() as connection:
                wake = queries.next_wake(connection, wire.format_time(datetime.now(UTC)))
            if wake is None or (moment is not None and wire.parse_time(wake) >= moment):
                break
            self.clock.move_to(wire.parse_time(wake))
        if moment is not None:
            self.clock.move_to(moment)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        with self.database.read() as connection:
            return [tuple(row) for row in connection.execute(sql)]


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Inside]:
    # The fault server keeps its own time, which goes on.
    with (
        BrainServer() as server,
        freezegun.freeze_time(NOON, ignore=["_pytest", "tests.brainserver"]) as clock,
    ):
        made = Inside(tmp_path, server, clock)
        yield made
        made.close()


LLAMA = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}


@pytest.mark.parametrize(("outage", "lasts_s"), [("refuses", 600), ("loads", 90)])
def test_after_an_outage_all_jobs_run_in_order_and_none_has_lost_an_attempt(
    inside: Inside, outage: str, lasts_s: float
) -> None:
    prompts = [f"job {number}" for number in range(JOBS)]
    inside.submit(prompts)
    if outage == "refuses":
        inside.server.close()
    else:
        inside.server.default = status(503, LLAMA)
    inside.run_until(NOON + timedelta(seconds=lasts_s))

    assert inside.rows("select distinct status, attempts_used from jobs") == [("queued", 0)]
    probes = [wire.parse_time(row[0]) for row in inside.rows("select started_at from job_attempts order by started_at")]
    late = [probe for probe in probes if probe - NOON >= timedelta(seconds=60)]
    assert late and all(after - before >= timedelta(seconds=30) for before, after in itertools.pairwise(late))
    assert len(probes) <= 6 + lasts_s / 30
    if outage == "loads":
        assert inside.server.count() == len(probes)

    refused = len(inside.server.requests)
    inside.server.default = answer()
    if outage == "refuses":
        inside.server.start()
    inside.run_until()
    assert inside.rows("select distinct status, attempts_used from jobs") == [("done", 1)]
    assert [record.prompt for record in inside.server.requests[refused:]] == prompts
    succeeded = inside.rows("select count(*) from job_attempts where status = 'succeeded'")
    assert succeeded == [(JOBS,)]
    assert inside.server.max_concurrent == 1


LOADING = {
    "llama.cpp": LLAMA,
    "a string": {"error": "Model small is currently loading", "estimated_time": 20.0},
    "an object without a code": {"error": {"message": "The model is loading", "type": "server_error"}},
    "a detail": {"detail": "The model is still loading"},
    "plain text": b"Loading model",
}


@pytest.mark.parametrize("body", LOADING.values(), ids=LOADING)
def test_nobody_is_suspected_for_a_model_that_is_loaded_however_the_brain_says_so(inside: Inside, body: Any) -> None:
    inside.server.script(*[status(503, body)] * 3)
    inside.submit(["first", "second"])
    inside.run_until()
    assert [record.prompt for record in inside.server.requests] == ["first"] * 4 + ["second"]
    assert inside.rows("select status, attempts_used from jobs") == [("done", 1)] * 2


def test_a_brain_that_is_silent_for_most_of_its_time_is_not_hung_up_on(make_lane: Any, server: BrainServer) -> None:
    assert config.parse({}).routes["local"].first_byte_s == 300  # so four minutes are the same part as eight seconds
    lane = make_lane(route="first_byte_s = 10")
    server.script(answer("at last", delay_s=8))
    job = lane.wait(lane.submit()["id"])
    assert (job["status"], job["attempt_count"]) == ("done", 1)
    assert (server.count(), server.connections, server.requests[0].hung_up_at) == (1, 1, None)


def test_a_job_whose_route_has_gone_from_the_configuration_waits_for_it_and_holds_nobody_up(
    make_lane: Any, server: BrainServer
) -> None:
    other = f'[routes.other]\nbase_url = "{server.base_url}"\nmodel = "m"'
    lane = make_lane(more=other)
    lane.post("/v1/lane/pause")
    orphan = lane.submit("orphan", route="other")["id"]
    lane.stop()
    with_both = lane.config.read_text()
    lane.config.write_text(with_both.replace(other, ""))
    lane.start().post("/v1/lane/resume")
    assert lane.wait(lane.submit("next")["id"])["status"] == "done"
    waiting = lane.get(f"/v1/jobs/{orphan}").json
    assert (waiting["status"], waiting["waiting"]) == ("queued", "route-missing")
    assert (
        lane.post("/v1/jobs", {"request": {"messages": [{"role": "user", "content": "x"}]}, "route": "other"}).status
        == 422
    )
    lane.stop()
    lane.config.write_text(with_both)
    lane.start()
    assert lane.wait(orphan)["status"] == "done"
    assert [record.prompt for record in server.requests] == ["next", "orphan"]
