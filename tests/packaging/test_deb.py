"""The Debian package: what is in it, that it can be built again byte for byte, and what lintian thinks of it."""

import gzip
import hashlib
import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from brainlaned import wire
from tests.sources import EPOCH, Checkout

COMMAND_S = 120.0


def run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=COMMAND_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def unpacked(package: Path, tmp_path: Path) -> Path:
    """The package's files and, in DEBIAN/, its control files."""
    run("dpkg-deb", "--raw-extract", package, tmp_path / "unpacked")
    return tmp_path / "unpacked"


def test_another_checkout_umask_and_day_build_the_same_bytes(checkout: Checkout, package: Path, tmp_path: Path) -> None:
    other = checkout.copy(tmp_path / "elsewhere")
    for path in other.path.rglob("*"):
        os.utime(path, (EPOCH - 1_000_000, EPOCH - 1_000_000))
    done = other.run("deb", "--build", other.build, "--dist", tmp_path / "dist", umask=0o077)
    assert done.returncode == 0, done.stderr
    built = tmp_path / "dist" / package.name
    # What is printed last is the package, for whoever wants to install it.
    assert done.stdout == f"{built}\n"
    assert hashlib.sha256(built.read_bytes()).digest() == hashlib.sha256(package.read_bytes()).digest()


@pytest.mark.parametrize(
    ("version", "debian"),
    [("0.1.0.dev0", "0.1.0~dev0"), ("1.2.0rc1", "1.2.0~rc1"), ("1.2.0b2.dev3", "1.2.0~b2~dev3"), ("1.2.0", "1.2.0")],
)
def test_what_comes_before_a_release_is_older_for_debian_too(checkout: Checkout, version: str, debian: str) -> None:
    found = runpy.run_path(str(checkout.path / "packaging/deb"))["debian_version"](version)
    assert found == debian
    release = re.match(r"[0-9.]*[0-9]", version)
    assert release is not None
    run("dpkg", "--compare-versions", found, "eq" if found == version else "lt", release[0])


def test_it_is_for_every_machine_and_needs_no_more_than_python_and_the_maker_of_its_user(
    checkout: Checkout, package: Path
) -> None:
    version = runpy.run_path(str(checkout.path / "packaging/deb"))["debian_version"](wire.VERSION)
    assert run("dpkg-deb", "--field", package, "Version") == f"{version}\n"
    assert package.name == f"brainlane_{version}_all.deb"
    assert run("dpkg-deb", "--field", package, "Architecture") == "all\n"
    needed = run("dpkg-deb", "--field", package, "Depends").strip().split(", ")
    assert needed[0] == "python3 (>= 3.11)"
    assert [each.split(" | ")[0] for each in needed[1:]] == ["systemd"]


def test_everything_in_it_is_roots_and_of_one_time(package: Path) -> None:
    lines = run("dpkg-deb", "--contents", package).splitlines()
    assert len(lines) > 500
    assert {line.split()[1] for line in lines} == {"root/root"}
    assert {tuple(line.split()[3:5]) for line in lines} == {tuple(lines[0].split()[3:5])}
    names = {line.split(maxsplit=5)[5] for line in lines}
    assert not [name for name in names if name.endswith((".pyc", "/installed", "/LICENSE")) and "dist-info" not in name]
    # Two places, by the policy: programs and documents below /usr, and what the administrator fills.
    assert {name.split("/")[1] for name in names} == {"", "usr", "etc"}
    assert [name for name in names if name.startswith("./etc/") and not name.endswith("/")] == []


def test_pages_and_changelog_are_compressed_and_everything_is_summed(checkout: Checkout, unpacked: Path) -> None:
    for page in checkout.path.glob("man/*.[1-8]"):
        packed = unpacked / f"usr/share/man/man{page.suffix[1]}/{page.name}.gz"
        assert gzip.decompress(packed.read_bytes()) == page.read_bytes()
    changelog = gzip.decompress((unpacked / "usr/share/doc/brainlane/changelog.gz").read_bytes()).decode()
    assert re.search(r"^ -- .+ <.+>  Tue, 14 Nov 2023 22:13:20 [-+]0000$", changelog, re.MULTILINE)
    summed = dict(reversed(line.split("  ", 1)) for line in (unpacked / "DEBIAN/md5sums").read_text().splitlines())
    files = [path for path in unpacked.rglob("*") if path.is_file() and unpacked / "DEBIAN" not in path.parents]
    assert summed == {
        path.relative_to(unpacked).as_posix(): hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
        for path in files
    }


def test_the_licence_of_each_library_stands_in_the_copyright(checkout: Checkout, unpacked: Path) -> None:
    text = (unpacked / "usr/share/doc/brainlane/copyright").read_text()
    assert (checkout.path / "LICENSE").read_text() in text
    libraries = list((unpacked / "usr/lib/brainlane").glob("*.dist-info"))
    assert len(libraries) > 10
    for library in libraries:
        assert f"{library.stem.replace('-', ' ')}, in /usr/lib/brainlane" in text
        for licence in library.rglob("LICENSE*"):
            assert licence.read_text() in text


@pytest.mark.skipif(shutil.which("lintian") is None, reason="lintian is not installed")
def test_lintian_finds_no_error(package: Path) -> None:
    done = subprocess.run(
        ["lintian", "--allow-root", "--fail-on", "error", str(package)],
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("E:")] == []


def test_each_override_of_lintian_has_its_reason_above(checkout: Checkout) -> None:
    lines = (checkout.path / "packaging/debian/lintian-overrides").read_text().splitlines()
    overrides = [number for number, line in enumerate(lines) if not line.startswith("#")]
    assert overrides
    assert all(number > 0 and lines[number - 1].startswith("# ") for number in overrides)


@pytest.mark.parametrize("script", ["postinst", "prerm", "postrm", "rtupdate"])
def test_a_maintainer_script_is_a_plain_shell_script(checkout: Checkout, script: str) -> None:
    path = checkout.path / "packaging/debian" / script
    run("sh", "-n", path)
    assert path.read_text().startswith("#!/bin/sh\n")
    assert "\nset -e\n" in path.read_text()


def test_a_source_without_git_must_be_told_its_time(checkout: Checkout, tmp_path: Path) -> None:
    done = subprocess.run(
        [checkout.path / "packaging/deb", "--build", checkout.build, "--dist", tmp_path],
        env={"PATH": os.environ.get("PATH", os.defpath), "GIT_CEILING_DIRECTORIES": str(checkout.path.parent)},
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    assert done.returncode != 0
    assert done.stderr.startswith("cannot build the package: no SOURCE_DATE_EPOCH")
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
