"""Kill the daemon again and again while clients work, then count: `python -m tests.hammer --seconds N --seed S`.

About two SIGKILLs a second hit a real daemon at moments that the seed chooses. Four clients submit with keys and, when
the connection breaks, ask again with the same key. The brain streams each answer over up to 300 ms; it lives here, so
it outlives the daemon and is the oracle of what was sent. At the end the lane is started once more, left to drain, and
must have lost nothing, sent nothing twice, and be able to say of every held job what is known and what to do.
"""

import argparse
import http.client
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.brainserver import BrainServer, Step, answer
from tests.lane import Lane, config_for

CLIENTS = 4
MEAN_LIFE_S = 0.5
STUCK_S = 60.0
"""After so long without any progress the lane is not left to drain any longer."""
SOMETHING_BROKE = (OSError, http.client.HTTPException)


@dataclass
class Report:
    """What a run came to. `faults` is empty when every promise was kept."""

    seed: int
    kills: int = 0
    accepted: int = 0
    recovered_done: int = 0
    """Jobs whose answer was on the disk when the process vanished, and was delivered from there."""
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(f"{number} {status}" for status, number in sorted(self.statuses.items()))
        lines = [
            f"seed {self.seed}: {self.kills} kills, {self.accepted} accepted ({counts}), "
            f"{self.recovered_done} finished from the spool"
        ]
        return "\n".join([*lines, *(f"FAULT {fault}" for fault in self.faults)])


class Client(threading.Thread):
    """Submits, and believes only what was answered: `accepted` maps a prompt to its job."""

    def __init__(self, lane: Lane, name: str, stop: threading.Event) -> None:
        super().__init__(name=name)
        self._lane = lane
        self._stop_asked = stop
        self.accepted: dict[str, int] = {}
        self.faults: list[str] = []

    def run(self) -> None:
        number = 0
        while not self._stop_asked.is_set():
            self._submit(f"{self.name}-{number}")
            number += 1
            self._stop_asked.wait(0.4)  # for the lane to keep up: what matters is the number of crashes, not of jobs

    def _submit(self, prompt: str) -> None:
        body = {"request": {"messages": [{"role": "user", "content": prompt}]}, "key": prompt}
        while True:
            try:
                said = self._lane.post("/v1/jobs", body, timeout_s=20)
                break
            except SOMETHING_BROKE:
                if self._stop_asked.is_set():
                    return  # never accepted as far as this client knows
                time.sleep(0.02)  # for the daemon to be started again
        if said.status not in {200, 201}:
            self.faults.append(f"submit of {prompt} was answered {said.status}: {said.body!r}")
            return
        self.accepted[prompt] = said.json["id"]


def hammer(seconds: float, seed: int, directory: Path) -> Report:
    """Run it in `directory`, which must be empty."""
    chance = random.Random(seed)
    report = Report(seed)

    def choose(prompt: str | None) -> Step:
        # One random stream per prompt: the order in which threads ask must not matter to the seed.
        mine = random.Random(f"{seed} {prompt}")
        return answer(f"echo of {prompt}", gap_s=mine.uniform(0, 0.3) / 5)

    with BrainServer() as server:
        server.by_prompt(choose)
        lane = Lane(directory, config_for(server.base_url, lane="crash_limit = 1000000"))
        stop = threading.Event()
        clients = [Client(lane, f"client{number}", stop) for number in range(CLIENTS)]
        lane.start()
        try:
            for client in clients:
                client.start()
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(chance.uniform(0, 2 * MEAN_LIFE_S))  # for the daemon to get somewhere before it is killed
                lane.kill()
                report.kills += 1
                # Now and then it dies again before it has answered, perhaps while it recovers.
                lane.start(wait=chance.random() < 0.8)
            stop.set()
            for client in clients:
                client.join(60)
            if lane.process is not None and lane.process.poll() is None:
                lane.wait_until_ready()
                lane.stop()
            lane.start()
            _drain(lane)
            _check(lane, server, clients, report)
        finally:
            stop.set()
            if lane.process is not None and lane.process.poll() is None:
                lane.stop()
    if "Traceback" in lane.log.read_text(errors="replace"):
        report.faults.append("a traceback in the log")
    return report


def _drain(lane: Lane) -> None:
    left, since = -1, time.monotonic()
    while now := lane.rows("select count(*) as n from jobs where status in ('queued', 'running')")[0]["n"]:
        if now != left:
            left, since = now, time.monotonic()
        elif time.monotonic() > since + STUCK_S:
            return  # what is left is reported by the check
        time.sleep(0.1)  # for the lane to work through what is queued


def _check(lane: Lane, server: BrainServer, clients: list[Client], report: Report) -> None:
    jobs = {row["key"]: row for row in lane.rows("select * from jobs")}
    report.statuses.update(row["status"] for row in jobs.values())
    held = [row for row in jobs.values() if row["status"] == "held"]
    report.recovered_done = lane.rows(
        "select count(*) as n from jobs where status = 'done' and detail like 'the daemon died in run %'"
    )[0]["n"]
    for client in clients:
        report.accepted += len(client.accepted)
        report.faults += client.faults
        for prompt, job_id in client.accepted.items():
            if prompt not in jobs or jobs[prompt]["id"] != job_id:
                report.faults.append(f"job {job_id} ({prompt}) was accepted and is missing")
    asked = Counter(each.prompt for each in server.requests if each.method == "POST" and each.whole)
    for prompt, times in asked.items():
        if times > 1:
            report.faults.append(f"{prompt} was sent {times} times")
        if prompt not in jobs:
            report.faults.append(f"{prompt} was sent and is unknown")
    for key, row in jobs.items():
        if row["status"] == "done" and asked[key] != 1:
            report.faults.append(f"job {row['id']} is done with {asked[key]} requests")
        if row["status"] == "done" and lane.get(f"/v1/jobs/{row['id']}/output").body.decode() != f"echo of {key}":
            report.faults.append(f"job {row['id']} has the answer of another")
        if row["status"] not in {"done", "held"}:
            report.faults.append(f"job {row['id']} is {row['status']} ({row['reason']}) after the lane had drained")
    for row in held:
        _check_held(lane.get(f"/v1/jobs/{row['id']}").json, report)
    if len(held) > report.kills:
        report.faults.append(f"{len(held)} jobs are held after {report.kills} kills")


def _check_held(job: dict[str, Any], report: Report) -> None:
    if job["reason"] not in {"sent-outcome-unknown", "answer-incomplete"} or not job["detail"]:
        report.faults.append(f"job {job['id']} is held for {job['reason']!r}: {job['detail']!r}")
    if job["attempts"][-1]["armed_at"] is None:
        report.faults.append(f"job {job['id']} is held, and was never armed")
    if job["next_action"] != f"brainctl recover {job['id']}":
        report.faults.append(f"job {job['id']} is held, and the next action is {job['next_action']!r}")


def run(trial: Callable[[float, int, Path], Any], description: str, seconds: float) -> None:
    """Let a trial of a lane run for the seconds and with the seed of the command line, and exit 1 for any fault."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=seconds)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix=f"{trial.__name__}-") as directory:
        report = trial(options.seconds, seed, Path(directory) / "lane")
    print(report)
    raise SystemExit(1 if report.faults else 0)


if __name__ == "__main__":
    run(hammer, "Kill a lane again and again, and count what became of its jobs.", 60)
