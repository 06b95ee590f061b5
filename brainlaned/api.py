"""The control plane: one table of paths, and thin handlers.

The event loop never touches SQLite: reads run in a thread pool on read connections, writes go to the acceptor. Whoever
waits is a future on the loop, woken when a job moves. Streams read the spool, and what is long is read piece by piece
as it is taken, so a slow reader blocks nobody and costs no memory.
"""

import asyncio
import codecs
import contextlib
import json
import os
import re
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, TypeVar, cast

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from . import access, config, decisions, errors, events, intake, parameters, queries, store, wire
from .acceptor import Acceptor
from .access import Role
from .backup import Backups
from .db import Database, Transaction
from .filesystem import Reserve
from .gate import Gates
from .streams import Streams
from .waiters import Waiters
from .wire import Decision, ErrorKind, Status, Waiting

BODY_S = 10.0
"""How long a request's body may take to arrive, in seconds."""

MOST_BODY_BYTES = 128 * 1024 * 1024
"""So much of all requests may be in memory at a time."""

READERS = 4
_STREAM_SILENCE_S = 15.0
_LARGE_BODY = 64 * 1024
_JOBS = "/v1/jobs/"
_PIECE_BYTES = 256 * 1024

Answer = TypeVar("Answer")
Handler = Callable[["Api", Request], Awaitable[Response]]


class Api:
    """What the handlers need. Given everything by the daemon."""

    def __init__(
        self,
        *,
        configuration: config.Config,
        database: Database,
        acceptor: Acceptor,
        cancel_call: Callable[[int], None],
        stuck: Callable[[], Waiting | None],
        running_tokens: Callable[[], int | None],
        erased: Callable[[], None],
        reserve: Reserve,
        backups: Backups,
        gates: Gates,
        streams: Streams,
        access_list: access.AccessList,
        waiters: Waiters,
        growth: Waiters,
        client: str,
        about: dict[str, Any],
    ) -> None:
        self.configuration = configuration
        self.database = database
        self.acceptor = acceptor
        self.cancel_call = cancel_call
        self.stuck = stuck
        self.running_tokens = running_tokens
        self.erased = erased
        self.reserve = reserve
        self.backups = backups
        self.gates = gates
        self.streams = streams
        self.access_list = access_list
        self.waiters = waiters
        self.growth = growth
        self._client = client
        self.about = about
        self.body_bytes = 0
        """How much of requests that are not answered yet is in memory."""
        self.is_stopping = False
        """Nothing new is claimed; submits and lists go on being answered."""
        self.is_over = False
        """Whoever waits is answered with what is, because the daemon ends."""
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="brainlane-reader")
        self._paths: dict[str, dict[str, tuple[Role, Handler]]] = {}
        for method, path, role, handler in TABLE:
            self._paths.setdefault(path, {})[method] = (role, handler)

    def close(self) -> None:
        self._pool.shutdown()

    async def in_thread(self, function: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    async def read(self, query: Callable[[sqlite3.Connection], Answer]) -> Answer:
        """Run a query on a read connection in the thread pool."""

        def run() -> Answer:
            with self.database.read() as connection:
                return query(connection)

        return await self.in_thread(run)

    async def write(self, change: Callable[[Transaction], Answer]) -> Answer:
        """Run a change in the acceptor's next transaction and return after its commit."""
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def answer(result: Answer | None, error: Exception | None) -> None:
            # On this loop. Whoever has hung up meanwhile is not told, and takes nobody's change with him.
            if answered.done():
                return
            if error is None:
                answered.set_result(cast("Answer", result))
            else:
                answered.set_exception(error)

        self.acceptor.ask(change, answer)
        return await answered

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. The table is looked up here, since a router costs more than the rest of a submit."""
        request = Request(scope, receive, send)
        request.state.body_bytes = 0
        try:
            response = await self._answer(request)
        finally:
            self.body_bytes -= request.state.body_bytes
        response.headers[wire.PROTOCOL_HEADER] = wire.PROTOCOL
        try:
            await response(scope, receive, send)
        except errors.BrainlaneError:
            raise  # what was being read is gone; the client sees that its answer has no end
        except Exception:
            events.request_failed(request.method, request.url.path)
            raise

    async def _answer(self, request: Request) -> Response:
        path = request.scope["path"]
        if path.startswith(_JOBS) and path != _JOBS:
            job_id, slash, verb = path.removeprefix(_JOBS).partition("/")
            request.scope["path_params"] = {"id": job_id}
            path = f"{_JOBS}{{id}}{slash}{verb}" if job_id else path
        methods = self._paths.get(path)
        if methods is None:
            return self._refused(_no_such(ErrorKind.NO_SUCH_PATH, request))
        # What may be got may be asked about as well; the server leaves the body out.
        has_head = "GET" in methods and methods["GET"][1] not in {stream, backup}
        found = methods.get("GET" if request.method == "HEAD" and has_head else request.method)
        if found is None:
            answer = self._refused(_no_such(ErrorKind.WRONG_METHOD, request))
            answer.headers["Allow"] = ", ".join(sorted({*methods, *({"HEAD"} if has_head else ())}))
            return answer
        role, handler = found
        try:
            await self._admit(request, role)
            return await handler(self, request)
        except errors.Refused as refusal:
            return self._refused(refusal)
        except errors.Superseded as error:
            return self._refused(errors.Refused(ErrorKind.MOVED_ON, str(error), next_action=_look_again(request)))
        except errors.Busy as error:
            return self._refused(errors.Refused(ErrorKind.BUSY, str(error), retry_safe=True))
        except errors.CommitUnknown as error:
            has_key = getattr(request.state, "has_key", False)
            return self._refused(errors.Refused(ErrorKind.OUTCOME_UNKNOWN, str(error), retry_safe=has_key))
        except sqlite3.OperationalError as error:
            return self._refused(_of_sqlite(error))
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception:
            events.request_failed(request.method, request.url.path)
            return self._refused(
                errors.Refused(ErrorKind.INTERNAL, "cannot answer: an internal error, which the journal tells")
            )

    def _refused(self, refusal: errors.Refused) -> Response:
        # A command to paste has to meet this lane.
        next_action = re.sub("^brainctl(?= )", self._client, refusal.next_action)
        error = wire.error_object(
            refusal.kind, str(refusal), next_action, retry_safe=refusal.retry_safe, field=refusal.field
        )
        answer = _json(error, wire.HTTP_OF_KIND[refusal.kind])
        if refusal.kind in {ErrorKind.TOO_LARGE, ErrorKind.TOO_SLOW, ErrorKind.FORBIDDEN, ErrorKind.BUSY}:
            # What is still on its way of this request is not worth reading.
            answer.headers["Connection"] = "close"
        return answer

    async def _admit(self, request: Request, role: Role) -> None:
        uid, pid = request.state.uid, request.state.pid
        known = self.access_list.known(uid)
        person = known if known is not None else await self.in_thread(lambda: self.access_list.look_up(uid))
        has = person.role
        request.state.caller = store.Caller(uid, person.name, pid)
        request.state.role, request.state.reads_others = has, person.reads_others
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


def _veil(request: Request, job: dict[str, Any]) -> None:
    """Leave out the sentences that may quote what was asked and answered, for whoever may not read it."""
    if request.state.reads_others or job["submitter"]["uid"] == request.state.uid:
        return
    for shown in (job, *job.get("attempts", ())):
        shown["detail"] = ""
    for decision in job.get("decisions", ()):
        decision["reason"] = None


# The handlers, in the order of the table.


async def submit(api: Api, request: Request) -> Response:
    body = await _body(api, request)
    submission = (
        await api.in_thread(lambda: intake.submission(body, api.configuration))
        if len(body) > _LARGE_BODY
        else intake.submission(body, api.configuration)
    )
    request.state.has_key = submission.key is not None
    caller = request.state.caller
    head_start_s = api.configuration.head_start_s[submission.priority]

    def change(tx: Transaction) -> dict[str, Any]:
        job_id, replayed = store.accept(
            tx,
            submission,
            caller,
            head_start_s,
            api.configuration.max_queued,
            disk_is_low=api.reserve.is_low(),
        )
        return {**queries.job(tx, job_id), "replayed": replayed}

    job = await api.write(change)
    if not job["replayed"]:
        events.submitted(job["id"], job["route"], caller.uid)
    return _json(job, 200 if job["replayed"] else 201)


async def list_jobs(api: Api, request: Request) -> Response:
    query, stuck = request.query_params, api.stuck()
    found = await api.read(lambda source: queries.jobs(source, parameters.selection(query), stuck=stuck))
    for job in found["jobs"]:
        _veil(request, job)
    return _json(found)


async def show(api: Api, request: Request) -> Response:
    job_id = parameters.job_id(request.path_params["id"])
    wait_s = parameters.wait_s(request.query_params)

    async def look() -> dict[str, Any]:
        stuck = api.stuck()
        job = await api.read(lambda source: queries.job_with_attempts(source, job_id, stuck=stuck))
        _veil(request, job)
        return job

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


async def request_of(api: Api, request: Request) -> Response:
    job_id = await _readable(api, request)
    parameters.nothing(request.query_params)
    return await _stored(api, job_id, "request", "application/json")


async def output(api: Api, request: Request) -> Response:
    job_id = await _readable(api, request)
    if not parameters.flag(request.query_params, "partial"):
        return await _stored(api, job_id, "text", "text/plain; charset=utf-8")
    text = await api.in_thread(lambda: api.streams.partial(job_id))
    return Response(text.encode(), media_type="text/plain; charset=utf-8")


async def response(api: Api, request: Request) -> Response:
    job_id = await _readable(api, request)
    parameters.nothing(request.query_params)
    before, after = await api.read(lambda source: queries.response_frame(source, job_id))
    if after is None:
        return Response(before.encode(), media_type="application/json")

    text, size = await _piece(api, job_id, "text", 0)
    if len(text) == size:
        document = before + json.dumps(text.decode(), ensure_ascii=False) + after
        return Response(document.encode(), media_type="application/json")

    async def pieces() -> AsyncIterator[bytes]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        yield before.encode() + b'"'
        async for piece in _pieces(api, job_id, "text"):
            yield json.dumps(decoder.decode(piece), ensure_ascii=False)[1:-1].encode()
        yield b'"' + after.encode()

    return StreamingResponse(pieces(), media_type="application/json")


async def stream(api: Api, request: Request) -> Response:
    job_id = await _readable(api, request)
    start = parameters.stream_start(request.query_params)
    api.waiters.make_room()
    return StreamingResponse(_stream(api, job_id, *start), media_type="text/event-stream")


async def cancel(api: Api, request: Request) -> Response:
    attempt, reason = intake.based_on(await _body(api, request))
    answer = await _decided(
        api, request, Decision.CANCEL, lambda tx, job_id, who: decisions.cancel(tx, job_id, attempt, reason, who)
    )
    # The intent is durable; if a call of this job is in flight, closing the line is all that is left.
    api.cancel_call(parameters.job_id(request.path_params["id"]))
    return answer


async def retry(api: Api, request: Request) -> Response:
    attempt, reason = intake.based_on(await _body(api, request))
    return await _decided(
        api, request, "retry", lambda tx, job_id, who: decisions.retry(tx, job_id, attempt, reason, who)
    )


async def forget(api: Api, request: Request) -> Response:
    attempt, reason = intake.based_on(await _body(api, request))
    answer = await _decided(
        api, request, "forget", lambda tx, job_id, who: decisions.forget(tx, job_id, attempt, reason, who)
    )
    # What was erased still stands in the log until that is cut.
    api.erased()
    return answer


async def recover(api: Api, request: Request) -> Response:
    attempt, reason, decision, text = intake.decision(await _body(api, request))
    return await _decided(
        api,
        request,
        decision,
        lambda tx, job_id, who: decisions.decide(tx, job_id, attempt, decision, text, reason, who),
    )


async def pause(api: Api, request: Request) -> Response:
    reason = intake.lane_change(await _body(api, request), "reason")
    caller = request.state.caller
    await api.write(lambda tx: store.pause(tx, reason, caller))
    events.lane_changed("paused", caller.uid, caller.pid, reason)
    return await status(api, request)


async def resume(api: Api, request: Request) -> Response:
    route = intake.lane_change(await _body(api, request), "route")
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
    parameters.nothing(request.query_params)
    lane = await api.read(queries.lane)
    stuck = api.stuck()
    lane["lane"]["answer_waiting"] = stuck is Waiting.ANSWER_WAITING
    free = api.reserve.free()
    lane["lane"]["disk_reserve"] = free < api.reserve.size
    lane["lane"]["disk_free_bytes"] = free
    if not request.state.reads_others:
        for job in lane["needs_person"]:
            job["detail"] = ""
    if lane["running"] is not None:
        lane["running"]["tokens"] = api.running_tokens()
    if api.is_stopping:
        lane["lane"]["state"] = "stopping"
    return _json({**api.about, **lane})


async def backup(api: Api, request: Request) -> Response:
    parameters.nothing(request.query_params)
    copy = await api.in_thread(api.backups.make)
    size = os.fstat(copy.fileno()).st_size
    events.backed_up(request.state.uid, request.state.pid, size)
    return StreamingResponse(
        _pieces_of(api, copy), media_type="application/vnd.sqlite3", headers={"Content-Length": str(size)}
    )


async def healthz(api: Api, request: Request) -> Response:
    parameters.nothing(request.query_params)
    return _json({"status": "stopping" if api.is_stopping else "ok"})


TABLE: list[tuple[str, str, Role, Handler]] = [
    ("POST", "/v1/jobs", Role.SUBMIT, submit),
    ("GET", "/v1/jobs", Role.OBSERVE, list_jobs),
    ("GET", "/v1/jobs/{id}", Role.OBSERVE, show),
    ("GET", "/v1/jobs/{id}/request", Role.OBSERVE, request_of),
    ("GET", "/v1/jobs/{id}/output", Role.OBSERVE, output),
    ("GET", "/v1/jobs/{id}/response", Role.OBSERVE, response),
    ("GET", "/v1/jobs/{id}/stream", Role.OBSERVE, stream),
    ("POST", "/v1/jobs/{id}/cancel", Role.SUBMIT, cancel),
    ("POST", "/v1/jobs/{id}/retry", Role.SUBMIT, retry),
    ("POST", "/v1/jobs/{id}/recover", Role.SUBMIT, recover),
    ("POST", "/v1/jobs/{id}/forget", Role.SUBMIT, forget),
    ("GET", "/v1/status", Role.OBSERVE, status),
    ("POST", "/v1/lane/pause", Role.OPERATE, pause),
    ("POST", "/v1/lane/resume", Role.OPERATE, resume),
    ("GET", "/v1/backup", Role.OPERATE, backup),
    ("GET", "/v1/healthz", Role.OBSERVE, healthz),
]


async def _decided(
    api: Api, request: Request, action: str, decide: Callable[[Transaction, int, store.Caller], object]
) -> Response:
    """Let whoever may touch the job decide about it, and answer with the job as it stands then."""
    job_id = parameters.job_id(request.path_params["id"])

    def change(tx: Transaction) -> dict[str, Any]:
        _may_touch(request, queries.submitter_uid(tx, job_id))
        decide(tx, job_id, request.state.caller)
        return queries.job(tx, job_id)

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
                if follower.has_more:
                    continue
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


async def _readable(api: Api, request: Request) -> int:
    """Return the job whose prompt or answer is asked for. Raises Refused (no-such-job, forbidden)."""
    job_id = parameters.job_id(request.path_params["id"])
    uid = await api.read(lambda source: queries.submitter_uid(source, job_id))
    if not request.state.reads_others:
        _may_touch(request, uid)
    return job_id


async def _stored(api: Api, job_id: int, what: queries.Stored, media_type: str) -> Response:
    """Answer with a text of the database. Raises Refused (no-output)."""
    piece, size = await _piece(api, job_id, what, 0)
    if len(piece) == size:
        return Response(piece, media_type=media_type)
    headers = {"Content-Length": str(size)}
    return StreamingResponse(_pieces(api, job_id, what), media_type=media_type, headers=headers)


async def _pieces(api: Api, job_id: int, what: queries.Stored) -> AsyncIterator[bytes]:
    """Yield a text of the database, read piece by piece as the client takes it."""
    offset = 0
    while piece := (await _piece(api, job_id, what, offset))[0]:
        yield piece
        offset += len(piece)


async def _piece(api: Api, job_id: int, what: queries.Stored, offset: int) -> tuple[bytes, int]:
    return await api.read(lambda source: queries.stored_piece(source, job_id, what, offset, _PIECE_BYTES))


async def _pieces_of(api: Api, file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while piece := await api.in_thread(lambda: file.read(_PIECE_BYTES)):
            yield piece


async def _body(api: Api, request: Request) -> bytes:
    """Read a body of at most 8 MiB, counted as it arrives, whatever its headers promise.

    All that are in memory at a time have a bound too, which two thousand clients at once would come to.
    """
    parameters.nothing(request.query_params)
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
                api.body_bytes += len(chunk)
                request.state.body_bytes = size
                if api.body_bytes > MOST_BODY_BYTES:
                    raise errors.Refused(
                        ErrorKind.BUSY, "cannot accept so many large requests at a time", retry_safe=True
                    )
                chunks.append(chunk)
    except TimeoutError as error:
        raise errors.Refused(
            ErrorKind.TOO_SLOW, f"cannot accept a body that takes over {BODY_S:g} s", retry_safe=True
        ) from error
    return b"".join(chunks)


def _of_sqlite(error: sqlite3.OperationalError) -> errors.Refused:
    if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL:
        return errors.Refused(ErrorKind.DISK_RESERVE, f"cannot store: {error}", retry_safe=True)
    return errors.Refused(ErrorKind.BUSY, f"cannot use the database: {error}; nothing was stored", retry_safe=True)


def _look_again(request: Request) -> str:
    return f"brainctl show {request.path_params['id']}" if "id" in request.path_params else "brainctl status"


_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def _json(document: Any, status_code: int = 200) -> Response:
    body = _COMPACT.encode(document).encode()
    return Response(body, status_code, media_type="application/json")


def _no_such(kind: ErrorKind, request: Request) -> errors.Refused:
    return errors.Refused(kind, f"cannot {request.method} '{request.url.path[:100]}'", next_action="man brainlaned-api")
