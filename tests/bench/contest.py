"""The peers side by side: their gap with the same call, their submits, their start, and what a SIGKILL leaves.

What is not installed is skipped with a line that names it.
"""

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.bench import gap, machine
from tests.bench.peers import ADAPTERS, Adapter
from tests.bench.results import Peer
from tests.bench.stand import Bench

PUTS = 1000
GAPS = 120
GAPS_OF_COMMANDS = 40
"""Of a spooler each job starts an interpreter."""
SLOW_PUTS = 100
STARTS = 3
HOLD_S = 2.0
PATIENCE_S = 12.0
"""How long after its worker was killed and started again a peer has to do something about the job."""
OURS = "brainlane"


class Contestant:
    """One peer in its own directory, spoken to through processes of its own."""

    def __init__(self, bench: Bench, name: str) -> None:
        self.name = name
        self.adapter: type[Adapter] = ADAPTERS[name]
        self.directory = bench.directory / f"peer-{name.replace(' ', '-')}"
        self._bench = bench

    def missing(self) -> str | None:
        """Return what is not there, or None."""
        for program in self.adapter.programs:
            if shutil.which(program) is None:
                return f"{self.name}: there is no {program}"
        if self.adapter.package is not None:
            done = subprocess.run(self._command("have"), capture_output=True)
            if done.returncode:
                return f"{self.name}: {self.adapter.package} is not installed"
        return None

    def in_new_place(self, place: str) -> None:
        """Let what follows happen in another directory."""
        self.directory = self._bench.directory / f"peer-{self.name.replace(' ', '-')}-{place}"
        self.directory.mkdir()

    def _command(self, word: str, *more: str) -> list[str]:
        module = [self._bench.peers_python, "-m", "tests.bench.peers"]
        return [*module, self.name, os.fspath(self.directory), self._bench.brain.base_url, word, *more]

    def put(self, prefix: str, count: int, environment: Mapping[str, str] | None = None) -> dict[str, float]:
        done = self._run("put", "--prefix", prefix, "--count", str(count), environment=environment)
        found: dict[str, float] = json.loads(done.splitlines()[-1])
        return found

    def left(self) -> int:
        return int(self._run("left").splitlines()[-1])

    def _run(self, *words: str, environment: Mapping[str, str] | None = None) -> str:
        given = {**os.environ, **(environment or {})}
        done = subprocess.run(self._command(*words), env=given, capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise RuntimeError(f"{self.name} cannot {words[0]}: {done.stderr[-2000:]}")
        return done.stdout

    @contextlib.contextmanager
    def working(self) -> Any:
        """Let its worker run; everything of it is gone at the end."""
        process = self.start()
        try:
            yield
        finally:
            self.kill(with_server=True)
            process.wait()

    def start(self) -> "subprocess.Popen[bytes]":
        with (self.directory / "log").open("ab") as log:
            return subprocess.Popen(self._command("work"), stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self, *, with_server: bool) -> None:
        """SIGKILL every process that was started for this directory; its name stands in their command lines."""
        for pid in _processes_of(self.directory, with_server=with_server):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _processes_of(directory: Path, *, with_server: bool) -> list[int]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes()
        except OSError:
            continue
        mine = os.fsencode(directory) in line or any(
            part.startswith(os.fsencode(directory) + b"/") for part in line.split(b"\0")
        )
        if mine and (with_server or b"redis-server" not in line):
            found.append(int(file.parent.name))
    return found


def peers(bench: Bench) -> None:
    """Measure all that are there, one after the other, and then kill all of them at once."""
    there = []
    for name in ADAPTERS:
        contestant = Contestant(bench, name)
        missing = contestant.missing()
        if missing is not None:
            bench.skip(missing)
            continue
        there.append(contestant)
        try:
            bench.results.peers[name] = _measure(bench, contestant)
        except (TimeoutError, RuntimeError) as error:
            bench.results.peers[name] = Peer(is_python_worker=contestant.adapter.is_python_worker)
            bench.skip(f"{name}: {error}")
    with ThreadPoolExecutor(len(ADAPTERS) + 1) as pool:
        ours = pool.submit(_kill_the_lane, bench)
        fates = list(pool.map(lambda each: _fate(bench, each), there))
    for contestant, fate in zip(there, fates, strict=True):
        bench.results.peers[contestant.name].after_kill = fate
    bench.results.peers[OURS] = Peer(after_kill=ours.result())
    for name, peer in bench.results.peers.items():
        print(f"  {name}: {peer}", flush=True)


def _measure(bench: Bench, contestant: Contestant) -> Peer:
    found = Peer(is_python_worker=contestant.adapter.is_python_worker)
    is_command = not contestant.adapter.is_python_worker
    prefix = f"{contestant.name} "
    bench.brain.forget()
    contestant.in_new_place("gap")
    found.commit_ms = 1000 / machine.commits_per_s(contestant.directory, 0.5)
    gaps = GAPS_OF_COMMANDS if is_command else GAPS
    rate = contestant.put(f"gap {prefix}", gaps)["per_s"]
    with contestant.working():
        found.gap_ms = gap.of(bench.brain.wait_for(gaps, f"gap {prefix}", limit_s=90)).p50_ms
        found.start_ms = _start_ms(bench, contestant)
    contestant.in_new_place("put")
    if not is_command:
        rate = contestant.put("never run ", PUTS)["per_s"]
        contestant.kill(with_server=True)
        found.synced = _is_synced(bench, contestant)
    found.enqueue_per_s = rate
    return found


def _is_synced(bench: Bench, contestant: Contestant) -> bool | None:
    """Say whether storing a job waits for the disk, which a slow disk tells: believe the clock, not the manual."""
    slow = machine.slow_disk(bench.directory)
    if slow is None:
        return None
    contestant.in_new_place("slow")
    rate = contestant.put("never run ", SLOW_PUTS, slow)["per_s"]
    contestant.kill(with_server=True)
    return rate < 1.5e6 / machine.SLOW_SYNC_US


def _start_ms(bench: Bench, contestant: Contestant) -> float:
    put = {}
    for number in range(STARTS):
        time.sleep(0.7)  # for its worker to be idle
        prefix = f"start {contestant.name} {number} "
        put[prefix] = contestant.put(prefix, 1)["at"]
        bench.brain.wait_for(1, prefix, limit_s=30)
    seen = bench.brain.seen()
    return (
        statistics.median(
            next(each.received for each in seen if each.prompt.startswith(prefix)) - at for prefix, at in put.items()
        )
        * 1000
    )


def _fate(bench: Bench, contestant: Contestant) -> str | None:
    try:
        return _kill(bench, contestant)
    except (TimeoutError, RuntimeError) as error:
        bench.skip(f"{contestant.name} after SIGKILL: {error}")
        return None


def _kill(bench: Bench, contestant: Contestant) -> str:
    contestant.in_new_place("kill")
    prefix = f"hold {HOLD_S} kill {contestant.name} "
    with contestant.working():
        contestant.put(prefix, 1)
        _until_arrived(bench, prefix)
        contestant.kill(with_server=False)
        again = contestant.start()
        time.sleep(PATIENCE_S)  # for whatever the peer does about it
        fate = judge(len(_asked(bench, prefix)), contestant.left())
        contestant.kill(with_server=False)
        again.wait()
    return fate


def judge(requests: int, left: int) -> str:
    """Say what became of a job in whose middle its worker was killed, by what the brain saw and the peer lists."""
    if requests > 1:
        return "run again, silently"
    return f"stuck for over {PATIENCE_S:g} s" if left else "lost, never again"


def _kill_the_lane(bench: Bench) -> str:
    prompt = f"hold {HOLD_S} kill {OURS}"
    with bench.lane("kill") as lane:
        job_id = lane.submit(prompt)["id"]
        _until_arrived(bench, prompt)
        lane.kill()
        lane.start()
        time.sleep(PATIENCE_S)  # as long as everybody has
        job = lane.get(f"/v1/jobs/{job_id}").json
        if len(_asked(bench, prompt)) == 1 and job["status"] == "held":
            return f"held for a person: {job['reason']}"
        return f"{job['status']} after {len(_asked(bench, prompt))} requests"


def _asked(bench: Bench, prefix: str) -> Sequence[str]:
    return [each.prompt for each in bench.brain.seen() if each.prompt.startswith(prefix)]


def _until_arrived(bench: Bench, prefix: str) -> None:
    deadline = time.monotonic() + 30
    while not _asked(bench, prefix):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing was asked with '{prefix}'")
        time.sleep(0.05)  # for the request
    time.sleep(0.2)  # into the middle of the call
