"""What the bytes of a brain's answer say: is the answer complete, and what is its text?

Owns the reading of chat completions, streamed or not. Nothing else in the program looks inside an answer, so a live
call and a spool found after a crash are judged by the same lines. It promises that the same bytes give the same Reply
however they were cut into chunks, that no bytes at all make it raise, that every string it returns can be encoded as
UTF-8 and every number written as JSON, and that an answer is complete only by a finish reason, an end marker after
something was said, or a whole JSON body. It opens no file, reads no clock and does not judge what was said: an empty
or truncated answer may be complete.

Where it is hard: lines end at CR, LF and CRLF only (U+2028 and U+0085 are text), a character may be cut between two
chunks, a surrogate pair between two deltas, and gateways put errors where an answer belongs.
"""

import codecs
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from httpx_sse._decoders import SSEDecoder

from .. import wire
from .scrub import Scrubber

Form = Literal["stream", "json", "other", "empty"]

_STREAM_STARTS = (b"data:", b"event:", b"id:", b"retry:", b":")
_LINE_END = re.compile("\r\n|\r|\n")
_BROKEN_ENDS = frozenset({"error", "abort"})
"""Finish reasons by which a server says that it did not finish (OpenRouter, vLLM, SGLang)."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Everything that one answer said, as far as it came."""

    text: str
    reasoning: str
    refusal: str
    tool_calls: tuple[Mapping[str, Any], ...]
    finish_reason: str | None
    complete: bool
    error: Mapping[str, Any] | None
    """What the brain, or a gateway before it, said went wrong; set on a complete answer only when it came after it."""
    usage: Mapping[str, Any] | None
    """As given, or None where it is unknown: an absent count is never 0."""
    flags: frozenset[wire.Flag]
    upstream_id: str | None
    model: str | None
    created: int | None
    form: Form

    @property
    def output(self) -> str:
        """Return what the submitter gets: the text, else the tool calls as JSON, else the refusal."""
        if self.text or not (self.tool_calls or self.refusal):
            return self.text
        return json.dumps(self.tool_calls, ensure_ascii=False) if self.tool_calls else self.refusal

    def frame(self) -> dict[str, Any]:
        """Assemble the one chat.completion object that a call without streaming would have returned, but for its text.

        Where the text belongs stands an empty one, so that a long answer is not kept twice.
        """
        content = "" if self.text or not (self.tool_calls or self.refusal) else None
        extras = {"reasoning_content": self.reasoning, "refusal": self.refusal, "tool_calls": list(self.tool_calls)}
        message = {"role": "assistant", "content": content} | {name: said for name, said in extras.items() if said}
        return {
            "id": self.upstream_id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [{"index": 0, "message": message, "finish_reason": self.finish_reason}],
            "usage": self.usage,
        }


class ReplyReader:
    """Read one answer from its raw bytes, fed in any chunking, in time and memory linear in their number."""

    def __init__(self) -> None:
        self._form: Form = "empty"
        self._head = b""
        self._body = bytearray()
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._line: list[str] = []
        self._after_cr = False
        self._events = SSEDecoder()
        self._has_end_marker = False
        self._has_unreadable_event = False

        self._text, self._reasoning, self._refusal = _Text(), _Text(), _Text()
        self._calls: dict[int, _Call] = {}
        self._has_spoken = False
        self._has_message = False
        self._has_content = False
        self._finish_reason: str | None = None
        self._error: dict[str, Any] | None = None
        self._failed = False
        self._usage: dict[str, Any] | None = None
        self._upstream_id: str | None = None
        self._model: str | None = None
        self._created: int | None = None

    def feed(self, chunk: bytes) -> str:
        """Take the next bytes and return the text that they made certain."""
        if self._form == "empty":
            chunk = self._decide_form(chunk)
        if self._form == "stream":
            # What follows the end is decoded still: the flags must not depend on where a chunk ended.
            return "".join([self._take_line(line) for line in self._split(self._decode(chunk))])
        if self._form == "json":
            self._body += chunk
        return ""

    @property
    def finished(self) -> bool:
        """Whether the answer is complete already; what may still follow is usage and the end marker."""
        if self._failed or self._finish_reason in _BROKEN_ENDS:
            return False
        if self._form != "json":
            end_is_known = self._has_end_marker and not self._has_unreadable_event
            return self._finish_reason is not None or (end_is_known and self._has_spoken)
        # A null content is no answer, unless the brain says why there is none.
        says_why = self._finish_reason in ("length", "content_filter")
        has_thought = self._finish_reason is not None and self._reasoning.is_begun
        return self._has_message and (self._has_content or self._has_spoken or says_why or has_thought)

    @property
    def ended(self) -> bool:
        """Whether nothing more can follow: the end marker or an error has been seen."""
        return self._has_end_marker or self._error is not None

    def close(self) -> Reply:
        """Return what the answer says, now that its body has ended, properly or not."""
        # Bytes that the decoder still holds are half a character: the body was cut there, no byte of it was invalid.
        if self._form == "stream":
            # No blank line ended the last event. What was cut out of it does not parse, so whatever parses is whole.
            self._take_line("".join(self._line))
            self._take_line("")
            self._line.clear()
        elif self._form == "json":
            self._take_body(_parse(self._decode(bytes(self._body))))
            self._body.clear()
        elif self._head:
            self._form = "other"
        calls = [self._calls[index] for index in sorted(self._calls) if self._calls[index].is_begun]
        texts = [self._text, self._reasoning, self._refusal]
        texts += [text for call in calls for text in (call.name, call.arguments)]
        for text in texts:
            text.add("", is_last=True)
        has_flag = {
            wire.Flag.INVALID_BYTES: self._decoder.errors == "replace" or any(text.is_damaged for text in texts),
            wire.Flag.NO_FINISH_REASON: self.finished and self._finish_reason is None,
            wire.Flag.NO_END_MARKER: self.finished and self._form == "stream" and not self._has_end_marker,
        }
        return Reply(
            text=str(self._text),
            reasoning=str(self._reasoning),
            refusal=str(self._refusal),
            tool_calls=tuple(call.assembled() for call in calls),
            finish_reason=self._finish_reason,
            complete=self.finished,
            error=self._error,
            usage=self._usage,
            flags=frozenset(flag for flag, holds in has_flag.items() if holds),
            upstream_id=self._upstream_id,
            model=self._model,
            created=self._created,
            form=self._form,
        )

    def _decide_form(self, chunk: bytes) -> bytes:
        """Tell by the first bytes what the body is; return those that are to be read, none while they do not suffice.

        The declared content type is not asked: servers that ignore `stream` and gateways' error pages often lie in it.
        """
        head = (self._head + chunk).removeprefix(codecs.BOM_UTF8).lstrip(b" \t\r\n")
        self._head = b""
        if head.startswith((b"{", b"[")):
            self._form = "json"
        elif head.startswith(_STREAM_STARTS):
            self._form = "stream"
        elif any(start.startswith(head) for start in (*_STREAM_STARTS, codecs.BOM_UTF8)):
            self._head, head = head, b""
        else:
            self._form = "other"
        return head

    def _decode(self, chunk: bytes) -> str:
        try:
            return self._decoder.decode(chunk)
        except UnicodeDecodeError:
            # The strict decoder has not moved, so the same bytes can be read again. That it had to be exchanged is the
            # mark of an invalid byte: U+FFFD in the text would not be, since a brain may really have sent one.
            self._decoder.errors = "replace"
            return self._decoder.decode(chunk)

    def _split(self, text: str) -> list[str]:
        """Return the lines that end in this text. A CR ends its line at once; an LF right after it is swallowed."""
        if text and self._after_cr:
            self._after_cr = False
            text = text.removeprefix("\n")
        if not text:
            return []
        self._after_cr = text.endswith("\r")
        first, *others = _LINE_END.split(text)
        self._line.append(first)
        if not others:
            return []
        lines = ["".join(self._line), *others]
        self._line = [lines.pop()]
        return lines

    def _take_line(self, line: str) -> str:
        if self.ended:
            return ""
        event = self._events.decode(line)
        if event is None:
            return ""
        data = event.data.strip()
        chunk = _parse(data)
        if event.event == "error":
            self._fail(_error_in(chunk) or chunk or data)
        elif data == "[DONE]":
            self._has_end_marker = True
        elif isinstance(chunk, dict):
            return self._take_object(chunk, ("delta",) if self._has_spoken else ("delta", "message"))
        elif data:
            self._has_unreadable_event = True
        return ""

    def _take_body(self, body: Any) -> None:
        if isinstance(body, list) and body and _error_in(body[0]):
            self._fail(_error_in(body[0]))  # Gemini puts its error object into a list.
        elif isinstance(body, dict):
            self._take_object(body, ("message",))

    def _take_object(self, chunk: dict[str, Any], message_keys: tuple[str, ...]) -> str:
        """Take one chat.completion or chat.completion.chunk, and return the text that it made certain."""
        self._upstream_id = self._upstream_id or _label(chunk.get("id"))
        self._model = self._model or _label(chunk.get("model"))
        created, usage, choice = chunk.get("created"), chunk.get("usage"), _first_choice(chunk.get("choices"))
        if self._created is None and isinstance(created, int | float) and not isinstance(created, bool):
            self._created = int(created)
        if isinstance(usage, dict) and usage:
            self._usage = _plain(usage)
        if error := _error_in(chunk) or choice.get("error"):
            self._fail(error)
        message = next((choice[key] for key in message_keys if isinstance(choice.get(key), dict)), None)
        text = self._take_message({"content": choice.get("text")} if message is None else message)
        self._has_message = self._has_message or message is not None or self._has_content
        reason = choice.get("finish_reason")
        if isinstance(reason, str) and reason:
            if reason in _BROKEN_ENDS and self._error is None:
                self._fail(f"the brain gave up: finish reason {reason}")
            self._finish_reason = _whole(reason)
        return text

    def _take_message(self, message: dict[str, Any]) -> str:
        self._has_content = self._has_content or isinstance(message.get("content"), str | list)
        # Several servers send both spellings of the reasoning, with the same words.
        self._reasoning.add(_text_of(message.get("reasoning_content")) or _text_of(message.get("reasoning")))
        self._refusal.add(_text_of(message.get("refusal")))
        calls = message.get("tool_calls")
        for piece in calls if isinstance(calls, list) else ():
            if isinstance(piece, dict):
                self._take_call(piece)
        text = self._text.add(_text_of(message.get("content")))
        self._has_spoken = self._has_spoken or self._text.is_begun or self._refusal.is_begun
        return text

    def _take_call(self, piece: dict[str, Any]) -> None:
        function = piece.get("function")
        function = function if isinstance(function, dict) else {}
        index, name, arguments = piece.get("index"), function.get("name"), function.get("arguments")
        if not isinstance(index, int):
            # Without an index a name begins the next call, and anything else goes on with the last one.
            index = next(reversed(self._calls), -1) + 1 if name else next(reversed(self._calls), 0)
        call = self._calls.setdefault(index, _Call())
        call.id = call.id or _label(piece.get("id"))
        call.type = call.type or _label(piece.get("type"))
        if isinstance(name, str) and call.name.parts != [name]:  # Some servers repeat the name with every piece.
            call.name.add(name)
        if isinstance(arguments, dict | list):
            arguments = json.dumps(_plain(arguments), ensure_ascii=False)
        if isinstance(arguments, str):
            call.arguments.add(arguments)
        self._has_spoken = self._has_spoken or call.is_begun

    def _fail(self, error: Any) -> None:
        """Record an error; it spoils the answer unless the brain had finished before."""
        error = _plain(error)
        if isinstance(error, list | int | float):
            error = json.dumps(error, ensure_ascii=False)
        self._error = error if isinstance(error, dict) else {"message": error}
        self._failed = self._failed or self._finish_reason is None


class TextReader:
    """Read the output of a local command, which is the answer as it stands. Secrets are removed on the way."""

    def __init__(self, secrets: tuple[str, ...]) -> None:
        self._scrubber = Scrubber(secrets)
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._parts: list[str] = []

    def feed(self, chunk: bytes) -> str:
        """Take the next bytes and return the text that they made certain."""
        return self._decode(self._scrubber.feed(chunk))

    def close(self) -> Reply:
        """Return what was said, now that nothing more follows."""
        self._decode(self._scrubber.flush(), is_last=True)
        is_damaged = self._decoder.errors == "replace"
        return Reply(
            text="".join(self._parts),
            reasoning="",
            refusal="",
            tool_calls=(),
            finish_reason=None,
            complete=False,
            error=None,
            usage=None,
            flags=frozenset({wire.Flag.INVALID_BYTES} if is_damaged else ()),
            upstream_id=None,
            model=None,
            created=None,
            form="other",
        )

    def _decode(self, chunk: bytes, is_last: bool = False) -> str:
        try:
            text = self._decoder.decode(chunk, is_last)
        except UnicodeDecodeError:
            # The strict decoder has not moved, so the same bytes can be read again.
            self._decoder.errors = "replace"
            text = self._decoder.decode(chunk, is_last)
        self._parts.append(text)
        return text


def read(body: Iterable[bytes], reader: ReplyReader | TextReader | None = None) -> Reply:
    """Read a whole body, as it was kept in a spool."""
    reader = reader or ReplyReader()
    for chunk in body:
        reader.feed(chunk)
    return reader.close()


@dataclass(slots=True)
class _Text:
    """A text that grows by parts, none of which ends in half a surrogate pair."""

    parts: list[str] = field(default_factory=list)
    held: str = ""
    is_damaged: bool = False

    @property
    def is_begun(self) -> bool:
        return bool(self.parts or self.held)

    def add(self, part: str, is_last: bool = False) -> str:
        """Add a part and return what is certain now: a high surrogate at the end waits for its other half."""
        part, self.held = self.held + part, ""
        if not is_last and "\ud800" <= part[-1:] <= "\udbff":
            part, self.held = part[:-1], part[-1]
        whole = _whole(part)
        self.is_damaged = self.is_damaged or whole.count("\ufffd") > part.count("\ufffd")
        if whole:
            self.parts.append(whole)
        return whole

    def __str__(self) -> str:
        whole = "".join(self.parts)
        self.parts = [whole] if whole else []  # a long text stands once
        return whole


@dataclass(slots=True)
class _Call:
    id: str | None = None
    type: str | None = None
    name: _Text = field(default_factory=_Text)
    arguments: _Text = field(default_factory=_Text)

    @property
    def is_begun(self) -> bool:
        return self.name.is_begun or self.arguments.is_begun

    def assembled(self) -> dict[str, Any]:
        function = {"name": str(self.name), "arguments": str(self.arguments)}
        return {"id": self.id, "type": self.type or "function", "function": function}


def _parse(text: str) -> Any:
    """Read JSON, control characters within strings allowed; None where it is none, or nested too deeply to be read."""
    try:
        return json.loads(text, strict=False, parse_int=_number, parse_float=_number, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None


def _number(digits: str) -> int | float | None:
    """Read a number; None where it is too large to be written as JSON again (1e999, or more than 4300 digits)."""
    try:
        return int(digits)
    except ValueError:
        return number if math.isfinite(number := float(digits)) else None


def _whole(text: str) -> str:
    """Join the halves of surrogate pairs, and put U+FFFD for a half that stands alone."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _plain(value: Any, depth: int = 0) -> Any:
    """Copy a JSON value with whole strings; what is nested deeper than any sensible value becomes None."""
    if isinstance(value, str):
        return _whole(value)
    if not isinstance(value, dict | list):
        return value
    if depth >= wire.MAX_NESTING:
        return None
    if isinstance(value, list):
        return [_plain(item, depth + 1) for item in value]
    return {_whole(key): _plain(item, depth + 1) for key, item in value.items()}


def _label(value: Any) -> str | None:
    """Return an id or a name as text; some servers number what others name."""
    return _whole(str(value)) or None if type(value) in (str, int, float) else None


def _text_of(content: Any) -> str:
    """Return the text of a string or of a list of parts; anything else has none."""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def _first_choice(choices: Any) -> dict[str, Any]:
    """Return the choice with index 0, or without an index; an empty one where there is none."""
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and choice.get("index") in (0, None):
            return choice
    return {}


def _error_in(value: Any) -> Any:
    """Return the error that stands in an object, or that the object is; None or empty where there is none."""
    if not isinstance(value, dict):
        return None
    is_error = value.get("object") == "error"  # Older vLLM, also between the last text and the end marker.
    return value.get("error") or (value if is_error else None)
