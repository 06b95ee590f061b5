"""What must be reached, as ratios between figures of one run; nothing here depends on how fast the machine is.

Where the project's goal was an absolute figure on the machine on which it was set, it stands here as a multiple of what
that machine took for a durable commit, an empty interpreter or the like.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tests.bench.results import Results


@dataclass(frozen=True)
class Ratio:
    """One promise: `of` is at most (or at least) `limit`. Where that is not yet what is wanted, `goal` says what is."""

    words: str
    of: Callable[[Results], float]
    limit: float
    at_least: bool = False
    goal: float | None = None

    def value(self, results: Results) -> float | None:
        """Return the ratio, or None where a part of it was not measured."""
        try:
            return self.of(results)
        except (KeyError, ValueError, ZeroDivisionError):
            return None

    def is_kept(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


def _quotient(
    words: str, above: str, below: str, limit: float, *, at_least: bool = False, goal: float | None = None
) -> Ratio:
    return Ratio(words, lambda results: results.figures[above] / results.figures[below], limit, at_least, goal)


def _in_commits(results: Results, name: str) -> float:
    """Return how many bare commits, measured just before, a figure is long."""
    return results.figures[f"{name}_ms"] / 1000 * results.figures[f"{name}_commits_per_s"]


def quickest_python_worker(results: Results) -> tuple[float, str]:
    """Return the smallest gap of a Python worker whose jobs are on the disk, and whose it is. Raises ValueError."""
    return min(
        (peer.gap_ms, name)
        for name, peer in results.peers.items()
        if peer.is_python_worker and peer.synced is not False and peer.gap_ms is not None
    )


RATIOS = (
    Ratio(
        "lane gap / the smallest gap of a Python worker that syncs",
        lambda results: results.figures["gap_ms"] / quickest_python_worker(results)[0],
        8,
        goal=1,
    ),
    Ratio("lane gap / a durable commit", lambda results: _in_commits(results, "gap"), 55),
    _quotient(
        "submits of 1 client / bare commits", "submit_1_per_s", "submit_commits_per_s", 0.04, at_least=True, goal=0.11
    ),
    _quotient(
        "submits of 16 clients / bare commits",
        "submit_16_per_s",
        "submit_commits_per_s",
        0.09,
        at_least=True,
        goal=0.28,
    ),
    _quotient(
        "submits of 16 clients / syncs of a slow disk",
        "slow_submit_16_per_s",
        "slow_syncs_per_s",
        2.2,
        at_least=True,
        goal=3,
    ),
    Ratio("submit to request at an idle lane / a durable commit", lambda results: _in_commits(results, "start"), 72),
    Ratio("processor at rest, percent of a core", lambda results: results.figures["rest_cpu_percent"], 0.3),
    Ratio(
        "wake-ups at rest / signs of life for systemd",
        lambda results: results.figures["rest_wake_ups_per_s"] * results.figures["rest_sign_of_life_s"],
        8,
    ),
    *(
        _quotient(f"{name}, very many rows / few", f"{name}_ms_many", f"{name}_ms_few", 1.5)
        for name in ("claim", "status", "list", "list_of_status", "list_of_nothing", "show")
    ),
    _quotient("start, very many rows / few", "boot_s_many", "boot_s_few", 2.5),
    _quotient("p99 of a submit beside a call / without one", "beside_p99_ms", "alone_p99_ms", 1.5),
    _quotient("brainctl submit / an empty Python", "brainctl_submit_ms", "python_ms", 8),
    _quotient("completing a command / an empty Python", "brainctl_complete_ms", "python_ms", 8),
    _quotient("completing a job's id / an empty Python", "brainctl_complete_id_ms", "python_ms", 8),
    _quotient("daemon at rest / an empty Python, in memory", "rest_mib", "python_mib", 5.8),
    Ratio(
        "growth by very many jobs / daemon at rest, in memory",
        lambda results: (
            (results.figures["after_jobs_mib"] - results.figures["fresh_mib"]) / results.figures["fresh_mib"]
        ),
        0.18,
    ),
    _quotient("growth by a long answer / its length, in memory", "answer_growth_mib", "answer_mib", 12),
)
