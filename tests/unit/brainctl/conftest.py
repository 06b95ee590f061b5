"""What the tests of brainctl's rooms share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.brainctl.scripted import ScriptedLane


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[ScriptedLane]:
    """A socket that answers what it is told to."""
    lane = ScriptedLane(tmp_path / "s")
    yield lane
    lane.close()
