"""The control plane: one table of paths, and thin handlers.

The event loop never touches SQLite: reads run in a thread pool on read connections, writes go to the acceptor. Whoever
waits is a future on the loop, woken when a job moves; it holds no thread, no connection and no transaction. Streams
read the spool, so a slow reader blocks nobody.
"""

import asyncio
import contextlib
import json
import re
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from . import access, config, decisions, errors, events, intake, queries, store, wire
from .acceptor import Acceptor
from .access import Role
from .db import Database, Transaction
from .gate import Gates
from .streams import Streams
from .wire import Decision, ErrorKind, Status

MAX_WAITERS = 2000
BODY_S = 10.0
"""How long a request's body may take to arrive, in seconds."""

READERS = 4
_STREAM_SILENCE_S = 15.0
_LARGE_BODY = 64 * 1024

Answer = TypeVar("Answer")
Handler = Callable[["Api", Request], Awaitable[Response]]


class Waiters:
    """Futures of those who wait for a job to move. Lives on the event loop; only `moved` is for other threads."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[int, set[asyncio.Future[None]]] = {}
        self.count = 0

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    def moved(self, job_ids: list[int]) -> None:
        """Wake whoever waits for one of these jobs. For any thread."""
        loop = self._loop
        if loop is not None and any(job_id in self._waiting for job_id in job_ids):
            loop.call_soon_threadsafe(self._wake, job_ids)

    def stop(self) -> None:
        """Wake all, for the end."""
        self._wake(list(self._waiting))
        self._loop = None

    def _wake(self, job_ids: list[int]) -> None:
        for job_id in job_ids:
            for future in self._waiting.pop(job_id, set()):
                if not future.done():
                    future.set_result(None)

    def make_room(self) -> None:
        """Raise Refused (too-many-waiters) when as many wait as may."""
        if self.count >= MAX_WAITERS:
            raise errors.Refused(
                ErrorKind.TOO_MANY_WAITERS, f"cannot wait: {self.count} clients wait already", retry_safe=True
            )

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count one who waits, or raise Refused (too-many-waiters)."""
        self.make_room()
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1

    @contextlib.contextmanager
    def watching(self, job_id: int) -> Iterator[asyncio.Future[None]]:
        """Lend a future that is done at the job's next move. Register first, then look, then wait."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(job_id, set()).add(future)
        try:
            yield future
        finally:
            others = self._waiting.get(job_id, set())
            others.discard(future)
            if not others:
                self._waiting.pop(job_id, None)


class Api:
    """What the handlers need. Given everything by the daemon; constructs only its own waiters."""

    def __init__(
        self,
        *,
        configuration: config.Config,
        database: Database,
        acceptor: Acceptor,
        cancel_call: Callable[[int], None],
        is_answer_waiting: Callable[[], bool],
        gates: Gates,
        streams: Streams,
        access_list: access.AccessList,
        waiters: Waiters,
        growth: Waiters,
        about: dict[str, Any],
    ) -> None:
        self.configuration = configuration
        self.database = database
        self.acceptor = acceptor
        self.cancel_call = cancel_call
        self.is_answer_waiting = is_answer_waiting
        self.gates = gates
        self.streams = streams
        self.access_list = access_list
        self.waiters = waiters
        self.growth = growth
        self.about = about
        self.is_stopping = False
        """Nothing new is claimed; submits and lists go on being answered."""
        self.is_over = False
        """Whoever waits is answered with what is, because the daemon ends."""
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="brainlane-reader")
        self.app = Starlette(
            routes=[
                Route(path, self._guarded(role, handler), methods=[method]) for method, path, role, handler in TABLE
            ],
            exception_handlers={
                HTTPException: _http_exception,
                404: _http_exception,
                405: _http_exception,
            },
        )
        self.app.router.redirect_slashes = False

    def close(self) -> None:
        self._pool.shutdown()

    async def in_thread(self, function: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    async def read(self, query: Callable[[queries.Executes], Answer]) -> Answer:
        """Run a query on a read connection in the thread pool."""

        def run() -> Answer:
            with self.database.read() as connection:
                return query(connection)

        return await self.in_thread(run)

    async def write(self, change: Callable[[Transaction], Answer]) -> Answer:
        """Run a change in the acceptor's next transaction and return after its commit."""
        # Shielded: whoever hangs up must not take the change of others with him.
        return await asyncio.shield(asyncio.wrap_future(self.acceptor.ask(change)))

    def _guarded(self, role: Role, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                await self._admit(request, role)
                response = await handler(self, request)
            except errors.Refused as refusal:
                response = _refused(refusal)
            except errors.Superseded as error:
                response = _refused(errors.Refused(ErrorKind.MOVED_ON, str(error), next_action=_look_again(request)))
            except errors.Busy as error:
                response = _refused(errors.Refused(ErrorKind.BUSY, str(error), retry_safe=True))
            except errors.CommitUnknown as error:
                has_key = getattr(request.state, "has_key", False)
                response = _refused(errors.Refused(ErrorKind.OUTCOME_UNKNOWN, str(error), retry_safe=has_key))
            except sqlite3.OperationalError as error:
                response = _refused(_of_sqlite(error))
            except ClientDisconnect:
                response = Response(status_code=499)
            except Exception:
                events.request_failed(request.method, request.url.path)
                response = _refused(
                    errors.Refused(ErrorKind.INTERNAL, "cannot answer: an internal error, which the journal tells")
                )
            response.headers[wire.PROTOCOL_HEADER] = wire.PROTOCOL
            return response

        return endpoint

    async def _admit(self, request: Request, role: Role) -> None:
        uid, pid = request.state.uid, request.state.pid
        known = self.access_list.known(uid)
        has, user = known if known is not None else await self.in_thread(lambda: self.access_list.look_up(uid))
        request.state.caller = store.Caller(uid, user, pid)
        request.state.role = has
        if has is None or has < role:
            events.forbidden(uid, pid, role.name.lower())
            raise errors.Refused(
                ErrorKind.FORBIDDEN,
                f"cannot {role.name.lower()}: uid {uid} is not among those whom the configuration lets do it",
                next_action="id",
            )


def _may_touch(request: Request, submitter_uid: int) -> None:
    """Let pass whoever operates the lane, and whoever submitted the job."""
    if request.state.role < Role.OPERATE and submitter_uid != request.state.uid:
        events.forbidden(request.state.uid, request.state.pid, "touch another user's job")
        raise errors.Refused(ErrorKind.FORBIDDEN, "cannot do this: the job is another user's", next_action="id")


# The handlers, in the order of the table.


async def submit(api: Api, request: Request) -> Response:
    body = await _body(request)
    submission = (
        await api.in_thread(lambda: intake.submission(body, api.configuration))
        if len(body) > _LARGE_BODY
        else intake.submission(body, api.configuration)
    )
    request.state.has_key = submission.key is not None
    caller = request.state.caller
    head_start_s = api.configuration.head_start_s[submission.priority]

    def change(tx: Transaction) -> dict[str, Any]:
        job_id, replayed = store.accept(tx, submission, caller, head_start_s, api.configuration.max_queued)
        return {**queries.job(tx, job_id), "replayed": replayed}

    job = await api.write(change)
    if not job["replayed"]:
        events.submitted(job["id"], job["route"], caller.uid)
    return _json(job, 200 if job["replayed"] else 201)


async def list_jobs(api: Api, request: Request) -> Response:
    selection = _selection(request)
    waiting = api.is_answer_waiting()
    return _json(await api.read(lambda source: queries.jobs(source, selection, answer_waiting=waiting)))


async def show(api: Api, request: Request) -> Response:
    job_id = _job_id(request)
    wait_s = _wait_s(request)

    async def look() -> dict[str, Any]:
        waiting = api.is_answer_waiting()
        return await api.read(lambda source: queries.job_with_attempts(source, job_id, answer_waiting=waiting))

    if wait_s == 0:
        return _json(await look())
    deadline = asyncio.get_running_loop().time() + wait_s
    with api.waiters.counted(), _hang_up_of(request) as hung_up:
        while True:
            with api.waiters.watching(job_id) as moved:
                status = await api.read(lambda source: queries.job_status(source, job_id))
                left_s = deadline - asyncio.get_running_loop().time()
                if status not in {Status.QUEUED, Status.RUNNING} or left_s <= 0 or api.is_over:
                    return _json(await look())
                await asyncio.wait({moved, hung_up}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if hung_up.done():
                    raise ClientDisconnect


async def output(api: Api, request: Request) -> Response:
    job_id = _job_id(request)
    await _check_owner(api, request, job_id)
    if _flag(request, "partial"):
        text = await api.in_thread(lambda: api.streams.partial(job_id))
    else:
        text = await api.read(lambda source: queries.output(source, job_id))
    return Response(text.encode(), media_type="text/plain; charset=utf-8")


async def response(api: Api, request: Request) -> Response:
    job_id = _job_id(request)
    await _check_owner(api, request, job_id)
    document = await api.read(lambda source: queries.response(source, job_id))
    return Response(document.encode(), media_type="application/json")


async def stream(api: Api, request: Request) -> Response:
    job_id = _job_id(request)
    await _check_owner(api, request, job_id)
    _only(request, "from")
    start = _stream_start(request)
    api.waiters.make_room()
    return StreamingResponse(_stream(api, job_id, *start), media_type="text/event-stream")


async def cancel(api: Api, request: Request) -> Response:
    job_id = _job_id(request)
    attempt, reason = intake.based_on(await _body(request))

    def change(tx: Transaction) -> dict[str, Any]:
        _may_touch(request, queries.submitter_uid(tx, job_id))
        decisions.cancel(tx, job_id, attempt, reason, request.state.caller)
        return queries.job(tx, job_id)

    answer = await _decided(api, request, job_id, Decision.CANCEL, change)
    # The intent is durable; if a call of this job is in flight, closing the line is all that is left.
    api.cancel_call(job_id)
    return answer


async def retry(api: Api, request: Request) -> Response:
    job_id = _job_id(request)
    attempt, reason = intake.based_on(await _body(request))

    def change(tx: Transaction) -> dict[str, Any]:
        _may_touch(request, queries.submitter_uid(tx, job_id))
        decisions.retry(tx, job_id, attempt, reason, request.state.caller)
        return queries.job(tx, job_id)

    return await _decided(api, request, job_id, "retry", change)


async def recover(api: Api, request: Request) -> Response:
    job_id = _job_id(request)
    attempt, reason, decision, text = intake.decision(await _body(request))

    def change(tx: Transaction) -> dict[str, Any]:
        _may_touch(request, queries.submitter_uid(tx, job_id))
        decisions.decide(tx, job_id, attempt, decision, text, reason, request.state.caller)
        return queries.job(tx, job_id)

    return await _decided(api, request, job_id, decision, change)


async def pause(api: Api, request: Request) -> Response:
    reason = intake.lane_change(await _body(request), "reason")
    caller = request.state.caller
    await api.write(lambda tx: store.pause(tx, reason, caller))
    events.lane_changed("paused", caller.uid, caller.pid, reason)
    return await status(api, request)


async def resume(api: Api, request: Request) -> Response:
    route = intake.lane_change(await _body(request), "route")
    caller = request.state.caller
    if route is not None and route not in api.configuration.routes:
        raise errors.Refused(
            ErrorKind.INVALID, f"cannot open the gate of '{route}': there is no such route", field="route"
        )
    if route is None:
        await api.write(store.resume)
        events.lane_changed("resumed", caller.uid, caller.pid, None)
    else:
        await api.write(lambda tx: api.gates.open(tx, route))
        events.lane_changed(f"gate of route {route} opened", caller.uid, caller.pid, None)
    return await status(api, request)


async def status(api: Api, request: Request) -> Response:
    lane = await api.read(queries.lane)
    lane["lane"]["answer_waiting"] = api.is_answer_waiting()
    if api.is_stopping:
        lane["lane"]["state"] = "stopping"
    return _json({**api.about, **lane})


async def healthz(api: Api, request: Request) -> Response:
    return _json({"status": "stopping" if api.is_stopping else "ok"})


TABLE: list[tuple[str, str, Role, Handler]] = [
    ("POST", "/v1/jobs", Role.SUBMIT, submit),
    ("GET", "/v1/jobs", Role.OBSERVE, list_jobs),
    ("GET", "/v1/jobs/{id}", Role.OBSERVE, show),
    ("GET", "/v1/jobs/{id}/output", Role.OBSERVE, output),
    ("GET", "/v1/jobs/{id}/response", Role.OBSERVE, response),
    ("GET", "/v1/jobs/{id}/stream", Role.OBSERVE, stream),
    ("POST", "/v1/jobs/{id}/cancel", Role.SUBMIT, cancel),
    ("POST", "/v1/jobs/{id}/retry", Role.SUBMIT, retry),
    ("POST", "/v1/jobs/{id}/recover", Role.SUBMIT, recover),
    ("GET", "/v1/status", Role.OBSERVE, status),
    ("POST", "/v1/lane/pause", Role.OPERATE, pause),
    ("POST", "/v1/lane/resume", Role.OPERATE, resume),
    ("GET", "/v1/healthz", Role.OBSERVE, healthz),
]


async def _decided(
    api: Api, request: Request, job_id: int, action: str, change: Callable[[Transaction], dict[str, Any]]
) -> Response:
    job = await api.write(change)
    events.decided(job_id, action, request.state.uid, request.state.pid)
    api.waiters.moved([job_id])
    return _json(job)


async def _stream(api: Api, job_id: int, attempt: int, start: int) -> AsyncIterator[bytes]:
    """Yield server-sent events: text from character `start` of an attempt on as it arrives, then the end."""
    follower = api.streams.follow(job_id, attempt, start)
    with api.waiters.counted():
        while True:
            with api.waiters.watching(job_id) as moved, api.growth.watching(job_id) as grew:
                for event in await api.in_thread(follower.look):
                    yield event
                if follower.is_over or api.is_over:
                    return
                done, _ = await asyncio.wait(
                    {moved, grew}, timeout=_STREAM_SILENCE_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    yield b": still here\n\n"


@contextlib.contextmanager
def _hang_up_of(request: Request) -> Iterator[asyncio.Task[None]]:
    """Lend a task that is done when the client is gone, so that nobody waits for one who does not."""

    async def receive() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.create_task(receive())
    try:
        yield task
    finally:
        task.cancel()


async def _check_owner(api: Api, request: Request, job_id: int) -> None:
    uid = await api.read(lambda source: queries.submitter_uid(source, job_id))
    _may_touch(request, uid)


async def _body(request: Request) -> bytes:
    """Read a body of at most 8 MiB, counted as it arrives, whatever its headers promise."""
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > wire.MAX_BODY_BYTES:
                    raise errors.Refused(
                        ErrorKind.TOO_LARGE,
                        f"cannot accept a body over {wire.MAX_BODY_BYTES} bytes",
                        field="body",
                    )
                chunks.append(chunk)
    except TimeoutError as error:
        raise errors.Refused(
            ErrorKind.TOO_SLOW, f"cannot accept a body that takes over {BODY_S:g} s", retry_safe=True
        ) from error
    return b"".join(chunks)


def _job_id(request: Request) -> int:
    text = request.path_params["id"]
    if not (text.isascii() and text.isdecimal() and len(text) <= 18 and int(text) > 0):
        raise errors.Refused(ErrorKind.NO_SUCH_JOB, f"cannot find job '{text[:40]}': no such job")
    return int(text)


def _only(request: Request, *names: str) -> None:
    for name in request.query_params:
        if name not in names:
            raise _bad_parameter(name, "there is no such parameter")


def _flag(request: Request, name: str) -> bool:
    _only(request, name)
    text = request.query_params.get(name, "0")
    if text not in {"0", "1"}:
        raise _bad_parameter(name, f"it is '{text[:40]}', and must be 0 or 1")
    return text == "1"


def _wait_s(request: Request) -> float:
    _only(request, "wait")
    text = request.query_params.get("wait", "0")
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s <= wire.MAX_WAIT_S:
        raise _bad_parameter("wait", f"it is '{text[:40]}', and must be from 0 to {wire.MAX_WAIT_S} seconds")
    return wait_s


def _whole_number(request: Request, name: str, default: int, *, lowest: int, highest: int = 2**53) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 16 and lowest <= int(text) <= highest):
        raise _bad_parameter(name, f"it is '{text[:40]}', and must be a whole number from {lowest} to {highest}")
    return int(text)


def _stream_start(request: Request) -> tuple[int, int]:
    """Return (attempt, character) of `from`: the id of a text event, ATTEMPT-CHARACTER, or a character alone."""
    text = request.query_params.get("from", "0")
    if not re.fullmatch(r"([0-9]{1,9}-)?[0-9]{1,15}", text):
        raise _bad_parameter("from", f"it is '{text[:40]}', and must be the id of a text event, or a whole number")
    attempt, _, character = text.rpartition("-")
    return int(attempt or 0), int(character)


def _selection(request: Request) -> queries.Selection:
    _only(request, "status", "route", "label", "after", "limit")
    parameters = request.query_params
    where = parameters.get("status")
    if where is not None and where not in set(Status):
        raise _bad_parameter("status", f"it is '{where[:40]}', and must be one of {', '.join(Status)}")
    label = parameters.get("label")
    key, is_pair, value = (label or "").partition("=")
    if label is not None and not is_pair:
        raise _bad_parameter("label", f"it is '{label[:40]}', and must be KEY=VALUE")
    after = _whole_number(request, "after", 0, lowest=1)
    return queries.Selection(
        status=Status(where) if where is not None else None,
        route=parameters.get("route"),
        label=(key, value) if label is not None else None,
        after=after or None,
        limit=_whole_number(request, "limit", 50, lowest=1, highest=wire.MAX_LIST),
    )


def _bad_parameter(name: str, cause: str) -> errors.Refused:
    return errors.Refused(ErrorKind.INVALID, f"cannot use parameter '{name[:40]}': {cause}", field=name[:40])


def _of_sqlite(error: sqlite3.OperationalError) -> errors.Refused:
    if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL:
        return errors.Refused(ErrorKind.DISK_RESERVE, f"cannot store: {error}", retry_safe=True)
    return errors.Refused(ErrorKind.BUSY, f"cannot use the database: {error}; nothing was stored", retry_safe=True)


def _look_again(request: Request) -> str:
    return f"brainctl show {request.path_params['id']}" if "id" in request.path_params else "brainctl status"


def _json(document: Any, status_code: int = 200) -> Response:
    body = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    return Response(body, status_code, media_type="application/json")


def _refused(refusal: errors.Refused) -> Response:
    error: dict[str, Any] = {
        "kind": refusal.kind,
        "message": str(refusal),
        "next_action": refusal.next_action,
        "retry_safe": refusal.retry_safe,
    }
    if refusal.field is not None:
        error["field"] = refusal.field
    answer = _json({"error": error}, wire.HTTP_OF_KIND[refusal.kind])
    if refusal.kind in {ErrorKind.TOO_LARGE, ErrorKind.TOO_SLOW, ErrorKind.FORBIDDEN}:
        # What is still on its way of this request is not worth reading.
        answer.headers["Connection"] = "close"
    return answer


async def _http_exception(request: Request, error: Exception) -> Response:
    is_method = isinstance(error, HTTPException) and error.status_code == 405
    kind = ErrorKind.WRONG_METHOD if is_method else ErrorKind.NO_SUCH_PATH
    answer = _refused(
        errors.Refused(kind, f"cannot {request.method} '{request.url.path[:100]}'", next_action="man brainlaned-api")
    )
    if isinstance(error, HTTPException):
        answer.headers.update(error.headers or {})  # Allow: what this path can do
    answer.headers[wire.PROTOCOL_HEADER] = wire.PROTOCOL
    return answer
