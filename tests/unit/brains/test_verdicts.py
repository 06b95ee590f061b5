"""The table from evidence to verdict, one row for each line that the README has of it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brainlaned.brains import reply, verdicts
from brainlaned.brains.verdicts import Kind, Terms
from brainlaned.states import MOVES, Closing, Evidence, Verdict
from brainlaned.wire import AttemptStatus, Flag, GateReason, Reason, Status

AT = "2026-03-01T12:00:0{}.000000Z"
ARMED, SENT, FAILED_AT, HEADERS_AT, BYTE_AT = (AT.format(number) for number in range(1, 6))
SECRET = "CANARY-123"  # shown if it leaks

TERMS = Terms(
    may_run_twice=False,
    attempts_left=3,
    names_model=False,
    require_complete=False,
    retry_first_s=2,
    retry_cap_s=600,
    secrets=(SECRET,),
)
LEAVE = replace(TERMS, may_run_twice=True)
LEAVE_BUT_LAST = replace(LEAVE, attempts_left=1, attempts_used=2)
LAST = replace(TERMS, attempts_left=1, attempts_used=2)
SECOND = replace(TERMS, attempts_left=2, attempts_used=1)
OWN_MODEL = replace(TERMS, names_model=True)
STRICT = replace(TERMS, require_complete=True)
CANCEL = replace(TERMS, cancel_requested=True)

NOTHING = Evidence()
ARMED_ONLY = Evidence(armed_at=ARMED)
UPLOADED = Evidence(armed_at=ARMED, sent_at=SENT)
UPLOAD_FAILED = Evidence(armed_at=ARMED, send_failed_at=FAILED_AT)


def answered(status: int = 200, *, whole: bool = True, body: bytes = b"", **more: Any) -> Evidence:
    seen = Evidence(
        armed_at=ARMED,
        sent_at=SENT,
        headers_at=HEADERS_AT,
        http_status=status,
        first_byte_at=BYTE_AT,
        whole=whole,
        spooled=True,
        body_start=body[:500],
    )
    return replace(seen, **more)


# Bodies.


def chunk(content: Any = None, *, finish: str | None = None, **delta: Any) -> str:
    choice = {"index": 0, "delta": {**({} if content is None else {"content": content}), **delta}}
    document = {"id": "c", "object": "chat.completion.chunk", "choices": [{**choice, "finish_reason": finish}]}
    return f"data: {json.dumps(document)}\n\n"


END = "data: [DONE]\n\n"
USAGE = 'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}\n\n'


def sse(*events: str) -> bytes:
    return "".join(events).encode()


def whole(message: Mapping[str, Any], finish: str | None = "stop", **more: Any) -> bytes:
    choices = [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}]
    return json.dumps({"id": "c", "object": "chat.completion", "choices": choices, **more}).encode()


def error(code: Any = None, *, type: str | None = None, message: str = "made up") -> bytes:
    return json.dumps({"error": {"message": message, "code": code, "type": type}}).encode()


COMPLETE = sse(chunk("hel"), chunk("lo"), chunk(finish="stop"), USAGE, END)
PART = sse(chunk("hel"), chunk("lo"))
CALL = {"index": 0, "id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PAGE = b"<html><body>Please log in</body></html>"

# What a row may expect of the gate.

UNTOUCHED: None = None
OPENED = "opened"
PROBED = "probed"
"""Closed, to be probed after a wait."""
OPERATOR = "operator"
"""Closed until the operator opens it."""


@dataclass(frozen=True)
class Row:
    """One line of the table. What is not named is not checked, but for the gate, which always is."""

    name: str
    evidence: Evidence
    job: Status
    reason: Reason
    attempt: AttemptStatus
    body: bytes | None = None
    terms: Terms = TERMS
    gate: str | None = UNTOUCHED
    why: GateReason | None = None
    uses: bool = True
    text: str | None = None
    flags: frozenset[Flag] | None = None
    attempt_reason: Reason | None = None
    says: tuple[str, ...] = field(default=())


D, F, H, Q, X = Status.DONE, Status.FAILED, Status.HELD, Status.QUEUED, Status.CANCELLED
SUCCEEDED, UNSUCCESSFUL, INTERRUPTED = AttemptStatus.SUCCEEDED, AttemptStatus.FAILED, AttemptStatus.INTERRUPTED
UNKNOWN, GIVEN_UP = AttemptStatus.UNKNOWN, AttemptStatus.CANCELLED

NOT_SENT = {
    "job": Q,
    "reason": Reason.NOT_SENT,
    "attempt": INTERRUPTED,
    "gate": PROBED,
    "why": GateReason.UNREACHABLE,
    "uses": False,
}
NOT_EXECUTED = {**NOT_SENT, "reason": Reason.NOT_EXECUTED}
AMBIGUOUS = {"job": H, "reason": Reason.SENT_OUTCOME_UNKNOWN, "attempt": UNKNOWN}
ASKED_AGAIN = {"job": Q, "reason": Reason.ASKED_AGAIN, "attempt": UNKNOWN}
INCOMPLETE = {"job": H, "reason": Reason.ANSWER_INCOMPLETE, "attempt": UNKNOWN}
ANSWERED = {"job": D, "reason": Reason.ANSWERED, "attempt": SUCCEEDED, "gate": OPENED}
JOB_FAILS = {"job": F, "reason": Reason.BAD_REQUEST, "attempt": UNSUCCESSFUL, "gate": OPENED}
FILTERED = {**JOB_FAILS, "reason": Reason.FILTERED}
COSTLY = {"job": Q, "reason": Reason.UPSTREAM_ERROR, "attempt": UNSUCCESSFUL, "gate": OPENED}
EXHAUSTED = {"job": F, "reason": Reason.ATTEMPTS_EXHAUSTED, "attempt": UNSUCCESSFUL, "gate": OPENED}
LATER = {
    "job": Q,
    "reason": Reason.ASKED_TO_WAIT,
    "attempt": UNSUCCESSFUL,
    "gate": PROBED,
    "why": GateReason.ASKED_TO_WAIT,
    "uses": False,
}
GATE = {"job": Q, "reason": Reason.ROUTE_REFUSED, "attempt": UNSUCCESSFUL, "gate": OPERATOR, "uses": False}
UNREADABLE = {"job": H, "reason": Reason.ANSWER_UNREADABLE, "attempt": UNKNOWN}
CONTRADICTS = {"job": H, "reason": Reason.EVIDENCE_CONTRADICTS, "attempt": UNKNOWN}

SENDING = [
    *(
        Row(f"nothing was armed: {said}", replace(NOTHING, error=said), says=(said,), **NOT_SENT)
        for said in (
            "ConnectError: [Errno 111] Connection refused",
            "ConnectError: [Errno -2] Name or service not known",
            "ConnectError: CERTIFICATE_VERIFY_FAILED",
            "ConnectTimeout: timed out",
            "PoolTimeout: timed out",
            "LocalProtocolError: Illegal header value",
            "UnsupportedProtocol: unsupported scheme",
        )
    ),
    Row(
        "nothing was armed, for a fault of our own",
        replace(NOTHING, fault="Busy: the database"),
        **{**NOT_SENT, "gate": UNTOUCHED, "why": None},
    ),
    Row("nothing was armed, and nobody says why", NOTHING, **{**NOT_SENT, "gate": UNTOUCHED, "why": None}),
    Row(
        "nothing was armed, since the daemon stopped",
        replace(NOTHING, cut_by=Reason.DAEMON_STOPPED, error="ConnectError: closed"),
        attempt_reason=Reason.DAEMON_STOPPED,
        **{**NOT_SENT, "gate": UNTOUCHED, "why": None},
    ),
    Row("the upload was cut", replace(UPLOAD_FAILED, error="RemoteProtocolError: Server disconnected"), **NOT_EXECUTED),
    Row("the server stopped reading", replace(UPLOAD_FAILED, error="ReadError: reset"), **NOT_EXECUTED),
    Row("the upload was cut, with leave to run twice", UPLOAD_FAILED, terms=LEAVE, **NOT_EXECUTED),
    Row("the upload was cut, at the last attempt", UPLOAD_FAILED, terms=LAST, **NOT_EXECUTED),
    Row(
        "early 413 while uploading",
        answered(413, sent_at=None, send_failed_at=FAILED_AT),
        body=error(413),
        **JOB_FAILS,
    ),
    Row(
        "early 401 while uploading",
        answered(401, sent_at=None, send_failed_at=FAILED_AT),
        body=error(401),
        why=GateReason.KEY_REFUSED,
        **GATE,
    ),
    *(
        Row(f"sent whole, then {said}", replace(UPLOADED, error=said), says=(ARMED, SENT, said), **AMBIGUOUS)
        for said in (
            "RemoteProtocolError: Server disconnected without sending a response",
            "ReadError: [Errno 104] Connection reset by peer",
            "ReadTimeout: timed out",
            "RemoteProtocolError: illegal status line",
        )
    ),
    Row("armed, and nothing more is known", ARMED_ONLY, says=(ARMED, "maybe sent"), **AMBIGUOUS),
    Row("no answer, with leave to run twice", UPLOADED, terms=LEAVE, **ASKED_AGAIN),
    Row("no answer, with leave and at the last attempt", UPLOADED, terms=LEAVE_BUT_LAST, **AMBIGUOUS),
    Row("200, then the body is cut", answered(whole=False), body=PART, text="hello", **INCOMPLETE),
    Row("200, then nothing at all", answered(whole=False, first_byte_at=None), body=b"", text="", **INCOMPLETE),
    Row(
        "200, and the stream ends politely in the middle", answered(whole=False), body=PART, text="hello", **INCOMPLETE
    ),
    Row("200, then cut in the middle of JSON", answered(whole=False), body=whole({"content": "x"})[:40], **INCOMPLETE),
    Row("200 cut, with leave to run twice", answered(whole=False), body=PART, terms=LEAVE, text="hello", **ASKED_AGAIN),
    Row(
        "200 cut, with leave and at the last attempt",
        answered(whole=False),
        body=PART,
        terms=LEAVE_BUT_LAST,
        text="hello",
        **INCOMPLETE,
    ),
    Row("200, complete", answered(), body=COMPLETE, text="hello", flags=frozenset(), **ANSWERED),
    Row("an answer that was never armed", answered(armed_at=None), body=COMPLETE, says=("HTTP 200",), **CONTRADICTS),
    Row("a spool of 2xx that is gone", answered(spooled=False), says=("HTTP 200", "gone"), **INCOMPLETE),
    Row("a spool of 400 that is gone", answered(400, spooled=False), says=("HTTP 400", "gone"), **CONTRADICTS),
]

CUT_BY_US = [
    Row(
        "no answer within the first-byte limit",
        replace(UPLOADED, cut_by=Reason.FIRST_BYTE_LIMIT),
        attempt_reason=Reason.FIRST_BYTE_LIMIT,
        says=("first-byte-limit",),
        **AMBIGUOUS,
    ),
    Row(
        "an upload that the total limit ended",
        replace(UPLOAD_FAILED, cut_by=Reason.TOTAL_LIMIT),
        attempt_reason=Reason.TOTAL_LIMIT,
        **NOT_EXECUTED,
    ),
    *(
        Row(
            f"an answer that was ended by the {limit}",
            answered(whole=False, cut_by=limit),
            body=PART,
            text="hello",
            attempt_reason=limit,
            says=(limit,),
            **INCOMPLETE,
        )
        for limit in (Reason.IDLE_LIMIT, Reason.TOTAL_LIMIT, Reason.OUTPUT_LIMIT, Reason.DAEMON_STOPPED)
    ),
    Row(
        "an answer over the cap is not bought again, leave or not",
        answered(whole=False, cut_by=Reason.OUTPUT_LIMIT),
        body=PART,
        terms=LEAVE,
        attempt_reason=Reason.OUTPUT_LIMIT,
        **INCOMPLETE,
    ),
    Row(
        "complete, and usage was awaited in vain",
        answered(whole=False, cut_by=Reason.IDLE_LIMIT),
        body=sse(chunk("hello"), chunk(finish="stop")),
        text="hello",
        flags=frozenset({Flag.NO_END_MARKER}),
        **ANSWERED,
    ),
    Row(
        "a 503 whose body was cut",
        answered(503, whole=False, cut_by=Reason.TOTAL_LIMIT),
        body=b'{"err',
        **LATER,
    ),
]

COMPLETENESS = [
    Row("a finish reason and the end marker", answered(), body=COMPLETE, text="hello", flags=frozenset(), **ANSWERED),
    Row(
        "the end marker after some text, without a finish reason",
        answered(),
        body=sse(chunk("hello"), END),
        text="hello",
        flags=frozenset({Flag.NO_FINISH_REASON}),
        **ANSWERED,
    ),
    Row("the end marker after no text", answered(whole=False), body=sse(chunk(""), END), **INCOMPLETE),
    Row(
        "a finish reason without the end marker",
        answered(whole=False),
        body=sse(chunk("hello", finish="stop")),
        text="hello",
        flags=frozenset({Flag.NO_END_MARKER}),
        **ANSWERED,
    ),
    Row("JSON without streaming", answered(), body=whole({"content": "hello"}), text="hello", **ANSWERED),
    Row(
        "cut off by the token limit, with text",
        answered(),
        body=sse(chunk("hello"), chunk(finish="length"), END),
        text="hello",
        flags=frozenset({Flag.TRUNCATED}),
        says=("token limit",),
        **ANSWERED,
    ),
    Row(
        "cut off by the token limit, without text",
        answered(),
        body=sse(chunk(finish="length"), END),
        text="",
        says=("max_tokens",),
        **{**JOB_FAILS, "reason": Reason.EMPTY_OUTPUT},
    ),
    Row(
        "cut off by the token limit, with nothing but thoughts",
        answered(),
        body=sse(chunk(reasoning_content="hmm"), chunk(finish="length"), END),
        text="",
        **{**JOB_FAILS, "reason": Reason.EMPTY_OUTPUT},
    ),
    Row(
        "cut off by the token limit, as JSON with a null content",
        answered(),
        body=whole({"content": None, "reasoning_content": "hmm"}, "length"),
        **{**JOB_FAILS, "reason": Reason.EMPTY_OUTPUT},
    ),
    Row(
        "cut off by the token limit, where a whole answer was required",
        answered(),
        body=sse(chunk("hello"), chunk(finish="length"), END),
        terms=STRICT,
        text="hello",
        flags=frozenset({Flag.TRUNCATED}),
        **{**ANSWERED, "job": H, "reason": Reason.ANSWER_TRUNCATED},
    ),
    Row("complete, where a whole answer was required", answered(), body=COMPLETE, terms=STRICT, **ANSWERED),
    Row(
        "the content filter, with text before it",
        answered(),
        body=sse(chunk("hel"), chunk(finish="content_filter"), END),
        text="hel",
        **FILTERED,
    ),
    Row(
        "the content filter, as JSON", answered(), body=whole({"content": None}, "content_filter"), text="", **FILTERED
    ),
    Row("a refusal", answered(), body=whole({"content": None, "refusal": "I will not"}), text="I will not", **FILTERED),
    Row(
        "a refusal as a finish reason", answered(), body=sse(chunk("no", finish="refusal"), END), text="no", **FILTERED
    ),
    Row("400 with the filter's code", answered(400), body=error("content_filter"), **FILTERED),
    Row("400 with a policy's code", answered(400), body=error("content_policy_violation"), **FILTERED),
    Row(
        "400 with the filter's code further inside",
        answered(400),
        body=json.dumps({"error": {"innererror": {"code": "ResponsibleAIPolicyViolation"}}}).encode(),
        **FILTERED,
    ),
    Row(
        "tool calls are the output",
        answered(),
        body=sse(chunk(tool_calls=[CALL]), chunk(finish="tool_calls"), END),
        text=json.dumps([{name: CALL[name] for name in ("id", "type", "function")}]),
        flags=frozenset(),
        **ANSWERED,
    ),
    Row(
        "bytes that are no text",
        answered(),
        body=sse(chunk("a@b"), chunk(finish="stop"), END).replace(b"@", b"\xff"),
        text="a\ufffdb",
        flags=frozenset({Flag.INVALID_BYTES}),
        **ANSWERED,
    ),
]

STATUSES = [
    *(
        Row(f"{code}", answered(code), body=error(code), says=(f"HTTP {code}",), **JOB_FAILS)
        for code in (400, 413, 422)
    ),
    *(
        Row(f"{code}, another of its kind", answered(code), body=error(code), **JOB_FAILS)
        for code in (405, 410, 451, 418)
    ),
    Row("context length exceeded", answered(400), body=error("context_length_exceeded"), **JOB_FAILS),
    *(
        Row(f"{code}", answered(code), body=error(code), why=GateReason.KEY_REFUSED, says=(f"HTTP {code}",), **GATE)
        for code in (401, 403)
    ),
    *(
        Row(f"{code}", answered(code, headers={"location": "/"}), body=b"", why=GateReason.WRONG_ADDRESS, **GATE)
        for code in (300, 301, 302, 303, 304, 307, 308)
    ),
    Row("404 for the route's own model", answered(404), body=error(404), why=GateReason.MODEL_UNKNOWN, **GATE),
    Row("404 for a model that the job named", answered(404), body=error(404), terms=OWN_MODEL, **JOB_FAILS),
    Row("402", answered(402), body=error(402), why=GateReason.QUOTA, **GATE),
    *(
        Row(f"429 with the code {code}", answered(429), body=error(code), why=GateReason.QUOTA, **GATE)
        for code in ("insufficient_quota", "credit_balance_exhausted", "billing_error", "INSUFFICIENT_QUOTA")
    ),
    Row(
        "429 with the code as its type",
        answered(429),
        body=error(429, type="insufficient_quota"),
        why=GateReason.QUOTA,
        **GATE,
    ),
    Row(
        "429 whose text mentions a quota",
        answered(429),
        body=error("rate_limit_exceeded", message="You exceeded your current quota, insufficient_quota"),
        **LATER,
    ),
    *(Row(f"{code}", answered(code), body=error(code), **LATER) for code in (409, 425, 429, 503, 529)),
    Row("429 at the last attempt", answered(429), body=error(429), terms=LAST, **LATER),
    Row(
        "408 after a failed upload",
        answered(408, sent_at=None, send_failed_at=FAILED_AT),
        body=error(408),
        **LATER,
    ),
    Row("408 after a whole upload", answered(408), body=error(408), **COSTLY),
    *(Row(f"{code}", answered(code), body=error(code), **COSTLY) for code in (500, 501, 505, 520)),
    Row("500 at the last attempt", answered(500), body=error(500), terms=LAST, **EXHAUSTED),
    Row("500 with leave to run twice", answered(500), body=error(500), terms=LEAVE, **COSTLY),
    *(Row(f"{code}", answered(code), body=PAGE, says=(f"HTTP {code}",), **AMBIGUOUS) for code in (502, 504, 524)),
    Row("502 with leave to run twice", answered(502), body=PAGE, terms=LEAVE, **ASKED_AGAIN),
    Row("502 with leave and at the last attempt", answered(502), body=PAGE, terms=LEAVE_BUT_LAST, **AMBIGUOUS),
    Row("503 while the model loads", answered(503), body=error(503, message="Loading model"), **LATER),
]

ERRORS_INSIDE = [
    Row("200 with the error 429 inside", answered(), body=error(429), **COSTLY),
    Row("200 with the error 503 inside, as text", answered(), body=error("503"), **COSTLY),
    Row("200 with an error 429 inside at the last attempt", answered(), body=error(429), terms=LAST, **EXHAUSTED),
    Row("200 with an error without a code inside", answered(), body=error(message="overloaded"), **COSTLY),
    Row("200 with the error 500 inside", answered(), body=error(500), **COSTLY),
    Row("200 with the error 400 inside", answered(), body=error(400), **JOB_FAILS),
    Row("200 with the error 401 inside", answered(), body=error(401), why=GateReason.KEY_REFUSED, **GATE),
    Row(
        "200 with an exhausted balance inside",
        answered(),
        body=error("insufficient_quota"),
        why=GateReason.QUOTA,
        **GATE,
    ),
    Row("200 with the filter's code inside", answered(), body=error("content_filter"), **FILTERED),
    Row("200 with the error 502 inside", answered(), body=error(502), **AMBIGUOUS),
    Row(
        "200 with an error as an event of the stream, before any text",
        answered(),
        body=sse('data: {"error": {"code": 429, "message": "slow down"}}\n\n'),
        says=("slow down",),
        **COSTLY,
    ),
    Row(
        "200 with an error event after part of the text",
        answered(),
        body=sse(chunk("a"), chunk("b"), chunk("c"), 'event: error\ndata: {"error": {"message": "overloaded"}}\n\n'),
        text="abc",
        says=("overloaded",),
        **INCOMPLETE,
    ),
    Row(
        "200 with an error event after nothing but thoughts",
        answered(),
        body=sse(chunk(reasoning_content="hmm"), 'data: {"error": {"code": 500}}\n\n'),
        **INCOMPLETE,
    ),
    *(
        Row(f"200, whole, {name}", answered(body=body), body=body, says=(body[:40].decode(),), **COSTLY)
        for name, body in (
            ("that is not JSON", PAGE),
            ("without choices", b'{"id": "c"}'),
            ("with no choice in it", b'{"choices": []}'),
            ("with null for choices", b'{"choices": null}'),
            ("with a null content", whole({"content": None})),
        )
    ),
    *(
        Row(
            f"200, whole, {name}, again",
            answered(body=body),
            body=body,
            terms=SECOND,
            says=(body.decode(),),
            **UNREADABLE,
        )
        for name, body in (("that is not JSON", PAGE), ("with no choice in it", b'{"choices": []}'))
    ),
    Row("200, whole, not JSON, at the only attempt", answered(), body=PAGE, terms=LAST, **UNREADABLE),
    Row("200, not JSON, and not whole either", answered(whole=False), body=PAGE, **INCOMPLETE),
    Row("204", answered(204), body=b"", **COSTLY),
]

CANCELS = [
    Row("cancelled before it was sent", NOTHING, X, Reason.CANCEL_REQUESTED, GIVEN_UP, terms=CANCEL, uses=False),
    Row("cancelled on its way", UPLOADED, X, Reason.CANCEL_REQUESTED, GIVEN_UP, terms=CANCEL, says=("may still be",)),
    Row(
        "cancelled, not executed", UPLOAD_FAILED, X, Reason.CANCEL_REQUESTED, GIVEN_UP, terms=CANCEL, says=("not exec",)
    ),
    Row(
        "cancelled in the middle of the answer",
        answered(whole=False, cut_by=Reason.CANCEL_REQUESTED),
        X,
        Reason.CANCEL_REQUESTED,
        GIVEN_UP,
        body=PART,
        terms=CANCEL,
        text="hello",
    ),
    Row(
        "cancelled, and the answer came all the same",
        answered(),
        X,
        Reason.CANCEL_REQUESTED,
        GIVEN_UP,
        body=COMPLETE,
        terms=CANCEL,
        text="hello",
    ),
]

ROWS = [*SENDING, *CUT_BY_US, *COMPLETENESS, *STATUSES, *ERRORS_INSIDE, *CANCELS]


def judged(evidence: Evidence, body: bytes | None = None, terms: Terms = TERMS) -> Verdict:
    return verdicts.judge(evidence, None if body is None else reply.read([body]), terms)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_table(row: Row) -> None:
    verdict = judged(row.evidence, row.body, row.terms)
    assert (verdict.job, verdict.reason, verdict.attempt) == (row.job, row.reason, row.attempt), verdict.detail
    assert verdict.uses_attempt == row.uses
    assert gate_of(verdict) == (row.gate, row.why)
    assert verdict.attempt_reason == row.attempt_reason
    assert row.text is None or verdict.text == row.text
    assert row.flags is None or verdict.flags == row.flags
    assert verdict.detail
    for words in row.says:
        assert words in verdict.detail


def gate_of(verdict: Verdict) -> tuple[str | None, GateReason | None]:
    if verdict.closes is not None:
        assert not verdict.opens
        return (OPERATOR if verdict.closes.operator_only else PROBED), verdict.closes.reason
    return (OPENED if verdict.opens else UNTOUCHED), None


def test_no_two_rows_have_one_name() -> None:
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names))


# What an answer brings along.


def test_a_done_job_has_text_response_finish_reason_and_usage() -> None:
    verdict = judged(answered(), COMPLETE)
    response = json.loads(verdict.response or "")
    assert (response["choices"][0]["message"]["content"], verdict.text) == ("", "hello")
    assert verdict.finish_reason == response["choices"][0]["finish_reason"] == "stop"
    assert verdict.usage == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_usage_that_nobody_told_is_unknown_and_not_nothing() -> None:
    assert judged(answered(whole=False), PART).usage is None
    assert judged(answered(), sse(chunk("hello", finish="stop"), END)).usage is None


def test_a_cut_answer_keeps_what_was_known_of_its_usage() -> None:
    assert judged(answered(whole=False), sse(chunk("a"), USAGE)).usage == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
    }


def test_the_body_of_an_error_is_quoted_up_to_five_hundred_characters_without_its_secrets() -> None:
    for status in (400, 401, 429, 500, 502):
        detail = judged(answered(status), error(status, message=f"key {SECRET} " + "x" * 2000)).detail
        assert SECRET not in detail
        assert "xxx" in detail
        assert len(detail) < 700


def test_a_body_that_is_no_answer_is_quoted_in_what_is_held() -> None:
    page = b"<html>" + b"y" * 2000
    detail = judged(answered(body=page), page, SECOND).detail
    assert page[:500].decode() in detail
    assert len(detail) < 700


# Waiting.


@pytest.mark.parametrize(
    ("used", "wait_s"), [(0, 2), (1, 4), (2, 8), (5, 64), (8, 512), (9, 600), (10, 600), (10**6, 600)]
)
def test_waits_that_nobody_named_double_up_to_the_cap(used: int, wait_s: float) -> None:
    terms = replace(TERMS, attempts_used=used, attempts_left=3)
    assert judged(answered(500), error(500), terms).wait_s == wait_s
    assert judged(UPLOADED, None, replace(terms, may_run_twice=True)).wait_s == wait_s


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({}, None),
        ({"retry-after": "30"}, 30),
        ({"retry-after": " 30 "}, 30),
        ({"retry-after": "0"}, 0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after-ms": "1500"}, 1.5),
        ({"retry-after-ms": "20", "retry-after": "30"}, 0.02),
        ({"retry-after-ms": "soon", "retry-after": "30"}, 30),
        ({"retry-after": "Sun, 01 Mar 2026 12:00:49 GMT"}, 45),
        ({"retry-after": "Sun, 01 Mar 2026 12:00:45 GMT", "date": "Sun, 01 Mar 2026 12:00:00 GMT"}, 45),
        ({"retry-after": "Sun, 01 Mar 2020 12:00:45 GMT", "date": "Sun, 01 Mar 2020 12:00:00 GMT"}, 45),
        ({"retry-after": "Sun, 01 Mar 2020 12:00:00 GMT"}, 0),
        ({"retry-after": "999999999999"}, 366 * 86400),
        ({"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT"}, 366 * 86400),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "1e9"}, None),
        ({"retry-after": ""}, None),
        ({"retry-after": "Sun, 01 Mar 2026"}, None),
        ({"retry-after": "Sun, 99 Mar 2026 12:00:00 GMT"}, None),
        ({"retry-after": "Sun, 01 Mar 2026 12:00:00 +99999999999999999999"}, None),
        ({"retry-after": "0001 Jan 23:59:59 + +99999999999"}, None),
        (
            {"retry-after": "Sun, 01 Mar 2026 12:00:49 GMT", "date": "Sun, 01 Mar 2026 12:00:00 +99999999999999999999"},
            45,
        ),
    ],
)
def test_the_wait_that_a_brain_names_is_read_in_every_form(headers: dict[str, str], wait_s: float | None) -> None:
    assert verdicts.retry_after_s(headers, HEADERS_AT) == wait_s
    closing = judged(answered(429, headers=headers), error(429)).closes
    assert closing is not None and closing.wait_s == wait_s


numbers = st.integers(0, 10**25).map(str)
pieces = st.sampled_from(["Sun,", "01", "Mar", "2026", "0001", "12:00:00", "GMT", "+", "-", ":", "1.2"]) | numbers
dates = st.builds(
    "Sun, {} Mar {} {}:00:00 {}{}".format, numbers, numbers, numbers, st.sampled_from(["+", "-", ""]), numbers
)
offsets = st.builds("Sun, 01 Mar 2026 12:00:00 {}{}".format, st.sampled_from(["+", "-", ""]), numbers)
headers = st.text(max_size=30) | st.lists(pieces, max_size=8).map(" ".join) | dates | offsets


@settings(deadline=None, max_examples=300)
@given(headers, headers)
def test_no_header_that_a_brain_can_send_makes_the_judge_fail(retry_after: str, date: str) -> None:
    headers = {"retry-after": retry_after, "retry-after-ms": date, "date": date}
    wait_s = verdicts.retry_after_s(headers, HEADERS_AT)
    assert wait_s is None or 0 <= wait_s <= 366 * 86400


def test_an_error_that_names_a_longer_wait_than_ours_is_waited_for() -> None:
    assert judged(answered(500, headers={"retry-after": "30"}), error(500)).wait_s == 30
    assert judged(answered(500, headers={"retry-after": "1"}), error(500)).wait_s == 2
    assert judged(answered(headers={"retry-after": "45"}), error(429)).wait_s == 45


@pytest.mark.parametrize(
    ("status", "message", "strike"),
    [
        (429, "slow down", True),
        (503, "overloaded", True),
        (409, "busy", True),
        (503, "Loading model", False),
        (429, "Loading model", True),
    ],
)
def test_whoever_was_put_off_has_a_strike_unless_the_model_was_being_loaded(
    status: int, message: str, strike: bool
) -> None:
    closing = judged(answered(status), error(status, message=message)).closes
    assert closing is not None and closing.strike is strike


def test_nothing_but_a_put_off_is_a_strike() -> None:
    for verdict in (
        judged(answered(401), error(401)),
        judged(replace(NOTHING, error="refused")),
        judged(UPLOAD_FAILED),
    ):
        assert isinstance(verdict.closes, Closing)
        assert not verdict.closes.strike


# Rules that hold in every row there could be.

times = st.none() | st.sampled_from([ARMED, SENT, HEADERS_AT])
bodies = st.none() | st.sampled_from([b"", COMPLETE, PART, PAGE, error(429), error("insufficient_quota"), error(502)])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Evidence, bytes | None, Terms]:
    headers_at = draw(times)
    evidence = Evidence(
        armed_at=draw(times),
        sent_at=draw(times),
        send_failed_at=draw(times),
        headers_at=headers_at,
        http_status=draw(st.integers(100, 599)) if headers_at else None,
        whole=draw(st.booleans()),
        spooled=headers_at is not None and draw(st.booleans()),
        cut_by=draw(st.none() | st.sampled_from([Reason.TOTAL_LIMIT, Reason.OUTPUT_LIMIT, Reason.DAEMON_STOPPED])),
        error=draw(st.none() | st.just("ReadError: reset")),
        fault=draw(st.none() | st.just("Busy: the database")),
    )
    terms = replace(
        TERMS,
        may_run_twice=draw(st.booleans()),
        attempts_left=draw(st.integers(-1, 4)),
        attempts_used=draw(st.integers(0, 4)),
        names_model=draw(st.booleans()),
        require_complete=draw(st.booleans()),
        cancel_requested=draw(st.booleans()),
    )
    return evidence, draw(bodies), terms


@settings(deadline=None, max_examples=600)
@given(cases())
def test_whatever_the_evidence_the_verdict_is_one_that_can_be_recorded_and_buys_nothing_twice(
    case: tuple[Evidence, bytes | None, Terms],
) -> None:
    evidence, body, terms = case
    verdict = judged(evidence, body, terms)
    assert verdict.job in MOVES[Status.RUNNING]
    assert verdict.reason not in {
        Reason.FIRST_BYTE_LIMIT,
        Reason.IDLE_LIMIT,
        Reason.TOTAL_LIMIT,
        Reason.OUTPUT_LIMIT,
        Reason.DAEMON_STOPPED,
    }
    surely_not_executed = evidence.armed_at is None or evidence.send_failed_at is not None
    assert verdict.attempt is not AttemptStatus.INTERRUPTED or surely_not_executed
    if verdict.job is Status.QUEUED:
        has_answer = evidence.headers_at is not None
        assert surely_not_executed or has_answer or terms.may_run_twice
        assert not verdict.uses_attempt or terms.attempts_left > 1
    if terms.cancel_requested:
        assert verdict.job is Status.CANCELLED


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, None, Kind.JOB),
        (401, None, Kind.GATE),
        (429, None, Kind.LATER),
        (429, "insufficient_quota", Kind.GATE),
        (500, None, Kind.COSTLY),
        (502, None, Kind.AMBIGUOUS),
        (599, None, Kind.COSTLY),
        (100, None, Kind.COSTLY),
    ],
)
def test_the_class_of_a_status(status: int, code: str | None, kind: Kind) -> None:
    assert verdicts.classify(status, code, names_model=False) is kind
