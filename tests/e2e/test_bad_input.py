"""Whatever a client sends, it gets an error object that names the field, and nothing is stored."""

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from brainlaned import api, wire
from tests.lane import Answer, Lane

MIB = 1024 * 1024
MESSAGES = [{"role": "user", "content": "hello"}]


def body_of(**fields: Any) -> dict[str, Any]:
    return {"request": {"messages": MESSAGES}, **fields}


def request_of(**parameters: Any) -> dict[str, Any]:
    return {"request": {"messages": MESSAGES, **parameters}}


def message_of(**fields: Any) -> dict[str, Any]:
    return {"request": {"messages": [*MESSAGES, fields]}}


def nested(depth: int) -> Any:
    """A value that is nested so deep that the whole body is nested `depth` deep."""
    value: Any = []
    for _ in range(depth - 3):
        value = [value]
    return value


@pytest.fixture
def refusing_lane(shared_lane: Lane) -> Iterator[Lane]:
    """The shared lane, in which nothing may have been stored when the test ends."""
    before = everything_stored(shared_lane)
    yield shared_lane
    assert everything_stored(shared_lane) == before


def everything_stored(lane: Lane) -> list[dict[str, Any]]:
    return lane.rows(
        """
        select (select count(*) from jobs) as jobs, (select count(*) from job_requests) as requests,
            (select count(*) from job_labels) as labels, (select count(*) from job_attempts) as attempts,
            (select count(*) from decisions) as decisions, paused_at
        from lane
        """
    )


def check(answered: Answer, field: str | None, status: int = 422, kind: str = "invalid") -> None:
    assert answered.status == status, answered.body
    assert answered.headers[wire.PROTOCOL_HEADER] == wire.PROTOCOL
    error = answered.error
    assert (error["kind"], error.get("field")) == (kind, field)
    assert error["message"].startswith("cannot ")
    assert error["next_action"]
    assert isinstance(error["retry_safe"], bool)


WRONG_VALUES = {
    "unknown field": (body_of(bogus=1), "bogus"),
    "misspelt field": (body_of(max_attempt=3), "max_attempt"),
    "request missing": ({}, "request"),
    "request null": ({"request": None}, "request"),
    "request a text": ({"request": "hello"}, "request"),
    "request a list": ({"request": MESSAGES}, "request"),
    "messages missing": ({"request": {}}, "request.messages"),
    "messages empty": ({"request": {"messages": []}}, "request.messages"),
    "messages an object": ({"request": {"messages": {}}}, "request.messages"),
    "messages a text": ({"request": {"messages": "hello"}}, "request.messages"),
    "message a text": ({"request": {"messages": ["hello"]}}, "request.messages[0]"),
    "role missing": (message_of(content="hello"), "request.messages[1].role"),
    "role empty": (message_of(role="", content="hello"), "request.messages[1].role"),
    "role a number": (message_of(role=1, content="hello"), "request.messages[1].role"),
    "content missing": (message_of(role="user"), "request.messages[1].content"),
    "content null": (message_of(role="user", content=None), "request.messages[1].content"),
    "content a number": (message_of(role="user", content=5), "request.messages[1].content"),
    "content an object": (message_of(role="user", content={}), "request.messages[1].content"),
    "stream": (request_of(stream=True), "request.stream"),
    "no stream": (request_of(stream=False), "request.stream"),
    "stream options a list": (request_of(stream_options=[]), "request.stream_options"),
    "two answers": (request_of(n=2), "request.n"),
    "no answers": (request_of(n=0), "request.n"),
    "answers a text": (request_of(n="1"), "request.n"),
    "answers true": (request_of(n=True), "request.n"),
    "model a number": (request_of(model=5), "request.model"),
    "model empty": (request_of(model=""), "request.model"),
    "route unknown": (body_of(route="nowhere"), "route"),
    "route empty": (body_of(route=""), "route"),
    "route a number": (body_of(route=5), "route"),
    "key a number": (body_of(key=5), "key"),
    "key empty": (body_of(key=""), "key"),
    "key of 300 bytes": (body_of(key="k" * 300), "key"),
    "key of 100 letters and 300 bytes": (body_of(key="好" * 100), "key"),
    "key of 256 bytes": (body_of(key="k" * 256), "key"),
    "priority unknown": (body_of(priority="urgent"), "priority"),
    "priority a number": (body_of(priority=1), "priority"),
    "max_attempts 0": (body_of(max_attempts=0), "max_attempts"),
    "max_attempts negative": (body_of(max_attempts=-1), "max_attempts"),
    "max_attempts huge": (body_of(max_attempts=10**30), "max_attempts"),
    "max_attempts a text": (body_of(max_attempts="3"), "max_attempts"),
    "max_attempts a fraction": (body_of(max_attempts=1.5), "max_attempts"),
    "max_attempts true": (body_of(max_attempts=True), "max_attempts"),
    "may_run_twice a text": (body_of(may_run_twice="yes"), "may_run_twice"),
    "may_run_twice a number": (body_of(may_run_twice=1), "may_run_twice"),
    "require_complete a list": (body_of(require_complete=[]), "require_complete"),
    "time without offset": (body_of(not_before="2031-01-31T22:00:00"), "not_before"),
    "time without a time of day": (body_of(not_before="2031-01-31"), "not_before"),
    "time in words": (body_of(not_before="tomorrow"), "not_before"),
    "time that never is": (body_of(not_before="2031-02-30T00:00:00Z"), "not_before"),
    "time out of range": (body_of(not_before="9999-12-31T23:59:59-23:59"), "not_before"),
    "time too far ahead": (body_of(not_before="2999-01-01T00:00:00Z"), "not_before"),
    "time a number": (body_of(not_before=1900000000), "not_before"),
    "labels a list": (body_of(labels=["a"]), "labels"),
    "labels too many": (body_of(labels={f"k{number}": "" for number in range(17)}), "labels"),
    "label key in capitals": (body_of(labels={"Key": "v"}), "labels"),
    "label key empty": (body_of(labels={"": "v"}), "labels"),
    "label key too long": (body_of(labels={"k" * 64: "v"}), "labels"),
    "label key and a line end": (body_of(labels={"key\n": "v"}), "labels"),
    "label value a number": (body_of(labels={"k": 5}), "labels.k"),
    "label value null": (body_of(labels={"k": None}), "labels.k"),
    "label value of 257 bytes": (body_of(labels={"k": "v" * 257}), "labels.k"),
    "surrogate in the prompt": (message_of(role="user", content="a\ud800b"), "request.messages[1].content"),
    "surrogate in the key": (body_of(key="\udfff"), "key"),
    "surrogate in a label": (body_of(labels={"k": "\ud83d"}), "labels.k"),
    "surrogate in the name of a parameter": (request_of(**{"\ud800": 1}), "request"),
    "nested 65 deep": (request_of(x=nested(65)), "request"),
}


@pytest.mark.parametrize(("document", "field"), WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_a_wrong_value_is_refused(refusing_lane: Lane, document: dict[str, Any], field: str) -> None:
    refused = refusing_lane.post("/v1/jobs", document)
    check(refused, field)
    assert f"'{field}'" in refused.error["message"]


GOOD = json.dumps(body_of()).encode()
NO_DOCUMENTS = {
    "nothing": (b"", "body"),
    "a space": (b" ", "body"),
    "no JSON": (b"request=hello", "body"),
    "half of it": (GOOD[:-1], "body"),
    "something after it": (GOOD + b"{}", "body"),
    "a list": (b"[" + GOOD + b"]", "body"),
    "null": (b"null", "body"),
    "a number": (b"5", "body"),
    "a text": (b'"hello"', "body"),
    "not UTF-8": (GOOD.replace(b"hello", b"\xff"), "body"),
    "UTF-16": (GOOD.decode().encode("utf-16"), "body"),
    "a surrogate in raw bytes": (GOOD.replace(b"hello", b"\xed\xa0\x80"), "body"),
    "a control character": (GOOD.replace(b"hello", b"\x00"), "body"),
    "NaN": (GOOD.replace(b'{"messages"', b'{"temperature": NaN, "messages"'), "body"),
    "infinity": (GOOD.replace(b'{"messages"', b'{"temperature": -Infinity, "messages"'), "body"),
    "a number too large": (GOOD.replace(b'{"messages"', b'{"temperature": 1e999, "messages"'), "request.temperature"),
    "a number of 5000 digits": (GOOD.replace(b'{"messages"', b'{"seed": ' + b"9" * 5000 + b', "messages"'), "body"),
    "a key twice": (GOOD[:-1] + b', "route": "local", "route": "other"}', "route"),
    "a key twice deep inside": (GOOD.replace(b'"role": "user"', b'"role": "user", "role": "system"'), "role"),
    "a hundred thousand lists": (GOOD[:-1] + b', "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "body"),
    "a hundred thousand objects": (b'{"request":' * 100_000 + b"1" + b"}" * 100_000, "body"),
}


@pytest.mark.parametrize(("body", "field"), NO_DOCUMENTS.values(), ids=NO_DOCUMENTS)
def test_a_body_that_is_no_strict_document_is_refused(refusing_lane: Lane, body: bytes, field: str) -> None:
    check(refusing_lane.post("/v1/jobs", body), field)


def test_the_prompt_does_not_stand_in_the_refusal(refusing_lane: Lane) -> None:
    refused = refusing_lane.post("/v1/jobs", {"request": {"messages": [{"role": "user", "content": "canary"}]}, "x": 1})
    check(refused, "x")
    assert b"canary" not in refused.body


@pytest.mark.parametrize(
    ("path", "document", "field"),
    [
        ("/v1/jobs/1/cancel", {"attempt": "1"}, "attempt"),
        ("/v1/jobs/1/cancel", {"attempt": True}, "attempt"),
        ("/v1/jobs/1/cancel", {"reason": 5}, "reason"),
        ("/v1/jobs/1/cancel", {"force": True}, "force"),
        ("/v1/jobs/1/cancel", [], "body"),
        ("/v1/lane/pause", {"reason": ["x"]}, "reason"),
        ("/v1/lane/pause", {"route": "local"}, "route"),
        ("/v1/lane/pause", b"{", "body"),
        ("/v1/lane/resume", {"route": 5}, "route"),
        ("/v1/lane/resume", {"route": "nowhere"}, "route"),
        ("/v1/lane/resume", {"reason": "x"}, "reason"),
    ],
)
def test_a_wrong_body_of_a_change_is_refused(refusing_lane: Lane, path: str, document: Any, field: str) -> None:
    check(refusing_lane.post(path, document), field)


# Large


def exchange(lane: Lane, head: str, parts: Iterable[bytes]) -> Answer:
    """Send a request in parts until the daemon has had enough, and return its first answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(60)
        client.connect(os.fspath(lane.socket))
        with suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(f"POST /v1/jobs HTTP/1.1\r\nHost: lane\r\n{head}\r\n\r\n".encode())
            for part in parts:
                client.sendall(part)
        with http.client.HTTPResponse(client) as response:
            response.begin()
            return Answer(response.status, response.headers, response.read())


def large(size: int) -> bytes:
    """A good body of exactly so many bytes."""
    return GOOD.replace(b"hello", b"x" * (size - len(GOOD) + len(b"hello")))


def chunks(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 65536):
        part = body[start : start + 65536]
        yield b"%x\r\n%b\r\n" % (len(part), part)
    yield b"0\r\n\r\n"


@pytest.mark.parametrize("size", [wire.MAX_BODY_BYTES + 1, 9 * MIB])
def test_a_body_that_is_too_large_is_refused(refusing_lane: Lane, size: int) -> None:
    check(exchange(refusing_lane, f"Content-Length: {size}", [large(size)]), "body", 413, "too-large")


@pytest.mark.parametrize("size", [wire.MAX_BODY_BYTES + 1, 9 * MIB])
def test_a_body_that_is_too_large_and_does_not_say_so_is_refused(refusing_lane: Lane, size: int) -> None:
    check(exchange(refusing_lane, "Transfer-Encoding: chunked", chunks(large(size))), "body", 413, "too-large")


def test_a_body_that_is_larger_than_it_says_is_cut_where_it_said(refusing_lane: Lane) -> None:
    check(exchange(refusing_lane, "Content-Length: 10", [large(9 * MIB)]), "body")


def test_a_body_that_ends_before_its_length_stores_nothing(refusing_lane: Lane) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(os.fspath(refusing_lane.socket))
        client.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: lane\r\nContent-Length: %d\r\n\r\n" % (len(GOOD) + 1) + GOOD)
    assert refusing_lane.get("/v1/healthz").status == 200


@pytest.mark.parametrize(
    "document",
    [
        large(wire.MAX_BODY_BYTES),
        body_of(key="k" * 255, labels={f"{number:063d}": "v" * 256 for number in range(16)}),
        request_of(x=nested(64)),
        request_of(n=1, stream_options={}, temperature=0.5, seed=2**63),
        message_of(role="user", content="\x00\uffff🌍"),
    ],
    ids=["8 MiB", "key and labels", "nesting", "parameters", "characters"],
)
def test_what_is_just_within_the_limits_is_accepted(shared_lane: Lane, document: Any) -> None:
    accepted = shared_lane.post("/v1/jobs", document)
    assert accepted.status == 201
    assert shared_lane.wait(accepted.json["id"])["status"] == "done"


# Slow


@pytest.fixture(scope="module", autouse=True)
def slow_clients(_shared: Any) -> Iterator[dict[str, Answer]]:
    """Clients that trickle their bodies from the first test of this file on, so that the last one hardly waits."""
    lane = _shared[1]
    stop = threading.Event()
    answers: dict[str, Answer] = {}

    def trickle() -> Iterator[bytes]:
        # One byte twice a second, for far longer than any body may take.
        deadline = time.monotonic() + 6 * api.BODY_S
        while time.monotonic() < deadline and not stop.wait(0.5):
            yield b" "

    def client(name: str, head: str, parts: Iterable[bytes]) -> None:
        answers[name] = exchange(lane, head, parts)

    threads = [
        threading.Thread(target=client, args=("slow", "Content-Length: 1000", trickle())),
        threading.Thread(target=client, args=("silent", "Content-Length: 1000", [GOOD])),
        threading.Thread(target=client, args=("lying", f"Content-Length: {10**15}", [GOOD])),
    ]
    for thread in threads:
        thread.start()
    yield answers
    stop.set()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("client", ["slow", "silent", "lying"])
def test_a_body_that_arrives_too_slowly_is_refused(
    refusing_lane: Lane, slow_clients: dict[str, Answer], client: str
) -> None:
    deadline = time.monotonic() + 4 * api.BODY_S
    while client not in slow_clients:
        assert time.monotonic() < deadline
        time.sleep(0.1)  # for the daemon to lose patience with a client that began with the first test
    check(slow_clients[client], None, 408, "too-slow")
    assert slow_clients[client].error["retry_safe"]


# Not even a request


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"GET /v1/jobs HTTP/1.1\r\n\r\n",
        b"GET /v1/status HTTP/1.1\r\nHost: lane\r\nX: " + b"x" * MIB + b"\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: lane\r\nContent-Length: ten\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: lane\r\nTransfer-Encoding: chunked\r\n\r\nthis is no chunk\r\n",
    ],
    ids=["words", "no host", "a huge head", "no length", "no chunk"],
)
def test_what_is_no_request_is_refused_in_the_same_shape(refusing_lane: Lane, sent: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(60)
        client.connect(os.fspath(refusing_lane.socket))
        with suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(sent)
        with http.client.HTTPResponse(client) as response:
            response.begin()
            answered = Answer(response.status, response.headers, response.read())
    assert 400 <= answered.status < 500
    assert answered.headers[wire.PROTOCOL_HEADER] == wire.PROTOCOL
    assert set(answered.error) >= {"kind", "message", "next_action", "retry_safe"}
    assert refusing_lane.get("/v1/healthz").status == 200
