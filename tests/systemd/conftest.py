"""What the tests on a booted system share: the machines, and brainlane installed in them.

Where a machine cannot be booted, its tests are skipped with the reason; in CI, where the environment says `CI`, that is
a failure. The package is built once for a test run and installed once for each Debian, in a booted machine; what that
machine has written then is the layer from which every test boots a machine of its own.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import sources
from tests.systemd import roots
from tests.systemd.installed import MEMBER, PACKAGE_INSIDE, STRANGER, TESTS_INSIDE, InstalledLane
from tests.systemd.machine import Machine, why_impossible

USERS = f"u {MEMBER} -\nm {MEMBER} brainlane\nu {STRANGER} -\n"


@pytest.fixture(params=[12, 13], ids=["debian12", "debian13"])
def debian(request: pytest.FixtureRequest) -> int:
    """The release of Debian that the test's machine runs."""
    return request.param


@pytest.fixture(scope="session")
def debian_roots() -> dict[int, Path]:
    """The roots to boot, built on first use."""
    reason = why_impossible()
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(f"in CI the tests on a booted system may not be skipped: {reason}")
        pytest.skip(reason)
    return roots.build(*roots.RELEASES)


@pytest.fixture
def machine(debian: int, debian_roots: dict[int, Path]) -> Iterator[Machine]:
    """A freshly booted Debian, without anything of ours."""
    with Machine(debian_roots[debian]) as machine:
        yield machine


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for what is made once for all the test processes of a run."""
    return sources.directory_of_the_run(tmp_path_factory)


@pytest.fixture(scope="session")
def package(shared: Path) -> Path:
    """The Debian package of the sources as they were when the first test asked."""

    def make(directory: Path) -> None:
        # What it fetches is kept with the roots, for it is as costly.
        sources.copy_of_the_tree(directory / "sources", roots.cache() / "package-build").make_package(directory)

    (package,) = sources.made_once(shared / "systemd-package", make).glob("*.deb")
    return package


@pytest.fixture(scope="session")
def layer_of(shared: Path, debian_roots: dict[int, Path], package: Path) -> Callable[[int], Path]:
    """Make the layer that installing the package adds to a Debian, with a member of the group and a stranger.

    The socket is up when a machine has booted; the service is not enabled, so that a test can configure it first.
    """

    def make(debian: int, directory: Path) -> None:
        with Machine(debian_roots[debian], binds={PACKAGE_INSIDE: package.parent}) as machine:
            machine.run("dpkg", "--install", f"{PACKAGE_INSIDE}/{package.name}")
            machine.run("systemd-sysusers", "-", input=USERS)
            machine.systemctl("disable", "--now", "brainlaned.socket", "brainlaned.service")
            machine.systemctl("enable", "brainlaned.socket")
            machine.run("sh", "-euc", "rm -rf /var/lib/brainlane /var/log/journal/*/*")
            machine.stop(keep=True)
            machine.upper.rename(directory / "layer")

    def layer(debian: int) -> Path:
        return sources.made_once(shared / f"systemd-layer{debian}", lambda directory: make(debian, directory)) / "layer"

    return layer


@pytest.fixture
def boot(
    debian: int, debian_roots: dict[int, Path], layer_of: Callable[[int], Path], package: Path
) -> Iterator[Callable[..., Machine]]:
    """Boot a Debian with brainlane, with our tests/ and the package at hand."""
    started: list[Machine] = []
    binds = {TESTS_INSIDE: sources.ROOT / "tests", PACKAGE_INSIDE: package.parent}

    def boot(**options: bool) -> Machine:
        started.append(Machine(layer_of(debian), debian_roots[debian], binds=binds, **options))
        return started[-1].start()

    yield boot
    for machine in started:
        machine.stop()


@pytest.fixture
def lane(boot: Callable[..., Machine]) -> InstalledLane:
    """A lane that is configured, with a brain that answers. Its socket is there, its service not yet started."""
    lane = InstalledLane(boot())
    lane.configure()
    lane.brain.start()
    return lane
