"""A local command as a brain: the prompt on its stdin, the answer on its stdout. One attempt is one process group.

Everything passes through files in the spool, not pipes: a grandchild that keeps a pipe open would keep us waiting for
ever, and what was printed before a crash would be gone. A small runner (runner.py) leads the group and writes down who
it is and how the command ended, so after a crash of ours the files tell: a status is a complete answer; an identity
without a status is a group that must be gone before anything else is claimed; no identity, and it was never started.

Nothing is polled: the call sleeps until the output grows (inotify(7)), the runner ends (pidfd_open(2)), somebody aborts
it, or a limit is due.
"""

import contextlib
import dataclasses
import errno
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import config, errors
from ..states import CommandEnd
from ..wire import Reason
from . import Ended, Marks
from .reply import TextReader
from .runner import identity_of
from .scrub import scrub

GRACE_S = 5.0
"""How long a group may take to end after SIGTERM, in seconds, before it is killed."""

STOPPED_GRACE_S = 2.0
"""The same when the daemon itself is to end, which does not wait long for us."""

SYNC_S = 1.0
"""No byte of the output stays unsynced for longer, in seconds."""

LOOK_AGAIN_S = 60.0
"""How long the call sleeps at the most, in seconds, in case the kernel has no watch left to give."""

COMPLAINT_CHARACTERS = 500
_TAIL_BYTES = 64 * 1024  # so much more than is quoted that a secret which is cut in two is not quoted
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_PATH = "/usr/local/bin:/usr/bin:/bin"
_RUNNER = Path(__file__).with_name("runner.py")
_IN_MODIFY = 0x2


class CommandBrain:
    """A route's command."""

    def __init__(self, route: config.Route) -> None:
        self._route = route
        self._environment = environment_of(route)

    def close(self) -> None:
        """Nothing is kept between two calls."""

    def begin(self, request: str, model: str, request_id: str, files: Path) -> "CommandCall":
        """Prepare one attempt; nothing is started yet. `files` is the path that the names of its files begin with."""
        return CommandCall(self._route, prompt_of(json.loads(request)), self._environment, files)


class CommandCall:
    """One attempt. `run` is called once, by the worker; `abort` by any thread at any time."""

    def __init__(self, route: config.Route, prompt: str, environment: Mapping[str, str], files: Path) -> None:
        self._route = route
        self._prompt = prompt
        self._environment = environment
        self._files = files
        self._lock = threading.Lock()
        self._cut_by: Reason | None = None
        self._error: str | None = None
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    @property
    def longest_s(self) -> float:
        """How long `run` may be silent at the most, in seconds, before something is wrong with ourselves."""
        return self._route.total_s + 2 * GRACE_S

    def abort(self, cause: Reason) -> None:
        """End the call from our side; the first cause given stands."""
        with self._lock:
            self._cut_by = self._cut_by or cause
            if self._woken >= 0:
                os.eventfd_write(self._woken, 1)

    def run(self, marks: Marks) -> Ended:
        """Run the command and return how it ended. Raises what `marks.armed` raised, or OSError: nothing ran."""
        try:
            end = self._run(marks)
        finally:
            with self._lock:
                os.close(self._woken)
                self._woken = -1
        reader = TextReader(self._route.secrets())
        room = self._route.max_output_mib * 1024 * 1024
        for chunk in _chunks(self._path("stdout"), room):
            reader.feed(chunk)
        return Ended(
            reply=reader.close(),
            whole=end.exit_status is not None,
            command=end,
            cut_by=self._cut_by,
            error=self._error,
        )

    def _run(self, marks: Marks) -> CommandEnd:
        self._path("stdin").write_text(self._prompt, encoding="utf-8")
        for name in ("stdout", "stderr"):
            self._path(name).touch(mode=0o600, exist_ok=False)
        if self._cut_by is not None:
            raise errors.CancelAsked(f"cannot start the command: {self._cut_by} came first")
        with contextlib.ExitStack() as stack:
            watch = _watch(stack, self._path("stdout"), self._path("stderr"))
            marks.armed()
            try:
                started, runner = self._start()
            except OSError:
                # Not even our own interpreter could be started, which is known to us alone.
                marks.send_failed()
                raise
            stack.callback(os.close, started)
            try:
                ended = stack.enter_context(_closing(os.pidfd_open(runner.pid)))
            except OSError as error:
                # It cannot be watched, so it is ended; how far it had come its files tell.
                self._error = f"{type(error).__name__}: {error.strerror}"
                os.killpg(runner.pid, signal.SIGKILL)
                runner.wait()
                return self._end_of(marks, was_ended=True)
            try:
                # The runner's word that it has written down who it is; its end without that means it started nothing.
                if os.read(started, 1):
                    marks.sent()
                    self._attend(marks, watch, ended)
            except OSError as error:
                # The disk fails under a command that runs: what it has printed is still an answer of a kind.
                self._error = f"{type(error).__name__}: {error.strerror}"
            finally:
                was_over = bool(_read(self._files, "status"))
                grace_s = STOPPED_GRACE_S if self._cut_by is Reason.DAEMON_STOPPED else GRACE_S
                was_told = _end_group(runner, ended, grace_s)
        return self._end_of(marks, was_ended=was_told and not was_over)

    def _end_of(self, marks: Marks, *, was_ended: bool) -> CommandEnd:
        end = read_end(self._files, self._route)
        if was_ended:
            # However it took our signal, that is not its own end.
            end = dataclasses.replace(end, exit_status=None)
        if not end.was_started:
            marks.send_failed()
        return end

    def _start(self) -> tuple[int, subprocess.Popen[bytes]]:
        started, ready = os.pipe2(os.O_CLOEXEC)
        try:
            words = [sys.executable, "-I", "-S", str(_RUNNER), str(self._files), str(os.getpid()), str(ready)]
            return started, subprocess.Popen(
                [*words, *self._route.command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self._environment,
                pass_fds=(ready,),
                start_new_session=True,
            )
        except OSError:
            os.close(started)
            raise
        finally:
            os.close(ready)

    def _attend(self, marks: Marks, watch: int | None, ended: int) -> None:
        """Wait for the end of the runner, and abort it when it grows or lasts too long."""
        poll = select.poll()
        for descriptor in (ended, self._woken, *([] if watch is None else [watch])):
            poll.register(descriptor, select.POLLIN)
        due = time.monotonic() + self._route.total_s
        room = self._route.max_output_mib * 1024 * 1024
        seen, sync_at = 0, None
        with _closing(os.open(self._path("stdout"), os.O_RDONLY | os.O_CLOEXEC)) as output:
            while self._cut_by is None:
                now = time.monotonic()
                if now >= due:
                    return self.abort(Reason.TOTAL_LIMIT)
                if sync_at is not None and now >= sync_at:
                    os.fdatasync(output)
                    sync_at = None
                until = min(due, now + LOOK_AGAIN_S, *([] if sync_at is None else [sync_at]))
                ready = dict(poll.poll(max(0.0, until - now) * 1000))
                if watch in ready:
                    _drain(watch)
                size = os.fstat(output).st_size
                if size > seen:
                    seen = size
                    sync_at = sync_at or time.monotonic() + SYNC_S
                    marks.grew()
                if max(size, self._path("stderr").stat().st_size) > room:
                    return self.abort(Reason.OUTPUT_LIMIT)
                if ended in ready:
                    return None
        return None

    def _path(self, name: str) -> Path:
        return self._files.with_name(f"{self._files.name}.{name}")


def environment_of(route: config.Route) -> dict[str, str]:
    """Return all that a route's command finds in its environment. Nothing of ours is handed on but these few."""
    language = os.environ.get("LANG", "C")
    return {
        "PATH": os.environ.get("PATH", _PATH),
        "HOME": os.environ.get("HOME", "/"),
        "LANG": "C.UTF-8" if language in {"", "C", "POSIX"} else language,
        "TERM": "dumb",
        "NO_COLOR": "1",
        **route.environment,
        **{name: value.reveal() for name, value in route.secret_environment.items()},
    }


def prompt_of(request: Mapping[str, Any]) -> str:
    """Return what the command reads on its stdin: the texts of all messages, an empty line between two."""
    texts = []
    for message in request["messages"]:
        content = message.get("content") or ""
        parts = content if isinstance(content, list) else [{"text": content}]
        texts.append("".join(part.get("text") or "" for part in parts))
    return "\n\n".join(texts)


def read_end(files: Path, route: config.Route | None) -> CommandEnd:
    """Return what the files say of how a command ended. What no runner of ours wrote counts as not written down."""
    secrets = route.secrets() if route else ()
    complaint = " ".join(scrub(_tail(files.with_name(f"{files.name}.stderr")), secrets).split())[-COMPLAINT_CHARACTERS:]
    status = re.fullmatch(r"(exit|spawn|blind|alone)(?: (-?[0-9]{1,4}))?", _read(files, "status"))
    word, number = (status[1], status[2]) if status else ("", None)
    if word == "blind":
        return CommandEnd(was_started=False, complaint=f"{_BOOT_ID} cannot be read: see the drop-in for command routes")
    if word == "alone":
        return CommandEnd(was_started=False, complaint="the daemon had gone")
    if word == "spawn" and number is not None:
        program = f"{route.command[0]}: " if route and route.command else ""
        return CommandEnd(was_started=False, complaint=f"{program}{os.strerror(int(number))}")
    if word == "exit" and number is not None:
        meanings = route.exit_statuses if route else config.EXIT_STATUSES
        meaning = meanings.get(int(number), "error")
        return CommandEnd(exit_status=int(number), meaning=meaning, complaint=complaint)
    was_started = files.with_name(f"{files.name}.identity").exists()
    return CommandEnd(was_started=was_started, complaint=complaint)


def take_over(files: Path, route: config.Route | None) -> CommandEnd:
    """Return how a command ended whose daemon died, having made sure that nothing of it runs any more.

    A group is killed only where its leader is the very process that wrote the identity, or, the leader being gone, who
    of it still has our files open. What it may write down about its end when we kill it is not looked at: that would be
    our doing. Raises OSError.
    """
    end = read_end(files, route)
    identity = re.fullmatch(r"([1-9][0-9]{0,9}) [0-9]+ (\S+)", _read(files, "identity"))
    if identity is not None:
        leader = int(identity[1])
        now_there = identity_of(leader)
        if now_there == identity[0]:
            _kill(leader, lambda pid: True)
        elif now_there is None and (identity_of(os.getpid()) or "").endswith(identity[2]):
            _kill(leader, lambda pid: _has_open(pid, files))
    return end


def _kill(group: int, is_ours: Callable[[int], bool]) -> None:
    """Kill those of a process group that are ours, though not our children, and wait until they are gone."""
    with contextlib.ExitStack() as stack:
        descriptors = []
        for pid in _members(group):
            with contextlib.suppress(ProcessLookupError):
                descriptor = stack.enter_context(_closing(os.pidfd_open(pid)))
                if is_ours(pid):
                    descriptors.append(descriptor)
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        for descriptor in descriptors:
            _wait_for(descriptor, GRACE_S)
    if any(is_ours(pid) for pid in _members(group)):
        raise OSError(errno.EBUSY, f"process group {group} does not end")


def _has_open(pid: int, files: Path) -> bool:
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(entry.readlink()).startswith(f"{files}."):
                    return True
    return False


def _members(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                state, _, of_group = entry.joinpath("stat").read_bytes().rpartition(b")")[2].split()[:3]
                if int(of_group) == group and state not in {b"Z", b"X"}:
                    found.append(int(entry.name))
    return found


def _end_group(runner: subprocess.Popen[bytes], ended: int, grace_s: float) -> bool:
    """End the group, and return whether it had to be told."""
    # The runner is not waited for before the last signal is sent, so its number cannot belong to anybody else.
    is_told = not _wait_for(ended, 0)
    if is_told:
        os.killpg(runner.pid, signal.SIGTERM)
        _wait_for(ended, grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(runner.pid, signal.SIGKILL)
    runner.wait()
    return is_told


def _wait_for(process: int, limit_s: float) -> bool:
    """Wait for the process behind a pidfd to end. Return whether it has."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(limit_s * 1000))


def _watch(stack: contextlib.ExitStack, *paths: Path) -> int | None:
    """Return a descriptor that becomes readable when a file grows; None: the kernel has none to give."""
    import ctypes  # not before it is needed: a hardened unit may forbid what its import does

    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    if descriptor < 0:
        return None
    stack.callback(os.close, descriptor)
    added = [libc.inotify_add_watch(descriptor, os.fsencode(path), _IN_MODIFY) for path in paths]
    return descriptor if min(added) >= 0 else None


def _drain(watch: int | None) -> None:
    if watch is not None:
        with contextlib.suppress(BlockingIOError):
            os.read(watch, 64 * 1024)


def _read(files: Path, name: str) -> str:
    try:
        return files.with_name(f"{files.name}.{name}").read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return ""


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return ""


def _chunks(path: Path, limit: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        while limit > 0 and (chunk := file.read(min(limit, 64 * 1024))):
            limit -= len(chunk)
            yield chunk


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)
