"""The package in a Debian where no systemd runs, as while an image is built: a chroot of each release.

The root is that of the booted tests, read-only below an overlay in a mount namespace of one command. So what a package
left behind is what lies in the overlay's upper layer.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from brainlaned import wire
from tests.sources import Checkout
from tests.systemd import roots

COMMAND_S = 120.0
TOOLS = ("mmdebstrap", "unshare", "dpkg-deb")
ENTER = """\
set -e
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$2/root"
mount -t proc proc "$2/root/proc"
where="$2/root"
shift 2
exec chroot "$where" "$@"
"""
CATALOG = "var/lib/systemd/catalog/database"
NOT_OF_A_PACKAGE = (
    "var/lib/dpkg/",
    "var/log/",
    "etc/passwd",
    "etc/group",
    "etc/shadow",
    "etc/gshadow",
    "etc/.pwd.lock",
    CATALOG,
)
"""What dpkg, the making of a user and systemd's own triggers touch."""


class Chroot:
    """A Debian whose changes are kept in `directory`; `upper` is all that differs from the root."""

    def __init__(self, root: Path, directory: Path) -> None:
        self._root = root
        self._directory = directory
        self.upper = directory / "upper"
        for name in ("upper", "work", "root"):
            (directory / name).mkdir(parents=True)

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", ENTER, "sh", self._root, self._directory, *command],
            env={
                "PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "LANG": "C.UTF-8",
                "DEBIAN_FRONTEND": "noninteractive",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )
        assert done.returncode == 0 or not check, f"{command} ended with {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def put(self, name: str, text: str = "") -> None:
        self.run("sh", "-c", f'mkdir -p "$(dirname {name})" && printf %s "$1" > {name}', "sh", text)

    def dpkg(self, *words: str) -> None:
        done = self.run("dpkg", *words)
        assert not [line for line in done.stderr.splitlines() if "rror" in line or "arning" in line], done.stderr

    def changed(self) -> set[str]:
        """List what is there now, or is no longer there, unlike in the root; not the directories that were there."""
        return {
            name
            for path in self.upper.rglob("*")
            for name in [path.relative_to(self.upper).as_posix()]
            if not name.startswith(NOT_OF_A_PACKAGE) and not (path.is_dir() and (self._root / name).is_dir())
        }


@pytest.fixture(params=[12, 13], ids=["debian12", "debian13"])
def chroot(request: pytest.FixtureRequest, package: Path, tmp_path: Path) -> Chroot:
    """A Debian with the package lying in /root."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    reason = "a chroot needs root" if os.geteuid() != 0 else f"not installed: {', '.join(missing)}" if missing else None
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(f"in CI the tests in a chroot may not be skipped: {reason}")
        pytest.skip(reason)
    chroot = Chroot(roots.build(request.param)[request.param], tmp_path)
    (chroot.upper / "root").mkdir(mode=0o700)
    shutil.copy(package, chroot.upper / "root/brainlane.deb")
    return chroot


INSTALL = ("--install", "/root/brainlane.deb")


def test_it_is_installed_without_a_running_systemd_and_runs(chroot: Chroot) -> None:
    chroot.dpkg(*INSTALL)
    assert chroot.run("brainctl", "--version").stdout == f"brainctl {wire.VERSION}\n"
    assert chroot.run("brainlaned", "--version").stdout == f"{wire.VERSION}\n"
    assert chroot.run("brainctl", "status", check=False).returncode == 9  # no lane answers, for none was started
    assert chroot.run("getent", "passwd", "brainlane").stdout.split(":")[5:] == [
        "/var/lib/brainlane",
        "/usr/sbin/nologin\n",
    ]
    assert chroot.run("stat", "-c", "%a %U", "/etc/brainlane/credentials").stdout == "700 root\n"
    # From the next boot on.
    for unit in ("brainlaned.socket", "brainlaned.service"):
        assert chroot.run("systemctl", "is-enabled", unit).stdout == "enabled\n"
    assert chroot.run("systemctl", "is-enabled", "brainlane-localbrain.service", check=False).stdout == "disabled\n"
    assert b"brainlane" in (chroot.upper / CATALOG).read_bytes()  # what journalctl -x explains
    # Compiled for the Python that runs it, so that a command starts fast whoever types it.
    compiled = list(chroot.upper.glob("usr/lib/brainlane/**/*.pyc"))
    sources = list(chroot.upper.glob("usr/lib/brainlane/**/*.py"))
    assert len(compiled) == len(sources) > 300
    chroot.run("dpkg", "--verify", "brainlane")


def test_an_upgrade_keeps_state_configuration_keys_and_what_was_disabled(chroot: Chroot) -> None:
    chroot.dpkg(*INSTALL)
    kept = ("/etc/brainlane/brainlaned.toml", "/etc/brainlane/credentials/openai", "/var/lib/brainlane/brainlane.db")
    for name in kept:
        chroot.put(name, "mine")
    chroot.run("systemctl", "disable", "brainlaned.service", "brainlaned.socket")
    chroot.dpkg(*INSTALL)
    for name in kept:
        assert chroot.run("cat", name).stdout == "mine"
    assert chroot.run("systemctl", "is-enabled", "brainlaned.service", check=False).stdout == "disabled\n"
    assert chroot.run("stat", "-c", "%a", "/etc/brainlane/credentials").stdout == "700\n"


def test_removing_keeps_what_is_the_administrators(chroot: Chroot) -> None:
    chroot.dpkg(*INSTALL)
    kept = {"etc/brainlane/brainlaned.toml", "etc/brainlane/credentials/openai", "var/lib/brainlane/brainlane.db"}
    for name in kept:
        chroot.put(f"/{name}")
    chroot.dpkg("--remove", "brainlane")
    assert kept <= chroot.changed()
    left = {name for name in chroot.changed() if name.startswith("usr/")}
    assert left == set()


def test_purging_leaves_nothing_but_the_user(chroot: Chroot) -> None:
    before = chroot.changed()
    chroot.dpkg(*INSTALL)
    chroot.put("/etc/brainlane/brainlaned.toml")
    chroot.put("/etc/brainlane/fast.toml")
    chroot.put("/etc/brainlane/credentials/openai", "secret")
    # The state and the sockets of two lanes, as systemd makes them, and a directory that is somebody else's.
    for directory in ("brainlane", "brainlane-fast"):
        chroot.put(f"/var/lib/{directory}/brainlane.db")
        chroot.put(f"/run/{directory}/control.sock")
        chroot.run("chown", "-R", "brainlane:brainlane", f"/var/lib/{directory}")
    chroot.put("/var/lib/brainlane-notes/mine")
    chroot.run("systemctl", "enable", "brainlaned@fast.socket", "brainlane-localbrain.service")
    # Nobody cleans up behind root's own Python.
    chroot.run("/usr/bin/python3", "-m", "compileall", "-q", "-o", "2", "/usr/lib/brainlane/brainctl")
    chroot.dpkg("--purge", "brainlane")
    left = chroot.changed() - before
    assert b"brainlane" not in (chroot.upper / CATALOG).read_bytes()
    assert left == {"var/lib/brainlane-notes", "var/lib/brainlane-notes/mine"}
    assert chroot.run("getent", "passwd", "brainlane").stdout.startswith("brainlane:")
    assert chroot.run("dpkg", "--status", "brainlane", check=False).returncode == 1
    chroot.dpkg(*INSTALL)
    assert chroot.run("brainctl", "--version").stdout == f"brainctl {wire.VERSION}\n"


def test_another_python_gets_its_own_compiled_files(chroot: Chroot) -> None:
    chroot.dpkg(*INSTALL)
    compiled = "/usr/lib/brainlane/brainctl/__pycache__"
    names = chroot.run("ls", compiled).stdout
    # What Debian runs when it has changed /usr/bin/python3; the old one's files are of no use.
    chroot.run("sh", "-c", f"for file in {compiled}/*; do mv $file ${{file%.*.pyc}}.cpython-30.pyc; done")
    chroot.run("/usr/share/python3/runtime.d/brainlane.rtupdate", "rtupdate", "3.0", "3.1")
    assert chroot.run("ls", compiled).stdout == names


def test_installing_from_the_source_needs_no_package_and_leaves_nothing_when_undone(
    chroot: Chroot, checkout: Checkout
) -> None:
    shutil.copytree(checkout.path, chroot.upper / "root/source")
    shutil.copytree(checkout.build, chroot.upper / "root/build")
    before = chroot.changed()
    said = chroot.run("/root/source/packaging/install", "--build", "/root/build").stdout
    assert len(list(chroot.upper.glob("usr/local/lib/brainlane/**/*.pyc"))) > 300
    for command in re.findall(r"^  (.+)$", said, re.MULTILINE):
        # What the administrator is told to do; a manager that would be told to read its units is not there.
        chroot.run("sh", "-c", command.replace(" && systemctl daemon-reload", "").replace(" --now", ""))
    assert chroot.run("systemctl", "is-enabled", "brainlaned.socket", "brainlaned.service").stdout == "enabled\n" * 2
    assert chroot.run("brainctl", "--version").stdout == f"brainctl {wire.VERSION}\n"
    assert chroot.run("getent", "passwd", "brainlane").stdout
    assert b"brainlane" in (chroot.upper / CATALOG).read_bytes()
    chroot.run("systemctl", "disable", "brainlaned.socket", "brainlaned.service")
    chroot.run("/root/source/packaging/uninstall")
    assert chroot.changed() - before <= {
        f"etc/systemd/system/{each}.target.wants" for each in ("sockets", "multi-user")
    }
