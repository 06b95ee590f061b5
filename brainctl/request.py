"""What `brainctl submit` asks for: the prompt from wherever it comes, and the body of the request.

Owns reading a prompt or an answer as UTF-8 and refusing what is none, by file and offset, before anything is sent;
and turning options into the fields of `POST /v1/jobs`. Whether a field's value is acceptable is the lane's to say.
"""

import json
import shlex
import sys
from collections.abc import Iterable
from typing import Any

from brainlaned.wire import MAX_BODY_BYTES, ErrorKind, Priority, parse_time

from .errors import Problem, usage
from .session import Session

STDIN = "-"

MAX_COMMAND = 300
"""A command longer than this is described rather than printed."""


def check_text(**options: str | None) -> None:
    """Refuse what came from the command line as bytes that are no UTF-8: they cannot be written as JSON."""
    for name, value in options.items():
        try:
            (value or "").encode()
        except UnicodeEncodeError as error:
            offset = len((value or "")[: error.start].encode("utf-8", "surrogateescape"))
            usage(f"cannot use {name.replace('_', '-')}: byte {offset} of it is not UTF-8")


def read_text(source: str) -> str:
    """Read a file, or standard input for `-`, as UTF-8 text, byte for byte."""
    name = "standard input" if source == STDIN else f"'{source}'"
    try:
        if source == STDIN:
            if sys.stdin is None:
                usage("cannot read standard input: it is closed")
            data = sys.stdin.buffer.read(MAX_BODY_BYTES + 1)
        else:
            with open(source, "rb") as file:  # noqa: PTH123 - the name may be of any bytes
                data = file.read(MAX_BODY_BYTES + 1)
    except (OSError, ValueError) as error:
        cause = (error.strerror if isinstance(error, OSError) else None) or str(error)
        usage(f"cannot read {name}: {cause.lower()}")
    if len(data) > MAX_BODY_BYTES:
        raise Problem(
            ErrorKind.TOO_LARGE, f"cannot send {name}: it is larger than a request may be ({MAX_BODY_BYTES} bytes)"
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        usage(f"cannot read {name}: byte {error.start} is not UTF-8")


def prompt(argument: str | None, file: str | None) -> str:
    """Return the one prompt that was given, as an argument, a file or standard input."""
    if argument is not None and file is not None:
        usage("cannot submit: a prompt is given twice, as an argument and with --file")
    source = STDIN if argument == STDIN else file
    if source is None and argument is None:
        usage("cannot submit: no prompt; give it as an argument, with --file FILE, or as - for standard input")
    check_text(PROMPT=argument)
    words = read_text(source) if source is not None else argument or ""
    if not words:
        usage("cannot submit: the prompt is empty")
    return words


def pairs(option: str, given: Iterable[str]) -> dict[str, str]:
    """Read repeated K=V options; a name stands once."""
    found: dict[str, str] = {}
    for item in given:
        check_text(**{option: item})
        name, equals, value = item.partition("=")
        if not name or not equals:
            usage(f"cannot use {option} '{item}': it is not NAME=VALUE")
        if name in found:
            usage(f"cannot use {option} '{item}': '{name}' is given twice")
        found[name] = value
    return found


def parameters(given: Iterable[str], model: str | None) -> dict[str, Any]:
    """Read the parameters of the completion: a value is JSON where it parses as such, else a string."""
    found: dict[str, Any] = {name: _value(text) for name, text in pairs("--param", given).items()}
    if "messages" in found:
        usage("cannot use --param messages=...: the prompt and --system make the messages")
    if model is not None:
        if "model" in found:
            usage("cannot use --param model=... together with --model: the model is given twice")
        check_text(**{"--model": model})
        found["model"] = model
    return found


def submission(
    words: str,
    *,
    system: str | None,
    parameters: dict[str, Any],
    key: str,
    route: str | None,
    priority: Priority | None,
    not_before: str | None,
    labels: dict[str, str],
    max_attempts: int | None,
    may_run_twice: bool | None,
    require_complete: bool | None,
) -> dict[str, Any]:
    """Build the body of a submit. What was not said is left out, so that the lane's own defaults hold."""
    check_text(**{"--system": system, "--key": key, "--route": route})
    if not_before is not None:
        try:
            parse_time(not_before)
        except ValueError:
            usage(
                f"cannot use --not-before '{not_before}': "
                "a time needs a date, a time of day and an offset, like 2026-01-31T22:00:00Z"
            )
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": words})
    fields: dict[str, Any] = {
        "request": {"messages": messages, **parameters},
        "key": key,
        "route": route,
        "priority": priority,
        "not_before": not_before,
        "labels": labels or None,
        "max_attempts": max_attempts,
        "may_run_twice": may_run_twice or None,
        "require_complete": require_complete or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _value(words: str) -> Any:
    def no_number(name: str) -> Any:
        raise ValueError(name)

    try:
        return json.loads(words, parse_constant=no_number)
    except (ValueError, RecursionError):
        return words


def unclear(problem: Problem, session: Session, key: str) -> Problem:
    """Add to a failed submit whether the job may have been stored, and if so the command that finds out.

    Asking again with the same key does: it answers with the job that is there, or makes the one that is not.
    """
    if problem.maybe_done:
        again = _same_command(session, key)
        problem.message += f"; the job may have been stored, under the key '{key}'"
        problem.next_action = f"{problem.next_action}; then {again}" if problem.next_action else again
        problem.retry_safe, problem.body = True, None
    elif problem.body is None:
        problem.message += "; nothing was stored"
    return problem


def _same_command(session: Session, key: str) -> str:
    words = list(session.words)
    if "--key" not in words and not any(word.startswith("--key=") for word in words):
        words.insert(words.index("submit") + 1, f"--key={key}")
    command = shlex.join(["brainctl", *words])
    if len(command) <= MAX_COMMAND and "\n" not in command:
        return command
    return f"the same command with --key={key}"
