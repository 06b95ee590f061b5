"""brainctl as a process, as a script or a person runs it.

`run` ends with the one thing that every end of a command must keep: no traceback, and exactly one line on standard
error for every exit status but 0. `Terminal` is a person at a terminal of 80 columns.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pexpect

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 60


@dataclass(frozen=True)
class Run:
    """How a command ended."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if name not in {"BRAINLANE_SOCKET", "COLUMNS", "NO_COLOR"}
    }
    return {**kept, "PYTHONPATH": str(ROOT), **(more or {})}


def python(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run an interpreter as brainctl is run, for what brainctl alone cannot be made to do."""
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env=environment(),
        cwd="/",
        timeout=LIMIT_S,
        check=False,
        **more,
    )


def run(*words: str | bytes, given: bytes | None = None, env: Mapping[str, str] | None = None) -> Run:
    """Run brainctl with these words."""
    ended = subprocess.run(
        [sys.executable, "-m", "brainctl", *words],
        input=given,
        stdin=subprocess.DEVNULL if given is None else None,
        capture_output=True,
        env=environment(env),
        cwd="/",
        timeout=LIMIT_S,
        check=False,
    )
    err = ended.stderr.decode()
    assert "Traceback" not in err, err
    if ended.returncode != 0:
        assert re.fullmatch(r"brainctl: [^\n]+\n", err), err
    return Run(ended.returncode, ended.stdout, err)


def unfolded(page: str) -> str:
    """Return a page with the commands that go on after a backslash as one line each, as a shell reads them."""
    return re.sub(r"\\\r?\n", "", re.sub(r" \\\r?\n +", " ", page))


class Terminal:
    """brainctl with a terminal of 80 columns for all three streams."""

    def __init__(self, *words: str, env: Mapping[str, str] | None = None) -> None:
        self._child: Any = pexpect.spawn(
            sys.executable,
            ["-m", "brainctl", *words],
            env=environment({"TERM": "xterm", **(env or {})}),
            cwd="/",
            dimensions=(24, 80),
            encoding="utf-8",
            codec_errors="strict",
            timeout=LIMIT_S,
        )
        self._child.delaybeforesend = None
        self.seen = ""

    def until(self, words: str) -> None:
        """Read until these words have been shown."""
        self._child.expect_exact(words)
        self.seen += self._child.before + self._child.after

    def press(self, keys: str) -> None:
        self._child.send(keys)

    def end(self) -> int:
        """Read to the end and return the exit status, as a shell would name it."""
        self._child.expect(pexpect.EOF)
        self.seen += self._child.before
        self._child.close()
        status: int = self._child.exitstatus if self._child.signalstatus is None else 128 + self._child.signalstatus
        return status

    @property
    def lines(self) -> list[str]:
        """What stood on the lines: of one that was rewritten in place every state of it."""
        return re.split(r"\r\n|\r|\n", self.seen)
