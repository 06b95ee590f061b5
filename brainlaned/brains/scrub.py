"""Removing secrets from what a brain says, since it may echo its key anywhere: in texts and in arriving bytes."""


def scrub(text: str, secrets: tuple[str, ...]) -> str:
    """Remove every secret from a text, the longest first."""
    for secret in secrets:
        text = text.replace(secret, "[removed]")
    return text


class Scrubber:
    """Remove every secret from bytes that arrive in pieces, since a brain may echo its key anywhere.

    Only what may be the beginning of a secret is held back, so a stream without one passes undelayed.
    """

    def __init__(self, secrets: tuple[str, ...]) -> None:
        self._secrets = [secret.encode() for secret in secrets]
        self._held = b""

    def feed(self, chunk: bytes) -> bytes:
        """Return what of the bytes so far surely holds no secret."""
        if not self._secrets:
            return chunk
        text = self._held + chunk
        for secret in self._secrets:
            text = text.replace(secret, b"[removed]")
        held = max((_overlap(text, secret) for secret in self._secrets), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> bytes:
        """Return what was held back, now that nothing more follows."""
        held, self._held = self._held, b""
        return held


def _overlap(text: bytes, secret: bytes) -> int:
    longest = min(len(text), len(secret) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(secret[:length])), 0)
