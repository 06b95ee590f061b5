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
    "\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0\U0001d173-\U0001d17a"  # unseen fillers
    "\ud800-\udfff\U000e0000-\U000e0fff]"  # half characters, tags and the variation selectors beyond the first 16
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


def wrapped(words: str, columns: int, indent: str = "", first: str | None = None) -> list[str]:
    """Break words into safe lines of at most so many columns, each behind the indent, the first behind its own.

    A word that is longer than a line is broken where the line ends.
    """
    room = max(1, columns - max(width(indent), width(first or "")))
    lines = [""]
    for word in one_line(words).split(" "):
        for piece in _pieces(word, room):
            longer = f"{lines[-1]} {piece}" if lines[-1] else piece
            if lines[-1] and width(longer) > room:
                lines.append(piece)
            else:
                lines[-1] = longer
    return [(indent if first is None or i else first) + line for i, line in enumerate(lines)]


def _pieces(word: str, room: int) -> list[str]:
    if width(word) <= room:
        return [word]
    pieces, used = [""], 0
    for character in word:
        taken = width(character)
        if pieces[-1] and used + taken > room:
            pieces.append("")
            used = 0
        pieces[-1] += character
        used += taken
    return pieces


def command(words: str, columns: int, indent: str, first: str | None = None) -> list[str]:
    """Set a command to paste: where it is longer than a line it goes on after a backslash, as a shell reads it.

    A word that is longer than a line goes on at the very beginning of the next one. Only a quoted one cannot be broken.
    """
    shell_words = re.findall(r"(?:'[^']*'|\"[^\"]*\"|\\.|[^\s'\"\\]|['\"\\])+", one_line(words))
    lines = [first if first is not None else indent]
    is_empty = True
    for i, word in enumerate(shell_words):
        ends = 0 if i == len(shell_words) - 1 else len(" \\")
        if is_empty:
            lines[-1] += word
        elif width(f"{lines[-1]} {word}") + ends <= columns:
            lines[-1] += f" {word}"
        else:
            lines[-1] += " \\"
            lines.append(f"{indent}  {word}")
        is_empty = False
        while width(lines[-1]) + ends > columns and not set(word) & set("'\"\\"):
            head = _pieces(lines[-1], columns - 1)[0]
            lines[-1:] = [f"{head}\\", lines[-1].removeprefix(head)]
    return lines


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
