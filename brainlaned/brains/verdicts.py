"""What an answer means: the one table from evidence to verdict, for a live call and after a crash alike.

It is pure: evidence, reply and terms in, verdict out. Its rows are those of the README's tables. The classes:

    J  the job fails, nothing else changes          S  not executed: later, no attempt used; the gate waits
    C  a retry may cost again: uses an attempt      L  the route's gate closes, the job stays queued
    A  unknown: held, or asked again by leave given before anything was sent

Codes decide, never words in a text: providers' texts change, and the word "quota" means two opposite things.
"""

import dataclasses
import email.utils
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from ..states import Closing, CommandEnd, Evidence, Verdict
from ..wire import AttemptStatus, Flag, GateReason, Reason, Status, parse_time
from .reply import Reply
from .scrub import scrub

QUOTA_CODES = frozenset(
    {
        "insufficient_quota",
        "credit_balance_exhausted",
        "billing_error",
        "billing_hard_limit_reached",
        "insufficient_balance",
        "insufficient_credits",
        "payment_required",
    }
)
FILTER_CODES = frozenset(
    {"content_filter", "content_policy_violation", "responsibleaipolicyviolation", "content_policy", "safety"}
)
_BODY_CHARACTERS = 500


class Kind(Enum):
    """The classes of the table."""

    JOB = "J"
    LATER = "S"
    COSTLY = "C"
    GATE = "L"
    AMBIGUOUS = "A"


@dataclass(frozen=True, slots=True)
class Terms:
    """What was agreed about the attempt before it was made."""

    may_run_twice: bool
    attempts_left: int
    """How many attempts may still be used, this one included."""
    names_model: bool
    require_complete: bool
    retry_first_s: float
    retry_cap_s: float
    attempts_used: int = 0
    cancel_requested: bool = False
    secrets: tuple[str, ...] = ()

    def growing_wait_s(self, times: int) -> float:
        """Return the wait after `times` earlier ones: doubling from the first, up to the cap, in seconds."""
        return float(min(self.retry_cap_s, self.retry_first_s * 2 ** min(times, 40)))


def judge(evidence: Evidence, reply: Reply | None, terms: Terms) -> Verdict:
    """Say what became of an attempt. Precedence: a recorded cancel; an answer; not sent; not executed; unknown."""
    verdict = _scrubbed(_judge(evidence, reply, terms), terms.secrets)
    complaint = f": {evidence.command.complaint}" if evidence.command and evidence.command.complaint else ""
    quotes = (scrub(quote, terms.secrets) for quote in (complaint, _quote(evidence, reply, terms)))
    quote = next((quote for quote in quotes if quote and quote in verdict.detail), "")
    return dataclasses.replace(verdict, quote=quote)


def _scrubbed(verdict: Verdict, secrets: tuple[str, ...]) -> Verdict:
    """Remove what only shows once the pieces are put together: a key cut across two deltas, or escaped in JSON."""
    if not secrets:
        return verdict
    usage = verdict.usage
    return dataclasses.replace(
        verdict,
        detail=scrub(verdict.detail, secrets),
        text=scrub(verdict.text, secrets),
        response=None if verdict.response is None else _json_without(json.loads(verdict.response), secrets),
        finish_reason=None if verdict.finish_reason is None else scrub(verdict.finish_reason, secrets),
        usage=None if usage is None else json.loads(_json_without(usage, secrets)),
    )


def _json_without(value: Any, secrets: tuple[str, ...]) -> str:
    """Write a value as JSON with every secret removed from its texts."""
    return json.dumps(_without(value, secrets), ensure_ascii=False)


def _without(value: Any, secrets: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        return scrub(value, secrets)
    if isinstance(value, Mapping):
        return {scrub(key, secrets): _without(item, secrets) for key, item in value.items()}
    return [_without(item, secrets) for item in value] if isinstance(value, list | tuple) else value


def _judge(evidence: Evidence, reply: Reply | None, terms: Terms) -> Verdict:
    if terms.cancel_requested:
        return _cancelled(evidence, reply)
    if evidence.armed_at is None:
        said = "and no leave to send was recorded before it"
        if evidence.headers_at is not None or evidence.spooled:
            said = f"an answer (HTTP {evidence.http_status}) is there, {said}"
            return _held(evidence, reply, Reason.EVIDENCE_CONTRADICTS, said)
        if evidence.command is not None and evidence.command.was_started:
            return _held(evidence, reply, Reason.EVIDENCE_CONTRADICTS, f"the command was started, {said}")
        return _not_sent(evidence, terms)
    if evidence.command is not None:
        return _command(evidence, evidence.command, reply, terms)
    if evidence.headers_at is not None or evidence.spooled:
        return _answered(evidence, reply, terms)
    if evidence.send_failed_at is not None:
        said = f"the upload failed at {evidence.send_failed_at}, so the brain cannot have the whole request"
        return _not_executed(evidence, said)
    return _ambiguous(evidence, terms, f"armed at {evidence.armed_at}, {_sent(evidence)}, and no answer came")


def _command(evidence: Evidence, end: CommandEnd, reply: Reply | None, terms: Terms) -> Verdict:
    """Judge a local command by its exit status; without one, by whether it was started."""
    if not end.was_started:
        return _not_executed(evidence, f"the command was not started{f': {end.complaint}' if end.complaint else ''}")
    said = f"armed at {evidence.armed_at}, started{f' at {evidence.sent_at}' if evidence.sent_at else ''}"
    complaint = f": {end.complaint}" if end.complaint else ""
    text = reply.output if reply else ""
    if evidence.cut_by is Reason.OUTPUT_LIMIT:
        return _incomplete(evidence, reply, terms, f"{said}, cut by brainlane at max_output_mib", may_ask_again=False)
    if reply is not None and end.exit_status == 0 and text.strip():
        return Verdict(
            job=Status.DONE,
            attempt=AttemptStatus.SUCCEEDED,
            reason=Reason.ANSWERED,
            detail=f"{said}, exit status 0",
            text=text,
            response=json.dumps(reply.frame(), ensure_ascii=False),
            flags=reply.flags,
            opens=True,
        )
    if end.exit_status is None:
        said = f"{said}, and it did not end by itself{complaint}"
        return _incomplete(evidence, reply, terms, said) if text else _ambiguous(evidence, terms, said)
    if end.exit_status == 0:
        return _held(evidence, reply, Reason.ANSWER_UNREADABLE, f"{said}, exit status 0 and no text{complaint}")
    status = end.exit_status
    said = f"{said}, {f'signal {-status}' if status < 0 else f'exit status {status}'}{complaint}"
    if end.meaning == "retry":
        return _by_kind(Kind.LATER, status, None, said, evidence, reply, terms)
    return _by_kind(Kind.JOB if end.meaning == "fail" else Kind.COSTLY, status, None, said, evidence, reply, terms)


def _answered(evidence: Evidence, reply: Reply | None, terms: Terms) -> Verdict:
    status = evidence.http_status or 0
    if not evidence.spooled:
        # Cannot come from a live call: the first line of the spool is on the disk before the mark is in the database.
        if 200 <= status < 300:
            return _incomplete(evidence, None, terms, f"HTTP {status} at {evidence.headers_at}, and its spool is gone")
        detail = f"HTTP {status} at {evidence.headers_at} is recorded, and its spool is gone"
        return _held(evidence, None, Reason.EVIDENCE_CONTRADICTS, detail)
    if 200 <= status < 300:
        return _two_hundred(evidence, reply, terms)
    code = _code_of(reply.error) if reply and reply.error else None
    kind = classify(status, code, names_model=terms.names_model, upload_failed=evidence.send_failed_at is not None)
    said = f"HTTP {status} at {evidence.headers_at}{_quote(evidence, reply, terms)}"
    return _by_kind(kind, status, code, said, evidence, reply, terms)


def classify(status: int, code: str | None, *, names_model: bool, upload_failed: bool = False) -> Kind:
    """Return the class of an HTTP status that is not 2xx, with the error code of its body where there is one."""
    if status == 429 and code in QUOTA_CODES:
        return Kind.GATE
    if status in {409, 425, 429, 503, 529}:
        return Kind.LATER
    if status == 408:
        return Kind.LATER if upload_failed else Kind.COSTLY
    if status in {502, 504, 524}:
        return Kind.AMBIGUOUS
    if status in {401, 402, 403, 407} or 300 <= status < 400:
        return Kind.GATE
    if status == 404 and not names_model:
        return Kind.GATE
    if 400 <= status < 500:
        return Kind.JOB
    return Kind.COSTLY


def _by_kind(
    kind: Kind, status: int, code: str | None, said: str, evidence: Evidence, reply: Reply | None, terms: Terms
) -> Verdict:
    match kind:
        case Kind.JOB:
            filtered = code in FILTER_CODES
            return Verdict(
                job=Status.FAILED,
                attempt=AttemptStatus.FAILED,
                reason=Reason.FILTERED if filtered else Reason.BAD_REQUEST,
                detail=said,
                text=reply.text if reply else "",
                opens=True,
            )
        case Kind.GATE:
            return Verdict(
                job=Status.QUEUED,
                attempt=AttemptStatus.FAILED,
                reason=Reason.ROUTE_REFUSED,
                detail=said,
                uses_attempt=False,
                closes=Closing(_gate_reason(status, code), said, operator_only=True),
            )
        case Kind.LATER:
            return Verdict(
                job=Status.QUEUED,
                attempt=AttemptStatus.FAILED,
                reason=Reason.ASKED_TO_WAIT,
                detail=said,
                uses_attempt=False,
                closes=Closing(
                    GateReason.ASKED_TO_WAIT,
                    said,
                    wait_s=retry_after_s(evidence.headers, evidence.headers_at),
                    strike=not (status == 503 and _is_loading(evidence, reply)),
                ),
            )
        case Kind.COSTLY:
            return _costly(evidence, reply, terms, said)
        case Kind.AMBIGUOUS:
            return _ambiguous(evidence, terms, f"{said}: a gateway spoke, the brain may still be working")


def _two_hundred(evidence: Evidence, reply: Reply | None, terms: Terms) -> Verdict:
    status = evidence.http_status
    answer = f"HTTP {status} at {evidence.headers_at}"
    if evidence.cut_by is Reason.OUTPUT_LIMIT:
        return _incomplete(evidence, reply, terms, f"{answer}, cut by brainlane at max_output_mib", may_ask_again=False)
    if reply is not None and reply.complete:
        return _complete(evidence, reply, terms, answer)
    if reply is not None and reply.error is not None:
        said = f"{answer}, an error inside{_quote(evidence, reply, terms)}"
        if reply.output or reply.reasoning:
            return _incomplete(evidence, reply, terms, f"{said} after part of the text", may_ask_again=False)
        return _error_inside(evidence, reply, terms, said)
    if evidence.whole and not (reply is not None and (reply.output or reply.reasoning)):
        said = f"{answer}, a whole body that is no answer{_quote(evidence, reply, terms)}"
        if terms.attempts_used == 0 and terms.attempts_left > 1:
            return _costly(evidence, reply, terms, said)
        return _held(evidence, reply, Reason.ANSWER_UNREADABLE, said)
    return _incomplete(evidence, reply, terms, f"{answer}, and the answer stops before its end")


def _complete(evidence: Evidence, reply: Reply, terms: Terms, answer: str) -> Verdict:
    flags = set(reply.flags)
    detail = f"{answer}, complete"
    text = reply.output
    if reply.finish_reason == "length":
        flags.add(Flag.TRUNCATED)
        detail = f"{answer}, cut off by the token limit"
    outcome, reason = Status.DONE, Reason.ANSWERED
    if reply.finish_reason in {"content_filter", "refusal"} or (reply.refusal and not reply.text):
        outcome, reason = Status.FAILED, Reason.FILTERED
        detail = f"{answer}, filtered or refused"
    elif reply.finish_reason == "length" and not text:
        outcome, reason = Status.FAILED, Reason.EMPTY_OUTPUT
        detail = f"{answer}, and the token limit was spent before any text: raise max_tokens"
    elif reply.finish_reason == "length" and terms.require_complete:
        outcome, reason = Status.HELD, Reason.ANSWER_TRUNCATED
    return Verdict(
        job=outcome,
        attempt=AttemptStatus.FAILED if outcome is Status.FAILED else AttemptStatus.SUCCEEDED,
        reason=reason,
        detail=detail,
        text=text,
        response=json.dumps(reply.frame(), ensure_ascii=False),
        finish_reason=reply.finish_reason,
        usage=reply.usage,
        flags=frozenset(flags),
        opens=True,
    )


def _error_inside(evidence: Evidence, reply: Reply, terms: Terms, said: str) -> Verdict:
    code = _code_of(reply.error or {})
    status = int(code) if code is not None and re.fullmatch(r"[345]\d\d", code) else 500
    kind = classify(status, code, names_model=terms.names_model)
    if code in QUOTA_CODES:
        kind, status = Kind.GATE, 429
    elif code in FILTER_CODES:
        kind, status = Kind.JOB, 400
    if kind in {Kind.JOB, Kind.GATE}:
        return _by_kind(kind, status, code, said, evidence, reply, terms)
    if kind is Kind.AMBIGUOUS:
        return _ambiguous(evidence, terms, said)
    return _costly(evidence, reply, terms, said)


def _costly(evidence: Evidence, reply: Reply | None, terms: Terms, said: str) -> Verdict:
    again = terms.attempts_left > 1
    wait_s = max(terms.growing_wait_s(terms.attempts_used), retry_after_s(evidence.headers, evidence.headers_at) or 0.0)
    return Verdict(
        job=Status.QUEUED if again else Status.FAILED,
        attempt=AttemptStatus.FAILED,
        reason=Reason.UPSTREAM_ERROR if again else Reason.ATTEMPTS_EXHAUSTED,
        detail=said,
        wait_s=wait_s if again else None,
        text=reply.text if reply else "",
        opens=True,
    )


def _ambiguous(evidence: Evidence, terms: Terms, said: str) -> Verdict:
    if terms.may_run_twice and terms.attempts_left > 1:
        return _ask_again(evidence, None, terms, said)
    return _held(evidence, None, Reason.SENT_OUTCOME_UNKNOWN, said)


def _incomplete(
    evidence: Evidence, reply: Reply | None, terms: Terms, said: str, *, may_ask_again: bool = True
) -> Verdict:
    if may_ask_again and terms.may_run_twice and terms.attempts_left > 1:
        return _ask_again(evidence, reply, terms, said)
    return _held(evidence, reply, Reason.ANSWER_INCOMPLETE, said)


def _ask_again(evidence: Evidence, reply: Reply | None, terms: Terms, said: str) -> Verdict:
    return Verdict(
        job=Status.QUEUED,
        attempt=AttemptStatus.UNKNOWN,
        reason=Reason.ASKED_AGAIN,
        detail=f"{_with_cut(said, evidence)}; may_run_twice was given before it was sent",
        attempt_reason=evidence.cut_by,
        wait_s=terms.growing_wait_s(terms.attempts_used),
        text=reply.output if reply else "",
    )


def _held(evidence: Evidence, reply: Reply | None, reason: Reason, said: str) -> Verdict:
    return Verdict(
        job=Status.HELD,
        attempt=AttemptStatus.UNKNOWN,
        reason=reason,
        detail=_with_cut(said, evidence),
        attempt_reason=evidence.cut_by,
        text=reply.output if reply else "",
        finish_reason=reply.finish_reason if reply else None,
        usage=reply.usage if reply else None,
        flags=reply.flags & {Flag.INVALID_BYTES} if reply else frozenset(),
    )


def _cancelled(evidence: Evidence, reply: Reply | None) -> Verdict:
    if evidence.armed_at is None:
        detail = "cancelled before anything was sent"
    elif evidence.send_failed_at is not None and evidence.headers_at is None:
        detail = f"cancelled; the upload failed at {evidence.send_failed_at}, so it was not executed"
    elif evidence.command is not None:
        detail = f"cancelled; armed at {evidence.armed_at}, {_sent(evidence)}, cost unknown; its processes were ended"
    else:
        detail = (
            f"cancelled; armed at {evidence.armed_at}, {_sent(evidence)}, cost unknown; it may still be running there"
        )
    return Verdict(
        job=Status.CANCELLED,
        attempt=AttemptStatus.CANCELLED,
        reason=Reason.CANCEL_REQUESTED,
        detail=detail,
        uses_attempt=evidence.armed_at is not None,
        text=reply.output if reply else "",
        usage=reply.usage if reply else None,
    )


def _not_sent(evidence: Evidence, terms: Terms) -> Verdict:
    if evidence.error is not None and evidence.cut_by not in {Reason.DAEMON_STOPPED, Reason.CANCEL_REQUESTED}:
        said = _with_cut("nothing was sent", evidence) if evidence.cut_by else f"nothing was sent: {evidence.error}"
        closes, wait_s = Closing(GateReason.UNREACHABLE, said), None
    else:
        # A stop, a crash or our own disk says nothing about the route; only a fault of ours is worth waiting for.
        said = f"nothing was sent: {evidence.fault or 'no leave to send was recorded'}"
        closes, wait_s = None, terms.retry_first_s if evidence.fault else None
    return Verdict(
        job=Status.QUEUED,
        attempt=AttemptStatus.INTERRUPTED,
        reason=Reason.NOT_SENT,
        detail=said,
        attempt_reason=evidence.cut_by,
        uses_attempt=False,
        wait_s=wait_s,
        closes=closes,
    )


def _not_executed(evidence: Evidence, said: str) -> Verdict:
    return Verdict(
        job=Status.QUEUED,
        attempt=AttemptStatus.INTERRUPTED,
        reason=Reason.NOT_EXECUTED,
        detail=_with_cut(said, evidence),
        attempt_reason=evidence.cut_by,
        uses_attempt=False,
        closes=Closing(GateReason.UNREACHABLE, said),
    )


def retry_after_s(headers: Mapping[str, str], headers_at: str | None) -> float | None:
    """Return how long the brain asked us to wait, in seconds, or None where it did not say.

    `retry-after-ms` goes before `retry-after`, which may be seconds, also with a fraction, or an HTTP date (RFC 9110,
    section 10.2.3). A date is read against the answer's own Date, so that a wrong clock here changes nothing.
    """
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        text = headers.get(name, "").strip()
        if re.fullmatch(r"\d{1,12}(\.\d{1,9})?", text):
            return min(float(text) / unit, 366 * 86400.0)
    named = _http_date(headers.get("retry-after", ""))
    if named is None:
        return None
    since = _http_date(headers.get("date", "")) or (parse_time(headers_at) if headers_at else None)
    return None if since is None else min(max(0.0, (named - since).total_seconds()), 366 * 86400.0)


def _http_date(text: str) -> datetime | None:
    try:
        moment = email.utils.parsedate_to_datetime(text)
        return moment.astimezone(UTC) if moment.tzinfo else None
    except (ValueError, OverflowError):
        return None


def _code_of(error: Mapping[str, Any]) -> str | None:
    # Providers put the code under "code" or "type"; the first of the two that we know, else whichever is there.
    codes = [str(error[name]).lower() for name in ("code", "type") if isinstance(error.get(name), str | int)]
    inner = error.get("innererror")
    if isinstance(inner, Mapping) and isinstance(inner.get("code"), str):
        codes.append(inner["code"].lower())
    known = [code for code in codes if code in QUOTA_CODES | FILTER_CODES]
    numeric = [code for code in codes if re.fullmatch(r"[345]\d\d", code)]
    return next(iter(known or numeric or codes), None)


def _is_loading(evidence: Evidence, reply: Reply | None) -> bool:
    # Not a judgement on the job: both answers wait alike, and only the suspicion against this job is left out.
    said = str(reply.error) if reply and reply.error else evidence.body_start.decode(errors="replace")
    return "loading" in said.lower()


def _gate_reason(status: int, code: str | None) -> GateReason:
    if status in {402, 429} or code in QUOTA_CODES:
        return GateReason.QUOTA
    if status in {401, 403, 407}:
        return GateReason.KEY_REFUSED
    return GateReason.MODEL_UNKNOWN if status == 404 else GateReason.WRONG_ADDRESS


def _quote(evidence: Evidence, reply: Reply | None, terms: Terms) -> str:
    if reply is not None and reply.error:
        said = scrub(json.dumps(reply.error, ensure_ascii=False), terms.secrets)[:_BODY_CHARACTERS]
    else:
        said = evidence.body_start.decode(errors="replace")
    return f": {said}" if said else ""


def _sent(evidence: Evidence) -> str:
    return f"sent at {evidence.sent_at}" if evidence.sent_at else "maybe sent"


def _with_cut(said: str, evidence: Evidence) -> str:
    if evidence.cut_by is not None:
        return f"{said}; ended by us ({evidence.cut_by})"
    return f"{said}; {evidence.error}" if evidence.error else said
