"""The HTTP server on the control socket: uvicorn, told to wait instead of looking ten times a second.

Owns how a connection learns who is at its other end, and the order of a shutdown in which nobody is reset: the listener
is no longer read, what has been accepted is answered, then the connections end. It never unlinks a socket.
"""

import asyncio
import json
import logging
import socket
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from . import access, wire

KEEP_ALIVE_S = 15
DRAIN_S = 0.1
"""How long requests that were on their way when the listener closed have to arrive (measured: none is reset)."""

MAX_HEAD_BYTES = 64 * 1024


class _PeerProtocol(H11Protocol):
    """HTTP/1.1 whose requests know the uid and pid of their sender."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        uid, pid = access.peer_of(transport.get_extra_info("socket"))
        self.app_state = {**self.app_state, "uid": uid, "pid": pid}

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP in the shape of every other refusal, and close."""
        error = {
            "kind": wire.ErrorKind.INVALID,
            "message": "cannot read the request: it is not HTTP/1.1, or its head is too large",
            "next_action": "man brainlaned-api",
            "retry_safe": False,
        }
        body = json.dumps({"error": error}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (wire.PROTOCOL_HEADER.encode(), wire.PROTOCOL.encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        self.transport.close()


class Server(uvicorn.Server):
    """uvicorn without its signals and its ticking; `finish` ends it."""

    def __init__(self, app: Any, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_PeerProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
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
