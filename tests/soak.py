"""Let one lane live for long under all that happens to lanes: `python -m tests.soak --seconds N --seed S`.

Clients submit with keys, look, list, follow and hang up, cancel, and send what is no request; the brain answers most,
and misbehaves towards some. In the first and the last fifth of the time the daemon is stopped and killed at moments
that the seed chooses. In between one daemon lives on undisturbed, and its memory, descriptors, write-ahead log and
spool are looked at twice a second: the median of the last quarter of that life must not be much above that of the
second (the first is for loading). At the end the lane drains, and every job must be accounted for by what the brain
saw: accepted jobs are there, no request beyond the armed attempts, nothing running, nothing sent again whose outcome
was unknown, a next action for each.
"""

import random
import statistics
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import brainserver, hammer
from tests.bench import stand
from tests.brainserver import BrainServer, Step, answer
from tests.lane import Lane, config_for

CLIENTS = 4
MEAN_LIFE_S = 4.0
SAMPLE_S = 0.5
MISBEHAVING = 0.15

ROOM = {"memory_mib": (1.15, 4), "descriptors": (1.25, 8), "log_mib": (2, 8), "spool_files": (2, 8)}
"""What the last quarter may be of the second: so many times as much, and so much more besides."""


@dataclass
class Report:
    """What a run came to. `faults` is empty when every promise was kept."""

    seed: int
    stops: int = 0
    kills: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    samples: list[dict[str, float]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(f"{number} {status}" for status, number in sorted(self.statuses.items()))
        lines = [f"seed {self.seed}: {self.stops} stops, {self.kills} kills, {counts}"]
        for name, (early, late) in quarters(self.samples).items():
            lines.append(f"{name}: {early:.1f} in the second quarter, {late:.1f} in the last")
        return "\n".join([*lines, *(f"FAULT {fault}" for fault in self.faults)])


def quarters(samples: list[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """Return the medians of the second and of the last quarter, by name; nothing where there are too few samples."""
    size = len(samples) // 4
    if size == 0:
        return {}
    second, last = samples[size : 2 * size], samples[-size:]
    return {
        name: (statistics.median(each[name] for each in second), statistics.median(each[name] for each in last))
        for name in samples[0]
    }


def growths(samples: list[dict[str, float]]) -> list[str]:
    """Return a line for each thing that has grown."""
    found = []
    for name, (early, late) in quarters(samples).items():
        times, more = ROOM[name]
        if late > early * times + more:
            found.append(f"{name} grew from {early:.1f} to {late:.1f} within one life")
    return found


class Misbehaviour:
    """Answers most prompts well, and some the first time in a way that the seed and the prompt choose."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._asked: Counter[str] = Counter()

    def __call__(self, prompt: str | None) -> Step:
        chance = random.Random(f"{self._seed} {prompt}")
        self._asked[str(prompt)] += 1
        good = answer(f"echo of {prompt}", gap_s=chance.uniform(0, 0.02))
        if chance.random() > MISBEHAVING or self._asked[str(prompt)] > 1:
            return good
        return chance.choice(
            [
                brainserver.status(500),
                brainserver.status(400),
                brainserver.status(429),
                brainserver.close_before_answer(),
                brainserver.reset_before_answer(),
                brainserver.cut(60),
                brainserver.html_page(),
                brainserver.error_in_200(),
            ]
        )


class Visitor(threading.Thread):
    """Does whatever else clients do, at random; what breaks by a restart is no fault, what is answered 500 is."""

    def __init__(self, lane: Lane, seed: int, stop: threading.Event) -> None:
        super().__init__(name="visitor")
        self._lane = lane
        self._chance = random.Random(f"{seed} visitor")
        self._stop_asked = stop
        self.faults: list[str] = []

    def run(self) -> None:
        while not self._stop_asked.wait(0.05):  # so that the lane has time for its jobs
            try:
                self._visit()
            except hammer.SOMETHING_BROKE:
                continue

    def _visit(self) -> None:
        newest = self._lane.get("/v1/jobs?limit=50", timeout_s=20).json["jobs"]
        job_id = self._chance.choice(newest)["id"] if newest else 1
        asked: tuple[str, str, Any] = self._chance.choice(
            [
                ("GET", "/v1/status", None),
                ("GET", "/v1/jobs?limit=1000", None),
                ("GET", f"/v1/jobs/{job_id}?wait=0.2", None),
                ("GET", f"/v1/jobs/{job_id}/output?partial=1", None),
                ("POST", f"/v1/jobs/{job_id}/cancel", {}),
                ("POST", "/v1/jobs", b"[" * 5000),
                ("POST", "/v1/jobs", {"request": {"messages": []}}),
                ("POST", "/v1/lane/resume", {"route": "local"}),
                ("STREAM", f"/v1/jobs/{job_id}/stream", None),
            ]
        )
        if asked[0] == "STREAM":
            return self._follow(asked[1])
        said = self._lane.ask(*asked, timeout_s=20)
        if said.status == 500:
            self.faults.append(f"{asked[:2]} was answered 500: {said.body[:200]!r}")
        return None

    def _follow(self, path: str) -> None:
        """Read the beginning of a stream, then hang up."""
        line = stand.connected(self._lane.socket, 20)
        line.sendall(f"GET {path} HTTP/1.1\r\nHost: lane\r\n\r\n".encode())
        line.recv(1024)
        line.close()


def soak(seconds: float, seed: int, directory: Path) -> Report:
    """Run it in `directory`, which must be empty."""
    chance = random.Random(seed)
    report = Report(seed)
    stop = threading.Event()
    with BrainServer() as server:
        server.by_prompt(Misbehaviour(seed))
        lane = Lane(directory, config_for(server.base_url, lane="crash_limit = 1000000\nstop_grace_s = 2"))
        clients = [hammer.Client(lane, f"client{number}", stop) for number in range(CLIENTS)]
        visitor = Visitor(lane, seed, stop)
        lane.start()
        try:
            for thread in (*clients, visitor):
                thread.start()
            _restarts(lane, chance, report, time.monotonic() + seconds / 5)
            report.samples = _one_life(lane, seconds * 3 / 5)
            _restarts(lane, chance, report, time.monotonic() + seconds / 5)
            stop.set()
            for thread in (*clients, visitor):
                thread.join(60)
            _drain(lane)
            report.faults += [*visitor.faults, *(fault for client in clients for fault in client.faults)]
            _check(lane, server, clients, report)
        finally:
            stop.set()
            if lane.process is not None and lane.process.poll() is None:
                lane.stop()
    report.faults += growths(report.samples)
    if "Traceback" in lane.log.read_text(errors="replace"):
        report.faults.append("a traceback in the log")
    return report


def _restarts(lane: Lane, chance: random.Random, report: Report, end: float) -> None:
    """Stop or kill the daemon again and again, and leave it running."""
    while time.monotonic() < end:
        time.sleep(chance.uniform(0, 2 * MEAN_LIFE_S))  # for the daemon to get somewhere
        if chance.random() < 0.5:
            lane.stop()
            report.stops += 1
        else:
            lane.kill()
            report.kills += 1
        lane.start()


def _one_life(lane: Lane, seconds: float) -> list[dict[str, float]]:
    assert lane.process is not None
    samples = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        log = lane.database.with_name(f"{lane.database.name}-wal")
        samples.append(
            {
                "memory_mib": stand.resident_mib(lane.process.pid),
                "descriptors": float(stand.descriptors(lane.process.pid)),
                "log_mib": log.stat().st_size / 1024 / 1024 if log.exists() else 0.0,
                "spool_files": float(len(list((lane.state_dir / "spool").iterdir()))),
            }
        )
        time.sleep(SAMPLE_S)  # until the next look
    return samples


def _drain(lane: Lane) -> None:
    """Let the lane work off what is queued; a gate that the brain's misbehaviour closed is opened again and again."""
    left, since = -1, time.monotonic()
    while now := lane.rows("select count(*) as n from jobs where status in ('queued', 'running')")[0]["n"]:
        if now != left:
            left, since = now, time.monotonic()
        elif time.monotonic() > since + hammer.STUCK_S:
            return  # what is left is reported by the check
        lane.post("/v1/lane/resume", {"route": "local"})
        time.sleep(0.2)  # for the lane to get on


def _check(lane: Lane, server: BrainServer, clients: list[hammer.Client], report: Report) -> None:
    jobs = {row["key"]: row for row in lane.rows("select * from jobs")}
    armed = Counter(row["job_id"] for row in lane.rows("select job_id from job_attempts where armed_at is not null"))
    asked = Counter(each.prompt for each in server.requests if each.method == "POST" and each.whole)
    report.statuses.update(row["status"] for row in jobs.values())
    for client in clients:
        for prompt, job_id in client.accepted.items():
            if prompt not in jobs or jobs[prompt]["id"] != job_id:
                report.faults.append(f"job {job_id} ({prompt}) was accepted and is missing")
    report.faults += [f"{prompt} was sent and is unknown" for prompt in asked if prompt not in jobs]
    for key, row in jobs.items():
        if asked[key] > armed[row["id"]]:
            report.faults.append(f"job {row['id']} was sent {asked[key]} times with {armed[row['id']]} armed attempts")
        if row["status"] in {"queued", "running"}:
            report.faults.append(f"job {row['id']} is {row['status']} ({row['reason']}) after the lane had drained")
        if row["status"] == "done":
            text = lane.get(f"/v1/jobs/{row['id']}/output").body.decode()
            if text != f"echo of {key}":
                report.faults.append(f"job {row['id']} has the answer {text[:80]!r}")
    questions = {
        "sent again after an unknown outcome": """
            select distinct job_id from job_attempts as first where status = 'unknown'
                and exists (select 1 from job_attempts where job_id = first.job_id and attempt > first.attempt)
        """,
        "has a running attempt": "select job_id from job_attempts where status = 'running'",
        "has no next action": "select id as job_id from operator_view where next_action is null",
        "is held without evidence": "select id as job_id from jobs where status = 'held' and detail = ''",
    }
    for words, sql in questions.items():
        report.faults += [f"job {row['job_id']} {words}" for row in lane.rows(sql)]


if __name__ == "__main__":
    hammer.run(soak, "Let one lane live for long, and see whether it stays the same.", 600)
