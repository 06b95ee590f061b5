"""What can go wrong on this side of the socket, and the one line in which it is told.

Owns the exception that carries an error object of the wire together with its exit status, and the line on standard
error. Every exit status but 0 comes with exactly one line, so the rooms below `cli` raise and never write.

    Problem        an error object: answered by the lane, or found out by brainctl itself
    Interrupted    a person pressed Ctrl-C; what goes on all the same stands in its text
"""

import sys
from typing import Any, NoReturn

from brainlaned.wire import EXIT_OF_KIND, ErrorKind, Exit

from . import text

INTERRUPTED = 130
"""What shells report for a command that SIGINT ended (128 + 2)."""


class Problem(Exception):
    """One error object, with the exit status that its kind gives."""

    def __init__(
        self,
        kind: str,
        message: str,
        next_action: str | None = None,
        *,
        retry_safe: bool = False,
        maybe_done: bool = False,
        body: bytes | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.next_action = next_action
        self.retry_safe = retry_safe
        self.maybe_done = maybe_done
        """Whether what was asked for may have happened all the same."""
        self.body = body
        """The error object as the lane wrote it, which --json prints unchanged."""
        # A kind that a newer lane has and this brainctl does not know is no reason to fail in another way.
        known = kind in ErrorKind.__members__.values()
        self.exit_status: int = EXIT_OF_KIND[ErrorKind(kind)] if known else Exit.INTERNAL

    @property
    def line(self) -> str:
        """Return what is told: the cause, and what to try."""
        return f"{self.message}; next: {self.next_action}" if self.next_action else self.message

    def error_object(self) -> dict[str, Any]:
        """Return the error as the wire would write it."""
        error = {
            "kind": self.kind,
            "message": self.message,
            "next_action": self.next_action,
            "retry_safe": self.retry_safe,
        }
        return {"error": error}


class Interrupted(Exception):
    """Ctrl-C while waiting, with what goes on all the same and the command that comes back to it."""

    def __init__(self, message: str, next_action: str) -> None:
        super().__init__(message)
        self.message = message
        self.next_action = next_action


def usage(message: str) -> NoReturn:
    """Refuse a command line: exit status 2."""
    raise Problem(ErrorKind.USAGE, message)


def say(words: str) -> None:
    """Write one line to standard error, whatever the words contain.

    On a terminal it is broken before the terminal would do so in the middle of a word, and what is to be typed next
    stands by itself.
    """
    lines = [f"brainctl: {text.one_line(words)}"]
    if text.is_terminal(sys.stderr) and text.width(lines[0]) > text.columns():
        told, _, command = lines[0].rpartition("; next: ")
        if not told:
            lines = text.wrapped(lines[0], text.columns(), "  ", "")
        elif command.startswith("brainctl ") and ", " not in command:
            lines = [
                *text.wrapped(told, text.columns(), "  ", ""),
                *text.command(command, text.columns(), "  ", "  next: "),
            ]
        else:
            lines = [
                *text.wrapped(told, text.columns(), "  ", ""),
                *text.wrapped(command, text.columns(), "  ", "  next: "),
            ]
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    sys.stderr.flush()
