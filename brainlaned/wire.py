"""The contract between brainlaned and whoever talks to it: the words, numbers and places that both sides must share.

Owns the vocabulary of the wire (statuses, reasons, kinds of error), the exit statuses, the limits of a request, the
format of a time, and where a lane's socket lies when nobody says otherwise. It is the only module of the daemon that
brainctl may import, so it imports nothing of the daemon and nothing slow. What stands here is public: a word is added,
never renamed.
"""

import os
from datetime import UTC, datetime
from enum import IntEnum, StrEnum
from pathlib import Path

VERSION = "0.1.0.dev0"

PROTOCOL = "1"
PROTOCOL_HEADER = "Brainlane-Protocol"

MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_NESTING = 64
MAX_LABELS = 16
MAX_LABEL_VALUE_BYTES = 256
LABEL_KEY_PATTERN = r"[a-z0-9_.-]{1,63}"
LANE_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}"
MAX_KEY_BYTES = 255
MAX_MODEL_BYTES = 255
MAX_REASON_BYTES = 1000
MAX_ATTEMPTS = 1_000_000
MAX_WAIT_S = 60
MAX_LIST = 500
MAX_SOCKET_PATH_BYTES = 107
"""Linux's sun_path holds 108 bytes, one of which ends the string (unix(7))."""


class Status(StrEnum):
    """Where a job stands. The moves between them are in states.py."""

    QUEUED = "queued"
    RUNNING = "running"
    HELD = "held"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class AttemptStatus(StrEnum):
    """How one try at a job ended, or that it has not."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """Surely not executed."""
    UNKNOWN = "unknown"
    """May have run, or ran and its answer is not whole."""
    CANCELLED = "cancelled"


class Reason(StrEnum):
    """Why a job made its last move, or an attempt ended: a closed list, which the database's CHECK repeats for jobs."""

    SUBMITTED = "submitted"
    CLAIMED = "claimed"
    ANSWERED = "answered"
    NOT_SENT = "not-sent"
    NOT_EXECUTED = "not-executed"
    ASKED_TO_WAIT = "asked-to-wait"
    ROUTE_REFUSED = "route-refused"
    UPSTREAM_ERROR = "upstream-error"
    ASKED_AGAIN = "asked-again"
    SENT_OUTCOME_UNKNOWN = "sent-outcome-unknown"
    ANSWER_INCOMPLETE = "answer-incomplete"
    ANSWER_UNREADABLE = "answer-unreadable"
    ANSWER_TRUNCATED = "answer-truncated"
    CRASHED_WORKER = "crashed-worker"
    EVIDENCE_CONTRADICTS = "evidence-contradicts"
    REFUSED_REPEATEDLY = "refused-repeatedly"
    ATTEMPTS_EXHAUSTED = "attempts-exhausted"
    FILTERED = "filtered"
    EMPTY_OUTPUT = "empty-output"
    BAD_REQUEST = "bad-request"
    CANCEL_REQUESTED = "cancel-requested"
    OPERATOR_RESENT = "operator-resent"
    OPERATOR_ACCEPTED = "operator-accepted"
    OPERATOR_COMPLETED = "operator-completed"
    OPERATOR_FAILED = "operator-failed"
    OPERATOR_CANCELLED = "operator-cancelled"
    OPERATOR_RETRIED = "operator-retried"
    # Why a call was cut by us; these stand on the attempt only.
    CONNECT_LIMIT = "connect-limit"
    FIRST_BYTE_LIMIT = "first-byte-limit"
    IDLE_LIMIT = "idle-limit"
    TOTAL_LIMIT = "total-limit"
    OUTPUT_LIMIT = "output-limit"
    DAEMON_STOPPED = "daemon-stopped"


class Waiting(StrEnum):
    """Why a queued job still waits. Derived by operator_view, stored nowhere."""

    WAITING_TURN = "waiting-turn"
    LANE_PAUSED = "lane-paused"
    ROUTE_GATED = "route-gated"
    ROUTE_MISSING = "route-missing"
    RETRY_WAIT = "retry-wait"
    NOT_BEFORE = "not-before"
    DISK_RESERVE = "disk-reserve"
    ANSWER_WAITING = "answer-waiting"


class GateReason(StrEnum):
    """Why a route's gate is closed."""

    UNREACHABLE = "unreachable"
    ASKED_TO_WAIT = "asked-to-wait"
    KEY_REFUSED = "key-refused"
    QUOTA = "quota"
    WRONG_ADDRESS = "wrong-address"
    MODEL_UNKNOWN = "model-unknown"


class Flag(StrEnum):
    """A remark on an answer that was taken all the same."""

    TRUNCATED = "truncated"
    PARTIAL = "partial"
    NO_END_MARKER = "no-end-marker"
    NO_FINISH_REASON = "no-finish-reason"
    INVALID_BYTES = "invalid-bytes"
    OPERATOR_TEXT = "operator-text"


class Priority(StrEnum):
    """How much of a head start a job buys; the seconds are in the configuration."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"


class Decision(StrEnum):
    """What a person may decide about a held job."""

    RESEND = "resend"
    ACCEPT = "accept"
    COMPLETE = "complete"
    FAIL = "fail"
    CANCEL = "cancel"


class ErrorKind(StrEnum):
    """The closed list of what can be wrong, as the `kind` of an error object."""

    INVALID = "invalid"
    FORBIDDEN = "forbidden"
    NO_SUCH_JOB = "no-such-job"
    NO_SUCH_PATH = "no-such-path"
    WRONG_METHOD = "wrong-method"
    KEY_CONFLICT = "key-conflict"
    MOVED_ON = "moved-on"
    TOO_LATE = "too-late"
    NO_OUTPUT = "no-output"
    TOO_LARGE = "too-large"
    TOO_SLOW = "too-slow"
    QUEUE_FULL = "queue-full"
    TOO_MANY_WAITERS = "too-many-waiters"
    DISK_RESERVE = "disk-reserve"
    BUSY = "busy"
    OUTCOME_UNKNOWN = "outcome-unknown"
    START_REFUSED = "start-refused"
    INTERNAL = "internal"
    # What only a client can find out: the ways in which no lane answers.
    NO_SOCKET = "no-socket"
    DEAD_SOCKET = "dead-socket"
    NO_PERMISSION = "no-permission"
    NO_ANSWER = "no-answer"
    LANE_FAILED = "lane-failed"
    NOT_A_LANE = "not-a-lane"
    USAGE = "usage"


class Exit(IntEnum):
    """Exit statuses of brainctl."""

    OK = 0
    FAILED = 1
    USAGE = 2
    HELD = 3
    CANCELLED = 4
    NO_SUCH_JOB = 5
    REFUSED = 6
    WAITED_LONG_ENOUGH = 7
    PERMISSION = 8
    NO_LANE = 9
    INTERNAL = 10


class DaemonExit(IntEnum):
    """Exit statuses of brainlaned (sysexits.h); systemd restarts none of those but OK and FAILURE."""

    OK = 0
    FAILURE = 1
    USAGE = 64
    DATABASE = 65
    LANE_TAKEN = 69
    PERMISSION = 77
    CONFIGURATION = 78


EXIT_OF_STATUS: dict[Status, Exit] = {
    Status.DONE: Exit.OK,
    Status.FAILED: Exit.FAILED,
    Status.HELD: Exit.HELD,
    Status.CANCELLED: Exit.CANCELLED,
}
"""The exit status of a command that waited for a job; one that stands elsewhere was not waited for long enough."""

EXIT_OF_KIND: dict[ErrorKind, Exit] = {
    ErrorKind.INVALID: Exit.REFUSED,
    ErrorKind.FORBIDDEN: Exit.PERMISSION,
    ErrorKind.NO_SUCH_JOB: Exit.NO_SUCH_JOB,
    ErrorKind.NO_SUCH_PATH: Exit.INTERNAL,
    ErrorKind.WRONG_METHOD: Exit.INTERNAL,
    ErrorKind.KEY_CONFLICT: Exit.REFUSED,
    ErrorKind.MOVED_ON: Exit.REFUSED,
    ErrorKind.TOO_LATE: Exit.REFUSED,
    ErrorKind.NO_OUTPUT: Exit.REFUSED,
    ErrorKind.TOO_LARGE: Exit.REFUSED,
    ErrorKind.TOO_SLOW: Exit.REFUSED,
    ErrorKind.QUEUE_FULL: Exit.REFUSED,
    ErrorKind.TOO_MANY_WAITERS: Exit.REFUSED,
    ErrorKind.DISK_RESERVE: Exit.REFUSED,
    ErrorKind.BUSY: Exit.NO_LANE,
    ErrorKind.OUTCOME_UNKNOWN: Exit.INTERNAL,
    ErrorKind.START_REFUSED: Exit.NO_LANE,
    ErrorKind.INTERNAL: Exit.INTERNAL,
    ErrorKind.NO_SOCKET: Exit.NO_LANE,
    ErrorKind.DEAD_SOCKET: Exit.NO_LANE,
    ErrorKind.NO_PERMISSION: Exit.PERMISSION,
    ErrorKind.NO_ANSWER: Exit.NO_LANE,
    ErrorKind.LANE_FAILED: Exit.NO_LANE,
    ErrorKind.NOT_A_LANE: Exit.NO_LANE,
    ErrorKind.USAGE: Exit.USAGE,
}

HTTP_OF_KIND: dict[ErrorKind, int] = {
    ErrorKind.INVALID: 422,
    ErrorKind.FORBIDDEN: 403,
    ErrorKind.NO_SUCH_JOB: 404,
    ErrorKind.NO_SUCH_PATH: 404,
    ErrorKind.WRONG_METHOD: 405,
    ErrorKind.KEY_CONFLICT: 409,
    ErrorKind.MOVED_ON: 409,
    ErrorKind.TOO_LATE: 409,
    ErrorKind.NO_OUTPUT: 409,
    ErrorKind.TOO_LARGE: 413,
    ErrorKind.TOO_SLOW: 408,
    ErrorKind.QUEUE_FULL: 429,
    ErrorKind.TOO_MANY_WAITERS: 429,
    ErrorKind.DISK_RESERVE: 507,
    ErrorKind.BUSY: 503,
    ErrorKind.OUTCOME_UNKNOWN: 503,
    ErrorKind.START_REFUSED: 503,
    ErrorKind.INTERNAL: 500,
}
"""The HTTP status of every kind that a daemon can answer."""


def error_object(
    kind: str, message: str, next_action: str | None, *, retry_safe: bool, field: str | None = None
) -> dict[str, dict[str, object]]:
    """Return the one shape in which anything is refused; `field`: which part of the request is at fault."""
    error: dict[str, object] = {"kind": kind, "message": message, "next_action": next_action, "retry_safe": retry_safe}
    return {"error": error if field is None else {**error, "field": field}}


def format_time(moment: datetime) -> str:
    """Write a moment as RFC 3339 in UTC with six digits of microseconds, so that text order is time order."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def parse_time(text: str) -> datetime:
    """Read an RFC 3339 time as an aware moment in UTC.

    Raises ValueError for anything that is not a date with a time, and for a time without an offset: the same words
    mean another moment in another zone, and twice a year two moments in the same zone.
    """
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None or len(text) < len("2026-01-31T22:00Z"):
            raise ValueError("a time needs a date, a time of day and an offset, like 2026-01-31T22:00:00Z")
        return moment.astimezone(UTC)
    except OverflowError as error:
        raise ValueError("the time is out of range") from error


def system_socket(lane: str | None = None) -> Path:
    """Return where systemd puts the socket of a lane (None: the lane without a name)."""
    return Path("/run", f"brainlane-{lane}" if lane else "brainlane", "control.sock")


def user_socket(lane: str | None = None) -> Path:
    """Return where a lane that runs without root puts its socket (XDG_RUNTIME_DIR, by platformdirs)."""
    import warnings

    from platformdirs import user_runtime_path

    with warnings.catch_warnings():
        # That there is no such directory is for whoever needs it to say.
        warnings.simplefilter("ignore")
        return user_runtime_path(f"brainlane-{lane}" if lane else "brainlane") / "control.sock"


def find_socket(lane: str | None = None) -> Path:
    """Return the socket that a client should try: the user's own lane where one is, else the system's."""
    system = system_socket(lane)
    if os.geteuid() != 0:
        try:
            own = user_socket(lane)
        except OSError:
            return system  # somebody else has taken the place where ours would be
        # Where there is no runtime directory it lies below /tmp, where anybody can lie in wait.
        if _is_mine(own.parent) or not (os.path.exists(system) or os.path.exists(own)):  # noqa: PTH110 - as below
            return own
    return system


def _is_mine(directory: Path) -> bool:
    try:
        return os.lstat(directory).st_uid == os.geteuid()
    except OSError:  # a directory that may not be searched is no error
        return False
