"""What every section stands on: the brain's process, lanes of this run, and what /proc says of a process."""

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.results import Results
from tests.lane import Lane, config_for

PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")


class BenchLane(Lane):
    """A lane whose daemon may be given a further environment."""

    environment: Mapping[str, str] = {}

    def command(self, *, cut: str | None = None, times: int = 1) -> list[str]:
        given = [f"{name}={value}" for name, value in self.environment.items()]
        return [*(["env", *given] if given else []), *super().command(cut=cut, times=times)]

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid


@dataclass
class Seen:
    """One request as the brain saw it; times on the monotonic clock."""

    prompt: str
    received: float
    ended: float | None


class BrainProcess:
    """The brain's process, seen from outside."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self._address = base_url.removeprefix("http://").removesuffix("/v1")

    def _ask(self, method: str, path: str) -> Any:
        connection = http.client.HTTPConnection(self._address, timeout=60)
        connection.request(method, path, b"" if method == "POST" else None)
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return answer

    def seen(self) -> list[Seen]:
        return [Seen(**each) for each in self._ask("GET", "/seen")]

    def forget(self) -> None:
        self._ask("POST", "/forget")

    def wait_for(self, count: int, prefix: str = "", limit_s: float = 60) -> list[Seen]:
        """Wait until `count` requests whose prompt begins so have been answered, and return them. Raises TimeoutError.

        Asked for seldom, since asking takes the same cores as what is measured.
        """
        deadline = time.monotonic() + limit_s
        while True:
            found = [each for each in self.seen() if each.prompt.startswith(prefix) and each.ended is not None]
            if len(found) >= count:
                return found
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(found)} of {count} requests within {limit_s:g} s")
            time.sleep(0.25)  # for the rest of them


@contextmanager
def brain_process() -> Iterator[BrainProcess]:
    """Start a brain, and stop it at the end."""
    command = [sys.executable, "-m", "tests.bench.brain"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield BrainProcess(process.stdout.readline().split()[-1])
        finally:
            process.kill()


@dataclass
class Bench:
    """One run: where it works, how large it is, and what it has found."""

    directory: Path
    brain: BrainProcess
    results: Results
    rows: int
    jobs: int
    """How many jobs are submitted to see what the daemon keeps of them in memory."""
    peers_python: str
    """The interpreter that has the peers installed."""

    def note(self, **figures: float) -> None:
        """Keep what was measured, and show it, since a run takes minutes."""
        self.results.figures.update(figures)
        for name, value in figures.items():
            print(f"  {name} = {value:.4g}", flush=True)

    def skip(self, why: str) -> None:
        self.results.skipped.append(why)
        print(f"  skipped: {why}", flush=True)

    @contextmanager
    def lane(self, name: str, *, environment: Mapping[str, str] | None = None) -> Iterator[BenchLane]:
        """Run a lane of its own for the length of the body; its state stays in the directory of the run."""
        lane = self.stopped_lane(name)
        lane.environment = environment or {}
        try:
            lane.start()
            yield lane
        finally:
            if lane.process is not None and lane.process.poll() is None:
                lane.stop()
            if "Traceback" in lane.log.read_text(errors="replace"):
                raise RuntimeError(f"a traceback in {lane.log}")

    def stopped_lane(self, name: str) -> BenchLane:
        return BenchLane(self.directory / name, config_for(self.brain.base_url, lane="max_queued = 1000000000"))


def status_of(pid: int) -> dict[str, int]:
    """Return the numbers of /proc/PID/status; sizes are in KiB."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0])
    return found


def resident_mib(pid: int) -> float:
    return status_of(pid)["VmRSS"] / 1024


def peak_mib(pid: int) -> float:
    return status_of(pid)["VmHWM"] / 1024


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def cpu_s(pid: int) -> float:
    """Return how long a process has computed, in its own code and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def wake_ups(pid: int) -> int:
    """Return how often the threads of a process have gone to sleep by themselves, which is how often they woke."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                total += int(line.split()[1])
    return total


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def connected(path: Path, timeout_s: float) -> socket.socket:
    """Return a bare connection to the Unix socket at `path`."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.settimeout(timeout_s)
    line.connect(os.fspath(path))
    return line
