"""A throw-away lane with the bundled model: two child processes, one job, and nothing left behind.

Owns starting the model server and a lane in a temporary directory, and stopping both whatever happens, Ctrl-C and
SIGTERM included. The children stand in process groups of their own, so that a Ctrl-C reaches them through us only, the
lane first: it may still be reading from the model. Everything it prints is for a person, so headings go to standard
output as well.
"""

import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self
from uuid import uuid4

from brainlaned.wire import MAX_SOCKET_PATH_BYTES, ErrorKind

from . import out, render, text, wait
from .client import Lane
from .errors import Problem, say

MODEL = "smollm2-135m"
MAX_TOKENS = 96
START_S = 60.0
"""Loading the model takes under a second on a machine with nothing else to do."""
LOOK_S = 0.05
STOP_S = 10.0
TAIL_LINES = 5

CONFIGURATION = """\
[lane]
default_route = "local"
stop_grace_s = 2

[routes.local]
base_url = "{base_url}"
model = "{model}"
"""


def run(prompt: str) -> int:
    """Run the demo and return the exit status of its job."""
    with ExitStack() as stack:
        signals = stack.enter_context(_Signals())
        with signals.held():
            directory = _directory(stack)
        base_url = _start_brain(stack, signals, directory)
        lane = _start_lane(stack, signals, directory, base_url)
        request = {"messages": [{"role": "user", "content": prompt}], "max_tokens": MAX_TOKENS, "temperature": 0}
        job = lane.submit({"request": request, "key": f"demo-{uuid4().hex}"}).object()["id"]
        _heading(f"job {job}, asked of {MODEL} at {base_url}")
        live = out.Live()
        try:
            waited = wait.follow(lane, job, float("inf"), live.write)
        finally:
            live.end()
        _heading("what the lane kept of it")
        # All but the next action: once this is read the lane is gone.
        out.lines(render.job(lane.show(job).object(), text.columns(), str)[:-2])
        line = render.outcome(waited.job, str)
        if line:
            say(line)
        return waited.exit_status


def _heading(words: str) -> None:
    out.lines(["", f"== {text.one_line(words)}"])


def _directory(stack: ExitStack) -> Path:
    """Make a directory whose socket has a path that the kernel takes, whatever TMPDIR says."""
    for parent in (None, "/tmp"):  # noqa: S108 - mkdtemp makes the name
        made = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="brainlane-", dir=parent, ignore_cleanup_errors=True)
        )
        if len(os.fsencode(f"{made}/control.sock")) <= MAX_SOCKET_PATH_BYTES:
            break
    return Path(made)


def _start_brain(stack: ExitStack, signals: "_Signals", directory: Path) -> str:
    """Start the model server and return the address at which it listens."""
    log = directory / "brain.log"
    brain = _child(stack, signals, ["brainlaned.localbrain", "--port", "0"], log, subprocess.PIPE)
    assert brain.stdout is not None  # noqa: S101 - it is a pipe
    deadline, said = time.monotonic() + START_S, b""
    while b"\n" not in said:
        readable, _, _ = select.select([brain.stdout], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(brain.stdout.fileno(), 4096) if readable else b""
        if not piece:
            brain.poll()
            raise _not_started("the bundled model", log)
        said += piece
    found = re.search(r"listening on (http://\S+)", said.decode("utf-8", "replace"))
    if found is None:
        raise _not_started("the bundled model", log)
    return found[1]


def _start_lane(stack: ExitStack, signals: "_Signals", directory: Path, base_url: str) -> Lane:
    """Start a lane that asks this brain, and return it once it answers."""
    log, configuration, socket = directory / "lane.log", directory / "brainlaned.toml", directory / "control.sock"
    configuration.write_text(CONFIGURATION.format(base_url=base_url, model=MODEL), encoding="utf-8")
    state = directory / "state"
    places = ["--config", str(configuration), "--state-dir", str(state), "--socket", str(socket)]
    process = _child(stack, signals, ["brainlaned", *places], log, subprocess.DEVNULL)
    lane, deadline = Lane(str(socket)), time.monotonic() + START_S
    while True:
        try:
            lane.status()
            return lane
        except Problem:
            if process.poll() is not None or time.monotonic() > deadline:
                raise _not_started("the lane", log) from None
        time.sleep(LOOK_S)  # for the socket to be there


def _child(stack: ExitStack, signals: "_Signals", module: list[str], log: Path, stdout: int) -> subprocess.Popen[bytes]:
    with log.open("wb") as stderr, signals.held():
        process = subprocess.Popen(
            [sys.executable, "-m", *module],
            # Where we are installed without the interpreter knowing it, the child would not find us.
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*_python_path(), str(Path(__file__).parents[1])])},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        stack.callback(_stop, process, signals)
    return process


def _python_path() -> list[str]:
    given = os.environ.get("PYTHONPATH")
    return [given] if given else []


def _stop(process: subprocess.Popen[bytes], signals: "_Signals") -> None:
    """End a child by SIGTERM, and if it does not listen by SIGKILL."""
    with signals.held():
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _not_started(what: str, log: Path) -> Problem:
    """Pass on what a child said last, which is why it did not start."""
    said = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    cause = "; ".join(said[-TAIL_LINES:]) or f"it said nothing within {START_S:g} s"
    return Problem(ErrorKind.LANE_FAILED, f"cannot start {what}: {cause}")


class _Signals:
    """SIGINT, SIGTERM and SIGHUP unwind the stack, but never between a child's start and the promise to stop it."""

    def __init__(self) -> None:
        self._held = 0
        self._pending: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._before = {number: signal.signal(number, self._arrived) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let signals wait until the body has ended."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            number, self._pending = self._pending, None
            if number is not None:
                self._arrived(number, None)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self._held:
            self._pending = number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            say(f"stopped by {signal.Signals(number).name}")
            raise SystemExit(128 + number)
