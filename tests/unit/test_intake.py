import json
import time
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import freezegun
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brainlaned import config, errors, intake, store, wire

CONFIG = config.parse(
    {
        "lane": {"default_route": "near"},
        "routes": {
            "near": {"base_url": "http://127.0.0.1:1/v1", "model": "small", "max_attempts": 4},
            "far": {"base_url": "https://brain.example/v1", "model": "large"},
        },
    }
)
MESSAGES = [{"role": "user", "content": "hello"}]
PROMPT_CANARY = "CANARY-prompt"


def body(request: dict[str, Any] | None = None, **fields: Any) -> bytes:
    return json.dumps({"request": {"messages": MESSAGES, **(request or {})}, **fields}).encode()


def accepted(request: dict[str, Any] | None = None, **fields: Any) -> store.Submission:
    return intake.submission(body(request, **fields), CONFIG)


def refused(data: bytes) -> errors.Refused:
    """Return the refusal of a body, having checked that it is one that the wire can carry."""
    with pytest.raises(errors.Refused) as found:
        intake.submission(data, CONFIG)
    refusal = found.value
    assert refusal.kind is wire.ErrorKind.INVALID
    assert refusal.field
    assert f"field '{refusal.field}'" in str(refusal)
    assert refusal.next_action
    assert json.dumps([str(refusal), refusal.field], ensure_ascii=False).encode()
    return refusal


# What is accepted.


def test_a_prompt_alone_gets_the_default_route_and_its_limits() -> None:
    found = accepted()
    assert (found.route, found.model, found.names_model, found.max_attempts) == ("near", "small", False, 4)
    assert (found.key, found.not_before, dict(found.labels)) == (None, None, {})
    assert (found.priority, found.may_run_twice, found.require_complete) == ("normal", False, False)


def test_everything_that_was_said_is_kept() -> None:
    found = accepted(
        {"model": "own", "temperature": 0.5},
        route="far",
        key="k",
        priority="high",
        not_before="2026-01-31T22:00:00+02:00",
        labels={"team": "blue"},
        max_attempts=1,
        may_run_twice=True,
        require_complete=True,
    )
    assert (found.route, found.model, found.names_model, found.key) == ("far", "own", True, "k")
    assert (found.priority, found.max_attempts, dict(found.labels)) == ("high", 1, {"team": "blue"})
    assert (found.may_run_twice, found.require_complete) == (True, True)
    assert found.not_before == datetime(2026, 1, 31, 20, tzinfo=UTC)


def test_the_stored_request_is_canonical_and_has_no_model() -> None:
    found = accepted({"zeta": 1, "model": "own", "alpha": "é"})
    assert found.request == '{"alpha":"é","messages":[{"content":"hello","role":"user"}],"zeta":1}'


def test_the_prompt_is_not_in_the_repr_of_a_submission() -> None:
    assert PROMPT_CANARY not in repr(accepted({"messages": [{"role": "user", "content": PROMPT_CANARY}]}))


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
        [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "x", "name": "me"}],
    ],
)
def test_the_forms_of_a_message_are_accepted(messages: list[dict[str, Any]]) -> None:
    assert json.loads(accepted({"messages": messages}).request)["messages"] == messages


@pytest.mark.parametrize("text", ["\U0001f30d", "\u0000", "\u2028", "e\u0301", "\ufffd", "\U0010ffff"])
def test_any_unicode_text_is_accepted_and_kept(text: str) -> None:
    found = accepted({"messages": [{"role": "user", "content": text}]})
    assert json.loads(found.request)["messages"][0]["content"] == text


def test_the_escaped_halves_of_one_character_are_accepted() -> None:
    found = intake.submission(body().replace(b"hello", b"\\ud83c\\udf0d"), CONFIG)
    assert json.loads(found.request)["messages"][0]["content"] == "\U0001f30d"


@pytest.mark.parametrize("name", ["route", "key", "priority", "not_before", "labels", "max_attempts", "may_run_twice"])
def test_a_null_means_that_nothing_was_said(name: str) -> None:
    assert accepted(**{name: None}) == accepted()


# Bytes that are no strict JSON object.


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"hello", "body"),
        (b"[]", "body"),
        (b'"text"', "body"),
        (b"5", "body"),
        (b"null", "body"),
        (b"\xef\xbb\xbf" + body(), "body"),
        (body().replace(b"hello", b"caf\xe9"), "body"),
        (body().decode().encode("utf-16"), "body"),
        (body() + b" x", "body"),
        (body({"temperature": float("nan")}), "body"),
        (body({"temperature": float("inf")}), "body"),
        (body({"temperature": float("-inf")}), "body"),
        (body({"temperature": 0}).replace(b": 0", b": 1e999"), "request.temperature"),
        (body({"stop": [0]}).replace(b"[0]", b"[1, -1e999]"), "request.stop[1]"),
        (body().replace(b"hello", b"\\ud800"), "request.messages[0].content"),
        (body().replace(b"hello", b"a\\udc00b"), "request.messages[0].content"),
        (body(key="k").replace(b'"k"', b'"\\udfff"'), "key"),
        (body().replace(b'"content"', b'"\\ud800"'), "request.messages[0]"),
        (body(x=1).replace(b'"x"', b'"\\ud800"'), "body"),
        (b'{"key": "a", "key": "a"}', "key"),
        (body({"seed": 1}).replace(b'"seed": 1', b'"seed": 1, "seed": 1'), "seed"),
        (body(labels={"a": "1"}).replace(b'"a": "1"', b'"a": "1", "a": "2"'), "a"),
        (body({"seed": 0}).replace(b'"seed": 0', b'"seed": 1' + b"0" * 5000), "body"),
        (body(max_attempts=0).replace(b": 0", b": 1" + b"0" * 5000), "body"),
    ],
)
def test_what_is_no_strict_json_object_is_refused(data: bytes, field: str) -> None:
    assert refused(data).field == field


def test_a_key_that_stands_twice_and_is_no_text_is_refused_in_words_that_can_be_sent() -> None:
    refused(b'{"\\ud800": 1, "\\ud800": 2}')


def nested(depth: int, kind: str) -> bytes:
    """A body whose deepest array or object lies `depth` deep, the body itself being 1."""
    inner = depth - 2
    deep = "[" * inner + "]" * inner if kind == "arrays" else '{"a":' * inner + "1" + "}" * inner
    return body({"deep": "DEEP"}).replace(b'"DEEP"', deep.encode())


@pytest.mark.parametrize("kind", ["arrays", "objects"])
def test_sixty_four_levels_are_accepted_and_one_more_is_not(kind: str) -> None:
    assert intake.submission(nested(wire.MAX_NESTING, kind), CONFIG)
    refusal = refused(nested(wire.MAX_NESTING + 1, kind))
    assert (refusal.field, "nested over 64 deep" in str(refusal)) == ("request", True)


@pytest.mark.parametrize("kind", ["arrays", "objects"])
def test_nesting_that_no_stack_can_hold_is_refused_like_any_other(kind: str) -> None:
    assert "nested over 64 deep" in str(refused(nested(200_000, kind)))


@pytest.mark.parametrize("values", [b"[" + b"0," * 4000 + b"0]", b'{"a":' + b"0}", b"[[[[[[[[[[0]]]]]]]]]]"])
def test_checking_a_body_takes_memory_in_proportion_to_it(values: bytes) -> None:
    data = body({"KEY": "VALUES"}).replace(b"KEY", b"k" * 8000).replace(b'"VALUES"', values)
    intake.document(data)  # what is built once does not count
    tracemalloc.start()
    try:
        intake.document(data)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 200 * len(data)


@settings(deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_no_bytes_at_all_bring_forth_another_error_than_a_refusal(data: bytes) -> None:
    refused(data)


# Fields.


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"colour": "red"}, "colour"),
        ({"Route": "near"}, "Route"),
        ({"attempts": 1}, "attempts"),
        ({"stream": True}, "stream"),
        ({"route": "nowhere"}, "route"),
        ({"route": ""}, "route"),
        ({"route": 5}, "route"),
        ({"key": ""}, "key"),
        ({"key": "k" * 256}, "key"),
        ({"key": "\u00e9" * 128}, "key"),
        ({"key": 5}, "key"),
        ({"priority": "urgent"}, "priority"),
        ({"priority": ""}, "priority"),
        ({"priority": 1}, "priority"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"max_attempts": -1}, "max_attempts"),
        ({"max_attempts": 1.0}, "max_attempts"),
        ({"max_attempts": "3"}, "max_attempts"),
        ({"max_attempts": True}, "max_attempts"),
        ({"max_attempts": 1_000_001}, "max_attempts"),
        ({"max_attempts": 10**4000}, "max_attempts"),
        ({"may_run_twice": 1}, "may_run_twice"),
        ({"may_run_twice": "true"}, "may_run_twice"),
        ({"require_complete": 0}, "require_complete"),
        ({"labels": ["a"]}, "labels"),
        ({"labels": {f"k{number}": "" for number in range(17)}}, "labels"),
        ({"labels": {"Upper": "x"}}, "labels"),
        ({"labels": {"": "x"}}, "labels"),
        ({"labels": {"a b": "x"}}, "labels"),
        ({"labels": {"a\n": "x"}}, "labels"),
        ({"labels": {"a" * 64: "x"}}, "labels"),
        ({"labels": {"a": 5}}, "labels.a"),
        ({"labels": {"a": None}}, "labels.a"),
        ({"labels": {"a": "\u00e9" * 129}}, "labels.a"),
        ({"not_before": 5}, "not_before"),
        ({"not_before": ""}, "not_before"),
        ({"not_before": "tomorrow"}, "not_before"),
        ({"not_before": "2026-01-31"}, "not_before"),
        ({"not_before": "22:00+01:00"}, "not_before"),
        ({"not_before": "2026-01-31T22:00:00"}, "not_before"),
        ({"not_before": "2026-01-31 22:00:00.123456"}, "not_before"),
        ({"not_before": "2026-02-30T22:00:00Z"}, "not_before"),
        ({"not_before": "2026-01-31T25:00:00Z"}, "not_before"),
        ({"not_before": "2026-01-31T22:00:00+99:00"}, "not_before"),
        ({"not_before": "9999-12-31T23:59:59Z"}, "not_before"),
        ({"not_before": "9999-12-31T23:59:59-01:00"}, "not_before"),
        ({"not_before": "0001-01-01T00:00:00+01:00"}, "not_before"),
        ({"not_before": "1969-12-31T23:59:59Z"}, "not_before"),
    ],
)
def test_a_field_that_cannot_be_used_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    refusal = refused(body(**fields))
    assert refusal.field == field
    assert len(str(refusal)) < 5000


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b'{"key": "k"}', "request"),
        (b'{"request": null}', "request"),
        (b'{"request": "hello"}', "request"),
        (b'{"request": []}', "request"),
        (b'{"request": {}}', "request.messages"),
    ],
)
def test_a_body_without_a_request_is_refused(data: bytes, field: str) -> None:
    assert refused(data).field == field


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"stream": True}, "request.stream"),
        ({"stream": False}, "request.stream"),
        ({"stream": None}, "request.stream"),
        ({"n": 2}, "request.n"),
        ({"n": 0}, "request.n"),
        ({"n": True}, "request.n"),
        ({"n": "1"}, "request.n"),
        ({"n": [1]}, "request.n"),
        ({"stream_options": None}, "request.stream_options"),
        ({"stream_options": "x"}, "request.stream_options"),
        ({"model": ""}, "request.model"),
        ({"model": 5}, "request.model"),
        ({"messages": None}, "request.messages"),
        ({"messages": "hello"}, "request.messages"),
        ({"messages": {}}, "request.messages"),
        ({"messages": []}, "request.messages"),
        ({"messages": ["hello"]}, "request.messages[0]"),
        ({"messages": [{"content": "x"}]}, "request.messages[0].role"),
        ({"messages": [{"role": "", "content": "x"}]}, "request.messages[0].role"),
        ({"messages": [{"role": 5, "content": "x"}]}, "request.messages[0].role"),
        ({"messages": [*MESSAGES, {"role": "user"}]}, "request.messages[1].content"),
        ({"messages": [{"role": "user", "content": None}]}, "request.messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "request.messages[0].content"),
        ({"messages": [{"role": "user", "content": {"text": "x"}}]}, "request.messages[0].content"),
    ],
)
def test_a_request_that_no_brain_could_answer_is_refused_by_its_place(request_: dict[str, Any], field: str) -> None:
    assert refused(body(request_)).field == field


@pytest.mark.parametrize("count", [1, None])
def test_asking_for_the_one_answer_that_a_job_has_is_accepted(count: int | None) -> None:
    assert accepted({"n": count})


@pytest.mark.parametrize("key", ["k", "k" * 255, "\u00e9" * 127])
def test_a_key_is_counted_in_bytes(key: str) -> None:
    assert accepted(key=key).key == key


def test_labels_up_to_their_limits_are_accepted() -> None:
    labels = {f"{number:02}._-" + "a" * 58: "\u00e9" * 128 for number in range(wire.MAX_LABELS)}
    assert dict(accepted(labels=labels).labels) == labels


@pytest.mark.parametrize("number", [10**300, -(10**4000), 2**64])
def test_a_whole_number_of_any_size_is_passed_on_as_it_is(number: int) -> None:
    assert json.loads(accepted({"seed": number}).request)["seed"] == number


def test_a_refusal_never_shows_the_prompt() -> None:
    messages = [{"role": "user", "content": PROMPT_CANARY}]
    for request in ({"messages": messages, "n": 2}, {"messages": [*messages, {}]}, {"messages": PROMPT_CANARY}):
        assert PROMPT_CANARY not in str(refused(body(request)))
    assert PROMPT_CANARY not in str(refused(body({"messages": messages}, colour=1)))
    assert PROMPT_CANARY not in str(refused(body({"messages": messages})[:-1]))


# Times.


@pytest.fixture
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Let this process live in another time zone."""
    with monkeypatch.context() as patched:
        patched.setenv("TZ", request.param)
        time.tzset()
        yield request.param
    time.tzset()


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-10-25T02:30:00+02:00", datetime(2026, 10, 25, 0, 30, tzinfo=UTC)),
        ("2026-10-25T02:30:00+01:00", datetime(2026, 10, 25, 1, 30, tzinfo=UTC)),
        ("2026-10-25T02:30:00Z", datetime(2026, 10, 25, 2, 30, tzinfo=UTC)),
        ("2026-10-25T02:30:00.000001Z", datetime(2026, 10, 25, 2, 30, 0, 1, tzinfo=UTC)),
        ("1970-01-01T00:00:00Z", datetime(1970, 1, 1, tzinfo=UTC)),
    ],
)
@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/St_Johns"], indirect=True)
@pytest.mark.usefixtures("zone")
def test_a_time_with_an_offset_means_the_same_instant_in_every_zone(text: str, moment: datetime) -> None:
    assert accepted(not_before=text).not_before == moment


def test_a_job_may_wait_ten_years_and_no_longer() -> None:
    with freezegun.freeze_time("2026-03-01T00:00:00Z"):
        furthest = datetime(2026, 3, 1, tzinfo=UTC) + intake.FURTHEST
        assert accepted(not_before=wire.format_time(furthest)).not_before == furthest
        assert refused(body(not_before=wire.format_time(furthest + timedelta(seconds=1)))).field == "not_before"


# The digest.


def test_the_digest_covers_request_route_and_model() -> None:
    digests = [
        accepted().digest,
        accepted({"temperature": 0}).digest,
        accepted({"messages": [{"role": "user", "content": "hello!"}]}).digest,
        accepted({"messages": [*MESSAGES, *MESSAGES]}).digest,
        accepted(route="far").digest,
        accepted({"model": "own"}).digest,
        accepted({"model": "small"}).digest,
    ]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    "fields",
    [
        {"labels": {"a": "b"}},
        {"priority": "high"},
        {"key": "k"},
        {"not_before": "2026-01-31T22:00:00Z"},
        {"max_attempts": 9},
        {"may_run_twice": True},
        {"require_complete": True},
        {"route": "near"},
    ],
)
def test_the_digest_covers_nothing_else(fields: dict[str, Any]) -> None:
    assert accepted(**fields).digest == accepted().digest


def test_the_order_of_keys_and_the_white_space_do_not_matter_to_the_digest() -> None:
    one = b'{"request":{"messages":[{"role":"user","content":"hello"}],"seed":1,"model":"m"}}'
    other = b' {"request": {"model": "m", "seed":1, "messages": [ {"content": "hello", "role": "user"} ] } }\n'
    assert intake.submission(one, CONFIG).digest == intake.submission(other, CONFIG).digest


def test_the_order_of_messages_matters_to_the_digest() -> None:
    one, other = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    assert accepted({"messages": [one, other]}).digest != accepted({"messages": [other, one]}).digest


# The smaller bodies.


def test_a_change_without_a_body_is_based_on_nothing() -> None:
    assert intake.based_on(b"") == intake.based_on(b"{}") == (None, None)
    assert intake.based_on(b'{"attempt": 2, "reason": "late"}') == (2, "late")


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b'{"attempt": "2"}', "attempt"),
        (b'{"attempt": true}', "attempt"),
        (b'{"reason": 5}', "reason"),
        (b'{"why": "x"}', "why"),
        (b"[]", "body"),
        (b"{", "body"),
    ],
)
def test_a_change_that_cannot_be_read_is_refused_by_field(data: bytes, field: str) -> None:
    with pytest.raises(errors.Refused) as found:
        intake.based_on(data)
    assert found.value.field == field


@pytest.mark.parametrize("action", list(wire.Decision))
def test_every_decision_is_read(action: wire.Decision) -> None:
    text = "the answer" if action is wire.Decision.COMPLETE else None
    data = json.dumps({"action": action, "text": text, "attempt": 3, "reason": "seen"}).encode()
    assert intake.decision(data) == (3, "seen", action, text)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"{}", "action"),
        (b'{"action": "retry"}', "action"),
        (b'{"action": 5}', "action"),
        (b'{"action": "complete"}', "text"),
        (b'{"action": "resend", "text": "x"}', "text"),
        (b'{"action": "resend", "note": "x"}', "note"),
    ],
)
def test_a_decision_that_cannot_be_read_is_refused_by_field(data: bytes, field: str) -> None:
    with pytest.raises(errors.Refused) as found:
        intake.decision(data)
    assert found.value.field == field


def test_a_change_of_the_lane_says_one_thing_or_nothing() -> None:
    assert intake.lane_change(b"", "reason") is None
    assert intake.lane_change(b'{"reason": "night"}', "reason") == "night"
    with pytest.raises(errors.Refused) as found:
        intake.lane_change(b'{"reason": "night"}', "route")
    assert found.value.field == "reason"


# For a command.


COMMANDS = config.parse(
    {"routes": {"here": {"kind": "command", "command": ["llm"]}, "other": {"kind": "command", "command": ["cat"]}}}
    | {"lane": {"default_route": "here"}}
)


def for_command(request_: dict[str, Any] | None = None, **fields: Any) -> store.Submission:
    return intake.submission(body(request_, **fields), COMMANDS)


@pytest.mark.parametrize(
    "messages",
    [
        MESSAGES,
        [{"role": "system", "content": "one"}, {"role": "user", "content": "two"}],
        [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": ""}]}],
        [{"role": "user", "content": []}],
    ],
)
def test_a_command_is_given_any_text(messages: list[dict[str, Any]]) -> None:
    found = for_command({"messages": messages})
    assert json.loads(found.request) == {"messages": messages}
    assert (found.route, found.model, found.names_model) == ("here", "llm", False)


def test_the_same_text_for_two_commands_is_not_the_same_request() -> None:
    assert for_command().digest == for_command().digest != for_command(route="other").digest


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def content(*parts: Any) -> dict[str, Any]:
    return {"messages": [*MESSAGES, {"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"model": "small"}, "request.model"),
        ({"temperature": 0.5}, "request.temperature"),
        ({"max_tokens": None}, "request.max_tokens"),
        ({"n": 1}, "request.n"),
        ({"stream_options": {}}, "request.stream_options"),
        ({"tools": []}, "request.tools"),
        (content(IMAGE), "request.messages[1].content"),
        (content({"type": "text", "text": "one"}, IMAGE), "request.messages[1].content"),
        (content({"type": "text"}), "request.messages[1].content"),
        (content({"type": "text", "text": None}), "request.messages[1].content"),
        (content("one"), "request.messages[1].content"),
        (content(5), "request.messages[1].content"),
        pytest.param(
            content({**IMAGE, "text": "a caption"}),
            "request.messages[1].content",
        ),
        pytest.param(
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
            "request.messages[0].tool_calls",
        ),
    ],
)
def test_what_a_command_would_never_get_is_refused_by_its_place(request_: dict[str, Any], field: str) -> None:
    with pytest.raises(errors.Refused) as found:
        for_command(request_)
    assert (found.value.kind, found.value.field) == (wire.ErrorKind.INVALID, field)
    assert "'here' is a command" in str(found.value)


def test_a_refusal_for_a_command_never_shows_the_prompt() -> None:
    with pytest.raises(errors.Refused) as found:
        for_command(content({"type": "text", "text": PROMPT_CANARY}, {"type": PROMPT_CANARY}))
    assert PROMPT_CANARY not in f"{found.value} {found.value.next_action}"
