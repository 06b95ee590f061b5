"""What the bytes of an answer say: complete or not, and which text.

The bodies here are those of call.md section 4 and of the cases B-6, C-6, C-7, C-8 and C-9.
"""

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brainlaned.brains.reply import Reply, ReplyReader, read
from brainlaned.wire import Flag

DONE = b"data: [DONE]\n\n"


def event(value: Any, end: str = "\n", ascii_only: bool = False) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=ascii_only)}{end}{end}".encode()


def chunk(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": "m",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}],
    }


def say(*texts: str) -> bytes:
    return b"".join(event(chunk(content=text)) for text in texts)


STOP = event(chunk("stop"))


def completion(message: Any, finish_reason: Any = "stop", **more: Any) -> bytes:
    return json.dumps(
        {"id": "c", "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}], **more}
    ).encode()


def bytewise(body: bytes) -> Iterator[bytes]:
    return (body[at : at + 1] for at in range(len(body)))


def read_all(body: bytes) -> Reply:
    """Read a body at once and byte by byte, which must be the same."""
    reply = read([body])
    assert read(bytewise(body)) == reply
    return reply


# Streams, and how they end.


def test_a_stream_with_finish_reason_and_end_marker_is_complete_without_flags() -> None:
    reply = read_all(event(chunk(role="assistant", content="")) + say("Hel", "lo") + STOP + DONE)
    assert reply == Reply(
        text="Hello",
        reasoning="",
        refusal="",
        tool_calls=(),
        finish_reason="stop",
        complete=True,
        error=None,
        usage=None,
        flags=frozenset(),
        upstream_id="chatcmpl-1",
        model="m",
        created=1700000000,
        form="stream",
    )


def test_a_stream_that_stops_after_two_deltas_is_not_complete_and_keeps_its_text() -> None:
    reply = read_all(say("half an ", "ans"))
    assert (reply.complete, reply.text, reply.finish_reason, reply.flags) == (False, "half an ans", None, frozenset())


def test_an_end_marker_after_text_without_finish_reason_is_complete_with_a_flag() -> None:
    reply = read_all(say("all of it") + DONE)
    assert (reply.complete, reply.flags) == (True, frozenset({Flag.NO_FINISH_REASON}))


def test_a_finish_reason_without_end_marker_is_complete_with_a_flag() -> None:
    reply = read_all(say("all of it") + STOP)
    assert (reply.complete, reply.flags) == (True, frozenset({Flag.NO_END_MARKER}))


@pytest.mark.parametrize(
    "body", [DONE, event(chunk(content="")) + DONE, event(chunk(reasoning="hm")) + DONE, b": x\n\n"]
)
def test_an_end_marker_after_nothing_said_is_not_complete(body: bytes) -> None:
    assert not read_all(body).complete


def test_a_last_event_without_its_blank_line_counts_when_it_is_whole() -> None:
    assert read_all(say("a") + STOP.rstrip()).complete
    assert read_all(say("a") + STOP.rstrip() + b"\n").complete
    assert read_all(say("a") + DONE.rstrip()).flags == {Flag.NO_FINISH_REASON}
    assert not read_all(say("a") + STOP.rstrip()[:-1]).complete
    assert not read_all(say("a") + DONE.rstrip()[:-1]).complete


def test_what_follows_the_end_marker_is_not_the_answer() -> None:
    assert read_all(say("a") + DONE + say("b") + event({"error": "late"})) == read([say("a") + DONE])


def test_an_unreadable_event_spoils_an_answer_that_has_only_an_end_marker() -> None:
    garbage = b'data: {"choices": [{"delta": {"content": "lo\n\n'
    reply = read_all(say("a") + garbage + say("b") + DONE)
    assert (reply.complete, reply.text) == (False, "ab")
    assert read_all(say("a") + garbage + say("b") + STOP + DONE).complete


@pytest.mark.parametrize("data", ["7", "[]", "null", '"text"', "[" * 100_000, '{"a":' * 100_000])
def test_an_event_that_is_no_object_is_unreadable(data: str) -> None:
    reply = read([say("a"), f"data: {data}\n\n".encode(), DONE])
    assert (reply.complete, reply.text) == (False, "a")


def test_finished_and_ended_tell_how_far_the_stream_has_come() -> None:
    reader = ReplyReader()
    steps = []
    for part in (say("a"), STOP, event({"choices": [], "usage": {"total_tokens": 3}}), DONE):
        reader.feed(part)
        steps.append((reader.finished, reader.ended))
    assert steps == [(False, False), (True, False), (True, False), (True, True)]


def test_usage_is_taken_as_given_from_a_last_chunk_without_choices() -> None:
    usage = {"total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}, "big": 10**4000, "cost": 0.25}
    reply = read_all(say("a") + STOP + event({"choices": [], "usage": usage}) + DONE)
    assert reply.usage == usage
    assert read_all(event(chunk(content="a") | {"usage": None}) + STOP + DONE).usage is None


def test_only_the_choice_with_index_0_counts() -> None:
    other = {"choices": [{"index": 1, "delta": {"content": "other"}, "finish_reason": "stop"}]}
    reply = read_all(say("a") + event(other))
    assert (reply.text, reply.complete) == ("a", False)


def test_a_server_that_streams_one_whole_message_is_understood() -> None:
    body = b"data: " + completion({"role": "assistant", "content": "whole"}) + b"\n\n"
    assert read_all(body + DONE).text == "whole"
    assert read_all(say("who", "le") + body + DONE).text == "whole"


def test_legacy_text_of_a_completion_counts_as_text() -> None:
    assert read_all(event({"choices": [{"text": "a"}]}) + DONE).text == "a"
    assert read_all(b'{"choices": [{"text": "a", "finish_reason": "stop"}]}').complete


@pytest.mark.parametrize("body", [say("a") + STOP, completion({"content": "a"}), b"dat", b""])
def test_closing_twice_gives_the_same_reply(body: bytes) -> None:
    reader = ReplyReader()
    reader.feed(body)
    assert reader.close() == reader.close()


# Lines and characters.


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
@pytest.mark.parametrize("start", ["", "\ufeff", "\n", ": keep alive\n\n", "retry: 100\n", "id: 7\n\n"])
def test_every_line_end_of_the_standard_is_one(start: str, end: str) -> None:
    body = start + 'event: message\n: comment\ndata: {"choices":\ndata:[{"delta": {"content": "né 好 🌍"}}]}\n\n'
    reply = read_all((body + "data: [DONE]\n\n").replace("\n", end).encode())
    assert (reply.form, reply.text, reply.complete) == ("stream", "né 好 🌍", True)


def test_an_event_is_known_as_soon_as_its_last_line_has_ended() -> None:
    for end in ("\n", "\r", "\r\n"):
        reader = ReplyReader()
        assert "".join(reader.feed(part) for part in bytewise(event(chunk(content="a"), end))) == "a"


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\0", "\x0b", "\x0c", "\x1c"])
def test_a_unicode_line_separator_within_a_string_is_text(separator: str) -> None:
    # json.dumps would escape the control characters among them, so the bytes are made by hand.
    body = f'data: {{"choices": [{{"delta": {{"content": "a{separator}b"}}}}]}}\n\n'.encode()
    assert read_all(body + DONE).text == f"a{separator}b"


@pytest.mark.parametrize(
    "text", ["\0", "\x1b[2J", "\uffff", "\ufeff", "\ufffd", "\U0010ffff", "a\0b", "data: [DONE]\n\n"]
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_any_scalar_value_survives(text: str, ascii_only: bool) -> None:
    streamed = read_all(event(chunk(content=text), ascii_only=ascii_only) + STOP + DONE)
    whole = read_all(json.dumps({"choices": [{"message": {"content": text}}]}, ensure_ascii=ascii_only).encode())
    assert (streamed.text, streamed.flags) == (text, frozenset())
    assert (whole.text, whole.flags) == (text, frozenset({Flag.NO_FINISH_REASON}))


def test_surrogate_halves_in_neighbouring_deltas_are_joined() -> None:
    body = event(chunk(content="a\ud83c"), ascii_only=True) + event(chunk(content="\udf0db"), ascii_only=True)
    reply = read_all(body + STOP + DONE)
    assert (reply.text, reply.flags) == ("a🌍b", frozenset())


def test_half_a_character_is_held_back_until_it_is_certain() -> None:
    reader = ReplyReader()
    first, second = (event(chunk(content=half), ascii_only=True) for half in ("a\ud83c", "\udf0db"))
    assert [reader.feed(first), reader.feed(event(chunk())), reader.feed(second)] == ["a", "", "🌍b"]


@pytest.mark.parametrize("texts", [["\ud83c"], ["\ud83c", "b"], ["\udf0d"], ["a\udf0d\ud83c"]])
def test_a_lone_surrogate_becomes_a_replacement_mark_with_a_flag(texts: list[str]) -> None:
    body = b"".join(event(chunk(content=text, reasoning=text), ascii_only=True) for text in texts)
    reply = read_all(body + STOP + DONE)
    expected = "".join(texts).replace("\ud83c", "\ufffd").replace("\udf0d", "\ufffd")
    assert (reply.text, reply.reasoning, reply.flags) == (expected, expected, frozenset({Flag.INVALID_BYTES}))


def test_an_invalid_byte_becomes_one_replacement_mark_with_a_flag() -> None:
    for invalid in (b"\xff", b"\xc3", b"\xf0\x9f\x8c"):
        reply = read_all(say("n?", "🌍").replace(b"?", invalid) + STOP + DONE)
        assert (reply.text, reply.complete, reply.flags) == ("n\ufffd🌍", True, frozenset({Flag.INVALID_BYTES}))
        whole = read_all(completion({"content": "n?"}).replace(b"?", invalid))
        assert (whole.text, whole.complete, whole.flags) == ("n\ufffd", True, frozenset({Flag.INVALID_BYTES}))


def test_a_body_cut_within_a_character_had_no_invalid_byte() -> None:
    body = say("a", "🌍")
    reply = read_all(body[: body.index(b"\xf0") + 2])
    assert (reply.text, reply.complete, reply.flags) == ("a", False, frozenset())


# Errors.


def test_an_error_event_after_three_deltas_spoils_the_answer_and_keeps_the_text() -> None:
    failure = b'event: error\ndata: {"error": {"type": "overloaded_error", "message": "Overloaded"}}\n\n'
    reply = read_all(say("a", "b", "c") + failure + STOP + DONE)
    assert (reply.complete, reply.text, reply.finish_reason) == (False, "abc", None)
    assert reply.error == {"type": "overloaded_error", "message": "Overloaded"}


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        ('data: {"error": {"code": 502, "message": "x"}, "choices": []}', {"code": 502, "message": "x"}),
        ('data: {"error": "x"}', {"message": "x"}),
        ('data: {"error": ["x", 1]}', {"message": '["x", 1]'}),
        ('data: {"error": true}', {"message": "true"}),
        ('data: {"error": "\\ud800"}', {"message": "\ufffd"}),
        ('data: {"object": "error", "message": "x"}', {"object": "error", "message": "x"}),
        ('data: {"choices": [{"delta": {}, "error": {"code": 1}, "finish_reason": "error"}]}', {"code": 1}),
        ('data: {"choices": [{"finish_reason": "abort"}]}', {"message": "the brain gave up: finish reason abort"}),
        ('event: error\ndata: {"code": 3}', {"code": 3}),
        ("event: error\ndata: not JSON", {"message": "not JSON"}),
        ("event: error", {"message": ""}),
    ],
)
def test_an_error_in_a_stream_is_found_in_every_dress(failure: str, error: dict[str, Any]) -> None:
    for after in (b"\n\n" + STOP + DONE, b"\n\n", b""):
        reply = read_all(say("a") + failure.encode() + after)
        assert (reply.complete, reply.text, reply.error) == (False, "a", error)
    reader = ReplyReader()
    reader.feed(say("a") + failure.encode() + b"\n\n")
    assert (reader.finished, reader.ended) == (False, True)


def test_an_error_after_the_finish_reason_does_not_unmake_the_answer() -> None:
    reply = read_all(say("a") + STOP + event({"error": {"message": "x"}}))
    assert (reply.complete, reply.error, reply.flags) == (True, {"message": "x"}, frozenset({Flag.NO_END_MARKER}))


@pytest.mark.parametrize("nothing", [None, "", {}, False])
def test_an_empty_error_is_none(nothing: Any) -> None:
    assert read_all(event(chunk("stop", content="a") | {"error": nothing}) + DONE).complete
    assert read_all(completion({"content": "a"}, error=nothing)).complete


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'{"error": {"code": 429, "message": "slow down"}}', {"code": 429, "message": "slow down"}),
        (b'{"error": "slow down"}', {"message": "slow down"}),
        (b'[{"error": {"code": 400}}]', {"code": 400}),
        (b'{"object": "error", "code": 400}', {"object": "error", "code": 400}),
        (completion({"content": "a"}, error={"code": 1}), {"code": 1}),
        (completion({"content": "a"}, "error"), {"message": "the brain gave up: finish reason error"}),
    ],
)
def test_an_error_object_in_the_body_is_found(body: bytes, error: dict[str, Any]) -> None:
    reply = read_all(body)
    assert (reply.form, reply.complete, reply.error) == ("json", False, error)


# Tool calls, refusals, reasoning.


def calling(*pieces: dict[str, Any]) -> bytes:
    return event(chunk(tool_calls=list(pieces)), ascii_only=True)


def function_call(call_id: str | None, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_tool_calls_in_pieces_are_joined_by_index() -> None:
    body = (
        calling({"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": ""}})
        + calling({"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x'}})
        + calling({"index": 1, "function": {"arguments": "{}"}}, {"index": 0, "function": {"arguments": '": "\ud83c'}})
        + calling({"index": 0, "id": "", "function": {"name": "f", "arguments": '\udf0d"}'}})
    )
    reply = read_all(body + event(chunk("tool_calls")) + DONE)
    assert reply.tool_calls == (function_call("a", "f", '{"x": "🌍"}'), function_call("b", "g", "{}"))
    assert reply.complete
    assert json.loads(reply.output) == list(reply.tool_calls)


def test_tool_calls_without_index_begin_with_their_names() -> None:
    body = (
        calling({"id": "a", "function": {"name": "f", "arguments": "{"}})
        + calling({"function": {"arguments": "}"}})
        + calling({"id": "b", "function": {"name": "f", "arguments": {"x": [1]}}})
    )
    assert read_all(body + DONE).tool_calls == (function_call("a", "f", "{}"), function_call("b", "f", '{"x": [1]}'))


def test_an_end_marker_after_a_tool_call_or_a_refusal_is_complete() -> None:
    assert read_all(calling({"index": 0, "function": {"name": "f"}}) + DONE).flags == {Flag.NO_FINISH_REASON}
    assert read_all(event(chunk(refusal="I will not")) + DONE).flags == {Flag.NO_FINISH_REASON}
    nameless = read_all(calling({"index": 0, "id": "a"}) + DONE)
    assert (nameless.complete, nameless.tool_calls) == (False, ())


def test_a_refusal_is_the_output_where_there_is_nothing_else() -> None:
    reply = read_all(event(chunk(refusal="I ")) + event(chunk(refusal="will not")) + STOP + DONE)
    assert (reply.text, reply.refusal, reply.output) == ("", "I will not", "I will not")


def test_text_is_the_output_even_beside_tool_calls() -> None:
    body = say("a") + calling({"index": 0, "function": {"name": "f", "arguments": "{}"}}) + DONE
    assert read_all(body).output == "a"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_alone_is_complete_by_its_finish_reason_and_is_no_output(key: str) -> None:
    reply = read_all(event(chunk(**{key: "hm"})) + event(chunk(**{key: "m"})) + event(chunk("length")) + DONE)
    assert (reply.reasoning, reply.text, reply.output, reply.finish_reason) == ("hmm", "", "", "length")
    assert reply.complete


def test_reasoning_sent_under_both_names_is_taken_once() -> None:
    assert read_all(event(chunk(reasoning="hm", reasoning_content="hm")) + STOP).reasoning == "hm"


# Bodies of JSON, and of anything else.


@pytest.mark.parametrize(
    ("message", "finish_reason", "complete"),
    [
        ({"content": "a"}, "stop", True),
        ({"content": "a"}, None, True),
        ({"content": [{"type": "text", "text": "a"}]}, "stop", True),
        ({"content": ""}, "length", True),
        ({"content": ""}, "stop", True),
        ({"content": ""}, "content_filter", True),
        ({"content": None}, "length", True),
        ({"content": None}, "content_filter", True),
        ({"content": None}, "stop", False),
        ({"content": None}, None, False),
        ({}, "stop", False),
        ({"content": None, "refusal": "no"}, "stop", True),
        ({"content": None, "refusal": "no"}, None, True),
        ({"content": None, "reasoning": "hm"}, "stop", True),
        ({"content": None, "reasoning": "hm"}, None, False),
        ({"content": None, "tool_calls": [{"id": "a", "function": {"name": "f"}}]}, "tool_calls", True),
        ({"content": None, "tool_calls": []}, "stop", False),
        ({"content": 7}, "stop", False),
        (None, "length", False),
        ("text", "stop", False),
        ([], "stop", False),
    ],
)
def test_a_json_answer_is_complete_when_its_message_says_something(
    message: Any, finish_reason: str | None, complete: bool
) -> None:
    reply = read_all(completion(message, finish_reason))
    assert (reply.form, reply.complete, reply.finish_reason) == ("json", complete, finish_reason)
    assert reply.flags == ({Flag.NO_FINISH_REASON} if complete and finish_reason is None else frozenset())


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url"}, 7, {"text": [[]]}, {"type": "text", "text": "b"}]
    assert read_all(completion({"content": parts})).text == "ab"


@pytest.mark.parametrize("choices", [None, [], "stop", {}, 7, [None], [[]], ["a"], [{}], [{"index": 0}]])
def test_a_body_without_a_choice_is_not_complete(choices: Any) -> None:
    reply = read_all(json.dumps({"id": 7, "model": ["m"], "created": True, "choices": choices, "usage": "x"}).encode())
    assert (reply.form, reply.complete, reply.text) == ("json", False, "")
    assert (reply.upstream_id, reply.model, reply.created, reply.usage) == ("7", None, None, None)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[",
        b"{}",
        b"[]",
        b"[7]",
        b"{]",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"{\xff",
        b'{"choices": [{"message":',
    ],
)
def test_broken_json_is_not_complete(body: bytes) -> None:
    reply = read([body])
    assert (reply.form, reply.complete, reply.text) == ("json", False, "")


@pytest.mark.parametrize("blank", [b"", b"\xef\xbb\xbf", b" \n", b"\xef\xbb\xbf\r\n\t"])
def test_the_form_is_told_by_the_first_bytes_that_are_not_blank(blank: bytes) -> None:
    assert read_all(blank + completion({"content": "a"})).text == "a"
    assert read_all(blank + say("a") + DONE).text == "a"
    assert read_all(blank + b"<html>data: no</html>").form == "other"
    assert read_all(blank + b"identity unknown").form == "other"
    assert read_all(blank + b"dat").form == "other"
    assert read_all(blank).form == "empty"


def test_numbers_that_json_cannot_write_again_are_unknown() -> None:
    usage = '{"a": NaN, "b": -Infinity, "c": 1e999, "d": ' + "9" * 5000 + ', "e": 1.5, "f": -2, "g": 3, "g": 4}'
    reply = read_all(completion({"content": "a"})[:-1] + f', "usage": {usage}}}'.encode())
    assert reply.complete
    assert reply.usage == {"a": None, "b": None, "c": None, "d": None, "e": 1.5, "f": -2, "g": 4}


def test_what_is_nested_too_deeply_to_be_sensible_is_dropped() -> None:
    reply = read_all(completion({"content": "a"})[:-1] + b', "usage": {"x": ' + b"[" * 300 + b"]" * 300 + b"}}")
    assert (reply.complete, reply.text) == (True, "a")
    assert 60 < json.dumps(reply.usage).count("[") < 70


def completion_of(reply: Reply) -> dict[str, Any]:
    """The completion object as the submitter gets it, its text put in place."""
    found = reply.frame()
    if found["choices"][0]["message"]["content"] == "":
        found["choices"][0]["message"]["content"] = reply.text
    return found


def test_a_text_stands_in_the_output_only() -> None:
    reply = read_all(say("hello") + DONE)
    assert (reply.output, reply.frame()["choices"][0]["message"]["content"]) == ("hello", "")


def test_one_response_object_is_assembled_from_a_stream() -> None:
    call = function_call("a", "f", "{}")
    body = event(chunk(reasoning="hm")) + calling({"index": 0, **call}) + event(chunk("tool_calls"))
    reply = read_all(body + event({"usage": {"total_tokens": 3}}) + DONE)
    assert reply.frame() == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
                "finish_reason": "tool_calls",
            }
        ],
        "usage": {"total_tokens": 3},
    }


@pytest.mark.parametrize("body", [completion({"content": "a" * 1_000_000}), say("a" * 1_000_000), say("a") * 6_000])
def test_a_megabyte_fed_byte_by_byte_takes_seconds_at_most(body: bytes) -> None:
    start = time.perf_counter()
    read(bytewise(b" " * 500_000 + body + b" " * 500_000))
    assert time.perf_counter() - start < 20  # It takes two; what is quadratic takes minutes.


# Whatever comes.

patient = settings(deadline=None)  # A busy machine is no failure.
any_text = st.text(st.characters(exclude_categories=()), max_size=6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=6,
)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return strategy | json_values


def objects(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries({}, optional=fields)


functions = objects(name=maybe(any_text), arguments=maybe(any_text))
tool_calls = objects(index=maybe(st.integers(0, 2)), id=maybe(any_text), type=json_values, function=maybe(functions))
parts = st.lists(maybe(objects(type=json_values, text=maybe(any_text))), max_size=3)
messages = objects(
    content=maybe(any_text | parts),
    reasoning=maybe(any_text),
    reasoning_content=maybe(any_text),
    refusal=maybe(any_text),
    tool_calls=maybe(st.lists(maybe(tool_calls), max_size=3)),
)
reasons = st.sampled_from(["stop", "length", "error", "", None])
choices = objects(
    index=maybe(st.integers(0, 1)),
    delta=maybe(messages),
    message=maybe(messages),
    text=maybe(any_text),
    error=json_values,
    finish_reason=maybe(reasons),
)
completions = objects(
    id=json_values,
    model=json_values,
    created=json_values,
    error=json_values,
    usage=json_values,
    choices=maybe(st.lists(maybe(choices), max_size=2)),
)
events = maybe(completions).map(lambda value: event(value, ascii_only=True)) | st.sampled_from(
    [DONE, STOP, say("né 好 🌍"), b": comment\n\n", b"event: error\n", b"data: \xff\n\n", b"data: {\n\n", b"id: 1\n"]
)
streams = st.builds(
    lambda body, end: body.replace(b"\n", end),
    st.lists(events, max_size=8).map(lambda several: b"data:\n\n" + b"".join(several)),
    st.sampled_from([b"\n", b"\r", b"\r\n"]),
)
bodies = streams | maybe(completions).map(lambda value: json.dumps(value).encode())
damaged = st.builds(
    lambda body, at, junk, skip: body[:at] + junk + body[at + skip :],
    bodies,
    st.integers(0, 400),
    st.binary(max_size=3),
    st.integers(0, 3),
)


def check_promises(reply: Reply) -> None:
    """What every Reply promises, whatever it was read from: it can be written, and is not complete for nothing."""
    written = json.dumps(
        [completion_of(reply), reply.error, reply.output], ensure_ascii=False, allow_nan=False
    ).encode()
    assert json.loads(written)[2] == reply.output
    for text in (reply.text, reply.reasoning, reply.refusal, reply.output, reply.upstream_id, reply.model):
        (text or "").encode()
    if reply.complete:
        assert reply.form in ("stream", "json")
        assert reply.finish_reason or reply.flags >= {Flag.NO_FINISH_REASON}
    if reply.complete and reply.output:
        again = read([json.dumps(completion_of(reply)).encode()])
        assert again.complete
        assert (again.output, again.reasoning, again.usage) == (reply.output, reply.reasoning, reply.usage)


@patient
@given(bodies | damaged, st.lists(st.integers(0, 600), max_size=12))
def test_any_chunking_of_the_same_bytes_gives_the_same_reply(body: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    chunks = [body[start:end] for start, end in pairwise(edges)]
    reply = read_all(body)
    assert read(chunks) == reply
    check_promises(reply)


@patient
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_never_complete_and_never_raise(body: bytes) -> None:
    for start in (b"", b"{", b"data: ", b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'):
        reply = read_all(start + body)
        check_promises(reply)
        assert not reply.complete


@patient
@given(streams)
def test_the_texts_that_became_certain_are_the_text(body: bytes) -> None:
    reader = ReplyReader()
    certain = "".join([reader.feed(part) for part in bytewise(body + b"\n\n")])
    text = reader.close().text
    assert text in (certain, certain + "\ufffd")


@patient
@given(st.lists(st.text(max_size=8), min_size=1, max_size=5), st.booleans(), st.data())
def test_a_stream_cut_before_its_end_is_never_complete(texts: list[str], ascii_only: bool, data: st.DataObject) -> None:
    said = b"".join(event(chunk(content=text), ascii_only=ascii_only) for text in texts)
    for last in (STOP, DONE):
        whole = said + last
        cut = data.draw(st.integers(0, len(whole.rstrip()) - 1))
        reply = read([whole[:cut]])
        assert not reply.complete
        assert "".join(texts).startswith(reply.text)


@patient
@given(st.text(max_size=8), st.data())
def test_a_json_body_cut_before_its_end_is_never_complete(text: str, data: st.DataObject) -> None:
    body = completion({"content": text})
    assert read([body]).complete
    assert not read([body[: data.draw(st.integers(0, len(body) - 1))]]).complete
