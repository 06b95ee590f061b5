"""What the path and the query of a request may say: texts in, checked values out.

Every refusal names the parameter and its value. What stands in bodies is for intake.py.
"""

import re
from collections.abc import Mapping

from . import access, errors, queries, wire
from .wire import ErrorKind, Status

_SHOWN = 40


def job_id(text: str) -> int:
    """Read the id of a job in a path. Raises Refused (no-such-job) for what can be none."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 18 and int(text) > 0):
        raise errors.Refused(ErrorKind.NO_SUCH_JOB, f"cannot find job '{text[:_SHOWN]}': no such job")
    return int(text)


def flag(query: Mapping[str, str], name: str) -> bool:
    """Read a query that may have one parameter, 0 or 1. Raises Refused (invalid), as all that follow."""
    _only(query, name)
    text = query.get(name, "0")
    if text not in {"0", "1"}:
        raise _bad(name, f"it is '{text[:_SHOWN]}', and must be 0 or 1")
    return text == "1"


def wait_s(query: Mapping[str, str]) -> float:
    """Read how long somebody will wait, in seconds."""
    _only(query, "wait")
    text = query.get("wait", "0")
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= wire.MAX_WAIT_S:
        raise _bad("wait", f"it is '{text[:_SHOWN]}', and must be from 0 to {wire.MAX_WAIT_S} seconds")
    return found


def stream_start(query: Mapping[str, str]) -> tuple[int, int]:
    """Return (attempt, character) of `from`: the id of a text event, ATTEMPT-CHARACTER, or a character alone."""
    _only(query, "from")
    text = query.get("from", "0")
    if not re.fullmatch(r"([0-9]{1,9}-)?[0-9]{1,15}", text):
        raise _bad("from", f"it is '{text[:_SHOWN]}', and must be the id of a text event, or a whole number")
    attempt, _, character = text.rpartition("-")
    return int(attempt or 0), int(character)


def selection(query: Mapping[str, str]) -> queries.Selection:
    """Read which jobs a list is to hold. Looks up names, so it is for the thread pool."""
    _only(query, "status", "route", "label", "submitter", "since", "until", "after", "limit")
    where = query.get("status")
    if where is not None and where not in set(Status):
        raise _bad("status", f"it is '{where[:_SHOWN]}', and must be one of {', '.join(Status)}")
    label = query.get("label")
    key, is_pair, value = (label or "").partition("=")
    if label is not None and not is_pair:
        raise _bad("label", f"it is '{label[:_SHOWN]}', and must be KEY=VALUE")
    after = _whole_number(query, "after", 0, lowest=1)
    return queries.Selection(
        status=Status(where) if where is not None else None,
        route=query.get("route"),
        label=(key, value) if label is not None else None,
        submitter_uid=_uid(query),
        since=_time(query, "since"),
        until=_time(query, "until"),
        after=after or None,
        limit=_whole_number(query, "limit", 50, lowest=1, highest=wire.MAX_LIST),
    )


def nothing(query: Mapping[str, str]) -> None:
    """Refuse every parameter."""
    _only(query)


def _uid(query: Mapping[str, str]) -> int | None:
    text = query.get("submitter")
    if text is None:
        return None
    uid = access.uid_of(text)
    if uid is None:
        raise _bad("submitter", f"it is '{text[:_SHOWN]}', and must be the name or the uid of a user")
    return uid


def _time(query: Mapping[str, str], name: str) -> str | None:
    text = query.get(name)
    if text is None:
        return None
    try:
        return wire.format_time(wire.parse_time(text))
    except ValueError as error:
        raise _bad(name, f"it is '{text[:_SHOWN]}': {error}") from error


def _whole_number(query: Mapping[str, str], name: str, default: int, *, lowest: int, highest: int = 2**53) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 16 and lowest <= int(text) <= highest):
        raise _bad(name, f"it is '{text[:_SHOWN]}', and must be a whole number from {lowest} to {highest}")
    return int(text)


def _only(query: Mapping[str, str], *names: str) -> None:
    for name in query:
        if name not in names:
            raise _bad(name, "there is no such parameter")


def _bad(name: str, cause: str) -> errors.Refused:
    return errors.Refused(ErrorKind.INVALID, f"cannot use parameter '{name[:_SHOWN]}': {cause}", field=name[:_SHOWN])
