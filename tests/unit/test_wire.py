import contextlib
import os
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brainlaned import states, wire
from brainlaned.wire import ErrorKind, Exit, Status

ONLY_A_CLIENT_FINDS_OUT = {
    ErrorKind.NO_SOCKET,
    ErrorKind.DEAD_SOCKET,
    ErrorKind.NO_PERMISSION,
    ErrorKind.NO_ANSWER,
    ErrorKind.LANE_FAILED,
    ErrorKind.NOT_A_LANE,
    ErrorKind.USAGE,
}

# Times.

moments = st.datetimes(datetime(1970, 1, 1), datetime(9000, 1, 1), timezones=st.just(UTC))


def test_a_time_is_written_in_utc_with_six_digits() -> None:
    moment = datetime(2026, 1, 31, 22, 5, 6, tzinfo=timezone(timedelta(hours=2)))
    assert wire.format_time(moment) == "2026-01-31T20:05:06.000000Z"


@settings(deadline=None)
@given(moments)
def test_a_written_time_is_read_as_the_same_moment(moment: datetime) -> None:
    assert wire.parse_time(wire.format_time(moment)) == moment


@settings(deadline=None)
@given(moments, moments)
def test_the_order_of_texts_is_the_order_of_moments(one: datetime, other: datetime) -> None:
    assert (wire.format_time(one) < wire.format_time(other)) == (one < other)


@pytest.mark.parametrize(
    "text",
    [
        "2026-10-25T02:30:00+02:00",
        "2026-10-25 02:30+02:00",
        "2026-10-25T00:30Z",
        "2026-10-24T20:30:00.000000-04:00",
    ],
)
def test_one_instant_may_be_written_with_any_offset(text: str) -> None:
    assert wire.parse_time(text) == datetime(2026, 10, 25, 0, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        "2026-01-31",
        "2026-01-31Z",
        "22:00Z",
        "2026-01-31T22:00:00",
        "2026-01-31T22:00:00.123456",
        "2026-02-29T22:00:00Z",
        "2026-01-31T22:00:61Z",
        "2026-01-31T22:00:00+25:00",
        "9999-12-31T23:59:59-00:01",
        "0001-01-01T00:00:00+00:01",
        "1767225600",
    ],
)
def test_what_names_no_single_instant_is_no_time(text: str) -> None:
    with pytest.raises(ValueError):
        wire.parse_time(text)


@settings(deadline=None)
@given(st.text(max_size=40))
def test_no_text_makes_the_reading_of_times_fail_in_another_way(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert wire.parse_time(text).tzinfo is UTC


def test_the_database_reads_the_times_that_are_written() -> None:
    connection = sqlite3.connect(":memory:")
    moment = datetime(2026, 1, 31, 22, 5, 6, 123456, tzinfo=UTC)
    (seconds,) = connection.execute("select strftime('%s', ?)", (wire.format_time(moment),)).fetchone()
    connection.close()
    assert int(seconds) == int(moment.timestamp())


# The tables.


def test_every_kind_of_error_has_an_exit_status() -> None:
    assert set(wire.EXIT_OF_KIND) == set(ErrorKind)


def test_every_kind_that_a_daemon_answers_has_an_http_status_of_an_error() -> None:
    assert set(wire.HTTP_OF_KIND) == set(ErrorKind) - ONLY_A_CLIENT_FINDS_OUT
    assert all(400 <= status < 600 for status in wire.HTTP_OF_KIND.values())


def test_no_kind_of_error_exits_like_a_success_or_like_the_end_of_a_job() -> None:
    assert not {Exit.OK, Exit.FAILED, Exit.HELD, Exit.CANCELLED} & set(wire.EXIT_OF_KIND.values())


@pytest.mark.parametrize(
    ("kind", "http_status", "exit_status"),
    [
        (ErrorKind.INVALID, 422, 6),
        (ErrorKind.FORBIDDEN, 403, 8),
        (ErrorKind.NO_SUCH_JOB, 404, 5),
        (ErrorKind.KEY_CONFLICT, 409, 6),
        (ErrorKind.MOVED_ON, 409, 6),
        (ErrorKind.TOO_LATE, 409, 6),
        (ErrorKind.NO_OUTPUT, 409, 6),
        (ErrorKind.TOO_LARGE, 413, 6),
        (ErrorKind.QUEUE_FULL, 429, 6),
        (ErrorKind.DISK_RESERVE, 507, 6),
        (ErrorKind.BUSY, 503, 9),
        (ErrorKind.START_REFUSED, 503, 9),
        (ErrorKind.INTERNAL, 500, 10),
    ],
)
def test_the_statuses_of_an_error_are_those_of_the_contract(
    kind: ErrorKind, http_status: int, exit_status: int
) -> None:
    assert (wire.HTTP_OF_KIND[kind], wire.EXIT_OF_KIND[kind]) == (http_status, exit_status)


def test_the_exit_statuses_are_those_of_the_contract() -> None:
    assert [(status.name, status.value) for status in Exit] == [
        ("OK", 0),
        ("FAILED", 1),
        ("USAGE", 2),
        ("HELD", 3),
        ("CANCELLED", 4),
        ("NO_SUCH_JOB", 5),
        ("REFUSED", 6),
        ("WAITED_LONG_ENOUGH", 7),
        ("PERMISSION", 8),
        ("NO_LANE", 9),
        ("INTERNAL", 10),
    ]
    assert [status.value for status in wire.DaemonExit] == [0, 1, 64, 65, 69, 77, 78]


def test_every_end_of_waiting_has_its_own_exit_status() -> None:
    assert set(wire.EXIT_OF_STATUS) == states.FINAL | {Status.HELD}
    assert len(set(wire.EXIT_OF_STATUS.values())) == len(wire.EXIT_OF_STATUS)


def test_the_words_of_one_list_are_written_alike() -> None:
    for words in (Status, wire.AttemptStatus, wire.Reason, wire.Waiting, wire.GateReason, wire.Flag, ErrorKind):
        assert all(word.value == word.name.lower().replace("_", "-") for word in words), words


# Places.


def test_the_socket_of_the_system_is_under_run_and_named_after_its_lane() -> None:
    assert wire.system_socket() == Path("/run/brainlane/control.sock")
    assert wire.system_socket("gpu") == Path("/run/brainlane-gpu/control.sock")


def test_the_socket_of_a_user_is_in_the_runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", os.fspath(tmp_path))
    assert wire.user_socket() == tmp_path / "brainlane" / "control.sock"
    assert wire.user_socket("gpu") == tmp_path / "brainlane-gpu" / "control.sock"


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", os.fspath(tmp_path))
    return tmp_path


# A lane that no machine has, so that the place of the system is surely empty.
LANE = "that-nobody-has"


@pytest.mark.usefixtures("runtime")
def test_root_asks_the_lane_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert wire.find_socket(LANE) == wire.system_socket(LANE)


def test_a_user_asks_the_own_lane_where_one_is_and_nobody_elses(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    own = runtime / f"brainlane-{LANE}" / "control.sock"
    own.parent.mkdir()
    own.touch()
    if os.getuid() == 0:
        os.chown(own.parent, 1000, -1)
        assert wire.find_socket(LANE) == own
        os.chown(own.parent, 1001, -1)
        assert wire.find_socket(LANE) == wire.system_socket(LANE)  # somebody else's trap


def test_a_user_without_any_lane_is_told_of_the_own_place(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert wire.find_socket(LANE) == runtime / f"brainlane-{LANE}" / "control.sock"


def test_the_contract_is_read_without_looking_for_places() -> None:
    """Importing it must cost a command line nothing: the library that knows the places is loaded when asked for."""
    script = "import sys, brainlaned.wire; print(sorted({'platformdirs', 'sqlite3', 'typer'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "[]\n"
