"""One request to an OpenAI-compatible endpoint: one attempt, one send.

No retries, no redirects, no pooled connection, no proxy that the route does not name. The answer is always streamed,
since only a streamed call stops working for us when we hang up, and gives evidence of its first byte.

The trace is a gate, not a log: httpcore announces each step before it does it, so committing `armed` when the request's
headers are about to be sent means that without it not one byte left. Only that mark may abort a call. An answer whose
arming was never announced means that the library has changed its events: a contradiction for the judge, and a test
pins the events.

httpx's own time-outs are per operation and start again with every byte, so the limits of an attempt are kept by a clock
of our own, which closes the connection through a duplicate of its descriptor: under TLS the original socket object is
detached, and the duplicate works in every phase. A cancel does the same.
"""

import contextlib
import json
import math
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from .. import config
from ..later import Later
from ..wire import Reason
from . import Ended, Marks
from .reply import ReplyReader
from .scrub import Scrubber, scrub

USAGE_S = 2.0
"""How long usage is awaited once the answer is complete, in seconds."""

RESOLVE_S = 60.0
"""What a name may take to resolve, in seconds; it happens before anything is armed, and nothing can cut it short."""

BACKSTOP_S = 10.0
"""How much later than our own clock httpx gives up, in seconds, so that it is always ours that says why."""

MODELS_S = 30.0
"""What a list of models may take, in seconds."""

_MODELS_BYTES = 8 * 1024 * 1024
_KEPT_HEADERS = (
    "content-type",
    "content-length",
    "content-encoding",
    "transfer-encoding",
    "retry-after",
    "retry-after-ms",
    "date",
    "location",
)
_UPSTREAM_ID_HEADERS = ("x-request-id", "request-id", "x-generation-id", "x-litellm-call-id")
_ERROR_CHARACTERS = 500


class HttpBrain:
    """A route's client, built once: a new one would cost its TLS context each time."""

    def __init__(self, route: config.Route) -> None:
        self._route = route
        self._secrets = route.secrets()
        proxy = route.proxy.reveal() if route.proxy else None
        tls: ssl.SSLContext | bool = False
        if route.base_url.startswith("https:") or (proxy or "").startswith("https:"):
            tls = ssl.create_default_context(cafile=route.ca_file)
        self._client = httpx.Client(
            verify=tls,
            trust_env=False,
            follow_redirects=False,
            proxy=proxy,
            limits=httpx.Limits(max_keepalive_connections=0),
            timeout=httpx.Timeout(
                connect=route.connect_s, read=route.total_s + BACKSTOP_S, write=route.idle_s, pool=route.connect_s
            ),
        )
        self._later = Later("brainlane-limits")
        self._headers = {"Accept": "text/event-stream, application/json", "Accept-Encoding": "identity"}
        self._headers |= {"Content-Type": "application/json", "User-Agent": "brainlane"}
        if route.api_key:
            self._headers["Authorization"] = f"Bearer {route.api_key.reveal()}"
        self._headers |= {name: value.reveal() for name, value in route.headers.items()}

    def close(self) -> None:
        self._client.close()

    def models(self) -> tuple[int, list[str] | None]:
        """Ask which models there are. Return the HTTP status, and their names where the answer could be read.

        Raises OSError, in one sentence and without secrets, where no answer came.
        """
        secrets = self._secrets
        body = b""
        try:
            limit = httpx.Timeout(MODELS_S, connect=self._route.connect_s)
            with self._client.stream("GET", self._url("models"), headers=self._headers, timeout=limit) as response:
                over = time.monotonic() + MODELS_S
                for chunk in response.iter_raw():
                    body += chunk
                    if len(body) > _MODELS_BYTES or time.monotonic() > over:
                        return response.status_code, None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            raise OSError(scrub(f"{type(error).__name__}: {error}", secrets)[:_ERROR_CHARACTERS]) from None
        try:
            names = [scrub(str(model["id"]), secrets) for model in json.loads(body)["data"]]
        except (ValueError, TypeError, KeyError, RecursionError):
            names = None
        return response.status_code, names

    def _url(self, path: str) -> str:
        address, mark, query = self._route.base_url.partition("?")
        return f"{address.rstrip('/')}/{path}{mark}{query}"

    def begin(self, request: str, model: str, request_id: str, files: Path) -> "HttpCall":
        """Prepare one attempt; nothing is connected yet. It leaves no files of its own: the marks take the answer."""
        document: dict[str, Any] = json.loads(request)
        document["model"] = model
        document["stream"] = True
        document["stream_options"] = {**document.get("stream_options", {}), "include_usage": True}
        body = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
        headers = {**self._headers, "X-Request-Id": request_id}
        prepared = self._client.build_request("POST", self._url("chat/completions"), content=body, headers=headers)
        return HttpCall(self._client, self._route, self._secrets, prepared, self._later)


class HttpCall:
    """One attempt. `run` is called once, by the worker; `abort` by any thread at any time."""

    def __init__(
        self,
        client: httpx.Client,
        route: config.Route,
        secrets: tuple[str, ...],
        prepared: httpx.Request,
        later: Later,
    ) -> None:
        self._secrets = secrets
        self._later = later
        self._client = client
        self._route = route
        self._prepared = prepared
        self._lock = threading.Lock()
        self._line: socket.socket | None = None
        self._cut_by: Reason | None = None
        self._not_armed: Exception | None = None

    @property
    def longest_s(self) -> float:
        """How long `run` may be silent at the most, in seconds, before something is wrong with ourselves."""
        return RESOLVE_S + self._route.connect_s + self._route.total_s

    def abort(self, cause: Reason) -> None:
        """End the call from our side; the first cause given stands."""
        with self._lock:
            self._cut_by = self._cut_by or cause
            self._shut_down()

    def run(self, marks: Marks) -> Ended:
        """Make the call and return how it ended. Raises what `marks.armed` raised, nothing having been sent."""
        reader = ReplyReader()
        scrubber = Scrubber(self._secrets)
        answered = whole = False
        error: str | None = None
        with _Limits(self, self._later) as limits:
            limits.total(self._route.total_s)
            self._prepared.extensions["trace"] = _Trace(self, marks, limits, self._route)
            try:
                response = self._client.send(self._prepared, stream=True)
                try:
                    answered = True
                    marks.headers(response.status_code, self._kept(response.headers))
                    whole = self._read(response, reader, marks, limits, scrubber)
                finally:
                    response.close()
                    self._take(scrubber.flush(), reader, marks)
            # UnicodeEncodeError and ExceptionGroup come too, and none may end the lane.
            except BaseException as failure:
                error = self._describe(failure)
            finally:
                self._hang_up()
        if self._not_armed is not None:
            raise self._not_armed
        reply = reader.close() if answered else None
        return Ended(reply=reply, whole=whole, cut_by=self._cut_by, error=error)

    def _read(
        self, response: httpx.Response, reader: ReplyReader, marks: Marks, limits: "_Limits", scrubber: "Scrubber"
    ) -> bool:
        encoding = response.headers.get("content-encoding", "identity").lower()
        if encoding not in {"identity", ""}:
            raise _Unreadable(f"the answer is encoded ({encoding[:40]}), though identity was asked for")
        room = self._route.max_output_mib * 1024 * 1024
        for chunk in response.iter_raw():
            was_finished = reader.finished
            if not was_finished:
                limits.phase(self._route.idle_s, Reason.IDLE_LIMIT)
            if len(chunk) > room:
                chunk = chunk[:room]
                self.abort(Reason.OUTPUT_LIMIT)
            room -= len(chunk)
            self._take(scrubber.feed(chunk), reader, marks)
            if self._cut_by is not None or reader.ended:
                # After the end marker nothing can follow; whoever keeps the line open must not keep the lane.
                return False
            if reader.finished and not was_finished:
                # What follows now, be it comments without end, does not make the wait longer.
                limits.phase(min(USAGE_S, self._route.idle_s), Reason.IDLE_LIMIT)
        framed = "content-length" in response.headers or "transfer-encoding" in response.headers
        return framed and self._cut_by is None

    def _take(self, chunk: bytes, reader: ReplyReader, marks: Marks) -> None:
        if chunk:
            marks.body(chunk)
            reader.feed(chunk)

    def _kept(self, headers: httpx.Headers) -> dict[str, str]:
        return {
            name: self._scrub(headers[name])[:_ERROR_CHARACTERS]
            for name in (*_KEPT_HEADERS, *_UPSTREAM_ID_HEADERS)
            if name in headers
        }

    def _describe(self, failure: BaseException) -> str:
        return self._scrub(f"{type(failure).__name__}: {failure}")[:_ERROR_CHARACTERS]

    def _scrub(self, text: str) -> str:
        return scrub(text, self._secrets)

    # What the trace and the clock need.

    def connected(self, line: socket.socket) -> None:
        with self._lock:
            if self._line is None:
                self._line = line.dup()
            if self._cut_by is not None:
                self._shut_down()

    def arm(self, marks: Marks) -> None:
        with self._lock:
            if self._cut_by is not None:
                raise _CutFirst(f"cannot arm the call: {self._cut_by} came first")
        try:
            marks.armed()
        except Exception as error:
            self._not_armed = error
            raise

    def _shut_down(self) -> None:
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.shutdown(socket.SHUT_RDWR)

    def _hang_up(self) -> None:
        with self._lock:
            if self._line is not None:
                self._line.close()
                self._line = None


def upstream_id_of(headers: Mapping[str, str]) -> str | None:
    """Return the id that the brain gave the call, from headers whose names are in lower case; None: it gave none."""
    return next((headers[name] for name in _UPSTREAM_ID_HEADERS if name in headers), None)


class _CutFirst(Exception):
    """We ended the call before it was armed."""


class _Unreadable(Exception):
    """An answer that we will not try to read."""


class _Trace:
    """httpcore's trace extension as marks. A CONNECT to a proxy is not our request, and arms nothing."""

    def __init__(self, call: HttpCall, marks: Marks, limits: "_Limits", route: config.Route) -> None:
        self._call = call
        self._marks = marks
        self._limits = limits
        self._route = route
        self._ours = False

    def __call__(self, event: str, info: Mapping[str, Any]) -> None:
        match event:
            case "connection.connect_tcp.complete":
                self._call.connected(info["return_value"].get_extra_info("socket"))
                # Over TLS or a proxy there is more to come before anything of ours can be sent.
                self._limits.phase(self._route.connect_s, Reason.CONNECT_LIMIT)
            case "http11.send_request_headers.started":
                self._ours = info["request"].method != b"CONNECT"
                if self._ours:
                    # The upload is bounded by httpx, which counts idle_s anew for each piece, and by the total.
                    self._limits.no_phase()
                    self._call.arm(self._marks)
            case "http11.send_request_headers.failed" | "http11.send_request_body.failed" if self._ours:
                self._marks.send_failed()
                self._limits.phase(self._route.first_byte_s, Reason.FIRST_BYTE_LIMIT)
            case "http11.send_request_body.complete" if self._ours:
                self._marks.sent()
                self._limits.phase(self._route.first_byte_s, Reason.FIRST_BYTE_LIMIT)


class _Limits:
    """The clock of one attempt: aborts it when the total or the present phase has lasted too long.

    Moving a limit further away costs nothing: whoever comes at the earlier time looks, and comes again.
    """

    def __init__(self, call: HttpCall, later: Later) -> None:
        self._call: HttpCall | None = call
        self._later = later
        self._lock = threading.Lock()
        self._total = math.inf
        self._phase = math.inf
        self._cause = Reason.FIRST_BYTE_LIMIT
        self._looks_at = math.inf

    def __enter__(self) -> "_Limits":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._call = None  # whoever comes at the latest limit must not keep it until then

    def total(self, limit_s: float) -> None:
        with self._lock:
            self._total = time.monotonic() + limit_s
            self._look_in_time()

    def phase(self, limit_s: float, cause: Reason) -> None:
        with self._lock:
            self._phase, self._cause = time.monotonic() + limit_s, cause
            self._look_in_time()

    def no_phase(self) -> None:
        with self._lock:
            self._phase = math.inf

    def _look_in_time(self) -> None:
        due = min(self._total, self._phase)
        if due < self._looks_at:
            self._looks_at = due
            self._later.call(max(0.0, due - time.monotonic()), self._look)

    def _look(self) -> None:
        with self._lock:
            if self._call is None:
                return
            now = time.monotonic()
            if now >= self._total:
                self._call.abort(Reason.TOTAL_LIMIT)
            elif now >= self._phase:
                self._call.abort(self._cause)
            else:
                self._looks_at = math.inf
                self._look_in_time()
