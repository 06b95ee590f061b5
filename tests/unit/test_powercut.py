"""The disk that the power-cut tests believe in: what must survive a cut, and what may be lost."""

import random
from pathlib import Path

import pytest

from tests.powercut import PAGE, SECTOR, Call, Directory, Disk, File, messages, read_traces

SEEDS = range(200)
STATE = Path("/state")


def hexadecimal(text: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in text.encode())


def disk_after(*lines: str, tmp_path: Path) -> Disk:
    """Replay a log in which «text» stands for what strace writes in hexadecimal."""
    disk = Disk(STATE)
    for call in calls_of(*lines, tmp_path=tmp_path):
        disk.apply(call)
    return disk


def calls_of(*lines: str, tmp_path: Path) -> list[Call]:
    trace = tmp_path / "trace"
    said = []
    for line in lines:
        parts = line.split("«")
        said.append(parts[0] + "".join(hexadecimal(a) + b for a, b in (part.split("»") for part in parts[1:])))
    # A line is of process 7 where it does not name another.
    trace.write_text("".join(f"{line}\n" if line.startswith("8 ") else f"7 {line}\n" for line in said))
    return read_traces([trace])


def found(disk: Disk, tmp_path: Path) -> set[bytes | None]:
    """Return every content in which the file "a" is found; None: it is not there."""
    contents: set[bytes | None] = set()
    for seed in SEEDS:
        place = tmp_path / str(seed)
        disk.top.build(place, random.Random(seed))
        contents.add((place / "a").read_bytes() if (place / "a").exists() else None)
    return contents


MADE = 'openat(AT_FDCWD<«/»>, "«/state/a»", O_WRONLY|O_CREAT|O_EXCL, 0600) = 3<«/state/a»>'
WROTE = 'write(3<«/state/a»>, "«one»", 3) = 3'
SYNCED = "fdatasync(3<«/state/a»>) = 0"
ENTERED = "fsync(4<«/state»>) = 0"


def test_what_is_synced_with_its_entry_is_found_whole(tmp_path: Path) -> None:
    assert found(disk_after(MADE, ENTERED, WROTE, SYNCED, tmp_path=tmp_path), tmp_path) == {b"one"}


def test_a_synced_file_whose_entry_is_not_synced_may_be_gone(tmp_path: Path) -> None:
    assert found(disk_after(MADE, WROTE, SYNCED, tmp_path=tmp_path), tmp_path) == {b"one", None}


def test_what_is_not_synced_may_be_there_in_part_as_zeros_or_not_at_all(tmp_path: Path) -> None:
    contents = found(disk_after(MADE, ENTERED, WROTE, tmp_path=tmp_path), tmp_path)
    assert contents >= {b"", b"o", b"one", b"\0\0\0"} and None not in contents


def test_a_sync_that_began_before_a_write_had_ended_does_not_cover_it(tmp_path: Path) -> None:
    begun, ended = '8 write(3<«/state/a»>, "«one»", 3 <unfinished ...>', "8 <... write resumed>) = 3"
    disk = disk_after(
        MADE,
        ENTERED,
        begun,
        "fdatasync(3<«/state/a»> <unfinished ...>",
        ended,
        "<... fdatasync resumed>) = 0",
        tmp_path=tmp_path,
    )
    assert b"" in found(disk, tmp_path)


def test_a_sync_that_failed_covers_nothing(tmp_path: Path) -> None:
    failed = "fdatasync(3<«/state/a»>) = -1 EIO (Input/output error) (INJECTED)"
    assert b"" in found(disk_after(MADE, ENTERED, WROTE, failed, tmp_path=tmp_path), tmp_path)


def test_a_removal_that_is_not_synced_may_be_undone(tmp_path: Path) -> None:
    disk = disk_after(MADE, ENTERED, WROTE, SYNCED, 'unlink("«/state/a»") = 0', tmp_path=tmp_path)
    assert found(disk, tmp_path) == {b"one", None}


def test_entries_are_lost_from_the_last_one_on(tmp_path: Path) -> None:
    directory = Directory()
    for at, name in enumerate("abc"):
        directory.change(at, {name: File()})
    kinds = set()
    for seed in SEEDS:
        directory.build(tmp_path / str(seed), random.Random(seed))
        kinds.add("".join(sorted(path.name for path in (tmp_path / str(seed)).iterdir())))
    assert kinds == {"", "a", "ab", "abc"}


def test_pages_are_lost_one_by_one_and_seldom_torn_between_sectors() -> None:
    file = File(durable=bytearray(b"." * 3 * PAGE), pending=[(1, page * PAGE, b"x" * PAGE) for page in range(3)])
    kinds = set()
    for seed in SEEDS:
        content = file.found(random.Random(seed))
        pages = [content[start : start + PAGE] for start in range(0, 3 * PAGE, PAGE)]
        kinds.add(tuple(sorted(set(page)) == [46] for page in pages))
    assert {(True, False, True), (False, True, False)} <= kinds
    torn = {seed for seed in SEEDS if len({file.found(random.Random(seed))[i] for i in range(0, PAGE, SECTOR)}) > 1}
    assert 0 < len(torn) < len(SEEDS) / 2


def test_a_message_that_left_in_pieces_is_dated_by_its_first(tmp_path: Path) -> None:
    socket = "5<UNIX-STREAM:[1->2]>"
    head = f'sendto({socket}, "«HTTP/1.1 201 Created\r\ncontent-length: 4\r\n\r\n»", 44, 0, NULL, 0) = 44'
    calls = calls_of(head, f'sendto({socket}, "«body»", 4, 0, NULL, 0) = 4', tmp_path=tmp_path)
    (said,) = messages(calls, "UNIX", b"HTTP/")
    assert (said.at, said.body) == (1, b"body") and said.head.startswith("HTTP/1.1 201 ")


def test_a_call_that_the_model_does_not_know_is_not_passed_over(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fallocate"):
        disk_after(MADE, "fallocate(3<«/state/a»>, 0, 0, 4096) = 0", tmp_path=tmp_path)
