"""What a run found, by names that stand for ever in its JSON: figures, peers, the machine, and what was skipped."""

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path


class Latencies:
    """How long things took, given in seconds and shown in milliseconds."""

    def __init__(self, seconds: Iterable[float]) -> None:
        self._in_order = list(seconds)
        self._sorted = sorted(self._in_order)

    def __len__(self) -> int:
        return len(self._sorted)

    def quietest_third(self) -> "Latencies":
        """Return the third of the time in which they were shortest: what else a machine does only makes them longer."""
        length = max(1, len(self._in_order) // 3)
        starts = range(0, len(self._in_order) - length + 1, length)
        thirds = [Latencies(self._in_order[start : start + length]) for start in starts]
        return min(thirds, key=lambda third: third.p50_ms)

    @property
    def p50_ms(self) -> float:
        return statistics.median(self._sorted) * 1000

    @property
    def p99_ms(self) -> float:
        return percentile(self._sorted, 99) * 1000


def percentile(ordered: list[float], percent: float) -> float:
    """Return the smallest value that `percent` of the ordered values do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


@dataclass
class Peer:
    """What one peer did. None: not measured."""

    enqueue_per_s: float | None = None
    gap_ms: float | None = None
    commit_ms: float | None = None
    """What a bare durable commit took just before: a virtual disk is not always equally fast."""
    synced: bool | None = None
    """Whether what it has stored is on the disk: whether a slow disk slows it down."""
    start_ms: float | None = None
    after_kill: str | None = None
    is_python_worker: bool = True


@dataclass
class Results:
    """One run."""

    machine: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    peers: dict[str, Peer] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """Sections that ended with an exception, which is a fault of the program or of the benchmark."""

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Results":
        found = json.loads(path.read_text(encoding="utf-8"))
        peers = {name: Peer(**peer) for name, peer in found.pop("peers").items()}
        return cls(**found, peers=peers)
