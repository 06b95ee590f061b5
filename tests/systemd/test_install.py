"""The package on a clean Debian: what an operator does from the installation to the purge."""

import time
from pathlib import Path

import pytest

from brainlaned import events
from tests.systemd.conftest import USERS
from tests.systemd.installed import MEMBER, PACKAGE_INSIDE, TESTS_INSIDE, InstalledLane, only_debian13
from tests.systemd.machine import Machine, wait_until

UNITS = ("brainlaned.socket", "brainlaned.service", "brainlane-localbrain.service", "brainlaned@second.service")
LIFE = ("submitted", "claimed", "ended")


@pytest.fixture
def machine(debian: int, debian_roots: dict[int, Path], package: Path):
    """A clean Debian, with the package at hand."""
    binds = {PACKAGE_INSIDE: package.parent, TESTS_INSIDE: Path(__file__).parents[1]}
    with Machine(debian_roots[debian], binds=binds) as machine:
        yield machine


def traces(machine: Machine) -> set[str]:
    """Everything whose name is ours, wherever systems keep their files."""
    places = ("/etc", "/usr", "/var", "/run", "/opt", "/root", "/home", "/tmp")  # noqa: S108 - of the machine
    found = machine.run("find", *places, "-xdev", "(", "-name", "*brainl*", "-o", "-name", "*brainctl*", ")").stdout
    return set(found.split())


def test_the_package_is_installed_used_and_purged(machine: Machine, package: Path) -> None:
    assert traces(machine) == set()
    machine.run("dpkg", "--install", f"{PACKAGE_INSIDE}/{package.name}")
    machine.run("systemd-sysusers", "-", input=USERS)
    lane = InstalledLane(machine)
    for unit in ("brainlaned.socket", "brainlaned.service"):
        assert machine.systemctl("is-enabled", unit).stdout == "enabled\n"
        assert machine.systemctl("is-active", unit).stdout == "active\n"
    checked = machine.run("systemd-analyze", "verify", "--man=no", *UNITS)
    assert (checked.stdout, checked.stderr) == ("", "")

    lane.brain.start()
    lane.configure()
    machine.systemctl("restart", "brainlaned")
    machine.systemctl("start", "brainlaned")
    # Not as an argument, for those of any command may come into the journal by others.
    asked = lane.brainctl("submit", "--wait", "-f", "-", user=MEMBER, input="good day")
    assert asked.stdout.strip() == "hello world"
    assert lane.brain.prompts() == ["good day"]
    assert "1 done" in lane.brainctl("status", user=MEMBER).stdout
    assert machine.systemctl("is-system-running").stdout == "running\n"

    life = machine.journal(None, "BRAINLANE_JOB=1")
    # The worker may have claimed it before its submitter was answered.
    assert sorted(entry["MESSAGE_ID"] for entry in life) == sorted(events.IDS[name] for name in LIFE)
    assert {entry["_SYSTEMD_UNIT"] for entry in life} == {"brainlaned.service"}
    explained = machine.run(
        "journalctl", "-x", "--no-pager", "-u", "brainlaned", f"MESSAGE_ID={life[-1]['MESSAGE_ID']}"
    )
    assert "Defined-By: brainlane\n" in explained.stdout
    assert "To see it: brainctl show 1" in explained.stdout
    assert "good day" not in machine.run("journalctl", "--no-pager", "-o", "verbose").stdout

    machine.run("dpkg", "--purge", "brainlane")
    assert machine.systemctl("is-active", "brainlaned.socket", "brainlaned.service", check=False).status != 0
    assert traces(machine) == set()
    assert machine.run("pgrep", "-u", "brainlane", check=False).status == 1
    assert "0 unit files" in machine.systemctl("list-unit-files", "brainlane*", check=False).stdout
    assert machine.run("getent", "passwd", "brainlane").status == 0  # who may own files elsewhere


@only_debian13
def test_a_new_version_comes_without_refusing_a_client_and_leaves_everything_where_it_was(
    lane: InstalledLane, package: Path
) -> None:
    machine = lane.machine
    lane.configure(route='api_key = "paid"')
    machine.put("/etc/brainlane/credentials/paid", "sk-once-and-again\n", 0o600)
    lane.start()
    lane.answered("before")
    socket = machine.run("stat", "-c", "%i", "/run/brainlane/control.sock").stdout
    first = lane.main_pid()

    with machine.popen("dpkg", "--install", f"{PACKAGE_INSIDE}/{package.name}") as upgrade:
        while upgrade.poll() is None:
            assert lane.get("/v1/healthz").status == 200
            time.sleep(0.05)  # so that the upgrade gets on, too
        assert upgrade.returncode == 0
    wait_until(lambda: lane.main_pid() not in {first, "0"}, "the new version runs")
    assert machine.run("stat", "-c", "%i", "/run/brainlane/control.sock").stdout == socket
    lane.answered("after")
    assert [job["id"] for job in lane.get("/v1/jobs").json["jobs"]] == [2, 1]
    assert {each["headers"]["authorization"] for each in lane.brain.requests} == {"Bearer sk-once-and-again"}
