"""Standard output: data, and nothing but data.

Owns every write to it, so that a reader who has gone away and a disk that is full are told apart and never end in a
traceback. On a terminal text is escaped; in a pipe it is passed on byte for byte.
"""

import sys
from collections.abc import Iterable

from brainlaned.wire import ErrorKind

from . import text
from .errors import Problem


class ReaderGone(Exception):
    """Whoever read standard output has closed it, as `head` does."""


def write(data: str | bytes) -> None:
    """Write data as it is, and have it out before returning."""
    try:
        if isinstance(data, bytes):
            sys.stdout.flush()
            sys.stdout.buffer.write(data)
        else:
            sys.stdout.write(data)
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderGone from None
    except OSError as error:
        raise Problem(ErrorKind.INTERNAL, f"cannot write to standard output: {error.strerror}") from error


def lines(page: Iterable[str]) -> None:
    """Write lines that are already safe to show."""
    write("".join(f"{line}\n" for line in page))


def document(body: bytes) -> None:
    """Write a JSON document of the wire unchanged; on a terminal what it would obey stands as JSON escapes."""
    if text.is_terminal(sys.stdout):
        write(text.safe_json(body.decode("utf-8", "replace")) + "\n")
    else:
        write(body + b"\n")


def answer(body: bytes, *, raw: bool = False) -> None:
    """Write the text of a job: the exact bytes, or escaped and with a last line break where a person reads it."""
    if raw or not text.is_terminal(sys.stdout):
        write(body)
        return
    words = text.safe(body.decode("utf-8", "replace"))
    write(words if words.endswith("\n") or not words else words + "\n")


class Live:
    """Text as it arrives, on standard output: escaped on a terminal, as it is in a pipe."""

    def __init__(self, *, raw: bool = False) -> None:
        self._escape = text.is_terminal(sys.stdout) and not raw
        self._last = "\n"

    def write(self, words: str) -> None:
        """Pass on a piece."""
        write(text.safe(words) if self._escape else words.encode())
        self._last = words[-1:] or self._last

    def end(self) -> None:
        """Finish the last line on a terminal."""
        if self._escape and self._last != "\n":
            write("\n")
