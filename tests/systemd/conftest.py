"""What the tests on a booted system share: the machines.

Where a machine cannot be booted, its tests are skipped with the reason; in CI, where the environment says `CI`, that is
a failure.
"""

import os
from collections.abc import Iterator

import pytest

from tests.systemd import roots
from tests.systemd.machine import Machine, why_impossible


@pytest.fixture(params=[12, 13], ids=["debian12", "debian13"])
def debian(request: pytest.FixtureRequest) -> int:
    """The release of Debian that the test's machine runs."""
    return request.param


@pytest.fixture(scope="session")
def debian_roots() -> dict[int, "os.PathLike[str]"]:
    """The roots to boot, built on first use."""
    reason = why_impossible()
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(f"in CI the tests on a booted system may not be skipped: {reason}")
        pytest.skip(reason)
    return roots.build(*roots.RELEASES)


@pytest.fixture
def machine(debian: int, debian_roots: dict) -> Iterator[Machine]:
    """A freshly booted Debian, without anything of ours."""
    with Machine(debian_roots[debian]) as machine:
        yield machine
