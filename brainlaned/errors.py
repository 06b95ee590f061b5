"""What can go wrong in ways that cross a room's wall. Expected ends of a call are values, not exceptions.

    BrainlaneError
    ├── StartRefused     the daemon may not run here: an exit status and one line for the operator
    ├── Refused          a request is answered with an error object: its kind decides the HTTP status
    ├── Superseded       a compare-and-set found that the row has moved on; nothing was changed
    ├── CancelAsked      arming refused, because somebody asked to cancel the job first
    ├── Busy             another process holds the database; nothing was stored
    └── CommitUnknown    a commit failed: stored or not, only a later look can tell

Messages read "cannot VERB OBJECT: CAUSE", lowercase, the value in quotes, no trailing dot.
"""

from .wire import DaemonExit, ErrorKind


class BrainlaneError(Exception):
    """The root, so that a caller can tell our own refusals from a fault of the program."""


class StartRefused(BrainlaneError):
    """The daemon may not start, or not go on, in this place or with this configuration."""

    def __init__(self, status: DaemonExit, message: str, next_action: str = "brainlaned --help") -> None:
        super().__init__(message)
        self.status = status
        self.next_action = next_action


class Refused(BrainlaneError):
    """A request that is answered with an error object, nothing having been changed."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        field: str | None = None,
        next_action: str = "brainctl status",
        retry_safe: bool = False,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.field = field
        self.next_action = next_action
        self.retry_safe = retry_safe


class Superseded(BrainlaneError):
    """The row is no longer as the caller knew it. Raised by the store alone, after changing nothing."""


class CancelAsked(BrainlaneError):
    """The job may not be armed any more. Raised by the store alone, after changing nothing."""


class Busy(BrainlaneError):
    """The database stayed locked by another process for the whole busy time-out. Nothing was stored."""


class CommitUnknown(BrainlaneError):
    """COMMIT itself failed, so that what it held may be on the disk or not."""
