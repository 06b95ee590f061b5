import errno
import json
import os
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brainlaned.later import Later
from brainlaned.spool import SYNC_S, Spool, Writer

ROOT = Path(__file__).resolve().parent.parent.parent
AT = "2026-03-01T12:00:01.000000Z"
HEADERS = {"content-type": "text/event-stream", "x-request-id": "caf\u00e9"}
BODY = b"data: one\n\ndata: \xff\xfe\n\n" + b"x" * 70_000 + b"\n"
LIMIT_S = 30.0


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "spool"


@pytest.fixture
def spool(directory: Path) -> Spool:
    made = Spool(directory)
    made.open()
    return made


def write(spool: Spool, *, whole: bool, job_id: int = 7, attempt: int = 2, body: bytes = BODY) -> None:
    with spool.create(job_id, attempt) as writer:
        writer.head(200, HEADERS, AT)
        writer.body(body[:10])
        writer.body(body[10:])
        writer.close(whole=whole)
        assert writer.failure is None


def body_of(spool: Spool, job_id: int = 7, attempt: int = 2, start: int = 0) -> bytes:
    part = spool.find(job_id, attempt)
    assert part is not None
    return b"".join(part.body(start))


# What is on the disk.


def test_only_the_lane_itself_may_look_into_its_spool(spool: Spool, directory: Path) -> None:
    previous = os.umask(0)
    try:
        write(spool, whole=False)
        write(spool, whole=True, job_id=8)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()} == {0o600}


def test_opening_a_spool_that_is_there_keeps_what_is_in_it(spool: Spool, directory: Path) -> None:
    write(spool, whole=True)
    Spool(directory).open()
    assert body_of(spool) == BODY


def test_a_whole_answer_is_renamed_and_read_back_as_it_came(spool: Spool, directory: Path) -> None:
    write(spool, whole=True)
    assert [file.name for file in directory.iterdir()] == ["7-2.whole"]
    part = spool.find(7, 2)
    assert part is not None
    assert (part.status, part.headers, part.headers_at, part.whole) == (200, HEADERS, AT, True)
    assert body_of(spool) == BODY


def test_an_answer_that_was_cut_keeps_its_name_and_what_there_is_of_it(spool: Spool, directory: Path) -> None:
    write(spool, whole=False)
    assert [file.name for file in directory.iterdir()] == ["7-2.part"]
    part = spool.find(7, 2)
    assert part is not None and not part.whole
    assert body_of(spool) == BODY


def test_an_answer_is_readable_while_it_arrives(spool: Spool) -> None:
    with spool.create(7, 2) as writer:
        writer.head(200, HEADERS, AT)
        assert body_of(spool) == b""
        writer.body(b"abc")
        assert body_of(spool) == b"abc"
        writer.body(b"def")
        assert body_of(spool, start=3) == b"def"
        assert body_of(spool, start=99) == b""


def test_an_attempt_without_a_file_is_not_found(spool: Spool) -> None:
    assert spool.find(7, 2) is None


def test_a_file_that_is_there_already_is_never_written_over(spool: Spool) -> None:
    write(spool, whole=False)
    with pytest.raises(FileExistsError):
        spool.create(7, 2)
    assert body_of(spool) == BODY


def test_an_attempt_that_was_created_and_never_answered_has_no_status(spool: Spool) -> None:
    spool.create(7, 2).close(whole=False)
    part = spool.find(7, 2)
    assert part is not None
    assert (part.status, part.whole, list(part.body())) == (None, False, [])


def test_leaving_without_a_word_means_that_the_answer_was_cut(spool: Spool, directory: Path) -> None:
    with pytest.raises(KeyboardInterrupt), spool.create(7, 2) as writer:
        writer.head(200, HEADERS, AT)
        raise KeyboardInterrupt
    assert [file.name for file in directory.iterdir()] == ["7-2.part"]


def test_closing_twice_is_harmless(spool: Spool, directory: Path) -> None:
    with spool.create(7, 2) as writer:
        writer.head(200, HEADERS, AT)
        writer.close(whole=True)
        writer.close(whole=False)
    assert [file.name for file in directory.iterdir()] == ["7-2.whole"]


# What a crash leaves.


def test_wherever_the_file_is_torn_what_there_is_can_be_read(spool: Spool, directory: Path) -> None:
    body = b"data: caf\xc3\xa9\n\n"
    write(spool, whole=True, body=body)
    whole = (directory / "7-2.whole").read_bytes()
    (directory / "7-2.whole").unlink()
    first_line = whole.index(b"\n") + 1
    for length in range(len(whole) + 1):
        (directory / "7-2.part").write_bytes(whole[:length])
        part = spool.find(7, 2)
        assert part is not None
        assert part.status == (200 if length >= first_line else None)
        assert b"".join(part.body()) == whole[first_line:length]
        assert not part.whole


@pytest.mark.parametrize(
    "first_line",
    [
        b"\n",
        b"null\n",
        b"[]\n",
        b"5\n",
        b"{}\n",
        b"\0" * 4096 + b"\n",
        b"\xff\xfe\n",
        b'{"status": 200}\n',
        b'{"status": 200, "headers": {}}\n',
        b'{"status": 200, "headers": [], "headers_at": "x"}\n',
        b'{"status": "many", "headers": {}, "headers_at": "x"}\n',
        b'{"status": null, "headers": {}, "headers_at": "x"}\n',
        b'{"status": 1e999, "headers": {}, "headers_at": "x"}\n',
        b"[" * 60_000 + b"\n",
        b" " * 100_000 + b"{}\n",
    ],
    ids=lambda line: line[:24].decode(errors="replace").strip(),
)
@pytest.mark.parametrize("suffix", ["part", "whole"])
def test_a_first_line_that_is_none_leaves_an_answer_that_says_nothing(
    spool: Spool, directory: Path, first_line: bytes, suffix: str
) -> None:
    (directory / f"7-2.{suffix}").write_bytes(first_line + b"body")
    part = spool.find(7, 2)
    assert part is not None
    assert (part.status, part.whole, list(part.body())) == (None, False, [])


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_at_all_keep_a_start_from_reading_its_spool(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    directory = tmp_path_factory.mktemp("spool")
    (directory / "7-2.part").write_bytes(data)
    part = Spool(directory).find(7, 2)
    assert part is not None and not part.whole
    list(part.body())


# When it is on the disk.


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files and directories that were synced, in order."""
    names: list[str] = []

    def noting(sync: object) -> object:
        def note(descriptor: int) -> None:
            sync(descriptor)  # type: ignore[operator]
            names.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

        return note

    monkeypatch.setattr(os, "fsync", noting(os.fsync))
    monkeypatch.setattr(os, "fdatasync", noting(os.fdatasync))
    return names


def test_a_file_is_in_its_directory_before_anything_may_be_sent(spool: Spool, synced: list[str]) -> None:
    spool.create(7, 2)
    assert synced == ["spool"]


def test_what_has_been_written_is_brought_to_the_disk_when_somebody_is_to_tell_of_it(
    spool: Spool, synced: list[str]
) -> None:
    with spool.create(7, 2) as writer:
        writer.head(200, HEADERS, AT)
        synced.clear()
        writer.sync()
        assert synced == ["7-2.part"]
    synced.clear()
    writer.sync()
    assert synced == []


def test_the_end_is_on_the_disk_before_the_name_says_so(spool: Spool, directory: Path, synced: list[str]) -> None:
    writer = spool.create(7, 2)
    writer.body(b"x")
    synced.clear()
    writer.close(whole=True)
    assert synced == ["7-2.part"]
    assert (directory / "7-2.whole").exists()


def test_what_arrives_is_synced_soon_though_nothing_follows(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    sync = os.fdatasync

    def note(descriptor: int) -> None:
        sync(descriptor)
        done.set()

    with spool.create(7, 2) as writer:
        monkeypatch.setattr(os, "fdatasync", note)
        writer.body(b"x")
        assert not done.is_set()
        assert done.wait(SYNC_S + LIMIT_S)


def test_a_stream_of_many_pieces_is_synced_once_a_second_and_not_with_each(spool: Spool, synced: list[str]) -> None:
    with spool.create(7, 2) as writer:
        synced.clear()
        for _ in range(200):
            writer.body(b"x")
        assert len(synced) < 100


# When the disk does not take it.


@pytest.fixture
def full(directory: Path) -> Iterator[Writer]:
    """A writer whose every write fails as on a full disk."""
    directory.mkdir()
    path = directory / "7-2.part"
    path.touch()
    yield Writer(path, os.open("/dev/full", os.O_WRONLY), Later("test"))


def test_a_failed_write_is_remembered_and_never_raised(full: Writer, directory: Path) -> None:
    full.head(200, HEADERS, AT)
    full.body(b"x")
    full.close(whole=True)
    assert full.failure is not None and full.failure.errno == errno.ENOSPC
    assert [file.name for file in directory.iterdir()] == ["7-2.part"]


def test_what_went_wrong_first_is_what_is_remembered(full: Writer) -> None:
    full.head(200, HEADERS, AT)
    first = full.failure
    full.body(b"x")
    full.close(whole=False)
    assert full.failure is first


def test_a_close_that_fails_is_remembered_and_never_raised(spool: Spool) -> None:
    writer = spool.create(7, 2)
    os.close(writer._descriptor)  # as when the descriptor went bad under us
    writer.close(whole=True)
    assert writer.failure is not None and writer.failure.errno == errno.EBADF


def test_after_a_failed_write_nothing_more_is_written_since_a_hole_is_worse_than_an_end(directory: Path) -> None:
    script = """
        import json, pathlib, resource, sys
        from brainlaned.spool import Spool
        spool = Spool(pathlib.Path(sys.argv[1]))
        spool.open()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        with spool.create(7, 2) as writer:
            writer.head(200, {}, "2026-03-01T12:00:01.000000Z")
            writer.body(b"kept")
            size = (pathlib.Path(sys.argv[1]) / "7-2.part").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 3, hard))
            writer.body(b"torn here")
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            writer.body(b"never written")
            writer.close(whole=True)
        print(json.dumps([type(writer.failure).__name__, writer.failure.errno]))
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), os.fspath(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == ["OSError", errno.EFBIG]
    part = Spool(directory).find(7, 2)
    assert part is not None and not part.whole
    assert b"".join(part.body()) == b"kepttor"


def test_a_spool_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        Spool(tmp_path / "none" / "spool").open()
    with pytest.raises(OSError, match="No such file"):
        Spool(tmp_path / "none").create(7, 2)


# Tidying.


def test_the_attempts_of_a_spool_are_those_with_a_file(spool: Spool, directory: Path) -> None:
    write(spool, whole=True, job_id=7, attempt=1)
    write(spool, whole=False, job_id=12, attempt=3)
    for name in ("notes.txt", "7.part", "a-b.part", "7-1.orphan-run", "7-x.whole", "-.part"):
        (directory / name).touch()
    assert spool.attempts() == {(7, 1), (12, 3)}


@pytest.mark.parametrize("whole", [True, False])
def test_a_stored_answer_is_removed_and_no_other(spool: Spool, whole: bool) -> None:
    write(spool, whole=whole, attempt=2)
    write(spool, whole=whole, attempt=3)
    for _ in range(2):
        spool.remove(7, 2)
        assert spool.attempts() == {(7, 3)}


@pytest.mark.parametrize("whole", [True, False])
def test_a_file_of_no_attempt_we_know_is_kept_under_a_name_that_meets_no_other(
    spool: Spool, directory: Path, whole: bool
) -> None:
    write(spool, whole=whole)
    (kept,) = spool.set_aside(7, 2, "run1")
    assert kept == directory / f"7-2.{'whole' if whole else 'part'}-orphan-run1"
    assert BODY in kept.read_bytes()
    assert (spool.attempts(), spool.find(7, 2)) == (set(), None)
    write(spool, whole=whole)
    (again,) = spool.set_aside(7, 2, "run2")
    assert kept.exists() and again != kept


def test_there_may_be_nothing_to_set_aside(spool: Spool) -> None:
    assert spool.set_aside(7, 2, "run1") == []


def test_when_both_names_of_one_attempt_are_there_both_are_kept(spool: Spool, directory: Path) -> None:
    (directory / "7-2.part").write_bytes(b"one")
    (directory / "7-2.whole").write_bytes(b"other")
    spool.set_aside(7, 2, "run1")
    kept = [file.read_bytes() for file in directory.iterdir()]
    assert sorted(kept) == [b"one", b"other"]


# The files of a local command.


COMMAND_FILES = ("stdin", "stdout", "stderr", "identity", "identity.new", "status", "status.new")


def leave_command(spool: Spool, directory: Path, attempt: int = 2, said: bytes = BODY) -> None:
    """Leave every file that there can be of an attempt by a command."""
    spool.create(7, attempt).close(whole=False)
    for name in COMMAND_FILES:
        (directory / f"7-{attempt}.{name}").write_bytes(said if name == "stdout" else name.encode())


def test_the_files_of_an_attempt_begin_with_one_path(spool: Spool, directory: Path) -> None:
    assert spool.files(7, 2) == directory / "7-2"


@pytest.mark.parametrize("whole", [False, True])
def test_the_output_of_a_command_is_its_answer_from_the_first_byte_on(
    spool: Spool, directory: Path, whole: bool
) -> None:
    leave_command(spool, directory)
    if whole:
        (directory / "7-2.part").rename(directory / "7-2.whole")
    part = spool.find(7, 2)
    assert part is not None
    assert (part.path, part.is_command, part.status, part.body_offset) == (directory / "7-2.stdout", True, None, 0)
    assert body_of(spool) == BODY
    assert body_of(spool, start=9) == BODY[9:]


def test_a_first_line_in_the_output_of_a_command_is_output(spool: Spool, directory: Path) -> None:
    line = b'{"status": 200, "headers": {}, "headers_at": "%s"}\nrest' % AT.encode()
    leave_command(spool, directory, said=line)
    assert body_of(spool) == line


def test_an_answer_that_is_no_command_s_is_none(spool: Spool) -> None:
    write(spool, whole=False)
    part = spool.find(7, 2)
    assert part is not None and not part.is_command


@pytest.mark.parametrize("name", COMMAND_FILES)
def test_any_file_of_a_command_makes_its_attempt_known(spool: Spool, directory: Path, name: str) -> None:
    (directory / f"7-2.{name}").touch()
    assert spool.attempts() == {(7, 2)}


def test_every_file_of_a_command_is_removed_and_none_of_another_attempt(spool: Spool, directory: Path) -> None:
    leave_command(spool, directory, attempt=2)
    leave_command(spool, directory, attempt=3)
    spool.remove(7, 2)
    assert {file.name.partition(".")[0] for file in directory.iterdir()} == {"7-3"}
    assert len(list(directory.iterdir())) == len(COMMAND_FILES) + 1


def test_the_files_of_a_command_that_nobody_knows_are_kept_and_meet_no_later_one(spool: Spool, directory: Path) -> None:
    leave_command(spool, directory)
    before = sorted(file.read_bytes() for file in directory.iterdir())
    kept = spool.set_aside(7, 2, "run1")
    assert sorted(file.read_bytes() for file in kept) == before
    assert sorted(kept) == sorted(directory.iterdir())
    assert (spool.attempts(), spool.find(7, 2)) == (set(), None)
    leave_command(spool, directory)
    assert spool.set_aside(7, 2, "run2") != kept
    assert len(list(directory.iterdir())) == 2 * len(before)
