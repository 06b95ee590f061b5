"""A short run of the fuzz, and proof that it can see: answers whose end is known, and faults that it must not miss.

The long run is `python -m tests.fuzz`.
"""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from tests import fuzz
from tests.fuzz import CASES, KEY, WHOLE_STREAM, Bench, Case

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("fuzz")) as made:
        yield made


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(CASES)
def test_no_bytes_raise_ask_twice_finish_without_an_end_or_keep_a_secret(bench: Bench, case: Case) -> None:
    bench.check(case)


def whole(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        pytest.param(whole(WHOLE_STREAM), ("done", "answered"), id="a stream"),
        pytest.param(HEAD + b"\r\n" + WHOLE_STREAM, ("done", "answered"), id="a stream up to the close"),
        pytest.param(whole(fuzz.completion("one")), ("done", "answered"), id="a JSON answer"),
        pytest.param(whole(b"{}"), ("queued", "upstream-error"), id="a whole body that is no answer"),
        pytest.param(whole(fuzz.DEEP_BODY), ("queued", "upstream-error"), id="a nest"),
        pytest.param(
            whole(b"data: " + fuzz.DEEP_BODY + b"\n\n"), ("queued", "upstream-error"), id="a nest as an event"
        ),
        pytest.param(
            whole(b'{"usage": {"a": NaN, "b": 1e999, "c": ' + b"9" * 9000 + b"}, " + fuzz.completion("one")[1:]),
            ("done", "answered"),
            id="numbers that are none",
        ),
        pytest.param(
            whole(fuzz.delta("\ud800") + b"data: \xff\n\ndata: [DONE]\n\n"),
            ("held", "answer-incomplete"),
            id="bytes that are no text",
        ),
        pytest.param(HEAD + b"\r\n" + fuzz.delta("one"), ("held", "answer-incomplete"), id="a part"),
        pytest.param(whole(KEY.encode(), b"400 " + KEY.encode()), ("failed", "bad-request"), id="an echoed key"),
        pytest.param(whole(b"", b"401 No"), ("queued", "route-refused"), id="a refused key"),
        pytest.param(whole(b"", b"429 Later"), ("queued", "asked-to-wait"), id="a busy brain"),
        pytest.param(b"", ("held", "sent-outcome-unknown"), id="nothing"),
        pytest.param(b"\x00\xff" * 50, ("held", "sent-outcome-unknown"), id="noise"),
        pytest.param(HEAD + b" no colon " + KEY.encode(), ("held", "sent-outcome-unknown"), id="half a head"),
        pytest.param(
            b"HTTP/1.1 103 Early Hints\r\nLink: </>\r\n\r\n" + whole(WHOLE_STREAM), ("done", "answered"), id="a hint"
        ),
    ],
)
def test_answers_whose_end_is_known_come_to_it_live_and_after_a_crash(
    bench: Bench, answer: bytes, end: tuple[str, str]
) -> None:
    assert bench.check(Case([answer])) == end


@pytest.mark.parametrize(
    ("body", "is_so"),
    [
        (WHOLE_STREAM, True),
        (fuzz.delta("one"), False),
        (fuzz.delta("one") + b"data: [DONE]\n\n", True),
        (fuzz.delta("one", "stop"), True),
        (fuzz.delta("one", "stop")[:-30], False),
        (fuzz.delta("[DONE] finish_reason"), False),
        (fuzz.completion("one"), True),
        (fuzz.completion("one")[:-1], False),
        (b'{"choices": []}', False),
        (b"", False),
    ],
)
@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
def test_the_oracle_finds_the_end_of_an_answer_in_every_framing(body: bytes, is_so: bool, framing: str) -> None:
    lines, payload = fuzz.framed(body, framing, [3, 40])
    assert fuzz.may_be_done(b"\r\n".join([b"HTTP/1.1 200 OK", *lines, b"", b""]) + payload) is is_so
