"""What a path and a query may say: any text is a checked value or a refusal that names the parameter."""

from datetime import UTC, datetime
from urllib.parse import parse_qsl

import hypothesis
import pytest
from hypothesis import strategies as st

from brainlaned import errors, parameters, wire
from brainlaned.wire import ErrorKind, Status


@pytest.mark.parametrize(("text", "number"), [("1", 1), ("007", 7), ("9" * 18, 10**18 - 1)])
def test_the_id_of_a_job_is_a_whole_number(text: str, number: int) -> None:
    assert parameters.job_id(text) == number


@pytest.mark.parametrize("text", ["", "0", "-1", "+1", " 1", "1 ", "1_0", "1.0", "1e3", "\u0661", "x", "\0", "9" * 19])
def test_what_can_be_no_id_is_no_such_job(text: str) -> None:
    with pytest.raises(errors.Refused) as refused:
        parameters.job_id(text)
    assert refused.value.kind is ErrorKind.NO_SUCH_JOB


def test_what_is_not_said_has_its_default() -> None:
    assert parameters.flag({}, "partial") is False
    assert parameters.wait_s({}) == 0
    assert parameters.stream_start({}) == (0, 0)
    parameters.nothing({})
    found = parameters.selection({})
    assert (found.status, found.route, found.label, found.submitter_uid) == (None, None, None, None)
    assert (found.since, found.until, found.after, found.limit) == (None, None, None, 50)


def test_what_is_said_is_read() -> None:
    assert parameters.flag({"partial": "1"}, "partial")
    assert not parameters.flag({"partial": "0"}, "partial")
    assert parameters.wait_s({"wait": "0.5"}) == 0.5
    assert parameters.wait_s({"wait": str(wire.MAX_WAIT_S)}) == wire.MAX_WAIT_S
    assert parameters.stream_start({"from": "12"}) == (0, 12)
    assert parameters.stream_start({"from": "3-12"}) == (3, 12)
    found = parameters.selection(
        {
            "status": "held",
            "route": "",
            "label": "a=b=c",
            "submitter": "root",
            "since": "2026-03-01T13:00:00+01:00",
            "until": "2026-03-01T12:00:00.5Z",
            "after": "7",
            "limit": str(wire.MAX_LIST),
        }
    )
    assert (found.status, found.route, found.label, found.submitter_uid) == (
        Status.HELD,
        "",
        ("a", "b=c"),
        0,
    )
    assert (found.since, found.until) == ("2026-03-01T12:00:00.000000Z", "2026-03-01T12:00:00.500000Z")
    assert wire.parse_time(found.since or "") == datetime(2026, 3, 1, 12, tzinfo=UTC)
    assert (found.after, found.limit) == (7, wire.MAX_LIST)


@pytest.mark.parametrize("name", ["since", "until"])
@pytest.mark.parametrize("text", ["", "yesterday", "2026-03-01", "2026-03-01T12:00:00", "2026-02-30T12:00:00Z", "1"])
def test_a_time_without_an_offset_or_none_at_all_is_refused(name: str, text: str) -> None:
    assert refused_field(f"{name}={text}") == name


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("status=Done", "status"),
        ("label=key", "label"),
        ("limit=0", "limit"),
        (f"limit={wire.MAX_LIST + 1}", "limit"),
        ("after=0", "after"),
        ("bogus=1", "bogus"),
        (f"{'x' * 100}=1", "x" * 40),
    ],
)
def test_what_makes_no_selection_is_refused_by_name(query: str, field: str) -> None:
    assert refused_field(query) == field


def refused_field(query: str) -> str | None:
    with pytest.raises(errors.Refused) as refused:
        parameters.selection(dict(parse_qsl(query, keep_blank_values=True)))
    assert refused.value.kind is ErrorKind.INVALID
    return refused.value.field


NAMES = st.sampled_from(["partial", "wait", "from", "status", "label", "since", "after", "limit"]) | st.text(max_size=9)
VALUES = st.text(max_size=30) | st.integers().map(str) | st.floats().map(str) | st.sampled_from(list(Status))


@hypothesis.settings(max_examples=500, deadline=None)
@hypothesis.given(st.dictionaries(NAMES, VALUES, max_size=3))
def test_no_query_at_all_brings_forth_another_error_than_a_refusal(query: dict[str, str]) -> None:
    for read in (
        parameters.wait_s,
        parameters.stream_start,
        parameters.selection,
        parameters.nothing,
        lambda given: parameters.flag(given, "partial"),
        lambda given: parameters.job_id(next(iter(given.values()), "1")),
    ):
        try:
            found = read(query)
        except errors.Refused as refusal:
            assert len(str(refusal)) < 400
        else:
            assert not isinstance(found, float) or 0 <= found <= wire.MAX_WAIT_S


@pytest.mark.parametrize(("text", "uid"), [("1000", 1000), ("root", 0), ("0", 0)])
def test_a_submitter_is_a_number_or_the_name_of_a_user(text: str, uid: int) -> None:
    assert parameters.selection({"submitter": text}).submitter_uid == uid


@pytest.mark.parametrize("text", ["nobody-at-all", "", "9" * 11, "\u0661", "ROOT", "a\0b"])
def test_a_submitter_whom_the_system_does_not_know_is_refused(text: str) -> None:
    with pytest.raises(errors.Refused, match="submitter"):
        parameters.selection({"submitter": text})
