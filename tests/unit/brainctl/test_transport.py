"""HTTP over a Unix socket: every end of a body, every way to break off, and limits that hold for the whole answer."""

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brainctl.transport import Exchange, Lost, NotHttp, connect

HEAD = b"HTTP/1.1 200 OK\r\nX-Some: thing\r\n"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def exchange(ours: socket.socket, *, within_s: float = 5, silence_s: float = 5) -> Exchange:
    return Exchange(ours, time.monotonic() + within_s, silence_s)


def whole(pieces: list[bytes]) -> tuple[int, bytes]:
    """Read an answer that comes in these pieces and then ends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def send() -> None:
            for piece in pieces:
                theirs.sendall(piece)
            theirs.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            reader = exchange(ours)
            head = reader.head()
            return head.status, b"".join(reader.body(head))
        finally:
            sender.join()


ANSWERS = {
    "length": HEAD + b"Content-Length: 6\r\n\r\nabc\ndefSURPLUS",
    "chunks": HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n4;x=y\r\nc\nde\r\n1\r\nf\r\n0\r\nTrailer: t\r\n\r\n",
    "end": HEAD + b"\r\nabc\ndef",
    "interim": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n" + HEAD + b"\r\nabc\ndef",
}


@pytest.mark.parametrize("name", ANSWERS)
@given(cuts=st.sets(st.integers(1, 150)))
def test_an_answer_is_the_same_however_it_is_cut(name: str, cuts: set[int]) -> None:
    answer = ANSWERS[name]
    places = [0, *sorted(cut for cut in cuts if cut < len(answer)), len(answer)]
    pieces = [answer[a:b] for a, b in itertools.pairwise(places)]
    expected = b"abc\nde" if name == "length" else b"abc\ndef"
    assert whole(pieces) == (200, expected)


@pytest.mark.parametrize("name", ["length", "chunks"])
def test_an_answer_that_breaks_off_anywhere_is_lost(name: str) -> None:
    answer = ANSWERS[name].removesuffix(b"fSURPLUS")
    for size in range(len(answer)):
        with pytest.raises(Lost):
            whole([answer[:size]])


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x00\x01\x02\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 \xb2\xb2\xb2 X\r\n\r\n",
        HEAD + b"Content-Length: many\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"x" * 100_000,
    ],
)
def test_what_is_not_http_is_told_apart(answer: bytes) -> None:
    with pytest.raises(NotHttp):
        whole([answer])


def test_a_head_that_trickles_in_does_not_extend_its_deadline(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    done = threading.Event()

    def trickle() -> None:
        for byte in HEAD * 100:
            if done.wait(0.02):
                return
            theirs.sendall(bytes([byte]))

    trickler = threading.Thread(target=trickle)
    trickler.start()
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        exchange(ours, within_s=0.4).head()
    assert time.monotonic() - started < 2
    done.set()
    trickler.join()


def test_silence_within_a_body_ends_it(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.sendall(HEAD + b"Content-Length: 5\r\n\r\nab")
    reader = exchange(ours, silence_s=0.2)
    head = reader.head()
    with pytest.raises(TimeoutError):
        list(reader.body(head))


def test_a_peer_that_answers_without_reading_is_heard(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.sendall(HEAD + b"Content-Length: 2\r\n\r\nno")
    theirs.close()
    reader = exchange(ours)
    reader.send(b"x" * 10_000_000)
    assert not reader.sent
    head = reader.head()
    assert b"".join(reader.body(head)) == b"no"


def test_ticks_come_while_nothing_else_does(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = pair
    ticks: list[float] = []
    with pytest.raises(TimeoutError):
        Exchange(ours, time.monotonic() + 2.5, 5, lambda: ticks.append(time.monotonic())).head()
    assert len(ticks) >= 2


def test_a_listener_whose_queue_is_full_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    waiting = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(0)
        with pytest.raises(TimeoutError):
            for _ in range(10):
                waiting.append(connect(path, time.monotonic() + 0.3))
    for connection in waiting:
        connection.close()
