"""Every step of the fault server does what it says: what all other tests with a brain rely on."""

import base64
import contextlib
import gzip
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import brainserver
from tests.brainserver import BrainServer, Record, Step, answer

CHAT = "/v1/chat/completions"
BIG = 8 * 1024 * 1024


@pytest.fixture
def server() -> Iterator[BrainServer]:
    with BrainServer() as running:
        yield running


def body(prompt: str = "hi", *, stream: bool = True, **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": prompt}], "stream": stream, **more}


def post(server: BrainServer, prompt: str = "hi", **more: object) -> httpx.Response:
    return httpx.post(server.base_url + "/chat/completions", json=body(prompt, **more), trust_env=False)


def bytes_after(server: BrainServer, *steps: Step) -> bytes:
    """Everything that a raw client receives for one request; raises ConnectionResetError on a RST."""
    server.script(*steps)
    with connected(server) as client:
        return everything(client)


@contextlib.contextmanager
def connected(server: BrainServer, prompt: str = "hi") -> Iterator[socket.socket]:
    """A raw connection on which one whole request has been sent."""
    sent = json.dumps(body(prompt)).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
        client.sendall(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(sent)) + sent)
        yield client


def everything(client: socket.socket) -> bytes:
    received = b""
    while data := client.recv(65536):
        received += data
    return received


def contents(text: str) -> list[dict[str, object]]:
    events = [line.removeprefix("data: ") for line in text.split("\n") if line]
    return [json.loads(event) for event in events if event != "[DONE]"]


def spoken(text: str) -> str:
    choices = [choice for event in contents(text) for choice in event["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def record(server: BrainServer) -> Record:
    """The last record, once its exchange is over."""
    assert server.wait_for(lambda s: bool(s.requests) and s.requests[-1].ended_at is not None)
    return server.requests[-1]


# The record


def test_a_request_is_recorded_with_its_times_headers_and_body(server: BrainServer) -> None:
    before, wall = time.monotonic(), time.time()
    post(server, "né 好 🌍")
    seen = record(server)
    assert (seen.number, seen.method, seen.path, seen.whole, seen.hung_up_at) == (0, "POST", CHAT, True, None)
    assert seen.json == body("né 好 🌍") and json.loads(seen.body) == seen.json
    assert seen.prompt == "né 好 🌍" and seen.headers["content-type"] == "application/json"
    assert before <= seen.received_at <= seen.ended_at <= time.monotonic() and wall <= seen.received_wall <= time.time()


def test_posts_are_counted_by_their_whole_prompt(server: BrainServer) -> None:
    for prompt in ["job 1", "job 10", "job 1"]:
        post(server, prompt)
    httpx.get(server.base_url + "/models")
    assert (server.count(), server.count("job 1"), server.count("job")) == (3, 2, 0)
    assert (server.count(whole=True), server.count(whole=False)) == (3, 0)


def test_an_upload_that_is_cut_is_recorded_as_not_whole(server: BrainServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"POST %b HTTP/1.1\r\nContent-Length: 100\r\n\r\n{" % CHAT.encode())
    seen = record(server)
    assert (seen.whole, seen.body, seen.json, seen.hung_up_at is not None) == (False, b"{", None, True)
    assert server.count(whole=False) == 1


def test_a_head_that_is_cut_is_recorded_without_a_method_and_nothing_at_all_is_not_recorded(
    server: BrainServer,
) -> None:
    for number, sent in enumerate([b"POST /v1/ch", b""], 1):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(sent)
        assert server.wait_for(lambda s, number=number: s.connections == number and not s._open)
    assert [(each.method, each.body, each.whole) for each in server.requests] == [("", b"POST /v1/ch", False)]
    assert (server.connections, server.count()) == (2, 0)


def test_concurrency_is_counted_at_arrival(server: BrainServer) -> None:
    held = server.hold()
    server.default = held
    with connected(server), connected(server), connected(server):
        assert server.wait_for(lambda s: s.count() == 3)
    assert sorted(each.concurrency for each in server.requests) == [1, 2, 3]
    assert server.max_concurrent == 3


def test_one_call_after_another_is_never_counted_as_concurrent(server: BrainServer) -> None:
    with httpx.Client(trust_env=False) as client:
        for _ in range(300):
            client.post(server.base_url + "/chat/completions", json=body())
    assert server.max_concurrent == 1


def test_a_client_that_left_in_the_middle_of_an_unread_upload_does_not_count_as_concurrent(server: BrainServer) -> None:
    server.script(brainserver.stop_reading(0, "wait"))
    with httpx.Client(trust_env=False, timeout=0.2) as client, pytest.raises(httpx.WriteTimeout):
        client.post(server.base_url + "/chat/completions", json=body("x" * BIG))
    post(server)
    assert server.max_concurrent == 1


def test_a_hang_up_is_noted_at_once_with_its_time(server: BrainServer) -> None:
    server.default = brainserver.silence()
    with connected(server):
        assert server.wait_for(lambda s: s.count() == 1)
        left = time.monotonic()
    hung_up_at = record(server).hung_up_at
    assert hung_up_at is not None and 0 <= hung_up_at - left < 0.2


def test_a_step_that_breaks_fails_the_test_that_used_it() -> None:
    def broken(x: brainserver.Exchange) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), BrainServer(default=broken) as server, connected(server) as client:
        everything(client)


def test_a_wrong_argument_is_refused_where_the_step_is_made() -> None:
    with pytest.raises(TypeError):
        brainserver.cut(no_such_thing=1)


# Choosing


def test_the_script_comes_first_then_the_prompt_then_the_default(server: BrainServer) -> None:
    server.script(answer("scripted"), answer("scripted too"))
    server.by_prompt(lambda text: answer("by prompt") if text == "b" else None)
    server.default = answer("default")
    assert [spoken(post(server, prompt).text) for prompt in "bbba"] == [
        "scripted",
        "scripted too",
        "by prompt",
        "default",
    ]


def test_other_gets_are_answered_without_using_the_script(server: BrainServer) -> None:
    server.script(brainserver.status(500))
    assert httpx.get(server.base_url + "/models").json()["data"][0]["id"] == "fake"
    assert httpx.get(server.base_url.removesuffix("/v1") + "/health").json() == {"status": "ok"}
    assert post(server).status_code == 500
    assert [each.concurrency for each in server.requests] == [0, 0, 1]


# Good answers


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
def test_an_answer_streams_its_words(server: BrainServer, framing: str) -> None:
    server.default = answer("one two three", framing=framing, headers={"X-Request-Id": "r1"})
    got = post(server)
    assert got.headers["content-type"] == "text/event-stream" and got.headers["x-request-id"] == "r1"
    assert ("transfer-encoding" in got.headers, "content-length" in got.headers) == (
        framing == "chunked",
        framing == "length",
    )
    assert spoken(got.text) == "one two three" and got.text.endswith("data: [DONE]\n\n")
    assert [event["choices"][0]["finish_reason"] for event in contents(got.text)] == [None] * 4 + ["stop"]


def test_usage_comes_when_asked_for_and_as_given_and_not_when_refused(server: BrainServer) -> None:
    asked = {"stream_options": {"include_usage": True}}
    server.script(answer("a b"), answer("a b"), answer("a b", usage=False), answer("a b", usage={"total_tokens": 9}))
    usages = [contents(post(server, "x y z", **more).text)[-1].get("usage") for more in ({}, asked, asked, {})]
    assert usages == [None, {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}, None, {"total_tokens": 9}]


def test_finish_reason_and_end_marker_can_be_left_out(server: BrainServer) -> None:
    got = bytes_after(server, answer("a", finish=None, done=False))
    assert b"[DONE]" not in got and b'"stop"' not in got and got.endswith(b"\n\n\r\n0\r\n\r\n")


def test_tokens_are_deltas_and_half_a_surrogate_pair_can_be_one(server: BrainServer) -> None:
    server.default = answer(tokens=["\ud83c", "\udf0d", {"reasoning_content": "hm"}], finish="length")
    deltas = [event["choices"][0]["delta"] for event in contents(post(server).text)]
    assert deltas[1:] == [{"content": "\ud83c"}, {"content": "\udf0d"}, {"reasoning_content": "hm"}, {}]


def test_a_request_without_stream_is_answered_in_json(server: BrainServer) -> None:
    assert post(server, stream=False).json()["choices"][0]["message"]["content"] == "hello world"


def test_a_json_answer_ignores_stream(server: BrainServer) -> None:
    server.script(brainserver.json_answer("whole", finish="length"))
    choice = post(server).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("whole", "length")


def test_delay_and_gap_are_kept(server: BrainServer) -> None:
    server.default = answer("a b", delay_s=0.2, gap_s=0.05)
    began = time.monotonic()
    with httpx.stream("POST", server.base_url + "/chat/completions", json=body()) as got:
        first = time.monotonic() - began
        pieces = list(got.iter_raw())
    assert first >= 0.2 and time.monotonic() - began >= first + 4 * 0.05 - 0.01 and len(pieces) >= 4


# Answers that are wrong in what they say


def test_a_status_carries_headers_and_body(server: BrainServer) -> None:
    server.script(brainserver.status(429, headers={"Retry-After": "30"}), brainserver.status(529, {"error": "x"}))
    server.script(brainserver.status(400, "not json", content_type="text/plain"))
    first, second, third = post(server), post(server), post(server)
    assert (first.status_code, first.headers["retry-after"], first.json()["error"]["code"]) == (429, "30", 429)
    assert (second.status_code, second.json()) == (529, {"error": "x"})
    assert (third.status_code, third.text, third.headers["content-type"]) == (400, "not json", "text/plain")


def test_errors_come_in_a_200(server: BrainServer) -> None:
    server.script(brainserver.error_in_200(), brainserver.error_in_200({"message": "no"}), brainserver.html_page())
    assert [(got := post(server)).json()["error"].get("code") for _ in range(2)] == [429, None]
    assert got.status_code == 200
    page = post(server)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html") and page.text.startswith("<!doctype")


def test_a_stream_breaks_off_with_an_error_event(server: BrainServer) -> None:
    server.script(brainserver.stream_then_error(["a", "b", "c"]))
    got = post(server)
    *deltas, error = contents(got.text)
    assert (got.status_code, len(deltas), error["error"]["code"]) == (200, 3, 529) and "[DONE]" not in got.text


def test_a_redirect_points_elsewhere(server: BrainServer) -> None:
    server.script(brainserver.redirect("http://127.0.0.2:1/"))
    got = post(server)
    assert (got.status_code, got.headers["location"]) == (307, "http://127.0.0.2:1/")


def test_a_gzip_bomb_is_small_on_the_wire(server: BrainServer) -> None:
    got = bytes_after(server, brainserver.gzip_bomb(10_000_000))
    top, _, packed = got.partition(b"\r\n\r\n")
    assert b"Content-Encoding: gzip" in top and len(packed) < 50_000 and len(gzip.decompress(packed)) == 10_000_000


def test_raw_bytes_are_sent_as_they_are_with_pauses(server: BrainServer) -> None:
    began = time.monotonic()
    assert bytes_after(server, brainserver.raw(b"HTT\xff", 0.1, "P")) == b"HTT\xffP"
    assert time.monotonic() - began >= 0.1


def test_raw_events_keep_bytes(server: BrainServer) -> None:
    got = bytes_after(server, brainserver.raw_events([b": hm\n\n", {"a": 1}]))
    assert got.endswith(b'\r\n\r\n6\r\n: hm\n\n\r\n10\r\ndata: {"a": 1}\n\n\r\n0\r\n\r\n')


# Answers that do not come, or not whole, or not fast


@pytest.mark.parametrize("steps", [brainserver.silence(), brainserver.gate(threading.Event())])
def test_silence_is_silent_until_the_client_leaves(server: BrainServer, steps: Step) -> None:
    server.script(steps)
    with connected(server) as client:
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
    seen = record(server)
    assert seen.whole and seen.hung_up_at is not None


def test_the_connection_closes_or_is_reset_before_an_answer(server: BrainServer) -> None:
    assert bytes_after(server, brainserver.close_before_answer()) == b""
    with pytest.raises(ConnectionResetError):
        bytes_after(server, brainserver.reset_before_answer())
    assert [(each.whole, each.hung_up_at) for each in server.requests] == [(True, None), (True, None)]


def test_nobody_listens_at_a_refused_address() -> None:
    with brainserver.refuse() as base_url, pytest.raises(httpx.ConnectError):
        httpx.get(base_url)


def segments(client: socket.socket) -> int:
    """How many segments with data have come in: tcpi_data_segs_in of tcp(7)'s TCP_INFO."""
    return int.from_bytes(client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 156)[152:156], sys.byteorder)


@pytest.mark.parametrize("after", [b"", brainserver.head()], ids=["head", "body"])
def test_a_drip_sends_one_byte_per_segment_and_gap(server: BrainServer, after: bytes) -> None:
    server.script(brainserver.drip(b"HTTP/1", 0.03, after=after))
    began = time.monotonic()
    with connected(server) as client:
        assert everything(client) == after + b"HTTP/1"
        assert segments(client) == 6 + bool(after)
    assert time.monotonic() - began >= 5 * 0.03


def test_bytewise_sends_one_byte_per_segment(server: BrainServer) -> None:
    events = b"".join(brainserver.sse("né 好 🌍"))
    server.script(brainserver.bytewise(events))
    with connected(server) as client:
        assert everything(client).endswith(b"\r\n\r\n" + events)
        assert segments(client) == len(events) + 1


@pytest.mark.parametrize("count", [3, None])
def test_informational_answers_come_before_the_real_one_or_for_ever(server: BrainServer, count: int | None) -> None:
    server.script(brainserver.informational(103, count=count, gap_s=0.01))
    with connected(server) as client:
        if count is None:
            received = b""
            while received.count(b"103 Early Hints") < 10:
                received += client.recv(65536)
        else:
            assert everything(client).startswith(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 3 + b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("framing", ["chunked", "length"])
@pytest.mark.parametrize("how", ["close", "reset", "chunk"])
def test_a_cut_delivers_exactly_so_many_bytes(server: BrainServer, framing: str, how: str) -> None:
    server.script(brainserver.cut(100, how, framing=framing))
    received = b""
    with (
        pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)) as error,
        httpx.stream("POST", server.base_url + "/chat/completions", json=body()) as got,
    ):
        for data in got.iter_raw():
            received += data
    if (framing, how) != ("length", "chunk"):
        assert received == b"".join(brainserver.sse())[:100]
    assert isinstance(error.value, httpx.ReadError) == (how == "reset")


def test_a_cut_can_come_before_the_first_byte_of_the_body(server: BrainServer) -> None:
    assert bytes_after(server, brainserver.cut(0)) == brainserver.head(chunked=True)


def test_an_endless_answer_ends_when_the_client_leaves(server: BrainServer) -> None:
    server.script(brainserver.endless("x", gap_s=0.001), brainserver.endless("x" * 1000, gap_s=0))
    for wanted in (5_000, 20_000_000):
        with httpx.stream("POST", server.base_url + "/chat/completions", json=body()) as got:
            received = 0
            for data in got.iter_raw():
                received += len(data)
                if received > wanted:
                    break
        assert record(server).hung_up_at is not None


# Uploads


def upload(server: BrainServer) -> tuple[list[str], httpx.Response | httpx.TransportError]:
    """Send a large body and return the trace of the client with its answer or error."""
    events: list[str] = []
    request = {"json": body("x" * BIG), "extensions": {"trace": lambda name, _: events.append(name)}}
    with httpx.Client(trust_env=False, timeout=5) as client:
        try:
            return events, client.post(server.base_url + "/chat/completions", **request)
        except httpx.TransportError as error:
            return events, error


@pytest.mark.parametrize("how", ["reset", "close"])
def test_an_upload_is_cut_by_the_server(server: BrainServer, how: str) -> None:
    server.script(brainserver.stop_reading(65536, how))
    events, error = upload(server)
    assert isinstance(error, httpx.TransportError) and "http11.send_request_body.failed" in events
    seen = record(server)
    assert (seen.whole, len(seen.body) < BIG, seen.hung_up_at) == (False, True, None)


def test_an_upload_stalls_when_the_server_stops_reading(server: BrainServer) -> None:
    server.script(brainserver.stop_reading(65536, "wait"))
    with httpx.Client(trust_env=False, timeout=0.5) as client, pytest.raises(httpx.WriteTimeout):
        client.post(server.base_url + "/chat/completions", json=body("x" * BIG))
    seen = record(server)
    assert not seen.whole and seen.hung_up_at is not None


def test_an_early_status_reaches_a_client_that_is_still_sending(server: BrainServer) -> None:
    server.script(brainserver.early_status(401))
    events, got = upload(server)
    assert isinstance(got, httpx.Response) and got.status_code == 401
    assert "http11.send_request_body.failed" in events and not record(server).whole


# Waiting


def test_a_held_request_says_when_it_arrived_and_goes_on_when_released(server: BrainServer) -> None:
    held = server.hold(answer("at last"))
    server.script(held)
    with connected(server) as client:
        assert held.arrived.wait(5)
        client.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.recv(1)
        held.release()
        client.settimeout(5)
        assert b"last" in everything(client)


def test_a_gate_opens_with_its_event(server: BrainServer) -> None:
    opened = threading.Event()
    server.script(brainserver.gate(opened, brainserver.status(503)))
    with connected(server) as client:
        opened.set()
        assert everything(client).startswith(b"HTTP/1.1 503 Service Unavailable\r\n")


def test_the_slot_stays_busy_after_a_hang_up(server: BrainServer) -> None:
    server.script(brainserver.busy_after_hangup(0.4))
    with connected(server) as client:
        client.recv(1)
    left = record(server).hung_up_at
    assert left is not None and post(server).status_code == 200
    assert record(server).ended_at - left >= 0.4 and server.max_concurrent == 1


def test_the_server_goes_away_and_comes_back_on_the_same_port() -> None:
    server = BrainServer(default=brainserver.silence()).start()
    with connected(server) as client:
        assert server.wait_for(lambda s: s.count(whole=True) == 1)
        server.close()
        assert everything(client) == b""
    with pytest.raises(httpx.ConnectError):
        post(server)
    server.default = answer()
    with server:
        assert post(server).status_code == 200
    assert [each.hung_up_at for each in server.requests] == [None, None]


# As a process


def test_as_a_process_it_obeys_the_control_side(tmp_path: Path) -> None:
    script = json.dumps([{"step": "status", "args": [503]}])
    no_content = base64.b64encode(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n").decode()
    command = [sys.executable, "-m", "tests.brainserver", "--script", script, "--log", str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            base_url = process.stdout.readline().removeprefix("listening on ").strip()
            side = base_url.removesuffix("/v1")
            chat = base_url + "/chat/completions"
            with httpx.Client(trust_env=False) as client:
                assert client.post(chat, json=body("a")).status_code == 503
                orders = {
                    "script": [
                        {"step": "raw", "args": [{"base64": no_content}]},
                        "html_page",
                    ],
                    "by_prompt": {"b": {"step": "hold", "then": {"step": "answer", "text": "released"}}},
                    "default": {"step": "answer", "text": "default"},
                }
                assert client.post(side + "/__control__", json=orders).status_code == 200
                assert client.post(chat, json=body("b")).status_code == 204
                assert client.post(chat, json=body("b")).text.startswith("<!doctype")
                with client.stream("POST", chat, json=body("c")) as got:
                    assert spoken(got.read().decode()) == "default"
                threading.Timer(0.2, lambda: httpx.post(side + "/__release__", trust_env=False)).start()
                assert spoken(client.post(chat, json=body("b")).text) == "released"
                assert client.post(side + "/__control__", json={"default": "no such step"}).status_code == 400
                assert client.post(side + "/__control__", json={"default": {"step": "cut"}}).status_code == 400
                seen = client.get(side + "/__requests__").json()
                assert [each["prompt"] for each in seen["requests"]] == ["a", "b", "b", "c", "b"]
                assert (seen["max_concurrent"], json.loads(seen["requests"][0]["body"])) == (1, body("a"))
                client.post(side + "/__control__", json={"reset": True})
                assert client.get(side + "/__requests__").json()["requests"] == []
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    for number in range(5):
        assert [line["event"] for line in lines if line["number"] == number] == ["arrived", "ended"]
