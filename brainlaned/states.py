"""The state machine of a job, what counts as evidence about one attempt, and what a verdict on it says.

               submit                claim                    answer stored
  (nothing) ──────────▶ queued ─────────────────▶ running ─────────────────▶ done
                        │  ▲ ▲                     │ │ │
                 cancel │  │ │ surely not sent,    │ │ └─ cannot succeed ──▶ failed ──(retry)──▶ queued
                        │  │ │ or may be retried   │ │
                        ▼  │ └─────────────────────┘ └─ may have been sent ▶ held ──▶ queued | done
                cancelled  └──────────────── resend ──────────────────────────┘        failed | cancelled
                        ▲──────────────── cancel while running or held

MOVES below is the only place that encodes the machine; the database repeats it as constraints and compare-and-set.
One move is not drawn: queued ──▶ held, for a job that its brain turned away again and again while it served others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .wire import AttemptStatus, Flag, GateReason, Reason, Status

MOVES: dict[Status | None, frozenset[Status]] = {
    None: frozenset({Status.QUEUED}),
    Status.QUEUED: frozenset({Status.RUNNING, Status.HELD, Status.CANCELLED}),
    Status.RUNNING: frozenset({Status.QUEUED, Status.HELD, Status.DONE, Status.FAILED, Status.CANCELLED}),
    Status.HELD: frozenset({Status.QUEUED, Status.DONE, Status.FAILED, Status.CANCELLED}),
    Status.DONE: frozenset(),
    Status.FAILED: frozenset({Status.QUEUED}),
    Status.CANCELLED: frozenset(),
}

FINAL = frozenset({Status.DONE, Status.FAILED, Status.CANCELLED})
"""Statuses that the lane never leaves by itself."""


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """How a local command ended, by the files that its runner left."""

    was_started: bool = True
    exit_status: int | None = None
    """Negative: the signal that ended it. None: nobody wrote it down."""
    meaning: str = "error"
    """What the route says that exit status means: retry, fail or error."""
    complaint: str = field(default="", repr=False)
    """The last it said on stderr, or why it could not be started; secrets removed."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one attempt. Times are RFC 3339 text; None means that it was not seen to happen.

    `armed_at` is the only mark whose absence proves anything: without it not one byte left.
    """

    armed_at: str | None = None
    sent_at: str | None = None
    send_failed_at: str | None = None
    headers_at: str | None = None
    http_status: int | None = None
    upstream_id: str | None = None
    first_byte_at: str | None = None
    ended_at: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    """Response headers worth keeping, names in lower case, secrets removed."""
    whole: bool = False
    """The body ended as its own framing said it would."""
    spooled: bool = False
    """A spool file with its first line is there."""
    command: CommandEnd | None = None
    """Of an attempt by a local command, which has no headers and no HTTP status."""
    cut_by: Reason | None = None
    """Why we ended the call from our side: a limit, a cancel, a stop."""
    error: str | None = None
    """What the client said when the call did not end properly, secrets removed."""
    fault: str | None = None
    """What on our own side kept the request from being sent."""
    body_start: bytes = field(default=b"", repr=False)
    """The first bytes of the body, secrets removed, for the case that it is no answer."""


@dataclass(frozen=True, slots=True)
class Closing:
    """Why a route's gate must close, and until when."""

    reason: GateReason
    detail: str
    operator_only: bool = False
    """Never probed: only a person opens it."""
    wait_s: float | None = None
    """What the brain named; None: waits that grow with each refusal in a row."""
    strike: bool = False
    """The brain answered this very job so; three in a row make it a suspect."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the evidence means: where the job goes, how the attempt ended, and why."""

    job: Status
    attempt: AttemptStatus
    reason: Reason
    detail: str
    """One sentence for the operator that quotes the evidence."""
    uses_attempt: bool = True
    wait_s: float | None = None
    """Seconds until a job that is queued again may run; None: at once."""
    quote: str = field(default="", repr=False)
    """What of `detail` are the brain's own words."""
    text: str = field(default="", repr=False)
    response: str | None = field(default=None, repr=False)
    """The completion object as JSON, an empty text standing where `text` belongs."""
    raw: bytes | None = field(default=None, repr=False)
    """The answer's own bytes, where its text could not hold them."""
    finish_reason: str | None = None
    usage: Mapping[str, object] | None = None
    flags: frozenset[Flag] = frozenset()
    attempt_reason: Reason | None = None
    """Where the attempt ended for a nearer reason than the job moved for."""
    closes: Closing | None = None
    """The route's gate closes for this."""
    opens: bool = False
    """The brain gave a real answer, so the route's gate opens."""

    @property
    def said(self) -> str:
        """The sentence as a log may have it: without the brain's own words, unless they are why a gate closes."""
        return self.detail.replace(self.quote, "") if self.quote and self.closes is None else self.detail
