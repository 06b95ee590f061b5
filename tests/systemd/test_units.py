"""The units as files: that systemd understands every line, how much they lay bare, and what the daemon relies on.

Nothing is booted here; systemd-analyze reads files.
"""

import os
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from brainlaned.config import Config, parse
from brainlaned.wire import DaemonExit

ROOT = Path(__file__).resolve().parents[2]
UNITS = sorted(path.name for path in (ROOT / "systemd").glob("*.s*"))
SERVICES = [name for name in UNITS if name.endswith(".service")]
LANES = ("brainlaned.service", "brainlaned@.service")
DROP_INS = sorted(path.name for path in (ROOT / "systemd/drop-ins").glob("*.conf"))
EXPOSURE = 12
"""The most that `systemd-analyze security` may find, in tenths."""


@pytest.fixture
def analyze() -> str:
    """Name the systemd-analyze to call."""
    found = shutil.which("systemd-analyze")
    if found is None and os.environ.get("CI"):
        pytest.fail("in CI systemd-analyze must be there")
    return found or pytest.skip("systemd-analyze is not installed")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The units, as instances, with programs that are there on every machine."""
    for name in UNITS:
        text = (ROOT / "systemd" / name).read_text()
        text = re.sub(r"^(Exec\w+=)/usr/bin/\S+", r"\1/bin/true", text, flags=re.MULTILINE)
        (tmp_path / name.replace("@.", "@second.")).write_text(text)
    return tmp_path


def settings(name: str) -> dict[str, list[str]]:
    """Return the values of each key of a unit, as they stand there."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in (ROOT / "systemd" / name).read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, value = line.split("=", 1)
            found[key].append(value)
    return found


def seconds(text: str) -> float:
    """Read a time span as the units write it."""
    number, unit = re.fullmatch(r"(\d+)(s|min)?", text).groups()  # type: ignore[union-attr]
    return int(number) * (60 if unit == "min" else 1)


def verify(analyze: str, unit: Path) -> str:
    """Return what systemd has to say about a unit."""
    done = subprocess.run(
        [analyze, "verify", "--man=no", unit],
        env={"PATH": os.environ["PATH"], "SYSTEMD_UNIT_PATH": f"{unit.parent}:"},
        capture_output=True,
        text=True,
    )
    # An unknown key is reported, but is no error to it.
    return done.stdout + done.stderr + ("" if done.returncode == 0 else f"status {done.returncode}")


@pytest.mark.parametrize("name", UNITS)
def test_systemd_has_nothing_to_say_about_a_unit(name: str, analyze: str, here: Path) -> None:
    assert verify(analyze, here / name.replace("@.", "@second.")) == ""


@pytest.mark.parametrize("name", DROP_INS)
def test_systemd_has_nothing_to_say_about_a_drop_in(name: str, analyze: str, here: Path) -> None:
    for unit in ("brainlaned", "brainlaned@second"):
        directory = here / f"{unit}.service.d"
        directory.mkdir()
        shutil.copy(ROOT / "systemd/drop-ins" / name, directory)
        assert verify(analyze, here / f"{unit}.service") == ""


@pytest.mark.parametrize("name", SERVICES)
def test_no_service_lays_bare_more_than_little(name: str, analyze: str, here: Path) -> None:
    unit = here / name.replace("@.", "@second.")
    command = [analyze, "security", "--no-pager", "--offline=true", f"--threshold={EXPOSURE}", unit]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("name", UNITS)
def test_every_unit_names_its_pages(name: str) -> None:
    (documentation,) = settings(name)["Documentation"]
    assert documentation.split()
    assert all(re.fullmatch(r"man:brain[a-z.-]+\([1578]\)", page) for page in documentation.split())


@pytest.mark.parametrize("name", LANES)
def test_no_limit_ends_a_lane_and_no_permanent_refusal_is_tried_again(name: str) -> None:
    found = settings(name)
    assert (found["Type"], found["NotifyAccess"], found["KillMode"]) == (["notify"], ["main"], ["mixed"])
    assert (found["StartLimitIntervalSec"], found["Restart"], found["RestartSec"]) == (["0"], ["always"], ["1s"])
    refusals = set(DaemonExit) - {DaemonExit.OK, DaemonExit.FAILURE}
    assert {int(status) for each in found["RestartPreventExitStatus"] for status in each.split()} == refusals
    assert settings(name.replace("service", "socket"))["TriggerLimitIntervalSec"] == ["0"]


@pytest.mark.parametrize("name", LANES)
def test_a_call_in_flight_may_finish_before_systemd_kills(name: str) -> None:
    default: Config = parse({})
    (limit,) = settings(name)["TimeoutStopSec"]
    assert seconds(limit) > default.stop_grace_s


@pytest.mark.parametrize("name", LANES)
def test_a_lane_needs_its_socket_and_takes_nothing_of_its_directory(name: str) -> None:
    found = settings(name)
    socket = name.replace(".service", ".socket").replace("@.", "@%i.")
    assert found["Requires"] == [socket]
    assert socket in found["After"][0].split()
    assert "RuntimeDirectory" not in found
    listening = settings(name.replace(".service", ".socket"))
    assert listening["FileDescriptorName"] == ["control"]
    assert (listening["SocketMode"], listening["SocketGroup"]) == (["0660"], ["brainlane"])
    assert listening["ListenStream"][0].startswith("/run/brainlane")


@pytest.mark.parametrize("kind", ["service", "socket"])
def test_a_template_differs_from_the_plain_unit_only_where_it_names_its_instance(kind: str) -> None:
    plain, template = settings(f"brainlaned.{kind}"), settings(f"brainlaned@.{kind}")
    assert list(plain) == list(template)
    for key, values in template.items():
        for ours, theirs in zip(values, plain[key], strict=True):
            if ours != theirs:
                assert "%i" in ours
                assert as_plain(ours) == as_plain(theirs), key


def as_plain(value: str) -> str:
    """Take the instance out of a value, in each of the ways in which a lane's name stands in one."""
    for part in ("@%i", "-%i", " --lane %i"):
        value = value.replace(part, "")
    return value.replace("brainlane: lane %i, ", "brainlane: one language model, ").replace(" lane %i", " lane")
