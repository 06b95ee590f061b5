"""A short run of the hammer; `python -m tests.hammer` runs it for as long as one likes."""

import random
from pathlib import Path

from tests.hammer import hammer

SECONDS = 15


def test_under_random_kills_nothing_is_lost_and_nothing_is_sent_twice(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    report = hammer(SECONDS, seed, tmp_path / "lane")
    print(report)
    assert report.faults == [], str(report)
    assert report.kills > 0 and report.accepted > 0 and report.statuses["done"] > 0
