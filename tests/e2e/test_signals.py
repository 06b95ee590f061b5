"""What every signal of a brain, or of the way to it, does to job, attempt and gate: each row against a real lane.

Every row asks what was sent and seen (the marks), where the job went and why, what is kept of the answer, how many
requests the brain had, how the route's gate stands, and then lets the next job run.
"""

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from brainlaned.wire import parse_time
from tests import brainserver
from tests.brainserver import BrainServer, Exchange, Step, answer, chunk, delta, event, head, sse, status
from tests.lane import Lane, config_for, running_lane

BIG = "x" * (7 * 1024 * 1024)
"""A prompt that no socket buffer takes whole."""

LONG_S = 3600.0
MARKS = ("armed_at", "sent_at", "send_failed_at", "headers_at", "first_byte_at")
NOTHING: tuple[str, ...] = ()
SENT = ("armed_at", "sent_at")
CUT_UPLOAD = ("armed_at", "send_failed_at")
ANSWERED = (*SENT, "headers_at", "first_byte_at")
EARLY = (*CUT_UPLOAD, "headers_at", "first_byte_at")

USAGE = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
EVENTS = b"".join(sse())
TWO_DELTAS = len(b"".join(sse()[:3]))
"""So many bytes of EVENTS are its two words, without any sign of an end."""


@dataclass(frozen=True)
class Scene:
    """One lane with all the routes that the rows need, and the brains behind them."""

    lane: Lane
    server: BrainServer
    elsewhere: BrainServer

    def gate(self, route: str) -> dict[str, Any]:
        routes = {gate["route"]: gate for gate in self.lane.get("/v1/status").json["routes"]}
        return routes[route]

    def closed_gate(self, route: str, limit_s: float = 20) -> dict[str, Any]:
        """Wait until the gate is closed and nothing is being asked, and return it."""
        deadline = time.monotonic() + limit_s
        while (gate := self.gate(route))["open"] or self.lane.get("/v1/status").json["running"]:
            assert time.monotonic() < deadline, f"the gate of {route} stays open"
            time.sleep(0.02)  # for the answer to be judged
        return gate

    def open(self, route: str) -> None:
        assert self.lane.post("/v1/lane/resume", {"route": route}).status == 200

    def job(self, job_id: int) -> dict[str, Any]:
        return self.lane.get(f"/v1/jobs/{job_id}").json

    def text(self, job: dict[str, Any]) -> str | None:
        """The output of a done job, or the part that was kept of another; None where there is none."""
        answered = self.lane.get(f"/v1/jobs/{job['id']}/output" + ("" if job["status"] == "done" else "?partial=1"))
        assert answered.status in {200, 409}
        return answered.body.decode() if answered.status == 200 else None

    def next_job_runs(self, route: str = "local") -> None:
        job = self.lane.wait(self.lane.submit("the next one", route=route)["id"])
        assert (job["status"], job["reason"], self.text(job)) == ("done", "answered", "hello world")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate that nobody vouches for, with its key in the same file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificate")
    path = tmp_path_factory.mktemp("tls") / "self-signed.pem"
    made = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=127.0.0.1", "-days", "2"]
    subprocess.run(
        [openssl, "req", "-x509", *made, "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", path, "-out", path],
        check=True,
        capture_output=True,
    )
    return path


@contextlib.contextmanager
def behind_tls(certificate: Path) -> Iterator[int]:
    """Give the port of a server that offers this certificate, and hangs up after the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as plain, contextlib.suppress(OSError):
                        context.wrap_socket(plain, server_side=True).close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        thread.join()


@contextlib.contextmanager
def listening(backlog: int) -> Iterator[int]:
    """Give the port of a listener that accepts nobody; with a backlog of 0, one that is full, it drops who knocks."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(backlog)
        port = listener.getsockname()[1]
        if backlog == 0:
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        yield port


@pytest.fixture(scope="module")
def _scene(tmp_path_factory: pytest.TempPathFactory, certificate: Path) -> Iterator[Scene]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(BrainServer())
        elsewhere = stack.enter_context(BrainServer())
        plain = f"127.0.0.1:{server.port}/v1"
        mute = f"127.0.0.1:{stack.enter_context(listening(100))}"
        # The limits are small only where a row is to run into them, and the routes that are down are asked once.
        routes = {
            "patient": ("http://" + plain, "retry_first_s = 30"),
            "free": ("http://" + plain, "retry_first_s = 0.05\nmay_run_twice = true"),
            "hasty": ("http://" + plain, "first_byte_s = 0.3"),
            "slow-head": ("http://" + plain, "first_byte_s = 1.5\nretry_first_s = 0.05"),
            "idle": ("http://" + plain, "idle_s = 0.3\nretry_first_s = 0.05"),
            "pinged": ("http://" + plain, "idle_s = 0.5\ntotal_s = 4"),
            "brief": ("http://" + plain, "total_s = 1.5"),
            "small": ("http://" + plain, "max_output_mib = 1"),
            "keyed": ("http://" + plain, 'headers.X-Key = "CANARY-123"'),
            "refused": (stack.enter_context(brainserver.refuse()), ""),
            "nowhere": ("http://nothing.invalid/v1", ""),
            "dropped": (f"http://127.0.0.1:{stack.enter_context(listening(0))}/v1", "connect_s = 0.3"),
            "no-tls": ("https://" + plain, "connect_s = 0.3"),
            "self-signed": (f"https://127.0.0.1:{stack.enter_context(behind_tls(certificate))}/v1", ""),
            "mute-tls": (f"https://{mute}/v1", "connect_s = 30\ntotal_s = 0.3"),
            "mute-proxy": ("https://brain.example/v1", f'proxy = "http://{mute}"\nconnect_s = 0.3\ntotal_s = 1'),
        }
        more = "\n".join(
            f'[routes.{name}]\nbase_url = "{url}"\nmodel = "test-model"\n'
            + ("" if "retry_first_s" in limits else "retry_first_s = 30\n")
            + limits
            for name, (url, limits) in routes.items()
        )
        config = config_for(server.base_url, more=more).replace("retry_first_s = 0.2", "retry_first_s = 0.05", 1)
        lane = stack.enter_context(running_lane(tmp_path_factory.mktemp("signals"), config))
        yield Scene(lane, server, elsewhere)
        assert "Traceback" not in lane.log.read_text()


@pytest.fixture
def scene(_scene: Scene) -> Iterator[Scene]:
    """The lane and its brains; afterwards at rest, every gate open, what was scripted and recorded forgotten."""
    yield _scene
    lane = _scene.lane
    _scene.server.release()
    for where in ("running", "queued", "held"):
        for job in lane.get(f"/v1/jobs?status={where}&limit=500").json["jobs"]:
            lane.post(f"/v1/jobs/{job['id']}/cancel")
            lane.wait(job["id"])
    for gate in lane.get("/v1/status").json["routes"]:
        if not gate["open"]:
            _scene.open(gate["route"])
    for server in (_scene.server, _scene.elsewhere):
        server.control({"reset": True, "default": "answer", "by_prompt": {}})


def attempts(job: dict[str, Any]) -> list[tuple[str, str]]:
    return [(one["status"], one["reason"]) for one in job["attempts"]]


def marks(attempt: dict[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in MARKS if attempt[name] is not None)


# Signals after which the job is at an end, or waits for a person


@dataclass(frozen=True)
class Row:
    """What the brain does, and what becomes of the job."""

    steps: Step | list[Step]
    status: str
    reason: str
    text: str | None = None
    flags: tuple[str, ...] = ()
    usage: dict[str, int] | None = None
    attempts: tuple[tuple[str, str], ...] = ()
    """Status and reason of each; where none are given, one that succeeded."""
    marks: tuple[str, ...] = ANSWERED
    """What was seen of the last attempt."""
    route: str = "local"
    prompt: str = "hello"
    fields: dict[str, Any] = field(default_factory=dict)
    detail: str = ""
    """Stands in the job's detail."""


def done(step: Step, text: str = "hello world", **expected: Any) -> Row:
    return Row(step, "done", "answered", text, attempts=(("succeeded", "answered"),), **expected)


def failed(step: Step, reason: str = "bad-request", text: str | None = None, **expected: Any) -> Row:
    return Row(step, "failed", reason, text, attempts=(("failed", reason),), **expected)


def held(step: Step, reason: str, text: str | None = None, cut_by: str | None = None, **expected: Any) -> Row:
    return Row(step, "held", reason, text, attempts=(("unknown", cut_by or reason),), **expected)


def again(step: Step, *, marks: tuple[str, ...] = ANSWERED, **expected: Any) -> Row:
    """Costs an attempt and is asked again; the second time it is answered."""
    tried = (("failed", "upstream-error"), ("succeeded", "answered"))
    return Row([step, answer()], "done", "answered", "hello world", attempts=tried, usage=ONE_WORD, **expected)


def twice(step: Step, cut_by: str | None = None, **expected: Any) -> Row:
    """Is asked again by leave given beforehand; the second time it is answered."""
    tried = (("unknown", cut_by or "asked-again"), ("succeeded", "answered"))
    return Row([step, answer()], "done", "answered", "hello world", attempts=tried, usage=ONE_WORD, **expected)


def unreadable(step: Step, detail: str) -> Row:
    tried = (("failed", "upstream-error"), ("unknown", "answer-unreadable"))
    return Row([step, step], "held", "answer-unreadable", attempts=tried, detail=detail)


def lasting(*parts: bytes) -> Step:
    """Send this, and then nothing more, without closing."""
    return brainserver.raw(*parts, LONG_S)


def pinging(first: bytes) -> Step:
    """Send this, and then comments for ever."""

    def forever(x: Exchange) -> None:
        x.read_body()
        x.send(head(chunked=True) + chunk(first))
        while True:
            x.send(chunk(b": ping\n\n"))
            x.pause(0.1)  # the time between two comments

    return forever


def crlf(events: bytes) -> bytes:
    return events.replace(b"\n", b"\r\n")


def in_the_200(**error: Any) -> Step:
    return brainserver.error_in_200({"message": "made up", **error})


def a_choice(finish: str | None = "stop", **message: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return {"id": "x", "object": "chat.completion", "choices": [choice]}


ONE_WORD = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
ACCENTS = "né 好 🌍"
SPOKEN = b"".join(sse(ACCENTS))
SPLIT_DATA = (
    b'data: {"choices":[{"index":0,\ndata: "delta":{"content":"two lines"},\ndata: "finish_reason":"stop"}]}\n\n'
)
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}}
ANY_CHARACTER = "a\x00b\x1b[1mc\uffff\U0010ffff\r\n\u2028\x85end"

ENDED = {
    # How a call ends once the whole request was sent
    "a polite close without a word": held(brainserver.close_before_answer(), "sent-outcome-unknown", marks=SENT),
    "a reset without a word": held(brainserver.reset_before_answer(), "sent-outcome-unknown", marks=SENT),
    "half a status line": held(brainserver.raw(b"HTTP/1.1 2"), "sent-outcome-unknown", marks=SENT),
    "half a head": held(brainserver.raw(head()[:40]), "sent-outcome-unknown", marks=SENT),
    "garbage for a head": held(brainserver.raw(b"\x16\x03\x01 nonsense\r\n\r\n"), "sent-outcome-unknown", marks=SENT),
    "a close, with leave to run twice": twice(
        brainserver.close_before_answer(), fields={"may_run_twice": True}, marks=ANSWERED
    ),
    "a reset, on a route that may run twice": twice(brainserver.reset_before_answer(), route="free"),
    "two closes, with leave for two attempts": Row(
        [brainserver.close_before_answer()] * 2,
        "held",
        "sent-outcome-unknown",
        attempts=(("unknown", "asked-again"), ("unknown", "sent-outcome-unknown")),
        marks=SENT,
        route="free",
        fields={"max_attempts": 2},
    ),
    "an answer cut by its length": held(
        brainserver.cut(TWO_DELTAS, framing="length"), "answer-incomplete", "hello world"
    ),
    "an answer cut by its chunks": held(brainserver.cut(TWO_DELTAS), "answer-incomplete", "hello world"),
    "an answer with a broken chunk": held(brainserver.cut(TWO_DELTAS, "chunk"), "answer-incomplete", "hello world"),
    "an answer that is reset": held(brainserver.cut(TWO_DELTAS, "reset"), "answer-incomplete", "hello world"),
    "an answer whose body never began": held(brainserver.cut(0), "answer-incomplete", marks=(*SENT, "headers_at")),
    "an answer that just stops": held(
        brainserver.raw(head() + EVENTS[:TWO_DELTAS]), "answer-incomplete", "hello world"
    ),
    "an answer in JSON that is cut": held(
        brainserver.cut(40, framing="length", body=a_choice(content="hello world")), "answer-incomplete"
    ),
    "an answer that is cut, with leave to run twice": twice(
        brainserver.cut(TWO_DELTAS), fields={"may_run_twice": True}
    ),
    # Limits
    "silence": held(
        brainserver.silence(), "sent-outcome-unknown", cut_by="first-byte-limit", marks=SENT, route="hasty"
    ),
    "a head that drips": held(
        brainserver.drip(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 9999, 0.02),
        "sent-outcome-unknown",
        cut_by="first-byte-limit",
        marks=SENT,
        route="hasty",
    ),
    "informational answers for ever": held(
        brainserver.informational(count=None, gap_s=0.02),
        "sent-outcome-unknown",
        cut_by="first-byte-limit",
        marks=SENT,
        route="hasty",
    ),
    "a head and then nothing": held(
        lasting(head()), "answer-incomplete", cut_by="first-byte-limit", marks=(*SENT, "headers_at"), route="slow-head"
    ),
    "a part and then nothing": held(
        lasting(head(), delta("a part ")), "answer-incomplete", "a part ", cut_by="idle-limit", route="idle"
    ),
    "silence that only the total ends": held(
        brainserver.silence(), "sent-outcome-unknown", cut_by="total-limit", marks=SENT, route="brief"
    ),
    "a dripping head that only the total ends": held(
        brainserver.drip(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 9999, 0.02),
        "sent-outcome-unknown",
        cut_by="total-limit",
        marks=SENT,
        route="brief",
    ),
    "informational answers that only the total ends": held(
        brainserver.informational(count=None, gap_s=0.02),
        "sent-outcome-unknown",
        cut_by="total-limit",
        marks=SENT,
        route="brief",
    ),
    "a body that drips": held(
        brainserver.drip(b":" * 9999, 0.02, after=head() + delta("a part ")),
        "answer-incomplete",
        "a part ",
        cut_by="total-limit",
        route="brief",
    ),
    "a silent brain, with leave to run twice": twice(
        brainserver.silence(), cut_by="first-byte-limit", route="slow-head", fields={"may_run_twice": True}
    ),
    # When an answer is complete
    "a whole answer": done(answer(usage=USAGE), usage=USAGE),
    "a whole answer whose end is the end of the connection": done(answer(framing="close", usage=USAGE), usage=USAGE),
    "a whole answer of known length": done(answer(framing="length"), usage=ONE_WORD),
    "an answer after informational ones": done(brainserver.informational(gap_s=0.01), usage=ONE_WORD),
    "usage that nobody told": done(answer(usage=False)),
    "an end marker without a finish reason": done(answer(finish=None, usage=False), flags=("no-finish-reason",)),
    "a finish reason and a close": done(answer(done=False, usage=False), flags=("no-end-marker",)),
    "a finish reason and then nothing": done(
        lasting(head(chunked=True) + chunk(b"".join(sse(done=False)))), flags=("no-end-marker",), route="idle"
    ),
    "usage a while after the finish reason": done(answer(usage=USAGE, gap_s=0.05), usage=USAGE),
    "an end marker and no close": done(lasting(head(chunked=True) + chunk(EVENTS))),
    "JSON instead of a stream": done(brainserver.json_answer(), usage=ONE_WORD),
    "JSON declared as text": done(brainserver.json_answer(content_type="text/plain"), usage=ONE_WORD),
    "a stream declared as a page": done(answer(content_type="text/html"), usage=ONE_WORD),
    "the token limit after some text": done(
        answer("half a", finish="length", usage=USAGE), "half a", flags=("truncated",), usage=USAGE
    ),
    "the token limit before any text": failed(
        answer(tokens=[], finish="length", usage=USAGE), "empty-output", flags=("truncated",), usage=USAGE
    ),
    "the token limit spent on reasoning": failed(
        answer(tokens=[{"reasoning_content": "let me think"}], finish="length", usage=USAGE),
        "empty-output",
        flags=("truncated",),
        usage=USAGE,
        detail="raise max_tokens",
    ),
    "the token limit, of a job that must be complete": Row(
        answer("half a", finish="length", usage=USAGE),
        "held",
        "answer-truncated",
        "half a",
        ("truncated",),
        USAGE,
        (("succeeded", "answer-truncated"),),
        fields={"require_complete": True},
    ),
    "a filter after some text": failed(
        answer("some", finish="content_filter", usage=USAGE), "filtered", "some", usage=USAGE
    ),
    "a filter instead of text": failed(answer(tokens=[], finish="content_filter", usage=False), "filtered"),
    "a finish reason of refusal": failed(answer("no", finish="refusal", usage=False), "filtered", "no"),
    "a refusal instead of text": failed(
        answer(tokens=[{"refusal": "I will not"}], usage=False), "filtered", "I will not"
    ),
    "tool calls": done(
        answer(tokens=[{"tool_calls": [{"index": 0, **CALL}]}], finish="tool_calls", usage=False), json.dumps([CALL])
    ),
    # Characters and lines
    "one byte per segment": done(brainserver.bytewise(SPOKEN), ACCENTS),
    "line ends of two bytes, one byte per segment": done(brainserver.bytewise(crlf(SPOKEN)), ACCENTS),
    "a cut in the middle of a field name": done(
        brainserver.raw(head() + SPOKEN[:-60], 0.01, SPOKEN[-60:-59], 0.01, SPOKEN[-59:]), ACCENTS
    ),
    "comments between the events": done(brainserver.raw_events([b": ping\n\n", *sse(ACCENTS), b": pong\n\n"]), ACCENTS),
    "one event of several data lines": done(brainserver.raw_events([SPLIT_DATA, event("[DONE]")]), "two lines"),
    "one event of several data lines, with line ends of two bytes": done(
        brainserver.bytewise(crlf(SPLIT_DATA + event("[DONE]"))), "two lines"
    ),
    "line separators that are text": done(answer(tokens=["a\u2028b", "c\x85d"], usage=False), "a\u2028bc\x85d"),
    "surrogate halves in neighbouring deltas": done(answer(tokens=["\ud83c", "\udf0d!"], usage=False), "🌍!"),
    "half a surrogate pair": done(answer(tokens=["a\ud83c", "b"], usage=False), "a\ufffdb", flags=("invalid-bytes",)),
    "an invalid byte": done(
        brainserver.raw_events([delta("a?b").replace(b"?", b"\xff"), *sse(tokens=[])]),
        "a\ufffdb",
        flags=("invalid-bytes",),
    ),
    "any character": done(answer(tokens=[ANY_CHARACTER], usage=False), ANY_CHARACTER, prompt=ANY_CHARACTER),
    # Job
    **{str(code): failed(status(code), detail=f"made to answer {code}") for code in (400, 413, 422)},
    "a context that is too long": failed(
        status(400, {"error": {"message": "too long", "code": "context_length_exceeded"}}),
        detail="context_length_exceeded",
    ),
    "a content policy": failed(
        status(400, {"error": {"message": "no", "code": "content_policy_violation"}}), "filtered"
    ),
    "a content filter's 400": failed(status(400, {"error": {"message": "no", "code": "content_filter"}}), "filtered"),
    "404 for a model that the job named": failed(
        status(404, {"error": {"message": "no such model", "code": "model_not_found"}}),
        fields={"request": {"model": "of-my-own"}},
        detail="model_not_found",
    ),
    "an error text with a NUL": failed(status(400, {"error": {"message": "a\x00b\x1b"}}), detail="a\\u0000b\\u001b"),
    "an error that is no JSON, with a NUL": failed(status(400, b"a\x00b\x1bc"), detail="a\x00b\x1bc"),
    "an early 413 under a large upload": failed(brainserver.early_status(413), prompt=BIG, marks=EARLY),
    # Costly
    "500": again(status(500)),
    "500, always": Row(
        [status(500)] * 2,
        "failed",
        "attempts-exhausted",
        attempts=(("failed", "upstream-error"), ("failed", "attempts-exhausted")),
        fields={"max_attempts": 2},
        detail="made to answer 500",
    ),
    "408 for a whole request": again(status(408)),
    "an error in the 200": again(brainserver.error_in_200()),
    "an error in the 200 without a code": again(in_the_200()),
    "an error as the first event": again(brainserver.stream_then_error([])),
    "an error in the 200, always": Row(
        [brainserver.error_in_200()] * 2,
        "failed",
        "attempts-exhausted",
        attempts=(("failed", "upstream-error"), ("failed", "attempts-exhausted")),
        fields={"max_attempts": 2},
        detail="rate limited",
    ),
    "a bad request in the 200": failed(in_the_200(code=400)),
    "a filter in the 200": failed(in_the_200(code="content_filter"), "filtered"),
    "a page": unreadable(brainserver.html_page(), "Please sign in."),
    "no JSON": unreadable(brainserver.status(200, b"hello"), "hello"),
    "broken JSON": unreadable(brainserver.status(200, b'{"choices": [{'), '{"choices": [{'),
    "choices that are null": unreadable(status(200, {"id": "x", "choices": None}), '"choices": null'),
    "choices that are empty": unreadable(status(200, {"id": "x", "choices": []}), '"choices": []'),
    "no choices at all": unreadable(status(200, {"id": "x"}), '{"id": "x"}'),
    "a content that is null": unreadable(status(200, a_choice(content=None)), '"content": null'),
    # Ambiguous
    **{str(code): held(status(code), "sent-outcome-unknown", detail="a gateway spoke") for code in (502, 504, 524)},
    **{
        f"{code}, with leave to run twice": twice(status(code), fields={"may_run_twice": True})
        for code in (502, 504, 524)
    },
    "504, always, with leave for two attempts": Row(
        [status(504)] * 2,
        "held",
        "sent-outcome-unknown",
        attempts=(("unknown", "asked-again"), ("unknown", "sent-outcome-unknown")),
        route="free",
        fields={"max_attempts": 2},
    ),
    "a gateway's error in the 200": held(in_the_200(code=502), "sent-outcome-unknown"),
    "an error event after some text": held(
        brainserver.stream_then_error(["one ", "two ", "three"]),
        "answer-incomplete",
        "one two three",
        detail="overloaded",
    ),
    "an error event after some text, with leave to run twice": held(
        brainserver.stream_then_error(["one ", "two ", "three"]),
        "answer-incomplete",
        "one two three",
        fields={"may_run_twice": True},
    ),
    # Encoded though it was asked not to be
    "a gzip bomb": held(
        brainserver.gzip_bomb(), "answer-incomplete", marks=(*SENT, "headers_at"), detail="encoded (gzip)"
    ),
}


@pytest.mark.parametrize("row", ENDED.values(), ids=ENDED.keys())
def test_a_signal_that_ends_a_job_or_leaves_it_to_a_person(scene: Scene, row: Row) -> None:
    steps = row.steps if isinstance(row.steps, list) else [row.steps]
    scene.server.script(*steps)
    fields = {"max_attempts": 3, "route": row.route, **row.fields}
    job = scene.lane.wait(scene.lane.submit(row.prompt, **fields)["id"])
    assert (job["status"], job["reason"]) == (row.status, row.reason), job["detail"]
    assert (tuple(job["flags"]), job["usage"], scene.text(job)) == (row.flags, row.usage, row.text)
    assert attempts(job) == list(row.attempts)
    assert job["attempts_used"] == len(row.attempts) == scene.server.count()
    assert marks(job["attempts"][-1]) == row.marks
    assert row.detail in job["detail"]
    assert scene.gate(row.route)["open"]
    scene.next_job_runs("local" if row.route in {"hasty", "slow-head", "brief", "idle"} else row.route)
    assert scene.server.max_concurrent == 1


ENDLESS = {
    "tokens without end": (brainserver.endless(gap_s=0.01), "brief", "total-limit", "again again "),
    "a flood": (brainserver.endless("x" * 1000, gap_s=0), "small", "output-limit", "x" * 1000),
}


@pytest.mark.parametrize(("step", "route", "cut_by", "begins"), ENDLESS.values(), ids=ENDLESS.keys())
def test_an_answer_without_end_is_cut_and_its_part_kept(
    scene: Scene, step: Step, route: str, cut_by: str, begins: str
) -> None:
    scene.server.script(step)
    job = scene.lane.wait(scene.lane.submit(route=route)["id"])
    assert (job["status"], job["reason"], job["usage"]) == ("held", "answer-incomplete", None)
    assert attempts(job) == [("unknown", cut_by)]
    text = scene.text(job)
    assert text is not None and text.startswith(begins) and len(text) < 1024 * 1024
    assert scene.server.wait_for(lambda server: server.requests[0].hung_up_at is not None)
    assert (scene.server.count(), scene.gate(route)["open"]) == (1, True)
    scene.next_job_runs()


def test_usage_is_not_awaited_for_ever_when_comments_keep_coming(scene: Scene) -> None:
    scene.server.script(pinging(b"".join(sse(done=False))))
    job = scene.lane.wait(scene.lane.submit(route="pinged")["id"])
    assert (job["status"], job["flags"], scene.text(job)) == ("done", ["no-end-marker"], "hello world")
    first = scene.server.requests[0]
    assert scene.server.wait_for(lambda server: first.hung_up_at is not None)
    # Usage is awaited for as long as the route may be idle, half a second; only the total limit comes after 4.
    assert first.hung_up_at is not None and first.hung_up_at - first.received_at < 3


def test_the_bytes_of_an_answer_with_an_invalid_one_are_kept(scene: Scene) -> None:
    broken = delta("a?b").replace(b"?", b"\xff")
    scene.server.script(brainserver.raw_events([broken, *sse(tokens=[])]))
    job = scene.lane.wait(scene.lane.submit()["id"])
    assert job["flags"] == job["attempts"][0]["flags"] == ["invalid-bytes"]
    kept = scene.lane.rows("select raw from attempt_parts where job_id = ?", job["id"])
    assert len(kept) == 1 and broken in kept[0]["raw"]


def test_any_character_stands_in_the_database_as_it_was_said(scene: Scene) -> None:
    scene.server.script(answer(tokens=[ANY_CHARACTER], usage=False))
    job = scene.lane.wait(scene.lane.submit(ANY_CHARACTER)["id"])
    assert scene.server.requests[0].prompt == ANY_CHARACTER
    stored = scene.lane.rows("select text from job_outputs where job_id = ?", job["id"])
    assert stored == [{"text": ANY_CHARACTER}]
    request = scene.lane.rows("select request from job_requests where job_id = ?", job["id"])[0]["request"]
    assert json.loads(request)["messages"][0]["content"] == ANY_CHARACTER


def test_every_attempt_has_its_own_times_and_its_own_request(scene: Scene) -> None:
    scene.server.default = status(500)
    job = scene.lane.wait(scene.lane.submit(max_attempts=2)["id"])
    assert (job["status"], job["reason"]) == ("failed", "attempts-exhausted")
    first, second = job["attempts"]
    assert first["armed_at"] < first["headers_at"] <= first["ended_at"] <= second["armed_at"] < second["headers_at"]
    ids = [record.headers["x-request-id"] for record in scene.server.requests]
    assert ids == [f"{job['id']}-1", f"{job['id']}-2"]
    assert (first["billed"], second["billed"]) == ("possibly", "possibly")


# Signals after which the route's gate closes until somebody opens it

QUOTA_CODES = ["insufficient_quota", "credit_balance_exhausted", "billing_error", "billing_hard_limit_reached"]
QUOTA_CODES += ["insufficient_balance", "insufficient_credits", "payment_required"]

REFUSED: dict[str, tuple[Step, str]] = {
    "401": (status(401), "key-refused"),
    "403": (status(403), "key-refused"),
    "301": (brainserver.redirect("http://127.0.0.1:1/", 301), "wrong-address"),
    "302": (brainserver.redirect("http://127.0.0.1:1/", 302), "wrong-address"),
    "308": (brainserver.redirect("http://127.0.0.1:1/", 308), "wrong-address"),
    "404": (status(404), "model-unknown"),
    "402": (status(402), "quota"),
    **{f"429 {code}": (status(429, {"error": {"message": "m", "code": code}}), "quota") for code in QUOTA_CODES},
    **{
        f"429 {code} as its type, with a time to wait": (
            status(429, {"error": {"message": "m", "type": code, "code": None}}, headers={"Retry-After": "1"}),
            "quota",
        )
        for code in QUOTA_CODES[:3]
    },
    "401 in the 200": (in_the_200(code=401), "key-refused"),
    "404 in the 200": (in_the_200(code=404), "model-unknown"),
    "a quota code in the 200": (in_the_200(code="insufficient_quota"), "quota"),
    "a quota code as the first event": (brainserver.stream_then_error([], {"code": "insufficient_quota"}), "quota"),
}


@pytest.mark.parametrize(("step", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_refusal_of_the_route_closes_its_gate_until_somebody_opens_it(scene: Scene, step: Step, reason: str) -> None:
    # A redirect has no body, so it has no first byte either.
    refused_on_its_route(scene, step, reason, "hello", ANSWERED[:-1] if reason == "wrong-address" else ANSWERED)


def test_an_early_refusal_under_a_large_upload_is_heard(scene: Scene) -> None:
    refused_on_its_route(scene, brainserver.early_status(401), "key-refused", BIG, EARLY)


def refused_on_its_route(scene: Scene, step: Step, reason: str, prompt: str, seen: tuple[str, ...]) -> None:
    scene.server.script(step)
    job_id = scene.lane.submit(prompt)["id"]
    behind = scene.lane.submit("behind")["id"]
    gate = scene.closed_gate("local")
    job = scene.job(job_id)
    assert (job["status"], job["reason"], job["waiting"]) == ("queued", "route-refused", "route-gated")
    assert job["next_action"] == "brainctl resume --route local"
    assert (job["flags"], job["usage"], scene.text(job), job["attempts_used"]) == ([], None, None, 0)
    assert attempts(job) == [("failed", "route-refused")]
    assert marks(job["attempts"][0]) == seen
    assert (gate["reason"], gate["next_probe_at"], gate["since"]) == (reason, None, job["moved_at"])
    assert gate["detail"] == job["detail"]
    assert scene.server.count() == 1
    # Another route is asked all the same.
    scene.next_job_runs("free")
    assert [scene.job(one)["status"] for one in (job_id, behind)] == ["queued", "queued"]
    scene.open("local")
    for one in (job_id, behind):
        assert (scene.lane.wait(one)["status"], scene.job(one)["attempts_used"]) == ("done", 1)
    assert scene.gate("local")["open"]
    assert (scene.server.count(), scene.server.count("behind")) == (4, 1)


def test_a_redirect_to_another_host_is_not_followed_and_no_key_goes_there(scene: Scene) -> None:
    scene.server.script(brainserver.redirect(scene.elsewhere.base_url + "/chat/completions", 307))
    job_id = scene.lane.submit(route="keyed")["id"]
    gate = scene.closed_gate("keyed")
    assert (gate["reason"], gate["next_probe_at"]) == ("wrong-address", None)
    assert scene.server.requests[0].headers["x-key"] == "CANARY-123"
    assert (scene.server.count(), scene.elsewhere.connections) == (1, 0)
    assert attempts(scene.job(job_id)) == [("failed", "route-refused")]
    scene.open("keyed")
    assert scene.lane.wait(job_id)["status"] == "done"


# Signals after which the route is asked again later

PUT_OFF = {
    **{str(code): status(code) for code in (409, 425, 429, 503, 529)},
    "429 that speaks of a quota": status(429, {"error": {"message": "quota exceeded", "type": "rate_limit_error"}}),
    "503 loading, as llama.cpp says it": status(
        503, {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
    ),
    "503 loading, as a string": status(503, {"error": "Model small is currently loading", "estimated_time": 20.0}),
    "503 loading, as plain text": status(503, b"Loading model", content_type="text/plain"),
    "503 with nothing": status(503, b""),
}


@pytest.mark.parametrize("step", PUT_OFF.values(), ids=PUT_OFF.keys())
def test_who_is_put_off_is_asked_again_and_loses_no_attempt(scene: Scene, step: Step) -> None:
    second = scene.server.hold()
    scene.server.script(step, second)
    job_id = scene.lane.submit()["id"]
    behind = scene.lane.submit("behind")["id"]
    assert second.arrived.wait(20)
    gate = scene.gate("local")
    assert (gate["open"], gate["reason"]) == (False, "asked-to-wait")
    assert parse_time(gate["next_probe_at"]) >= parse_time(gate["since"]) + timedelta(seconds=0.05)
    second.release()
    job = scene.lane.wait(job_id)
    assert (job["status"], job["reason"], job["flags"], scene.text(job)) == ("done", "answered", [], "hello world")
    assert (job["attempts_used"], job["usage"]) == (1, ONE_WORD)
    assert attempts(job) == [("failed", "asked-to-wait"), ("succeeded", "answered")]
    assert scene.lane.wait(behind)["attempts_used"] == 1
    assert [record.prompt for record in scene.server.requests] == ["hello", "hello", "behind"]
    assert scene.gate("local")["open"]


def test_a_put_off_of_an_unfinished_upload_loses_no_attempt(scene: Scene) -> None:
    second = scene.server.hold()
    scene.server.script(brainserver.early_status(408), second)
    job_id = scene.lane.submit(BIG)["id"]
    assert second.arrived.wait(20)
    assert scene.gate("local")["reason"] == "asked-to-wait"
    second.release()
    job = scene.lane.wait(job_id)
    assert (job["status"], job["attempts_used"]) == ("done", 1)
    assert attempts(job) == [("failed", "asked-to-wait"), ("succeeded", "answered")]
    assert marks(job["attempts"][0]) == EARLY
    scene.next_job_runs()


NAMED: dict[str, tuple[int, dict[str, str], float]] = {
    "milliseconds": (429, {"retry-after-ms": "31500"}, 31.5),
    "milliseconds before seconds": (503, {"retry-after-ms": "45000", "retry-after": "99"}, 45),
    "seconds": (429, {"Retry-After": "40"}, 40),
    "a fraction of seconds": (529, {"Retry-After": "40.25"}, 40.25),
    "seconds, 409": (409, {"Retry-After": "40"}, 40),
    "seconds, 425": (425, {"Retry-After": "40"}, 40),
    "a date": (
        429,
        {"Date": "Sun, 01 Mar 2026 12:00:00 GMT", "Retry-After": "Sun, 01 Mar 2026 12:00:45 GMT"},
        45,
    ),
    "two hours": (503, {"Retry-After": "7200"}, 7200),
}


@pytest.mark.parametrize(("code", "headers", "wait_s"), NAMED.values(), ids=NAMED.keys())
def test_a_wait_that_the_brain_names_is_shown_and_kept(
    scene: Scene, code: int, headers: dict[str, str], wait_s: float
) -> None:
    scene.server.script(status(code, headers=headers))
    job_id = scene.lane.submit(route="patient")["id"]
    gate = scene.closed_gate("patient")
    job = scene.job(job_id)
    assert (job["status"], job["reason"], job["waiting"]) == ("queued", "asked-to-wait", "route-gated")
    assert (job["attempts_used"], attempts(job)) == (0, [("failed", "asked-to-wait")])
    assert gate["reason"] == "asked-to-wait"
    waits = parse_time(gate["next_probe_at"]) - parse_time(job["moved_at"])
    assert abs(waits.total_seconds() - wait_s) < 0.001
    scene.next_job_runs()
    assert scene.server.count("hello") == 1
    scene.open("patient")
    assert scene.lane.wait(job_id)["status"] == "done"


def test_a_date_to_wait_for_counts_by_our_own_clock_where_the_brain_shows_none(scene: Scene) -> None:
    named = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=120)
    scene.server.script(status(503, headers={"Retry-After": format_datetime(named, usegmt=True)}))
    scene.lane.submit(route="patient")
    assert parse_time(scene.closed_gate("patient")["next_probe_at"]) >= named


def test_nobody_is_asked_sooner_than_the_brain_said(scene: Scene) -> None:
    scene.server.script(status(429, {"error": {"message": "quota for this minute"}}, headers={"Retry-After": "0.7"}))
    job = scene.lane.wait(scene.lane.submit()["id"])
    assert (job["status"], job["attempts_used"]) == ("done", 1)
    first, second = scene.server.requests
    assert first.ended_at is not None and second.received_at - first.ended_at >= 0.7


CUT_UPLOADS = {
    "reset": (brainserver.stop_reading(how="reset"), "local"),
    "closed": (brainserver.stop_reading(how="close"), "local"),
    "stalled": (brainserver.stop_reading(how="wait"), "idle"),
}


@pytest.mark.parametrize(("step", "route"), CUT_UPLOADS.values(), ids=CUT_UPLOADS.keys())
def test_an_upload_that_is_cut_was_not_executed_and_is_made_again(scene: Scene, step: Step, route: str) -> None:
    second = scene.server.hold()
    scene.server.script(step, second)
    job_id = scene.lane.submit(BIG, route=route)["id"]
    assert second.arrived.wait(20)
    gate = scene.gate(route)
    assert (gate["open"], gate["reason"]) == (False, "unreachable")
    second.release()
    job = scene.lane.wait(job_id)
    assert (job["status"], job["attempts_used"], scene.text(job)) == ("done", 1, "hello world")
    assert attempts(job) == [("interrupted", "not-executed"), ("succeeded", "answered")]
    assert marks(job["attempts"][0]) == CUT_UPLOAD
    assert job["attempts"][0]["billed"] == "no"
    assert (scene.server.count(whole=True), scene.server.count(whole=False)) == (1, 1)
    assert scene.gate(route)["open"]
    scene.next_job_runs()


NO_WAY = {
    "a refused connection": ("refused", "refused"),
    "a name that nobody knows": ("nowhere", "Name or service not known|resolution|nodename|No address"),
    "a connection that nobody takes": ("dropped", "Timeout"),
    "a server that speaks no TLS": ("no-tls", "Timeout|connect-limit"),
    "a certificate that nobody vouches for": ("self-signed", "CERTIFICATE_VERIFY_FAILED"),
    "a handshake that only the total ends": ("mute-tls", "total-limit"),
    "a proxy that says nothing": ("mute-proxy", ""),
}


@pytest.mark.parametrize(("route", "said"), NO_WAY.values(), ids=NO_WAY)
def test_where_no_brain_can_be_reached_nothing_was_sent(scene: Scene, route: str, said: str) -> None:
    job_id = scene.lane.submit(route=route)["id"]
    gate = scene.closed_gate(route, 5)
    job = scene.job(job_id)
    assert (job["status"], job["reason"], job["waiting"]) == ("queued", "not-sent", "route-gated")
    assert (job["flags"], job["usage"], scene.text(job), job["attempts_used"]) == ([], None, None, 0)
    assert [one["status"] for one in job["attempts"]] == ["interrupted"]
    assert (marks(job["attempts"][0]), job["attempts"][0]["billed"]) == (NOTHING, "no")
    assert gate["reason"] == "unreachable"
    assert parse_time(gate["next_probe_at"]) - parse_time(gate["since"]) >= timedelta(seconds=30)
    assert any(word in job["detail"] for word in said.split("|"))
    scene.next_job_runs()
    assert scene.server.count("hello") == 0


# We hang up, the brain goes on


def test_after_a_cancel_a_brain_that_goes_on_costs_the_next_job_nothing(scene: Scene) -> None:
    ghost = scene.server.hold(brainserver.busy_after_hangup(1.0))
    scene.server.script(ghost)
    job_id = scene.lane.submit("the ghost", may_run_twice=True)["id"]
    following = scene.lane.submit("the next one")["id"]
    assert ghost.arrived.wait(20)
    ghost.release()
    deadline = time.monotonic() + 20
    while scene.text(scene.job(job_id)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)  # for the first words to arrive
    scene.lane.post(f"/v1/jobs/{job_id}/cancel")
    job = scene.lane.wait(job_id)
    assert (job["status"], job["reason"]) == ("cancelled", "cancel-requested")
    assert "may still be running" in job["attempts"][0]["detail"]
    assert (scene.text(job) or "").startswith("again ")
    then = scene.lane.wait(following)
    assert (then["status"], attempts(then)) == ("done", [("succeeded", "answered")])
    assert (scene.server.count("the ghost"), scene.server.count("the next one")) == (1, 1)
    left, came = scene.server.requests[0].hung_up_at, scene.server.requests[1].ended_at
    assert left is not None and came is not None and came - left >= 1.0
    assert scene.gate("local")["open"]


def test_after_a_limit_a_brain_that_goes_on_costs_the_next_job_nothing(scene: Scene) -> None:
    scene.server.script(brainserver.busy_after_hangup(1.0, brainserver.silence()))
    job = scene.lane.wait(scene.lane.submit("the ghost", route="hasty")["id"])
    assert (job["status"], attempts(job)) == ("held", [("unknown", "first-byte-limit")])
    then = scene.lane.wait(scene.lane.submit("the next one")["id"])
    assert (then["status"], attempts(then)) == ("done", [("succeeded", "answered")])
    assert (scene.server.count("the ghost"), scene.server.count("the next one")) == (1, 1)
