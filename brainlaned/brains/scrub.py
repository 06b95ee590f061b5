"""Removing secrets from what a brain says, since it may echo its key anywhere: in texts and in arriving bytes."""

import re
from typing import AnyStr

_REMOVED = "[removed]"
_TELLING = 8
"""So many characters of a secret at the end of something cut short are too many to be left standing."""


def scrub(text: str, secrets: tuple[str, ...]) -> str:
    """Remove every secret from a text."""
    is_there = any(secret in text for secret in secrets)
    if not is_there and all(_overlap(text, secret) < _TELLING for secret in secrets):
        return text  # long ones should not be copied for nothing
    scrubber = Scrubber(secrets)
    # Secrets are ASCII, so no character is cut in two.
    return (scrubber.feed(text.encode("utf-8", "surrogatepass")) + scrubber.flush()).decode("utf-8", "surrogatepass")


class Scrubber:
    """Remove every secret from bytes that arrive in pieces; where one begins another, the longer goes first.

    Only what may be the beginning of a secret is held back, so a stream without one passes undelayed.
    """

    def __init__(self, secrets: tuple[str, ...]) -> None:
        self._secrets = sorted((secret.encode() for secret in secrets), key=len, reverse=True)
        self._any = re.compile(b"|".join(re.escape(secret) for secret in self._secrets))
        self._held = b""

    def feed(self, chunk: bytes) -> bytes:
        """Return what of the bytes so far surely holds no secret."""
        if not self._secrets:
            return chunk
        text = self._held + chunk
        return self._replace(text, len(text) - max(_overlap(text, secret) for secret in self._secrets))

    def flush(self) -> bytes:
        """Return what was held back, now that nothing more follows."""
        text, self._held = self._held, b""
        clean = self._replace(text, len(text))
        begun = max((_overlap(clean, secret) for secret in self._secrets), default=0)
        return clean[: len(clean) - begun] + _REMOVED.encode() if begun >= _TELLING else clean

    def _replace(self, text: bytes, end: int) -> bytes:
        """Return the text up to `end` without secrets, and hold back what follows."""
        parts, position = [], 0
        for found in self._any.finditer(text):
            if found.start() >= end:
                break
            parts += [text[position : found.start()], _REMOVED.encode()]
            position = found.end()
        end = max(position, end)
        self._held = text[end:]
        return b"".join([*parts, text[position:end]])


def _overlap(text: AnyStr, secret: AnyStr) -> int:
    """Return how much at the end of a text begins a secret."""
    longest = min(len(text), len(secret) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(secret[:length])), 0)
