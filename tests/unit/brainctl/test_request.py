"""What is handed in, and what is refused before anything is sent."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from brainctl import request
from brainctl.errors import Problem
from brainctl.session import Session
from brainlaned.wire import MAX_BODY_BYTES, ErrorKind, Priority

NOTHING: dict[str, Any] = {
    "system": None,
    "parameters": {},
    "key": "k",
    "route": None,
    "priority": None,
    "not_before": None,
    "labels": {},
    "max_attempts": None,
    "may_run_twice": False,
    "require_complete": False,
}


def test_what_was_not_said_is_left_to_the_lane() -> None:
    assert request.submission("hi", **NOTHING) == {
        "request": {"messages": [{"role": "user", "content": "hi"}]},
        "key": "k",
    }


def test_everything_that_was_said_stands_in_the_body() -> None:
    said: dict[str, Any] = {
        "system": "be brief",
        "parameters": {"temperature": 0, "model": "m"},
        "key": "k",
        "route": "r",
        "priority": Priority.HIGH,
        "not_before": "2026-01-31T22:00:00+01:00",
        "labels": {"a": "b"},
        "max_attempts": 2,
        "may_run_twice": True,
        "require_complete": True,
    }
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    expected = {name: value for name, value in said.items() if name not in {"system", "parameters"}}
    expected["request"] = {"messages": messages, "temperature": 0, "model": "m"}
    assert request.submission("hi", **said) == expected


@pytest.mark.parametrize(
    "time", ["tomorrow", "2026-01-31", "2026-01-31T22:00", "2026-01-31T22:00:00", "0001-01-01T00:00+23:00"]
)
def test_a_time_without_an_offset_is_refused_by_the_options_name(time: str) -> None:
    with pytest.raises(Problem, match=r"--not-before") as raised:
        request.submission("hi", **{**NOTHING, "not_before": time})
    assert raised.value.exit_status == 2


def test_a_value_is_json_where_it_parses_and_else_a_string() -> None:
    given = ["a=1", "b=true", 'c={"x": [1]}', "d=word", "e=", "f==", 'g="1"', "h=NaN", "i=-Infinity", "j=" + "[" * 9999]
    assert request.parameters(given, None) == {
        "a": 1,
        "b": True,
        "c": {"x": [1]},
        "d": "word",
        "e": "",
        "f": "=",
        "g": "1",
        "h": "NaN",
        "i": "-Infinity",
        "j": "[" * 9999,
    }


@pytest.mark.parametrize("given", [["a"], ["=1"], ["a=1", "a=2"], ["messages=[]"], ["model=x"], ["a=\udcff"]])
def test_a_parameter_that_is_none_or_stands_twice_is_refused(given: list[str]) -> None:
    with pytest.raises(Problem) as raised:
        request.parameters(given, "m")
    assert raised.value.kind == ErrorKind.USAGE


@pytest.mark.parametrize(("argument", "file"), [(None, None), ("a", "f"), ("-", "-"), ("", None)])
def test_there_is_exactly_one_prompt_and_it_is_not_empty(argument: str | None, file: str | None) -> None:
    with pytest.raises(Problem) as raised:
        request.prompt(argument, file)
    assert raised.value.exit_status == 2


def test_a_prompt_is_read_from_a_file_byte_for_byte(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes("né\r\n\x00\ufeffend\n".encode())
    assert request.prompt(None, str(tmp_path / "p")) == "né\r\n\x00\ufeffend\n"


def test_a_file_that_is_not_utf_8_is_refused_by_name_and_offset(tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_bytes("né".encode() + b"\xff")
    with pytest.raises(Problem, match=f"'{path}': byte 3 ") as raised:
        request.prompt(None, str(path))
    assert raised.value.exit_status == 2


def test_an_argument_that_is_not_utf_8_is_refused_by_its_offset_in_bytes() -> None:
    with pytest.raises(Problem, match="PROMPT: byte 3 ") as raised:
        request.prompt(b"n\xc3\xa9\xffx".decode("utf-8", "surrogateescape"), None)
    assert raised.value.exit_status == 2


def test_more_than_a_request_may_hold_is_not_even_read(tmp_path: Path) -> None:
    path = tmp_path / "p"
    with path.open("wb") as file:
        file.truncate(100 * MAX_BODY_BYTES)
    with pytest.raises(Problem) as raised:
        request.prompt(None, str(path))
    assert (raised.value.kind, raised.value.exit_status) == (ErrorKind.TOO_LARGE, 6)


def unclear(words: list[str], *, maybe_done: bool = True) -> Problem:
    problem = Problem(ErrorKind.NO_ANSWER, "lost", "look", maybe_done=maybe_done)
    return request.unclear(problem, Session(words), "the-key")


@pytest.mark.parametrize(
    "words",
    [["submit", "hi there"], ["--lane", "x", "submit", "--", "-x"], ["submit", "--key", "the-key", "hi"]],
)
def test_an_unclear_submit_names_its_key_and_the_command_that_finds_out(words: list[str]) -> None:
    problem = unclear(words)
    assert "may have been stored" in problem.line and "'the-key'" in problem.line and problem.retry_safe
    command = shlex.split(problem.line.partition("then ")[2])
    assert command[0] == "brainctl" and [word for word in command[1:] if word not in {"--key=the-key"}] == words
    assert " ".join(command).count("the-key") == 1


def test_a_command_that_cannot_be_pasted_is_described(tmp_path: Path) -> None:
    for prompt in ("two\nlines", "x" * 1000):
        problem = unclear(["submit", prompt])
        assert problem.line.endswith("the same command with --key=the-key")


def test_a_submit_that_reached_nobody_says_that_nothing_was_stored() -> None:
    assert "nothing was stored" in unclear(["submit", "x"], maybe_done=False).line
