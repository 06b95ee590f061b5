"""Brains: how one is asked once, and what its answer means.

A brain makes one attempt and tells what it sees through `Marks`; it knows no clock, no database and no job. How the
call ended is the value `Ended`; what that means is decided by verdicts.judge, for a live call and after a crash alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

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


@dataclass(frozen=True, slots=True)
class Ended:
    """How a call ended."""

    reply: Reply | None = field(default=None, repr=False)
    """None: no headers came."""
    whole: bool = False
    cut_by: Reason | None = None
    error: str | None = None
