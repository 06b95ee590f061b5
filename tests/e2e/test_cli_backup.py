"""A backup is a whole and sound copy under its name, for its owner alone, or nothing at all.

What a lane never sends (a copy that breaks off, that is not sound, that is of something else) a scripted socket does.
"""

import os
import re
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.commandline import LIMIT_S, Run, environment, python, run
from tests.lane import Lane, config_for, running_lane, wait_until
from tests.unit.brainctl.scripted import Act, ScriptedLane, answered, http, read_request, refused

STATUS = answered({"routes": []})

MANY_JOBS = """
insert into jobs with recursive n(i) as (select 1 union all select i + 1 from n limit 2000) select i from n
"""
ENDLESS_JOBS = """
create view jobs as with recursive n(i) as (select 1 union all select i + 1 from n) select i from n
"""


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[ScriptedLane]:
    lane = ScriptedLane(tmp_path / "s")
    yield lane
    lane.close()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A name in a directory of its own, so that whatever is left beside it is seen."""
    (tmp_path / "kept").mkdir()
    return tmp_path / "kept" / "back up?#.db"


def back_up(lane: Lane | ScriptedLane, place: Path, *before: str, **options: Any) -> Run:
    path = lane.socket if isinstance(lane, Lane) else lane.path
    return run(*before, "--socket", str(path), "backup", str(place), **options)


def names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def database(tmp_path: Path, *statements: str) -> bytes:
    path = tmp_path / "made.db"
    with closing(sqlite3.connect(path)) as made:
        for statement in ("create table jobs (id integer)", "pragma user_version = 1", *statements):
            made.execute(statement)
            made.commit()
    content = path.read_bytes()
    path.unlink()
    return content


def head(size: int) -> bytes:
    return http(200, b"").replace(b"Content-Length: 0", f"Content-Length: {size}".encode())


# Of a lane.


def test_a_backup_is_one_sound_file_for_its_owner_that_replaces_an_earlier_one(shared_lane: Lane, place: Path) -> None:
    place.write_text("an earlier one")
    place.chmod(0o644)
    shared_lane.wait(shared_lane.submit("hello")["id"])
    jobs = shared_lane.rows("select count(*) as n from jobs")[0]["n"]
    made = back_up(shared_lane, place)
    size = place.stat().st_size
    assert (made.code, made.err) == (0, "")
    assert made.text == f"{jobs} jobs, {size} bytes, {place}\n"
    assert names_in(place.parent) == [place.name]
    assert place.stat().st_mode & 0o7777 == 0o600
    with closing(sqlite3.connect(f"{place.as_uri()}?mode=ro", uri=True)) as copy:
        assert copy.execute("pragma integrity_check").fetchall() == [("ok",)]
        assert copy.execute("select count(*) from jobs").fetchone() == (jobs,)
    told = back_up(shared_lane, place, "--json").json
    assert told == {"file": str(place), "bytes": place.stat().st_size, "jobs": jobs, "schema": told["schema"]}
    assert told["schema"] > 0


def test_a_backup_can_be_made_while_the_brain_thinks(shared_lane: Lane, shared_server: Any, place: Path) -> None:
    held = shared_server.hold()
    shared_server.script(held)
    number = shared_lane.submit("slow")["id"]
    assert held.arrived.wait(20)
    assert back_up(shared_lane, place).code == 0
    assert shared_lane.get(f"/v1/jobs/{number}").json["status"] == "running"


def test_a_lane_that_is_restored_as_the_help_says_comes_up_paused_and_goes_on_when_told_to(
    shared_lane: Lane, shared_server: Any, place: Path, tmp_path: Path
) -> None:
    shared_lane.post("/v1/lane/pause")
    number = str(shared_lane.submit("hello")["id"])
    assert back_up(shared_lane, place).code == 0
    helped = " ".join(run("backup", "--help").text.split())
    for words in ("stop the lane", "in place of brainlane.db", "comes up paused", "brainctl resume"):
        assert words in helped
    other = f'[routes.other]\nbase_url = "{shared_server.base_url}"\nmodel = "m"'
    restored = Lane(tmp_path / "restored", config_for(shared_server.base_url, more=other))
    restored.state_dir.mkdir(mode=0o700)
    place.rename(restored.database)
    with running_lane(restored.directory, restored.config.read_text()) as lane:
        here = ("--socket", str(lane.socket))
        page = run(*here, "status").text
        assert re.search(r"^lane      paused since .* by brainlaned$", page, re.M), page
        assert "restored from the backup" in " ".join(page.split())
        assert run(*here, "resume").code == 0
        assert run(*here, "wait", number).code == 0


# Where it may go.


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda place: place.parent.rmdir(), "there is no directory"),
        (lambda place: place.mkdir(), "no file is there"),
        (lambda place: os.mkfifo(place), "no file is there"),
        (lambda place: place.symlink_to("/dev/null"), "no file is there"),
        (lambda place: place.symlink_to(place.with_name("elsewhere")), "no file is there"),
        (lambda place: Path(f"{place}-wal").touch(), "a database is in use there"),
        (lambda place: Path(f"{place}-journal").touch(), "a database is in use there"),
    ],
)
def test_a_place_that_cannot_be_taken_is_refused_before_the_lane_is_asked(
    scripted: ScriptedLane, place: Path, made: Callable[[Path], object], told: str
) -> None:
    made(place)
    refusal = back_up(scripted, place)
    assert (refusal.code, refusal.out, scripted.connections) == (2, b"", 0)
    assert told in refusal.err and str(place.parent) in refusal.err


def test_the_database_of_the_lane_itself_is_never_replaced(shared_lane: Lane) -> None:
    before = shared_lane.database.stat().st_ino
    assert back_up(shared_lane, shared_lane.database).code == 2
    assert shared_lane.database.stat().st_ino == before


AS_NOBODY = """
import os, sys
from brainctl import __main__, backup, cli, client, errors, out, render, session, unreachable, wait
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
sys.exit(__main__.main())
"""


def test_a_directory_in_which_nobody_may_write_is_told_of(scripted: ScriptedLane) -> None:
    words = ["-c", AS_NOBODY, "--socket", scripted.path, "backup", "/usr/b.db"]
    ended = python(*words)
    assert (ended.returncode, scripted.connections) == (2, 0), ended.stderr
    assert re.fullmatch(
        r"brainctl: cannot write the backup '/usr/b.db': no permission [^\n]*'/usr'[^\n]*\n", ended.stderr
    )


def test_a_lane_that_is_away_is_told_of_at_once_and_nothing_is_left(place: Path, tmp_path: Path) -> None:
    away = run("--json", "--socket", str(tmp_path / "nothing"), "backup", str(place))
    assert (away.code, away.json["error"]["kind"]) == (9, "no-socket")
    assert names_in(place.parent) == []


def test_a_lane_that_refuses_leaves_nothing(scripted: ScriptedLane, place: Path) -> None:
    for kind, http_status, code in (("forbidden", 403, 8), ("disk-reserve", 507, 6), ("busy", 503, 9)):
        scripted.script(STATUS, refused(kind, http_status))
        assert back_up(scripted, place).code == code
        assert names_in(place.parent) == []


# What arrives.


def broken_off(tmp_path: Path) -> Act:
    return http(200, database(tmp_path), more="X-More: 1\r\n")[:-1]


def damaged(tmp_path: Path) -> Act:
    content = bytearray(database(tmp_path, MANY_JOBS))
    # The second page, from its header on; the first one says what kind of file this is.
    content[4096:4196] = b"\xff" * 100
    return http(200, bytes(content))


def contradicting_itself(tmp_path: Path) -> Act:
    """Every page can be read, but an index does not say what it is said to say."""
    other = "update sqlite_schema set sql = 'create index i on jobs (id) where id > 5' where name = 'i'"
    statements = (MANY_JOBS, "create index i on jobs (id)", "pragma writable_schema = on", other)
    return http(200, database(tmp_path, *statements))


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (contradicting_itself, "not sound"),
        (broken_off, "broke off after"),
        (damaged, "not sound"),
        (lambda tmp_path: http(200, b"no database at all" * 1000), "not sound"),
        (lambda tmp_path: http(200, b""), "not sound"),
        (lambda tmp_path: http(200, database(tmp_path, "pragma user_version = 0")), "no schema version"),
        (lambda tmp_path: http(200, database(tmp_path, "alter table jobs rename to other")), "no such table"),
        (lambda tmp_path: b"HTTP/1.1 200 OK\r\nBrainlane-Protocol: 1\r\n\r\n" + database(tmp_path), "how long it is"),
    ],
)
def test_a_copy_that_is_not_whole_or_not_sound_is_not_kept_and_the_earlier_one_is(
    scripted: ScriptedLane, place: Path, tmp_path: Path, act: Callable[[Path], Act], told: str
) -> None:
    place.write_text("an earlier one")
    scripted.script(STATUS, act(tmp_path))
    failed = back_up(scripted, place, "--json")
    assert (failed.code, failed.json["error"]["kind"]) == (10, "internal")
    assert told in failed.err
    assert names_in(place.parent) == [place.name] and place.read_text() == "an earlier one"


def test_a_sound_copy_from_the_same_socket_is_kept(scripted: ScriptedLane, place: Path, tmp_path: Path) -> None:
    scripted.script(STATUS, http(200, database(tmp_path, "insert into jobs values (1)")))
    assert back_up(scripted, place).text.startswith("1 jobs, ")


def limited(what: int, limit: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(what, (limit, limit))


def under(limit: Callable[[], None], lane: ScriptedLane, place: Path) -> subprocess.CompletedProcess[str]:
    return python("-m", "brainctl", "--socket", lane.path, "backup", str(place), preexec_fn=limit)


def test_a_disk_that_takes_no_more_is_one_line_and_leaves_nothing(
    scripted: ScriptedLane, place: Path, tmp_path: Path
) -> None:
    scripted.script(STATUS, http(200, database(tmp_path)))
    full = under(limited(resource.RLIMIT_FSIZE, 5000), scripted, place)
    assert full.returncode == 10
    assert re.fullmatch(r"brainctl: cannot write the backup '[^\n]*; next: df [^\n]*\n", full.stderr)
    assert names_in(place.parent) == []


def test_a_copy_is_never_in_memory_as_a_whole(scripted: ScriptedLane, place: Path) -> None:
    size, piece = 128 * 1024 * 1024, bytes(1024 * 1024)

    def send(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(head(size))
        for _ in range(size // len(piece)):
            connection.sendall(piece)

    scripted.script(STATUS, send)
    ended = under(limited(resource.RLIMIT_DATA, size // 2), scripted, place)
    # It came to the end, where it was found to be no database.
    assert (ended.returncode, "not sound" in ended.stderr) == (10, True), ended.stderr
    assert names_in(place.parent) == []


# How long it takes.


def test_the_copy_is_waited_for_longer_than_any_other_answer(
    scripted: ScriptedLane, place: Path, tmp_path: Path
) -> None:
    content, asked = database(tmp_path), threading.Event()

    def slow(connection: socket.socket) -> None:
        read_request(connection)
        asked.wait(2)  # twice as long as any other answer may take
        connection.sendall(http(200, content))

    scripted.script(STATUS, slow)
    assert back_up(scripted, place, "--answer-within", "1").code == 0


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=str
)
@pytest.mark.parametrize("begun", [False, True], ids=["before the copy is made", "while it arrives"])
def test_whoever_stops_a_backup_leaves_nothing_behind(
    scripted: ScriptedLane, place: Path, number: signal.Signals, code: int, begun: bool
) -> None:
    asked, over = threading.Event(), threading.Event()

    def endless(connection: socket.socket) -> None:
        read_request(connection)
        if begun:
            connection.sendall(
                b"HTTP/1.1 200 OK\r\nBrainlane-Protocol: 1\r\nContent-Length: 9999999\r\n\r\n" + bytes(99)
            )
        asked.set()
        over.wait(LIMIT_S)

    scripted.script(STATUS, endless)
    process = started(scripted, place)
    try:
        assert asked.wait(LIMIT_S)
        assert re.fullmatch(r"\.brainlane-[0-9a-f]{16}\.unfinished", *names_in(place.parent))
        stopped(process, number, code)
    finally:
        over.set()
        process.kill()
        process.wait()
    assert names_in(place.parent) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=str)
def test_a_check_that_does_not_end_can_be_stopped_as_well(
    scripted: ScriptedLane, place: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    endless = database(tmp_path, "drop table jobs", ENDLESS_JOBS, "pragma journal_mode = wal")
    scripted.script(STATUS, http(200, endless))
    process = started(scripted, place)
    try:
        # It is open twice once the check has begun.
        wait_until(lambda: len(unfinished_files_of(process.pid)) >= 2)
        # Nothing is made beside a copy while it is looked at, whatever it says of itself.
        assert len(names_in(place.parent)) == 1
        stopped(process, number, code)
    finally:
        process.kill()
        process.wait()
    assert names_in(place.parent) == []


def started(lane: ScriptedLane, place: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "brainctl", "--socket", lane.path, "backup", str(place)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        cwd="/",
    )


def stopped(process: subprocess.Popen[bytes], number: signal.Signals, code: int) -> None:
    process.send_signal(number)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (code, b""), err
    assert re.fullmatch(r"brainctl: [^\n]*nothing is kept of the backup[^\n]*\n", err.decode())


def unfinished_files_of(pid: int) -> list[str]:
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found.append(link.readlink().name)
    return [name for name in found if ".unfinished" in name]
