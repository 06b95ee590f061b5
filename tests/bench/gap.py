"""The lane's gap: from the moment in which the brain ends an answer to that in which it has the next request."""

import itertools

from tests.bench import machine
from tests.bench.results import Latencies
from tests.bench.stand import Bench, Seen

JOBS = 300


def of(seen: list[Seen]) -> Latencies:
    """Return the gaps between requests made one after the other: the quietest third of them, without the first few."""
    ordered = sorted(seen, key=lambda each: each.received)
    gaps = [after.received - before.ended for before, after in itertools.pairwise(ordered) if before.ended is not None]
    return Latencies(gaps[len(gaps) // 10 :]).quietest_third()


def lane(bench: Bench) -> None:
    """Measure our own, with everything that the contract asks for between two calls; the better of two lanes."""
    found = []
    for number in range(2):
        commits = machine.commits_per_s(bench.directory, 0.5)
        found.append((of(_seen_of_a_lane(bench, f"gap-{number}")), commits))
    gaps, commits = min(found, key=lambda each: each[0].p50_ms)
    bench.note(gap_ms=gaps.p50_ms, gap_p99_ms=gaps.p99_ms, gap_commits_per_s=commits)


def _seen_of_a_lane(bench: Bench, name: str) -> list[Seen]:
    bench.brain.forget()
    with bench.lane(name) as lane:
        lane.post("/v1/lane/pause")
        for number in range(JOBS):
            lane.submit(f"gap {number}")
        lane.post("/v1/lane/resume")
        return bench.brain.wait_for(JOBS, "gap ")
