"""Whatever is sent to the socket, the lane answers in its own shape or closes, and the job that runs never knows.

Requests are made up from valid ones, spoilt ones and noise, several to a connection.
"""

import http.client
import io
import json
import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st

from brainlaned import wire
from tests.brainserver import BrainServer
from tests.lane import Lane, config_for, living

EXAMPLES = 1000
"""Connections; each carries one to five requests, so there are more than 2,000."""

PATIENCE_S = 60.0

METHODS = st.sampled_from(["GET", "GET", "POST", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "BREW", "get"])
IDS = st.sampled_from(["1", "1", "2", "3", "0", "-1", "99999999999999999999", "x", "%00", "1%2F2", "\xe9", "{id}"])
PATHS = st.one_of(
    st.sampled_from(["/v1/jobs", "/v1/status", "/v1/healthz", "/v1/lane/pause", "/v1/lane/resume", "/v1/backup", "/"]),
    st.builds("/v1/jobs/{}".format, IDS),
    st.builds(
        "/v1/jobs/{}/{}".format,
        IDS,
        st.sampled_from(
            ["request", "output", "response", "stream", "cancel", "retry", "recover", "forget", "bogus", ""]
        ),
    ),
    st.text(st.characters(min_codepoint=0x21, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=30),
)
QUERIES = st.one_of(
    st.just(""),
    st.sampled_from(
        [
            *(
                "?limit=1",
                "?limit=0",
                "?status=done",
                "?status=x",
                "?label=a=b",
                "?after=2",
                "?since=2026-03-01T12:00:00Z",
            ),
            *(
                "?since=x",
                "?wait=0",
                "?wait=0.01",
                "?wait=nan",
                "?partial=1",
                "?partial=2",
                "?from=0",
                "?submitter=root",
            ),
        ]
    ),
    st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=20).map("?{}".format),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        *("request", "route", "key", "priority", "not_before", "labels", "max_attempts", "may_run_twice", "attempt"),
        *("require_complete", "reason", "action", "text", "messages", "model", "bogus"),
    ]
)
VALID: list[dict[str, Any]] = [
    {},
    {"request": {"messages": [{"role": "user", "content": "hello"}]}},
    {"request": {"messages": [{"role": "user", "content": "hello"}]}, "key": "k", "labels": {"a": "b"}},
    {"request": {"messages": [{"role": "user", "content": "hello"}]}, "not_before": "2030-01-01T00:00:00Z"},
    {"attempt": 1, "reason": "because"},
    {"action": "resend", "attempt": 1},
    {"action": "complete", "text": "by hand"},
]
DOCUMENTS = st.one_of(
    st.sampled_from(VALID),
    st.builds(
        lambda valid, more: {**valid, **more}, st.sampled_from(VALID), st.dictionaries(FIELDS, VALUES, max_size=2)
    ),
    VALUES,
)
BODIES = st.one_of(
    st.just(b""),
    DOCUMENTS.map(lambda document: json.dumps(document).encode()),
    st.builds(
        lambda document, place: json.dumps(document).encode()[: place or None],
        st.sampled_from(VALID),
        st.integers(0, 60),
    ),
    st.binary(max_size=60),
)
FRAMING = st.sampled_from(
    ["length", "length", "length", "length", "chunked", "short", "long", "none", "words", "twice"]
)
HEADERS = st.lists(
    st.sampled_from(
        [
            *(
                b"Connection: close",
                b"Connection: keep-alive",
                b"Content-Type: application/json",
                b"Upgrade: websocket",
            ),
            *(b"Expect: 100-continue", b"X-Nothing: \xff\xfe", b"Accept-Encoding: gzip", b"Content-Encoding: gzip"),
            *(b"Host: other", b"Brainlane-Protocol: 99", b"no colon", b": no name", b"X: " + b"x" * 3000),
        ]
    ),
    max_size=2,
)


def whole(method: str, path: str, document: object) -> bytes:
    body = b"" if document is None else json.dumps(document).encode()
    return f"{method} {path} HTTP/1.1\r\nHost: lane\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


SOUND = st.one_of(
    st.sampled_from(VALID[1:4]).map(lambda document: whole("POST", "/v1/jobs", document)),
    st.sampled_from(["", "/output", "/request", "/stream"]).map(lambda rest: whole("GET", f"/v1/jobs/1{rest}", None)),
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """The bytes of one request, as they are sent."""
    method, path, query, body, framing = (draw(each) for each in (METHODS, PATHS, QUERIES, BODIES, FRAMING))
    lines = [f"{method} {path}{query} HTTP/1.1".encode("latin-1", "replace"), b"Host: lane", *draw(HEADERS)]
    length = {"length": len(body), "short": max(0, len(body) - 3), "long": len(body) + 3, "twice": len(body)}
    if framing in length:
        lines.append(b"Content-Length: %d" % length[framing])
    if framing == "twice":
        lines.append(b"Content-Length: %d" % (len(body) + 1))
    if framing == "words":
        lines.append(b"Content-Length: many")
    if framing == "chunked":
        lines.append(b"Transfer-Encoding: chunked")
        body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + b"0\r\n\r\n"
    return b"\r\n".join([*lines, b"", body])


NOISE = st.binary(max_size=200)
CONNECTIONS = st.lists(
    st.one_of(*[requests()] * 5, SOUND, NOISE),
    min_size=1,
    max_size=5,
)


class Kept(io.BytesIO):
    """Bytes that http.client may read as a socket's, and go on reading after an answer is over."""

    def makefile(self, *_: object) -> "Kept":
        return self

    def close(self) -> None:
        pass


def answers_in(received: bytes, sent: bytes) -> Iterator[tuple[int, http.client.HTTPMessage, bytes]]:
    """Read one answer after the other. After one to HEAD no body follows, and which one that is cannot be told."""
    stream = Kept(received)
    while stream.tell() < len(received) and b"HEAD" not in sent:
        response = http.client.HTTPResponse(stream)  # type: ignore[arg-type]
        response.begin()
        yield response.status, response.headers, response.read()


LAST = b"GET /v1/healthz HTTP/1.1\r\nHost: lane\r\nConnection: close\r\n\r\n"
"""Ends a connection, or ends what was left open before it, so that nobody waits for more."""


def exchange(path: Path, sent: bytes) -> bytes:
    """Send all and read to the end. Who closes his own side first is taken for gone, and would get half an answer."""
    received = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(PATIENCE_S)
        client.connect(os.fspath(path))
        with suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(sent + LAST)
        with suppress(ConnectionResetError):
            while part := client.recv(65536):
                received += part
    return received


def check(status: int, headers: http.client.HTTPMessage, body: bytes) -> None:
    assert status < 500 or status in {503, 507}, body
    assert headers[wire.PROTOCOL_HEADER] == wire.PROTOCOL
    if status >= 400:
        error = json.loads(body)["error"]
        assert set(error) - {"field"} == {"kind", "message", "next_action", "retry_safe"}
        # What is not even HTTP is refused with the status that HTTP has for that.
        assert status in {400, wire.HTTP_OF_KIND[wire.ErrorKind(error["kind"])]}
        assert "Traceback" not in error["message"]


@pytest.fixture(scope="module")
def working(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lane, BrainServer]]:
    """A lane and the brain that it asks."""
    with BrainServer() as server:
        made = Lane(tmp_path_factory.mktemp("any"), config_for(server.base_url, lane="max_queued = 50"))
        with living(made, server.release) as lane:
            yield lane, server


def test_no_request_at_all_brings_forth_a_fault_or_disturbs_the_job_that_runs(
    working: tuple[Lane, BrainServer],
) -> None:
    lane, server = working
    for _ in range(3):  # for the requests to be about
        lane.wait(lane.submit("before")["id"])
    held = server.hold()
    server.script(held)
    job = lane.submit("undisturbed")
    assert held.arrived.wait(PATIENCE_S)
    statuses: Counter[int] = Counter()

    @hypothesis.settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @hypothesis.given(CONNECTIONS)
    def sent(parts: list[bytes]) -> None:
        together = b"".join(parts)
        for status, headers, body in answers_in(exchange(lane.socket, together), together):
            statuses[status] += 1
            check(status, headers, body)

    sent()
    assert {200, 201, 400, 404, 405, 422} <= set(statuses)
    assert statuses.total() > EXAMPLES
    shown = lane.get(f"/v1/jobs/{job['id']}").json
    assert (shown["status"], shown["attempt_count"], shown["cancel_requested_at"]) == ("running", 1, None)
    lane.post("/v1/lane/pause")
    held.release()
    ended = lane.wait(job["id"])
    assert (ended["status"], ended["attempt_count"]) == ("done", 1)
    assert lane.get(f"/v1/jobs/{job['id']}/output").body == b"hello world"
    assert server.count("undisturbed") == 1
    log = lane.log.read_text()
    assert "Traceback" not in log and "a request failed" not in log
