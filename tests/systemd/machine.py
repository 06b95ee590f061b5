"""A Debian system for one test: booted by systemd-nspawn, spoken to through nsenter, thrown away at the end.

The system's files are an overlay: a read-only root (tests.systemd.roots) below, and a directory of this machine's own
above, which outlives a reboot. `Machine.run` is a command of the administrator's, `Machine.unit_run` a transient unit.

Where it is hard: only systemd-nspawn itself knows when the system inside is up, so it is asked to tell a notify socket
of ours. A killed nspawn leaves the system inside running, so the leader (the init process inside) is killed through its
pidfd in any case, and the kernel stops nspawn if the test run dies. The overlay is mounted in a mount namespace of its
own and needs no unmounting. Machines that run at the same time would share one control group, so each has its own.
"""

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOOT_S = 60.0
STOP_S = 30.0
COMMAND_S = 60.0
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
TOOLS = ("systemd-nspawn", "mmdebstrap", "nsenter", "unshare")

# What a machine needs beyond the usual so that its systemd may load eBPF programs (IPAddressDeny=, SocketBindDeny=).
_EBPF_OPTIONS = (
    "--capability=CAP_BPF,CAP_SYS_ADMIN,CAP_NET_ADMIN,CAP_PERFMON",
    "--system-call-filter=bpf",
)
_EBPF_ENVIRONMENT = {"UNIFIED_CGROUP_HIERARCHY": "1"}
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def why_impossible() -> str | None:
    """Say why no machine can be booted here; None if one can."""
    if os.geteuid() != 0:
        return "booting a machine needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)} (apt-get install systemd-container mmdebstrap)" if missing else None


class CommandFailed(AssertionError):
    """A command inside ended with a status that the test did not expect."""


@dataclass(frozen=True)
class Result:
    """How a command ended; `status` is negative for a signal."""

    status: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


class Machine:
    """One booted system. `layers` are read-only trees, the topmost first; `binds` maps paths inside to ours."""

    def __init__(self, *layers: Path, binds: Mapping[str, Path] | None = None, ebpf: bool = False) -> None:
        self._name = f"brainlane-{secrets.token_hex(4)}"  # a host's name too, so of few letters
        # Short, since the path of a socket must fit into 107 bytes.
        self._directory = Path(tempfile.mkdtemp(prefix=f"{self._name}-"))
        self._layers = layers
        self._binds = dict(binds or {})
        self._ebpf = ebpf
        for name in ("upper", "work", "root"):
            path = self._directory / name
            path.mkdir()
            path.chmod(0o755)  # the upper directory's mode becomes that of / inside
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._leader: int | None = None
        self._leader_fd = -1

    @property
    def upper(self) -> Path:
        """What this machine has written, as a layer for other machines once it is stopped."""
        return self._directory / "upper"

    @property
    def console(self) -> str:
        path = self._directory / "console"
        return path.read_text(errors="replace") if path.exists() else ""

    # --- life ---

    def start(self) -> "Machine":
        """Boot, and return when systemd inside has started everything. To be called from the main thread."""
        notify_path = self._directory / "notify"
        notify_path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify, self._console_file() as console:
            notify.bind(os.fspath(notify_path))
            self._nspawn = subprocess.Popen(
                self._command(),
                env={
                    **ENVIRONMENT,
                    "NOTIFY_SOCKET": os.fspath(notify_path),
                    **(_EBPF_ENVIRONMENT if self._ebpf else {}),
                },
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                preexec_fn=self._in_the_child,
            )
            try:
                self._wait_until_booted(notify)
            except BaseException:
                self.stop(keep=True)
                raise
        return self

    def stop(self, *, keep: bool = False) -> None:
        """Stop the system as if its power button had been pressed; its files are gone unless `keep` is set."""
        self._end(signal.SIGTERM)
        if not keep:
            shutil.rmtree(self._directory)

    def reboot(self) -> None:
        """Shut down in good order and boot again with the files as they were left."""
        self._end(signal.SIGTERM)
        self.start()

    def lose_power(self) -> None:
        """End every process inside at once, and boot again."""
        self._end(signal.SIGKILL)
        self.start()

    def __enter__(self) -> "Machine":
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    # --- commands ---

    def run(
        self,
        *argv: str,
        user: str | None = None,
        input: str | None = None,
        check: bool = True,
        timeout: float = COMMAND_S,
        env: Mapping[str, str] | None = None,
    ) -> Result:
        """Run a command inside and return how it ended. Raises CommandFailed unless it ended well or `check` is off."""
        with self.popen(*argv, user=user, env=env) as process:
            try:
                stdout, stderr = process.communicate(input, timeout)
            except BaseException:
                kill(process)
                raise
        result = Result(process.returncode, stdout, stderr)
        if check and result.status != 0:
            raise CommandFailed(f"{' '.join(argv)}: status {result.status}\n{stdout}\n{stderr}")
        return result

    def popen(self, *argv: str, user: str | None = None, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command inside, with pipes; to be waited for by the caller, or ended by `kill`."""
        assert self._leader is not None, "the machine is not running"
        enter = ["nsenter", "-t", str(self._leader), "-m", "-u", "-i", "-n", "-p", "-C", "-r", "-w", "--"]
        die_with_parent = ["setpriv", "--pdeathsig", "KILL", "--"]  # a killed nsenter would leave the command running
        become = [] if user is None else ["runuser", "-u", user, "--", *die_with_parent]
        return subprocess.Popen(
            [*enter, *die_with_parent, *become, *argv],
            env={**ENVIRONMENT, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def unit_run(
        self,
        *argv: str,
        user: str | None = None,
        properties: Iterable[str] = (),
        input: str | None = None,
        check: bool = True,
        timeout: float = COMMAND_S,
    ) -> Result:
        """Run a command as a transient unit, with a unit's control group, user and journal fields, and wait for it."""
        options = [f"--property={each}" for each in _with_user(properties, user)]
        return self.run(
            *("systemd-run", "--quiet", "--pipe", "--wait", "--collect", *options, "--", *argv),
            input=input,
            check=check,
            timeout=timeout,
        )

    def start_unit(self, unit: str, *argv: str, user: str | None = None, properties: Iterable[str] = ()) -> None:
        """Start a command as a transient unit that goes on running."""
        options = [f"--property={each}" for each in _with_user(properties, user)]
        self.run("systemd-run", "--quiet", "--collect", f"--unit={unit}", *options, "--", *argv)

    def systemctl(self, *argv: str, check: bool = True, timeout: float = COMMAND_S) -> Result:
        return self.run("systemctl", *argv, check=check, timeout=timeout)

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Return properties of a unit, as `systemctl show` names them."""
        lines = self.systemctl("show", f"--property={','.join(names)}", "--", unit).stdout.splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def journal(self, unit: str | None = None, *matches: str) -> list[dict[str, Any]]:
        """Return the entries of all boots, oldest first, of a unit (systemd's words about it too) or with these fields.

        Bytes that are no text come as the text that they would be with the odd byte replaced.
        """
        self.run("journalctl", "--sync")
        which = [] if unit is None else [f"--unit={unit}"]
        lines = self.run("journalctl", "--output=json", "--all", "--no-pager", *which, *matches).stdout.splitlines()
        return [{name: _text(value) for name, value in json.loads(line).items()} for line in lines]

    # --- files ---

    def put(self, path: str, text: str, mode: int = 0o644, *, owner: str = "root:root") -> None:
        """Write a file inside, making the directories that it needs."""
        self.run(
            *("sh", "-euc", 'mkdir -p "$(dirname "$0")"; umask 077; cat >"$0"; chown "$2" "$0"; chmod "$1" "$0"'),
            *(path, f"{mode:o}", owner),
            input=text,
        )

    def read(self, path: str) -> str:
        return self.run("cat", path).stdout

    @property
    def root(self) -> Path:
        """Return its files as they are now, seen from outside; whoever connects to a Unix socket by it is root."""
        assert self._leader is not None, "the machine is not running"
        return Path(f"/proc/{self._leader}/root")

    def connect(self, port: int) -> socket.socket:
        """Connect to a port of the machine's own loopback."""
        # A socket belongs for life to the network in which it was made. Only this thread goes there, and comes back.
        with Path("/proc/thread-self/ns/net").open() as ours, Path(f"/proc/{self._leader}/ns/net").open() as theirs:
            _enter_network(theirs.fileno())
            try:
                connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            finally:
                _enter_network(ours.fileno())
        try:
            connection.connect(("127.0.0.1", port))
        except BaseException:
            connection.close()
            raise
        return connection

    # --- within ---

    def _command(self) -> list[str]:
        layers = ":".join(os.fspath(layer) for layer in self._layers)
        options = f"lowerdir={layers},upperdir={self.upper},workdir={self._directory / 'work'}"
        root = self._directory / "root"
        nspawn = [
            *("systemd-nspawn", "--quiet", f"--directory={root}", f"--machine={self._name}"),
            *("--register=no", "--keep-unit", "--console=pipe", "--notify-ready=yes", "--private-network"),
            *("--resolv-conf=bind-host", "--timezone=off", "--link-journal=no"),
            *(f"--bind-ro={outside}:{inside}" for inside, outside in self._binds.items()),
            *(_EBPF_OPTIONS if self._ebpf else ()),
            "--boot",
        ]
        mount_and_run = 'mount -t overlay -o "$1" brainlane "$2"; shift 2; exec "$@"'
        return ["unshare", "--mount", "--", "sh", "-euc", mount_and_run, "sh", options, os.fspath(root), *nspawn]

    def _console_file(self) -> Any:
        return (self._directory / "console").open("ab")

    def _in_the_child(self) -> None:
        # Before anything is executed: nspawn is to end with us, and to live in a control group of this machine's own.
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        for group in self._control_groups():
            group.mkdir(exist_ok=True)
            (group / "cgroup.procs").write_text("0")

    def _control_groups(self) -> list[Path]:
        top = Path("/sys/fs/cgroup")
        if (top / "cgroup.procs").exists():  # cgroup v2 alone
            return [top / self._name]
        return [top / each / self._name for each in ("systemd", "unified") if (top / each).is_dir()]

    def _wait_until_booted(self, notify: socket.socket) -> None:
        assert self._nspawn is not None
        deadline = time.monotonic() + BOOT_S
        notify.settimeout(0.5)  # so that an nspawn that has ended is noticed
        while True:
            assert self._nspawn.poll() is None, f"the machine did not boot:\n{self.console}"
            assert time.monotonic() < deadline, f"the machine was not up within {BOOT_S} s:\n{self.console}"
            with contextlib.suppress(TimeoutError):
                said = dict(line.split("=", 1) for line in notify.recv(4096).decode().splitlines() if "=" in line)
                if "X_NSPAWN_LEADER_PID" in said:
                    self._leader = int(said["X_NSPAWN_LEADER_PID"])
                    self._leader_fd = os.pidfd_open(self._leader)
                if said.get("READY") == "1":
                    return

    def _end(self, how: signal.Signals) -> None:
        nspawn = self._nspawn
        if nspawn is None:
            return
        if how == signal.SIGTERM:
            nspawn.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                nspawn.wait(STOP_S)
        if self._leader_fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._leader_fd, signal.SIGKILL)
            os.close(self._leader_fd)
        self._leader, self._leader_fd = None, -1
        try:
            nspawn.wait(STOP_S)
        except subprocess.TimeoutExpired:
            nspawn.kill()
            nspawn.wait()
        self._nspawn = None
        for group in self._control_groups():
            for path in [*sorted((each for each in group.rglob("*") if each.is_dir()), reverse=True), group]:
                with contextlib.suppress(OSError):  # the kernel may be a moment behind; an empty group costs nothing
                    path.rmdir()


def kill(process: subprocess.Popen[str]) -> None:
    """End a command that `Machine.popen` started.

    Not through nsenter: what it leaves behind would be adopted by an init outside, and if that one does not care about
    a stranger's child, the dead child holds up the shutdown inside.
    """
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for child in children.read_text().split():
            os.kill(int(child), signal.SIGKILL)


def wait_until(holds: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
    """Wait for something inside that sends no event to wait for."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.1)  # for what the caller waits for


def _enter_network(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


def _with_user(properties: Iterable[str], user: str | None) -> Iterator[str]:
    yield from properties
    if user is not None:
        yield f"User={user}"


def _text(value: Any) -> Any:
    # journalctl writes a field that is not plain text as a list of its bytes, and a field with several values as a list
    # of these.
    if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(each, int) for each in value):
        return bytes(value).decode(errors="replace")
    return value
