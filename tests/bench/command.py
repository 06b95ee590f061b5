"""What brainctl takes at a shell's prompt, beside an interpreter that does nothing."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.bench.results import Latencies
from tests.bench.stand import Bench

ROUNDS = 25


def brainctl(bench: Bench) -> None:
    """Measure in turns, so that what else the machine does meets all alike."""
    program = Path(sys.executable).with_name("brainctl")
    with bench.lane("command") as lane:
        lane.post("/v1/lane/pause")
        here = {"BRAINLANE_SOCKET": os.fspath(lane.socket)}
        lane.submit()
        words = {**here, "_BRAINCTL_COMPLETE": "complete_bash", "COMP_WORDS": "brainctl sub", "COMP_CWORD": "1"}
        ids = {**words, "COMP_WORDS": "brainctl show ", "COMP_CWORD": "2"}
        started = [os.fspath(program)] if program.exists() else [sys.executable, "-m", "brainctl"]
        commands: dict[str, tuple[list[str], Mapping[str, str]]] = {
            "python_ms": ([sys.executable, "-c", "pass"], {}),
            "brainctl_submit_ms": ([*started, "submit", "hello"], here),
            "brainctl_status_ms": ([*started, "status"], here),
            "brainctl_complete_ms": (started, words),
            "brainctl_complete_id_ms": (started, ids),
        }
        if not _offers(started, ids):
            del commands["brainctl_complete_id_ms"]
            bench.skip("completion of a job's id: brainctl offers none")
        taken: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(ROUNDS):
            for name, (command, environment) in commands.items():
                taken[name].append(_wall_s(command, environment))
    bench.note(**{name: Latencies(seconds).p50_ms for name, seconds in taken.items()})


def _wall_s(command: list[str], environment: Mapping[str, str]) -> float:
    since = time.perf_counter()
    done = subprocess.run(
        command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    elapsed = time.perf_counter() - since
    if done.returncode or ("submit" in command and not done.stdout.strip().isdecimal()):
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr}")
    return elapsed


def _offers(command: list[str], environment: Mapping[str, str]) -> bool:
    """Say whether the completion offers anything."""
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True)
    return bool(done.stdout.strip())
