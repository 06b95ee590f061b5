"""What a request may say: bytes from the socket in, checked values out.

Owns every rule about the body of a request. JSON is read strictly: UTF-8 only, no key twice, no NaN or infinity, no
lone surrogate, no nesting over 64. An unknown field is refused, since a misspelt one would silently mean its default.
Every refusal names the field, and nothing has been stored when it is raised. The prompt itself never stands in one.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from . import config, errors, store, wire
from .wire import Decision, ErrorKind, Priority

FURTHEST = timedelta(days=366 * 10)
"""How far ahead a not_before may lie."""

_SHOWN = 60

_Way = tuple["_Way", str | int] | None
"""How a value is reached from the body: the way to what holds it, and the last step."""


def submission(body: bytes, configuration: config.Config) -> store.Submission:
    """Read the body of `POST /v1/jobs`. Raises Refused (invalid) naming the field."""
    fields = _Fields("", document(body))
    request = fields.take("request", dict, "an object", required=True)
    route_name = fields.take("route", str, "the name of a route")
    if route_name is None:
        route_name = configuration.default_route
    route = configuration.routes.get(route_name)
    if route is None:
        raise _invalid(
            "route", f"there is no route '{_show(route_name)}'; there are: {', '.join(configuration.routes)}"
        )
    key = fields.take("key", str, "a text")
    if key is not None and not 0 < len(key.encode()) <= wire.MAX_KEY_BYTES:
        raise _invalid("key", f"it must have 1 to {wire.MAX_KEY_BYTES} bytes")
    max_attempts = fields.take("max_attempts", int, "a whole number")
    if max_attempts is not None and not 0 < max_attempts <= wire.MAX_ATTEMPTS:
        raise _invalid("max_attempts", f"it is {max_attempts}, and must be from 1 to {wire.MAX_ATTEMPTS}")
    not_before = fields.take("not_before", str, "an RFC 3339 time")
    checked = store.Submission(
        request="",
        digest="",
        route=route_name,
        model=route.model,
        names_model=False,
        key=key,
        priority=_priority(fields.take("priority", str, "low, normal or high")),
        not_before=_not_before(not_before) if not_before is not None else None,
        labels=_labels(fields.take("labels", dict, "an object")),
        max_attempts=max_attempts or route.max_attempts,
        may_run_twice=bool(fields.take("may_run_twice", bool, "true or false")),
        require_complete=bool(fields.take("require_complete", bool, "true or false")),
    )
    fields.end()
    model = _check_request(request)
    if route.command:
        _check_command(request, model, route_name)
    canonical = _CANONICAL.encode(request)
    digest = hashlib.sha256(json.dumps([canonical, route_name, model]).encode()).hexdigest()
    if model is not None:
        checked = dataclasses.replace(checked, model=model, names_model=True)
    return dataclasses.replace(checked, request=canonical, digest=digest)


def based_on(body: bytes, *, more: Callable[["_Fields"], None] | None = None) -> tuple[int | None, str | None]:
    """Read the body of a change to a job: the attempt that it is based on, and the reason given."""
    fields = _Fields("", document(body) if body else {})
    attempt = fields.take("attempt", int, "the number of an attempt")
    reason = _short(fields, "reason")
    if more is not None:
        more(fields)
    fields.end()
    return attempt, reason


def decision(body: bytes) -> tuple[int | None, str | None, Decision, str | None]:
    """Read the body of `/recover`: attempt, reason, action, and the text of `complete`."""
    taken: list[tuple[Decision, str | None]] = []

    def more(fields: "_Fields") -> None:
        action = fields.take("action", str, ", ".join(Decision), required=True)
        text = fields.take("text", str, "a text")
        if action not in set(Decision):
            raise _invalid("action", f"it is '{_show(action)}', and must be one of {', '.join(Decision)}")
        if (text is not None) != (action == Decision.COMPLETE):
            raise _invalid("text", "it belongs to the action complete, and to no other")
        taken.append((Decision(action), text))

    attempt, reason = based_on(body, more=more)
    return attempt, reason, *taken[0]


def lane_change(body: bytes, field: str) -> str | None:
    """Read the body of `/v1/lane/pause` (reason) or `/v1/lane/resume` (route)."""
    fields = _Fields("", document(body) if body else {})
    value = _short(fields, field)
    fields.end()
    return value


def _short(fields: "_Fields", name: str) -> str | None:
    text: str | None = fields.take(name, str, "a text")
    if text is not None and len(text.encode()) > wire.MAX_REASON_BYTES:
        raise _invalid(name, f"it is longer than {wire.MAX_REASON_BYTES} bytes")
    return text


def document(body: bytes) -> dict[str, Any]:
    """Read a body as one strict JSON object. Raises Refused (invalid)."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise _invalid("body", f"byte {error.start} is not UTF-8") from error
    try:
        value = _STRICT.decode(text)
    except RecursionError as error:
        raise _invalid("body", f"it is nested over {wire.MAX_NESTING} deep") from error
    except ValueError as error:
        raise _invalid("body", f"it is not JSON: {str(error)[:200]}") from error
    _check_values(value)
    if not isinstance(value, dict):
        raise _invalid("body", "it must be a JSON object")
    return value


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _invalid(_show(key), "the key stands twice in one object")
        found[key] = value
    return found


def _no_constant(name: str) -> Any:
    raise _invalid("body", f"{name} is no JSON number")


_CANONICAL = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True)
_STRICT = json.JSONDecoder(object_pairs_hook=_no_key_twice, parse_constant=_no_constant)


def _check_values(root: Any) -> None:
    # Not recursive: the depth of what arrives is the sender's choice.
    # A step of the way is one link to the one before, and becomes text only in a refusal.
    left: list[tuple[_Way, Any, int]] = [(None, root, 1)]
    while left:
        way, value, depth = left.pop()
        if isinstance(value, dict | list) and depth > wire.MAX_NESTING:
            raise _invalid(_path(way).split(".")[0] or "body", f"it is nested over {wire.MAX_NESTING} deep")
        if isinstance(value, str):
            _check_text(way, value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise _invalid(_path(way), "the number is too large")
        elif isinstance(value, dict):
            for key, item in value.items():
                _check_text(way, key)
                left.append(((way, key), item, depth + 1))
        elif isinstance(value, list):
            left.extend(((way, index), item, depth + 1) for index, item in enumerate(value))


def _path(way: "_Way") -> str:
    steps: list[str] = []
    while way is not None:
        way, step = way
        steps.append(f"[{step}]" if isinstance(step, int) else f".{_show(step)}")
    return "".join(reversed(steps)).removeprefix(".")


def _check_text(way: "_Way", text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _invalid(
            _path(way) or "body", f"character {error.start} is a lone surrogate, which is no Unicode text"
        ) from error


def _check_request(request: dict[str, Any]) -> str | None:
    """Check the request and take the model out of it, returned apart."""
    if "stream" in request:
        raise _invalid("request.stream", "brainlane decides how it asks; follow a job with /v1/jobs/ID/stream")
    count = request.get("n", 1)
    if isinstance(count, bool) or count not in (1, None):
        raise _invalid("request.n", f"it is {_show(count)}, and a job has one answer")
    options = request.get("stream_options", {})
    if not isinstance(options, dict):
        raise _invalid("request.stream_options", "it must be an object")
    model = request.pop("model", None)
    if model is not None and (not isinstance(model, str) or not model):
        raise _invalid("request.model", f"it is {_show(model)}, and must be a name")
    if model is not None and len(model.encode()) > wire.MAX_MODEL_BYTES:
        raise _invalid("request.model", f"it is longer than {wire.MAX_MODEL_BYTES} bytes")
    messages = request.get("messages")
    if not isinstance(messages, list):
        raise _invalid("request.messages", "it must be a list of messages")
    if not messages:
        raise _invalid("request.messages", "it is empty")
    for index, message in enumerate(messages):
        path = f"request.messages[{index}]"
        if not isinstance(message, dict):
            raise _invalid(path, "it must be an object with role and content")
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise _invalid(f"{path}.role", "it must be a text such as user or system")
        if not isinstance(message.get("content"), str | list | None):
            raise _invalid(f"{path}.content", "it must be a text or a list of parts")
        if message.get("content") is None and not message.get("tool_calls"):
            raise _invalid(f"{path}.content", "it is missing")
    return model


def _check_command(request: dict[str, Any], model: str | None, route: str) -> None:
    """A command gets text on its stdin and nothing else, so whatever else was asked for would be silently dropped."""
    if model is not None:
        raise _invalid("request.model", f"route '{route}' is a command, which is not told a model")
    for name in request:
        if name != "messages":
            raise _invalid(f"request.{_show(name)}", f"route '{route}' is a command, which takes no parameters")
    for index, message in enumerate(request["messages"]):
        path = f"request.messages[{index}]"
        for name in message:
            if name not in {"role", "content", "name"}:
                raise _invalid(f"{path}.{_show(name)}", f"route '{route}' is a command, which is given text only")
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            is_text = isinstance(part, dict) and part.keys() <= {"type", "text"} and part.get("type", "text") == "text"
            if not (is_text and isinstance(part.get("text"), str)):
                raise _invalid(f"{path}.content", f"route '{route}' is a command, which is given text only")


def _priority(text: str | None) -> Priority:
    if text is None:
        return Priority.NORMAL
    if text not in set(Priority):
        raise _invalid("priority", f"it is '{_show(text)}', and must be one of {', '.join(Priority)}")
    return Priority(text)


def _not_before(text: str) -> datetime:
    try:
        moment = wire.parse_time(text)
    except ValueError as error:
        raise _invalid("not_before", f"it is '{_show(text)}': {error}") from error
    earliest, latest = wire.parse_time("1970-01-01T00:00:00Z"), datetime.now(UTC) + FURTHEST
    if not earliest <= moment <= latest:
        raise _invalid("not_before", f"it is '{_show(text)}', and may lie ten years ahead at the most")
    return moment


def _labels(labels: Mapping[str, Any] | None) -> dict[str, str]:
    labels = labels or {}
    if len(labels) > wire.MAX_LABELS:
        raise _invalid("labels", f"there are {len(labels)}, and may be {wire.MAX_LABELS}")
    for key, value in labels.items():
        if not re.fullmatch(wire.LABEL_KEY_PATTERN, key):
            raise _invalid("labels", f"the key '{_show(key)}' does not match {wire.LABEL_KEY_PATTERN}")
        if not isinstance(value, str):
            raise _invalid(f"labels.{key}", f"it is {_show(value)}, and must be a text")
        if len(value.encode()) > wire.MAX_LABEL_VALUE_BYTES:
            raise _invalid(f"labels.{key}", f"it is longer than {wire.MAX_LABEL_VALUE_BYTES} bytes")
    return dict(labels)


class _Fields:
    """An object's fields, each taken once; what nobody took is refused."""

    def __init__(self, path: str, values: Mapping[str, Any]) -> None:
        self._path = path
        self._values = dict(values)

    def take(self, name: str, kind: type, called: str, *, required: bool = False) -> Any:
        value = self._values.pop(name, None)
        if value is None:
            if required:
                raise _invalid(self._path + name, "it is missing")
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise _invalid(self._path + name, f"it is {_show(value)}, and must be {called}")
        return value

    def end(self) -> None:
        if self._values:
            name = _show(next(iter(self._values)))
            raise _invalid(name, "there is no such field")


def _show(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    # What is refused may be no Unicode text; the refusal must be.
    return text[:_SHOWN].encode(errors="backslashreplace").decode() + ("..." if len(text) > _SHOWN else "")


def _invalid(field: str, cause: str) -> errors.Refused:
    return errors.Refused(
        ErrorKind.INVALID, f"cannot accept field '{field}': {cause}", field=field, next_action="man brainlaned-api"
    )
