"""Text as a terminal may be shown it: nothing that moves the cursor, nothing that turns the line around, no wider
than the line.

Owns escaping, display width and colour. Knows nothing of jobs. Prompts, answers, labels and error texts come from
strangers; an escape sequence among them could rewrite what the operator reads just before he decides.
"""

import os
import re
import shutil
import sys
from typing import TextIO

UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and line feed
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional marks
    "\u200b\u2028\u2029\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff"  # unseen, or another line
    "\ud800-\udfff\U000e0000-\U000e007f]"  # half characters, tags
)
BREAKS = re.compile("[\t\n]")

COLOURS = {"red": "31", "green": "32", "yellow": "33", "cyan": "36", "bold": "1", "dim": "2"}


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def safe(words: str) -> str:
    """Return words with everything escaped that a terminal would obey instead of show; lines stay lines."""
    return UNSAFE.sub(_escape, words)


def one_line(words: str) -> str:
    """Return words as safe text without line breaks or tabs, for a table cell or a message."""
    return BREAKS.sub(lambda match: "\\n" if match[0] == "\n" else "\\t", safe(words))


def safe_json(document: str) -> str:
    """Return the same JSON with what a terminal would obey written as JSON escapes, so that its meaning stays."""

    def escape(match: re.Match[str]) -> str:
        code = ord(match[0])
        if code <= 0xFFFF:
            return f"\\u{code:04x}"
        code -= 0x10000
        return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"

    return UNSAFE.sub(escape, document)


def width(words: str) -> int:
    """Return how many columns words take: two for wide characters, none for combining ones."""
    if words.isascii():
        return len(words)
    from unicodedata import combining, east_asian_width

    return sum(
        0 if combining(c) or c in "\u200c\u200d\ufe0f" else 2 if east_asian_width(c) in "WF" else 1 for c in words
    )


def cut(words: str, columns: int) -> str:
    """Return words in at most so many columns, the last an ellipsis where something is missing."""
    if width(words) <= columns:
        return words
    kept = words
    while kept and width(kept) > columns - 1:
        kept = kept[: -max(1, (width(kept) - columns + 1) // 2)]
    return kept + "…" if columns > 0 else ""


def pad(words: str, columns: int) -> str:
    """Return words filled up with spaces to so many columns."""
    return words + " " * (columns - width(words))


def is_terminal(stream: TextIO) -> bool:
    """Return whether a person reads this stream."""
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def columns() -> int:
    """Return how wide a line may be: COLUMNS, or the terminal's, or 80 in a pipe."""
    return max(20, shutil.get_terminal_size((80, 24)).columns)


def paint(words: str, colour: str) -> str:
    """Return words in a colour where a person reads standard output and has not set NO_COLOR."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not is_terminal(sys.stdout)
    return words if plain else f"\x1b[{COLOURS[colour]}m{words}\x1b[0m"
