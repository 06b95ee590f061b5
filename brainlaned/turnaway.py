"""Answering every client that waits when a start is refused, so that each knows why and none starts us again."""

import contextlib
import json
import select
import socket
import time

from . import errors, wire

PATIENCE_S = 2.0
"""How long the clients may take to read their answers, in seconds."""


def turn_away(listener: socket.socket, refusal: errors.StartRefused) -> int:
    """Answer 503 to all who wait at a listening socket. Return how many."""
    error = wire.error_object(
        wire.ErrorKind.START_REFUSED, f"the lane does not start: {refusal}", refusal.next_action, retry_safe=True
    )
    body = json.dumps(error).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"{wire.PROTOCOL_HEADER}: {wire.PROTOCOL}\r\nConnection: close\r\n\r\n"
    )
    clients: list[socket.socket] = []
    listener.setblocking(False)
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            clients.append(client)
            client.setblocking(False)
            with contextlib.suppress(OSError):
                client.send(head.encode() + body)
                client.shutdown(socket.SHUT_WR)
    # Closing with something unread would reset the line, and the client might never see its answer.
    over = time.monotonic() + PATIENCE_S
    reading = list(clients)
    while reading and (left := over - time.monotonic()) > 0:
        for client in select.select(reading, [], [], left)[0]:
            try:
                is_over = not client.recv(64 * 1024)
            except OSError:
                is_over = True
            if is_over:
                reading.remove(client)
    for client in clients:
        client.close()
    return len(clients)
