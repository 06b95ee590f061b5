"""Brains: how one is asked once, and what its answer means.

A brain makes one attempt and tells what it sees through `Marks`; it knows no clock, no database and no job. How the
call ended is the value `Ended`; what that means is decided by verdicts.judge, for a live call and after a crash alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ..states import CommandEnd
from ..wire import Reason
from .reply import Reply


class Marks(Protocol):
    """What a call tells while it runs. Only `armed` may raise, and then nothing has been sent."""

    def armed(self) -> None:
        """Commit that from now on a byte may leave."""

    def sent(self) -> None:
        """The kernel took all bytes of the request."""

    def send_failed(self) -> None:
        """The brain cannot have the whole request."""

    def headers(self, status: int, headers: Mapping[str, str]) -> None:
        """The brain answered; names of headers are in lower case, secrets are removed."""

    def body(self, chunk: bytes) -> None:
        """Bytes of the answer, in order."""

    def grew(self) -> None:
        """The answer has grown in a file of the brain's own."""


class Call(Protocol):
    """One attempt. `run` is called once, by the worker; `abort` by any thread at any time."""

    @property
    def longest_s(self) -> float:
        """How long `run` may be silent at the most, in seconds, before something is wrong with ourselves."""

    def abort(self, cause: Reason) -> None:
        """End the call from our side; the first cause given stands."""

    def run(self, marks: Marks) -> "Ended":
        """Make the call and return how it ended. Raises what `marks.armed` raised, nothing having been sent."""


class Brain(Protocol):
    """A way to a brain, built once."""

    def begin(self, request: str, model: str, request_id: str, files: Path) -> Call:
        """Prepare one attempt at a job's request (JSON, without a model); nothing has left yet.

        `files` is the path that the names of the attempt's files begin with.
        """

    def close(self) -> None:
        """Let go of what is kept between two calls."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a call ended."""

    reply: Reply | None = field(default=None, repr=False)
    """None: no headers came."""
    whole: bool = False
    command: CommandEnd | None = None
    cut_by: Reason | None = None
    error: str | None = None
