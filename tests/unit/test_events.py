"""The journal: what is written where, and that code, catalogue and page name the same events."""

import ast
import io
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import freezegun
import pytest

from brainlaned import events

ROOT = Path(__file__).parents[2]
CATALOGUE = (ROOT / "packaging/brainlane.catalog").read_text(encoding="utf-8")
PAGE = (ROOT / "man/brainlaned.8").read_text(encoding="utf-8").replace("\\-", "-")
ENTRY = re.compile(r"^-- ([0-9a-f]{32})\nSubject: (.+)\n(?:[A-Z][A-Za-z-]*: .+\n)+\n((?:(?!^-- ).*\n?)*)", re.MULTILINE)


def functions() -> set[str]:
    """The names of all functions of the module that write an event, as they are given to `_event`."""
    tree = ast.parse(Path(events.__file__).read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "_event"]
    return {word.value for call in calls for word in ast.walk(call.args[0]) if isinstance(word, ast.Constant)}


def test_every_event_has_an_id_of_its_own() -> None:
    assert functions() == {*events.IDS, "held"} - {""}
    assert len(set(events.IDS.values())) == len(events.IDS)
    assert all(re.fullmatch("[0-9a-f]{32}", number) for number in events.IDS.values())


def test_every_event_is_called_somewhere() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "brainlaned").rglob("*.py")]
    assert [name for name in events.IDS if not any(f"events.{name}(" in source for source in sources)] == []


def test_the_catalogue_explains_every_event_and_names_what_to_do() -> None:
    entries = {number: (subject, text) for number, subject, text in ENTRY.findall(CATALOGUE)}
    assert set(entries) == set(events.IDS.values())
    for _, text in entries.values():
        explanation, _, action = text.strip().rpartition("\n\n")
        assert explanation and action


def test_the_page_lists_every_event_with_the_words_of_the_catalogue() -> None:
    listed = re.findall(r"^\.B ([a-z-]+)\n(.+)\.\n\.br\nMESSAGE_ID=([0-9a-f]{32})$", PAGE, re.MULTILINE)
    subjects = {number: subject for number, subject, _ in ENTRY.findall(CATALOGUE)}
    expected = [(name.replace("_", "-"), subjects[number], number) for name, number in events.IDS.items()]
    assert listed == expected


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
@pytest.mark.parametrize("page", sorted((ROOT / "man").iterdir()), ids=lambda page: page.name)
def test_groff_has_nothing_to_complain_about(page: Path) -> None:
    made = subprocess.run(
        ["groff", "-man", "-ww", "-Tutf8", "-z", page], capture_output=True, text=True, check=False, timeout=20
    )
    assert (made.returncode, made.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("journalctl") is None, reason="systemd is not installed")
def test_systemd_takes_the_catalogue(tmp_path: Path) -> None:
    place = tmp_path / "usr/lib/systemd/catalog"
    place.mkdir(parents=True)
    (place / "brainlane.catalog").write_text(CATALOGUE, encoding="utf-8")
    made = subprocess.run(
        ["journalctl", f"--root={tmp_path}", "--update-catalog"],
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert (made.returncode, made.stderr) == (0, "")
    shown = subprocess.run(
        ["journalctl", f"--root={tmp_path}", "--list-catalog"], capture_output=True, text=True, check=True, timeout=20
    )
    assert all(number in shown.stdout for number in events.IDS.values())


SPEAK = """
import sys
from brainlaned import events
from brainlaned.wire import Reason
if sys.argv[1:]:
    import logging_journald
    logging_journald.JournaldTransport.SOCKET_PATH = sys.argv[1]
events.start()
events.ended(17, 2, "near", "done", Reason.ANSWERED, "two\\nlines")
events.ready("/s", "/d", "1")
events.stop()
"""


def test_under_systemd_an_event_is_an_entry_with_fields(tmp_path: Path) -> None:
    # What systemd connects a service's stderr to, and where the journal listens.
    stream, journal = (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
    )
    with stream, journal:
        stream.bind(os.fspath(tmp_path / "stream"))
        journal.bind(os.fspath(tmp_path / "journal"))
        journal.settimeout(20)
        status = os.fstat(stream.fileno())
        environment = {**os.environ, "JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}", "PYTHONPATH": str(ROOT)}
        subprocess.run(
            [sys.executable, "-c", SPEAK, tmp_path / "journal"], env=environment, stderr=stream, check=True, timeout=60
        )
        ended, ready = journal.recv(65536), journal.recv(65536)
    for field in (b"BRAINLANE_JOB=17", b"BRAINLANE_ATTEMPT=2", b"BRAINLANE_ROUTE=near", b"BRAINLANE_REASON=answered"):
        assert field in ended.split(b"\n")
        assert field.partition(b"=")[0] not in ready
    assert f"MESSAGE_ID={events.IDS['ended']}".encode() in ended
    assert b"PRIORITY=6" in ended and b"BRAINLANE_EVENT=ended" in ended and b"two\nlines" in ended


def test_where_the_journal_is_not_there_an_event_is_a_line_all_the_same(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(os.fspath(tmp_path / "journal"))
    with (tmp_path / "log").open("wb") as log:
        status = os.fstat(log.fileno())
        environment = {**os.environ, "JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}", "PYTHONPATH": str(ROOT)}
        subprocess.run(
            [sys.executable, "-c", SPEAK, tmp_path / "journal"], env=environment, stderr=log, check=True, timeout=60
        )
    assert (tmp_path / "log").read_text().splitlines() == [
        "<6>job 17 attempt 2 on route near: done (answered): two",
        "  lines",
        "<6>brainlaned 1 is ready: socket /s, state /d",
    ]


def test_a_journal_that_takes_nothing_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("brainlaned")
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(logger, name, getattr(logger, name))  # so that it is put back
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stuck:
        events.start(stuck)
        for _ in range(5000):  # far more than a pipe holds
            events.ready("/s", "/d", "1")
        events.stop(limit_s=0.2)
        # So that the thread that writes comes to its end.
        with io.FileIO(reading) as pipe:
            seen = 0
            while seen < 5000:
                seen += pipe.read(65536).count(b"\n")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Events from now on; called, it ends them and returns what was written."""
    logger = logging.getLogger("brainlaned")
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(logger, name, getattr(logger, name))  # so that it is put back
    monkeypatch.setattr(events, "_seldom", type(events._seldom)())  # what other tests said does not count here
    journal = io.StringIO()
    events.start(journal)

    def written() -> list[str]:
        events.stop()
        return journal.getvalue().splitlines()

    return written


def test_what_goes_on_happening_is_one_line_a_minute_that_counts_the_others(lines: Callable[[], list[str]]) -> None:
    with freezegun.freeze_time("2026-03-01T12:00:00Z") as clock:
        for _ in range(100):
            events.claim_failed("disk I/O error")
        clock.tick(events.SELDOM_S - 0.1)
        events.claim_failed("disk I/O error")
        clock.tick(0.2)
        events.claim_failed("disk I/O error")
        clock.tick(events.SELDOM_S)
        events.claim_failed("database is full")
    said = "<3>nothing can be claimed for now:"
    assert lines() == [
        f"{said} disk I/O error",
        f"{said} disk I/O error (100 more like it since the last such line)",
        f"{said} database is full",
    ]


def test_each_cause_and_each_user_has_a_minute_of_its_own(lines: Callable[[], list[str]]) -> None:
    with freezegun.freeze_time("2026-03-01T12:00:00Z"):
        for _ in range(3):
            events.dropped(1000, 1, "too slow")
            events.dropped(1001, 2, "too slow")
            events.forbidden(1000, 1, "operate")
            events.forbidden(1000, 1, "submit")
            events.connections_full(1000, 1, 10)
            events.disk_low("/d", 5 * 2**20, 64 * 2**20)
    said = lines()
    assert len(said) == len(set(said)) == 6
    assert all(line.startswith(("<4>", "<3>")) for line in said)
    assert "<3>nothing is claimed or accepted: 5 MiB are free in /d, and disk_reserve_mib is 64" in said


def test_what_is_not_said_to_be_seldom_is_never_left_out(lines: Callable[[], list[str]]) -> None:
    for number in range(50):
        events.claimed(number, 1, "near")
    assert len(lines()) == 50


def test_the_memory_of_what_was_said_does_not_grow_with_those_who_come_and_go(lines: Callable[[], list[str]]) -> None:
    with freezegun.freeze_time("2026-03-01T12:00:00Z") as clock:
        for uid in range(1000):
            events.dropped(uid, 1, "too slow")
            clock.tick(events.SELDOM_S)
    assert len(events._seldom._kept) < 100
    assert len(lines()) == 1000
