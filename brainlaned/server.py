"""The HTTP server on the control socket: uvicorn, told to wait instead of looking ten times a second.

Owns how a connection learns who is at its other end, and the order of a shutdown in which nobody is reset: the listener
is no longer read, what has been accepted is answered, then the connections end. It never unlinks a socket. Clients that
send or take too slowly are dropped, and their number is bounded.
"""

import asyncio
import http
import json
import logging
import os
import resource
import socket
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from . import access, events, wire

KEEP_ALIVE_S = 15
DRAIN_S = 0.1
"""How long requests that were on their way when the listener closed have to arrive (measured: none is reset)."""

MAX_HEAD_BYTES = 64 * 1024

REQUEST_S = 10.0
"""How long the head of a request may take to arrive whole, in seconds; the same for its body (api.BODY_S)."""

BODY_GRACE_S = 2.0
ANSWER_S = 30.0
"""How long a piece of an answer may wait for its client to take it, in seconds."""

MOST_CONNECTIONS = 2200
"""As many as may wait, and some for those who do not."""

KEPT_CONNECTIONS = 20
OTHER_DESCRIPTORS = 100


class _PeerProtocol(H11Protocol):
    """HTTP/1.1 whose requests know the uid and pid of their sender, and whose clients have to keep up.

    A deadline is for a whole head or body, never for a byte: a byte now and then would move it for ever.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._request_due: asyncio.TimerHandle | None = None
        self._answer_due: asyncio.TimerHandle | None = None
        self._peer = (-1, -1)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Whatever the kernel does not take at once is a client who does not keep up, be it one byte.
        transport.set_write_buffer_limits(high=0)
        uid, pid = self._peer = access.peer_of(transport.get_extra_info("socket"))
        self.app_state = {**self.app_state, "uid": uid, "pid": pid}
        most = most_connections()
        # Whoever has to find out who took them all needs one too.
        if len(self.connections) > most + (KEPT_CONNECTIONS if uid in {0, os.geteuid()} else 0):
            events.connections_full(uid, pid, most)
            self._refuse(503, wire.ErrorKind.BUSY, f"cannot take another connection: there are {most} already")
            return
        self._expect(REQUEST_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._no_longer_expect()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._request_due is None:
            self._expect(REQUEST_S)
        was = self.conn.their_state
        super().data_received(data)
        now = self.conn.their_state
        if now is h11.SEND_BODY:
            if was is not h11.SEND_BODY:
                # Whoever reads the body has its own limit and answers; this is for a body that nobody wants.
                self._expect(REQUEST_S + BODY_GRACE_S)
        elif now is not h11.IDLE or not self.conn.trailing_data[0]:
            self._no_longer_expect()
            if now is h11.IDLE and self.conn.our_state is h11.IDLE:
                # The rest of a body that nobody wanted came after its answer, and took away the limit of an idle line.
                self._unset_keepalive_if_required()
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._answer_due is None:
            self._answer_due = self.loop.call_later(ANSWER_S, self._answer_is_late)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._answer_due is not None:
            self._answer_due.cancel()
            self._answer_due = None

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP in the shape of every other refusal, and close."""
        message = "cannot read the request: it is not HTTP/1.1, or its head is too large"
        self._refuse(400, wire.ErrorKind.INVALID, message, "man brainlaned-api")

    def _expect(self, limit_s: float) -> None:
        self._no_longer_expect()
        self._request_due = self.loop.call_later(limit_s, self._request_is_late)

    def _no_longer_expect(self) -> None:
        if self._request_due is not None:
            self._request_due.cancel()
            self._request_due = None

    def _request_is_late(self) -> None:
        self._request_due = None
        if self.transport.is_closing():
            return
        events.dropped(*self._peer, f"its request was not whole within {REQUEST_S:g} s")
        if self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE:
            message = f"cannot accept a request that takes over {REQUEST_S:g} s"
            self._refuse(408, wire.ErrorKind.TOO_SLOW, message)
        else:
            self.transport.abort()

    def _answer_is_late(self) -> None:
        self._answer_due = None
        events.dropped(*self._peer, f"it did not take its answer within {ANSWER_S:g} s")
        self.transport.abort()

    def _refuse(self, status: int, kind: wire.ErrorKind, message: str, next_action: str = "brainctl status") -> None:
        self._no_longer_expect()
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            self.transport.close()  # it has had its answer
            return
        is_safe = kind is not wire.ErrorKind.INVALID
        body = json.dumps(wire.error_object(kind, message, next_action, retry_safe=is_safe)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (wire.PROTOCOL_HEADER.encode(), wire.PROTOCOL.encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=status, headers=headers, reason=http.HTTPStatus(status).phrase.encode()),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        self.transport.close()


def most_connections() -> int:
    """Return how many clients may be connected at a time: what is meant, or what the process may have open."""
    return min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_DESCRIPTORS)


class Server(uvicorn.Server):
    """uvicorn without its signals and its ticking; `finish` ends it."""

    def __init__(self, app: Any, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                interface="asgi3",
                http=_PeerProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                date_header=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=5,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            )
        )
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        self._listener = listener
        self._finished = asyncio.Event()

    async def begin(self) -> None:
        """Accept connections from now on."""
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup(sockets=[self._listener])
        self.server_state.default_headers = self.config.encoded_headers

    async def finish(self) -> None:
        """Read the listener no more, answer what has been accepted, close."""
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        await asyncio.sleep(DRAIN_S)  # for requests whose connection was accepted a moment ago
        await self.shutdown(sockets=[self._listener])
