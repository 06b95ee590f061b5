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
from typing import NoReturn
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
        stack.enter_context(_terminated_like_interrupted())
        directory = _directory(stack)
        base_url = _start_brain(stack, directory)
        lane = _start_lane(stack, directory, base_url)
        request = {"messages": [{"role": "user", "content": prompt}], "max_tokens": MAX_TOKENS}
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


def _start_brain(stack: ExitStack, directory: Path) -> str:
    """Start the model server and return the address at which it listens."""
    log = directory / "brain.log"
    brain = _child(stack, ["brainlaned.localbrain", "--port", "0"], log, subprocess.PIPE)
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


def _start_lane(stack: ExitStack, directory: Path, base_url: str) -> Lane:
    """Start a lane that asks this brain, and return it once it answers."""
    log, configuration, socket = directory / "lane.log", directory / "brainlaned.toml", directory / "control.sock"
    configuration.write_text(CONFIGURATION.format(base_url=base_url, model=MODEL), encoding="utf-8")
    state = directory / "state"
    places = ["--config", str(configuration), "--state-dir", str(state), "--socket", str(socket)]
    process = _child(stack, ["brainlaned", *places], log, subprocess.DEVNULL)
    lane, deadline = Lane(str(socket)), time.monotonic() + START_S
    while True:
        try:
            lane.status()
            return lane
        except Problem:
            if process.poll() is not None or time.monotonic() > deadline:
                raise _not_started("the lane", log) from None
        time.sleep(LOOK_S)  # for the socket to be there


def _child(stack: ExitStack, module: list[str], log: Path, stdout: int) -> subprocess.Popen[bytes]:
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", *module],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    stack.callback(_stop, process)
    return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a child by SIGTERM, and if it does not listen by SIGKILL."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _not_started(what: str, log: Path) -> Problem:
    """Pass on what a child said last, which is why it did not start."""
    said = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    cause = "; ".join(said[-TAIL_LINES:]) or f"it said nothing within {START_S:g} s"
    return Problem(ErrorKind.LANE_FAILED, f"cannot start {what}: {cause}")


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack, so that the children are stopped, and then end as they should."""

    def unwind(number: int, frame: FrameType | None) -> NoReturn:
        say(f"stopped by {signal.Signals(number).name}")
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, unwind) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
