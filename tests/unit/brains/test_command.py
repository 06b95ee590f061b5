"""A local command as a brain: what it is given, how its end is read, and that nothing of it outlives its attempt.

The commands are real, and so are the files that they leave. What a crash of the daemon leaves is forged where no moment
of a real one would show it.
"""

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brainlaned import config, errors
from brainlaned.brains import Ended, command, runner
from brainlaned.brains.reply import TextReader, read
from brainlaned.config import Route, Secret
from brainlaned.states import CommandEnd
from brainlaned.wire import Flag, Reason
from tests.lane import members_of, wait_until

PATIENCE_S = 60
"""More than anything here takes on a busy machine."""

SECRET = "CANARY-3f9-key"
MIB = 1024 * 1024


def route(*words: str, **more: Any) -> Route:
    return Route("here", "", "m", command=words or ("sh",), **more)


def shell(**more: Any) -> Route:
    """A route whose prompts are scripts."""
    return route("sh", **more)


def request(*contents: Any) -> str:
    return json.dumps({"messages": [{"role": "user", "content": content} for content in contents]})


class Seen:
    """What a call tells while it runs, in order. `grown` is set when the output has grown."""

    def __init__(self, refuse: Exception | None = None) -> None:
        self.said: list[str] = []
        self.grown = threading.Event()
        self._refuse = refuse

    def armed(self) -> None:
        self.said.append("armed")
        if self._refuse is not None:
            raise self._refuse

    def sent(self) -> None:
        self.said.append("sent")

    def send_failed(self) -> None:
        self.said.append("send_failed")

    def headers(self, status: int, headers: object) -> None:
        raise AssertionError("a command has no headers")

    def body(self, chunk: bytes) -> None:
        raise AssertionError("a command's output is in a file")

    def grew(self) -> None:
        self.said.append("grew")
        self.grown.set()


class Running:
    """A call that runs in a thread of its own."""

    def __init__(self, call: command.CommandCall, seen: Seen, files: Path) -> None:
        self.call, self.seen = call, seen
        self._files = files
        self._ended: list[Ended] = []
        self._thread = threading.Thread(target=lambda: self._ended.append(call.run(seen)))
        self._thread.start()

    @property
    def group(self) -> int:
        return int(self._files.with_name(f"{self._files.name}.identity").read_text().split()[0])

    def join(self) -> Ended:
        self._thread.join(PATIENCE_S)
        return self._ended[0]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "spool").mkdir()
    return tmp_path / "spool" / "7-1"


def written(files: Path, name: str) -> Path:
    return files.with_name(f"{files.name}.{name}")


def ask(where: Route, files: Path, *contents: Any, seen: Seen | None = None) -> Ended:
    call = command.CommandBrain(where).begin(request(*contents), "m", "7-1", files)
    return call.run(seen or Seen())


def begin(where: Route, files: Path, script: str) -> Running:
    """Begin a script that prints something once it is ready, and return when it has."""
    seen = Seen()
    running = Running(command.CommandBrain(where).begin(request(script), "m", "7-1", files), seen, files)
    if not seen.grown.wait(PATIENCE_S):
        running.call.abort(Reason.DAEMON_STOPPED)
        running.join()
        raise AssertionError("it said nothing")
    return running


def text_of(ended: Ended) -> str:
    assert ended.reply is not None
    return ended.reply.output


def end_of(ended: Ended) -> CommandEnd:
    assert ended.command is not None
    return ended.command


# What it is given.


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([{"role": "user", "content": "one"}], "one"),
        ([{"role": "system", "content": "one"}, {"role": "user", "content": "two"}], "one\n\ntwo"),
        ([{"role": "user", "content": "one\n"}, {"role": "user", "content": ""}], "one\n\n\n"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "ab"),
        ([{"role": "user", "content": []}], ""),
        ([{"role": "assistant", "content": None}, {"role": "user", "content": "two"}], "\n\ntwo"),
    ],
)
def test_the_prompt_is_the_texts_of_all_messages_with_an_empty_line_between_two(messages: Any, prompt: str) -> None:
    assert command.prompt_of({"messages": messages}) == prompt


@pytest.mark.parametrize(
    "prompt",
    ["", "no line end", "\x00\x1b[31m\x7f", "a\r\nb\rc\n", "\ufeff\u2028\u0085\U0001f30d\ufffd", "x\n" * (MIB // 2)],
    ids=["nothing", "no line end", "controls", "line ends", "beyond ASCII", "a mebibyte"],
)
def test_every_byte_of_the_prompt_arrives_and_comes_back(files: Path, prompt: str) -> None:
    ended = ask(route("cat"), files, prompt)
    assert written(files, "stdin").read_bytes() == written(files, "stdout").read_bytes() == prompt.encode()
    assert text_of(ended) == prompt and end_of(ended).exit_status == 0


def test_the_words_of_the_command_are_passed_as_they_stand(files: Path) -> None:
    words = ["a b", "", "$HOME", "*", "-x", "\u00e9"]
    assert text_of(ask(route("printf", "%s|", *words), files, "")) == "".join(f"{word}|" for word in words)


def test_the_environment_is_a_list_and_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PATH": "/p", "HOME": "/h", "LANG": "C", "NOTIFY_SOCKET": "/n", "PYTHONPATH": "/x"}.items():
        monkeypatch.setenv(name, value)
    given = command.environment_of(shell(environment={"A": "1", "TERM": "x"}, secret_environment={"B": Secret(SECRET)}))
    assert given == {
        **{"PATH": "/p", "HOME": "/h", "LANG": "C.UTF-8", "TERM": "x", "NO_COLOR": "1"},
        **{"A": "1", "B": SECRET},
    }


@pytest.mark.parametrize(
    ("ours", "given"), [("C", "C.UTF-8"), ("POSIX", "C.UTF-8"), ("", "C.UTF-8"), ("de_DE.UTF-8", "de_DE.UTF-8")]
)
def test_a_language_that_has_no_letters_beyond_ascii_is_given_them(
    monkeypatch: pytest.MonkeyPatch, ours: str, given: str
) -> None:
    monkeypatch.setenv("LANG", ours)
    assert command.environment_of(shell())["LANG"] == given


def test_what_our_own_environment_does_not_say_is_given_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATH", "HOME", "LANG"):
        monkeypatch.delenv(name)
    given = command.environment_of(shell())
    assert set(given) == {"PATH", "HOME", "LANG", "TERM", "NO_COLOR"} and all(given.values())


@pytest.mark.parametrize(
    "language",
    [
        "C.UTF-8",
        pytest.param(
            "C",
        ),
        pytest.param(
            "xx_XX.UTF-8",
        ),
    ],
)
def test_the_command_finds_its_environment_and_nothing_else(files: Path, language: str) -> None:
    where = route("cat", "/proc/self/environ", environment={"LANG": language, "EMPTY": ""})
    found = dict(pair.split("=", 1) for pair in text_of(ask(where, files, "")).removesuffix("\0").split("\0"))
    assert found == command.environment_of(where)


def test_no_descriptor_but_the_three_is_open(files: Path, tmp_path: Path) -> None:
    with (tmp_path / "ours").open("w") as ours:
        os.set_inheritable(ours.fileno(), True)
        found = text_of(ask(route("sh", "-c", "ls /proc/$$/fd; ls /proc/$PPID/fd"), files, ""))
    assert found.split() == ["0", "1", "2"] * 2  # of the command, and of its runner


def test_no_signal_is_ignored_that_a_program_counts_on(files: Path) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as the daemon does
    try:
        found = text_of(ask(route("cat", "/proc/self/status"), files, ""))
    finally:
        signal.signal(signal.SIGHUP, previous)
    (ignored,) = (int(line.split()[1], 16) for line in found.splitlines() if line.startswith("SigIgn:"))
    # Only the signals of proc_pid_status(5) that have names: the C library keeps two more for itself.
    assert [number for number in range(1, 32) if ignored >> (number - 1) & 1] == []


# How it ended.


@pytest.mark.parametrize(
    ("script", "status", "meaning"),
    [
        ("exit 0", 0, "error"),
        ("exit 1", 1, "error"),
        ("exit 2", 2, "fail"),
        ("exit 75", 75, "retry"),
        ("exit 255", 255, "error"),
        ("kill -9 $$", -9, "error"),
        ("kill -TERM $$", -15, "error"),
        ("kill -PIPE $$", -13, "error"),
    ],
)
def test_the_exit_status_or_the_signal_is_read_back(files: Path, script: str, status: int, meaning: str) -> None:
    seen = Seen()
    ended = ask(shell(), files, f"echo why >&2; {script}", seen=seen)
    expected = CommandEnd(exit_status=status, meaning=meaning, complaint="why")
    # complaint is no part of the repr, and so is compared by itself.
    assert (end_of(ended), end_of(ended).complaint) == (expected, "why")
    assert (ended.whole, ended.cut_by, ended.error) == (True, None, None)
    assert seen.said == ["armed", "sent"]


def test_the_route_says_what_a_status_means(files: Path) -> None:
    where = shell(exit_statuses={75: "error", 2: "error", 3: "retry", 4: "fail"})
    meanings = {}
    for status in (2, 3, 4, 75):
        at = files.with_name(f"7-{status}")
        meanings[status] = end_of(ask(where, at, f"exit {status}")).meaning
    assert meanings == {2: "error", 3: "retry", 4: "fail", 75: "error"}


def test_a_program_that_cannot_be_started_was_not(files: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("#!/bin/sh\n")
    plain.chmod(0o644)
    garbled = tmp_path / "garbled"
    garbled.write_bytes(b"\x7fELF no")
    garbled.chmod(0o755)
    orphan = tmp_path / "orphan"
    orphan.write_text(f"#!{tmp_path}/no-interpreter\n")
    orphan.chmod(0o755)
    causes = {
        "no-such-program": "No such file or directory",
        f"{tmp_path}/none": "No such file or directory",
        f"{plain}": "Permission denied",
        f"{tmp_path}": "Permission denied",
        f"{plain}/below": "Not a directory",
        f"{garbled}": "Exec format error",
        f"{orphan}": "No such file or directory",
    }
    for number, (program, cause) in enumerate(causes.items()):
        seen = Seen()
        ended = ask(route(program), files.with_name(f"7-{number}"), "hello", seen=seen)
        assert end_of(ended).was_started is False
        assert end_of(ended).complaint == f"{program}: {cause}"
        assert (ended.whole, seen.said[0], seen.said[-1]) == (False, "armed", "send_failed")


def test_what_the_command_says_last_is_kept_and_no_more_of_it(files: Path) -> None:
    ended = ask(shell(), files, "yes first | head -n 3000 >&2; echo ' the last \xe9 ' >&2; exit 1")
    complaint = end_of(ended).complaint
    assert len(complaint) <= command.COMPLAINT_CHARACTERS
    assert complaint.partition(" ")[2].startswith("first first ")
    assert complaint.endswith("first the last \xe9")


def test_a_complaint_need_not_be_text(files: Path) -> None:
    assert end_of(ask(shell(), files, r"printf 'no\377\0' >&2; exit 1")).complaint == "no\ufffd\x00"


# Before it is started.


def test_what_was_refused_leave_is_never_started(files: Path, tmp_path: Path) -> None:
    seen = Seen(refuse=errors.CancelAsked("too late"))
    with pytest.raises(errors.CancelAsked):
        ask(route("touch", f"{tmp_path}/ran"), files, "", seen=seen)
    assert seen.said == ["armed"]
    assert not written(files, "identity").exists() and not (tmp_path / "ran").exists()


def test_what_was_cut_off_before_it_began_asks_for_no_leave(files: Path) -> None:
    call = command.CommandBrain(route("cat")).begin(request("hello"), "m", "7-1", files)
    call.abort(Reason.DAEMON_STOPPED)
    seen = Seen()
    with pytest.raises(errors.CancelAsked):
        call.run(seen)
    assert seen.said == [] and not written(files, "identity").exists()
    call.abort(Reason.CANCEL_REQUESTED)  # that comes too late is no fault


def test_files_that_are_there_already_are_never_written_over(files: Path) -> None:
    written(files, "stdout").write_text("another's")
    seen = Seen()
    with pytest.raises(FileExistsError):
        ask(route("cat"), files, "hello", seen=seen)
    assert seen.said == [] and written(files, "stdout").read_text() == "another's"


def test_an_interpreter_that_cannot_be_started_is_known_to_have_run_nothing(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/interpreter")
    seen = Seen()
    with pytest.raises(FileNotFoundError):
        ask(route("cat"), files, "hello", seen=seen)
    assert seen.said == ["armed", "send_failed"]


def test_a_runner_that_cannot_be_watched_is_ended_and_judged_by_its_files(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def refused(pid: int) -> int:
        started.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", refused)
    ended = ask(route("touch", f"{tmp_path}/ran"), files, "")
    with pytest.raises(ProcessLookupError):
        os.killpg(started[0], 0)
    end = end_of(ended)
    assert end.exit_status is None and ended.error == "OSError: Too many open files"
    assert end.was_started or not (tmp_path / "ran").exists()


# What it says.


@settings(deadline=None)
@given(st.lists(st.binary(max_size=9)))
def test_the_text_does_not_depend_on_how_the_bytes_were_cut(chunks: list[bytes]) -> None:
    reader = TextReader(())
    told = "".join(reader.feed(chunk) for chunk in chunks)
    whole = b"".join(chunks)
    reply = reader.close()
    assert reply.text == whole.decode(errors="replace")
    assert reply.text.startswith(told)
    assert reply == read([whole], TextReader(()))
    try:
        whole.decode()
        assert reply.flags == frozenset()
    except UnicodeDecodeError:
        assert reply.flags == {Flag.INVALID_BYTES}


@given(st.data())
def test_a_secret_is_removed_however_the_bytes_were_cut(data: st.DataObject) -> None:
    whole = f"before {SECRET}{SECRET} after CANARY".encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    reader = TextReader((SECRET,))
    told = [reader.feed(whole[start:end]) for start, end in itertools.pairwise([0, *cuts, len(whole)])]
    assert reader.close().text == "before [removed][removed] after CANARY"
    assert SECRET not in "".join(told)


def test_half_a_character_at_the_end_is_an_invalid_byte_and_not_lost() -> None:
    reply = read([b"caf\xc3"], TextReader(()))
    assert (reply.text, reply.flags, reply.complete) == ("caf\ufffd", {Flag.INVALID_BYTES}, False)


def test_any_output_is_kept_as_it_came(files: Path) -> None:
    ended = ask(shell(), files, r"printf 'a\377\0\033[1mb'")
    assert text_of(ended) == "a\ufffd\x00\x1b[1mb"
    assert ended.reply is not None and ended.reply.flags == {Flag.INVALID_BYTES}


def test_the_growing_output_is_told_while_the_command_runs(files: Path) -> None:
    running = begin(shell(), files, "echo first; read go; until [ -e go ]; do sleep 0.02; done; echo second")
    assert written(files, "stdout").read_text() == "first\n"
    running.call.abort(Reason.DAEMON_STOPPED)
    assert text_of(running.join()) == "first\n"
    assert running.seen.said[:3] == ["armed", "sent", "grew"]


def test_secrets_are_removed_from_what_it_says_and_complains_of(files: Path) -> None:
    where = shell(secret_environment={"KEY": Secret(SECRET)})
    ended = ask(where, files, 'echo "out $KEY"; echo "err $KEY" >&2; exit 1')
    assert text_of(ended) == "out [removed]\n"
    assert end_of(ended).complaint == "err [removed]"


@pytest.mark.parametrize(
    ("length", "times"), [pytest.param(5000, 1, id="a long one"), pytest.param(1500, 3, id="one that is repeated")]
)
def test_a_secret_is_removed_from_a_complaint_that_begins_within_it(files: Path, length: int, times: int) -> None:
    secret = "".join(f"{number:05}" for number in range(length // 5))
    where = shell(secret_environment={"KEY": Secret(secret)})
    complaint = end_of(ask(where, files, f'for i in $(seq {times}); do printf %s "$KEY" >&2; done; exit 1')).complaint
    assert secret[-20:] not in complaint


def test_an_output_that_cannot_be_synced_is_judged_all_the_same(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(command, "SYNC_S", 0.0)
    monkeypatch.setattr(os, "fdatasync", failing)
    assert text_of(ask(shell(), files, "echo one; sleep 1; echo two")).startswith("one\n")


# Limits, and its end by us.


@pytest.mark.parametrize("descriptor", [1, 2])
def test_a_flood_is_cut_at_the_limit_whichever_way_it_comes(files: Path, descriptor: int) -> None:
    ended = ask(shell(max_output_mib=1), files, f"yes >&{descriptor}")
    assert ended.cut_by is Reason.OUTPUT_LIMIT
    assert len(text_of(ended)) == (MIB if descriptor == 1 else 0)
    assert members_of(int(written(files, "identity").read_text().split()[0])) == set()


def test_as_much_as_the_limit_allows_is_an_answer(files: Path) -> None:
    ended = ask(shell(max_output_mib=1), files, f"head -c {MIB} /dev/zero")
    assert (ended.cut_by, len(text_of(ended)), end_of(ended).exit_status) == (None, MIB, 0)


def test_a_command_that_lasts_too_long_is_ended(files: Path) -> None:
    ended = ask(shell(total_s=0.5), files, "sleep 30")
    assert ended.cut_by is Reason.TOTAL_LIMIT
    assert end_of(ended).was_started


@pytest.mark.parametrize("ignores", [False, True], ids=["that listens", "that ignores SIGTERM"])
def test_every_process_of_a_group_is_gone_when_it_is_cut_off(
    files: Path, monkeypatch: pytest.MonkeyPatch, ignores: bool
) -> None:
    if ignores:
        monkeypatch.setattr(command, "GRACE_S", 0.5)
    deafness = "trap '' TERM; " if ignores else ""
    running = begin(shell(), files, f"{deafness}sleep 300 & sleep 300 & echo ready; sleep 300; wait")
    group = running.group
    wait_until(lambda: len(members_of(group)) == 5)  # the runner, the shell and three more
    running.call.abort(Reason.CANCEL_REQUESTED)
    running.call.abort(Reason.DAEMON_STOPPED)
    ended = running.join()
    assert ended.cut_by is Reason.CANCEL_REQUESTED
    # A killed process may be there for an instant longer than its leader.
    wait_until(lambda: members_of(group) == set())
    # However it took our signal, that is not its own end.
    assert (end_of(ended).exit_status, ended.whole, text_of(ended)) == (None, False, "ready\n")


def test_a_grandchild_that_keeps_the_output_open_holds_nothing_up_and_is_gone(files: Path) -> None:
    ended = ask(shell(), files, "sleep 300 & echo x")
    assert (text_of(ended), end_of(ended).exit_status, ended.cut_by) == ("x\n", 0, None)
    group = int(written(files, "identity").read_text().split()[0])
    wait_until(lambda: members_of(group) == set())


def test_a_command_whose_runner_was_killed_is_ended_with_an_unknown_end(files: Path) -> None:
    ended = ask(shell(), files, "echo part; sleep 300 & kill -9 $PPID; sleep 300")
    assert end_of(ended).was_started and end_of(ended).exit_status is None
    assert ended.whole is False and text_of(ended) == "part\n"
    group = int(written(files, "identity").read_text().split()[0])
    wait_until(lambda: members_of(group) == set())


# What the files say afterwards.


IDENTITIES = {"none": None, "one": "4194305 1 boot"}
STATUSES: dict[str | None, CommandEnd | None] = {
    None: None,
    "exit 0": CommandEnd(exit_status=0),
    "exit 2": CommandEnd(exit_status=2, meaning="fail"),
    "exit 75": CommandEnd(exit_status=75, meaning="retry"),
    "exit 9": CommandEnd(exit_status=9),
    "exit -9": CommandEnd(exit_status=-9),
    "spawn 2": CommandEnd(was_started=False),
    "spawn 13": CommandEnd(was_started=False),
}


@pytest.mark.parametrize("known", [True, False], ids=["a known route", "a route of earlier"])
@pytest.mark.parametrize("stderr", [None, "", f"why {SECRET}"])
@pytest.mark.parametrize("identity", IDENTITIES.values(), ids=list(IDENTITIES))
@pytest.mark.parametrize("status", STATUSES)
def test_every_combination_of_files_is_read(
    files: Path, status: str | None, identity: str | None, stderr: str | None, known: bool
) -> None:
    for name, text in {"status": status, "identity": identity, "stderr": stderr}.items():
        if text is not None:
            written(files, name).write_text(text)
    before = {path.name: path.read_text() for path in files.parent.iterdir()}
    where = shell(secret_environment={"KEY": Secret(SECRET)}) if known else None
    for read_files in (command.read_end, command.take_over):
        found = read_files(files, where)
        expected = STATUSES[status] or CommandEnd(was_started=identity is not None)
        assert (found.was_started, found.exit_status, found.meaning) == (
            expected.was_started,
            expected.exit_status,
            expected.meaning,
        )
        if status == "spawn 2":
            assert found.complaint == ("sh: " if known else "") + "No such file or directory"
        elif status is None or status.startswith("exit"):
            quoted = "why [removed]" if known else f"why {SECRET}"
            assert found.complaint == (quoted if stderr else "")
    assert {path.name: path.read_text() for path in files.parent.iterdir()} == before


def test_an_identity_that_is_there_and_empty_does_not_prove_that_nothing_ran(files: Path) -> None:
    written(files, "identity").touch()
    assert command.read_end(files, shell()).was_started


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param("status", b"exit"),
        pytest.param("status", b"exit many"),
        pytest.param("status", b"spawn 99999999999999999999"),
        pytest.param("status", b"exit \xff"),
        ("status", b"\0" * 512),
        pytest.param("identity", b"me"),
        pytest.param("identity", b" \n"),
        pytest.param("identity", b"\xff\xfe"),
        pytest.param("identity", b"\0" * 512),
        ("identity", b"99999999999999999999 1 boot"),
    ],
)
def test_what_another_wrote_into_the_files_proves_nothing_and_stops_nobody(
    files: Path, name: str, content: bytes
) -> None:
    written(files, name).write_bytes(content)
    assert command.take_over(files, shell()).exit_status is None


# After a crash of the daemon.


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process of somebody else, which leads a group."""
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as process:
        yield process
        process.kill()


def is_alive(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is None


@pytest.mark.parametrize("wrong", ["start time", "boot"])
def test_a_number_that_belongs_to_another_process_now_is_never_signalled(
    files: Path, stranger: subprocess.Popen[bytes], wrong: str
) -> None:
    identity = runner.identity_of(stranger.pid)
    assert identity is not None
    pid, started, boot = identity.split()
    forged = f"{pid} {int(started) + 1} {boot}" if wrong == "start time" else f"{pid} {started} {boot[::-1]}"
    written(files, "identity").write_text(forged)
    end = command.take_over(files, shell())
    assert (end.was_started, end.exit_status) == (True, None)
    assert is_alive(stranger)


def test_a_group_whose_leader_is_still_the_same_is_gone_when_it_was_taken_over(
    files: Path, stranger: subprocess.Popen[bytes]
) -> None:
    written(files, "identity").write_text(runner.identity_of(stranger.pid) or "")
    end = command.take_over(files, shell())
    assert (end.was_started, end.exit_status) == (True, None)
    assert members_of(stranger.pid) == set()
    assert stranger.wait(PATIENCE_S) == -signal.SIGKILL
    assert command.take_over(files, shell()) == end


def test_what_is_left_of_a_group_is_ended_though_its_end_is_written_down_which_stands(files: Path) -> None:
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as left:
        written(files, "identity").write_text(runner.identity_of(left.pid) or "")
        written(files, "status").write_text("exit 0")
        assert command.take_over(files, shell()).exit_status == 0
        assert left.wait(PATIENCE_S) == -signal.SIGKILL


def test_a_group_of_many_is_gone_when_it_was_taken_over_though_it_ignores_sigterm(files: Path) -> None:
    running = begin(shell(), files, 'trap "" TERM; sleep 300 & sleep 300 & echo part; sleep 300; wait')
    group = running.group
    wait_until(lambda: len(members_of(group)) == 5)
    end = command.take_over(files, shell())
    assert members_of(group) == set()
    assert (end.was_started, end.exit_status) == (True, None)
    assert end_of(running.join()).exit_status is None


def test_a_group_that_has_lost_its_leader_is_gone_when_it_was_taken_over(files: Path) -> None:
    with ExitStack() as stack:
        reading, writing = os.pipe()
        stack.callback(os.close, reading)
        leader = subprocess.Popen(
            # The second sleep keeps what it was given to write to, so the line says that both are there.
            ["sh", "-c", "sleep 300 & sleep 300 & echo ready; wait"],
            stdout=writing,
            stderr=stack.enter_context(written(files, "stderr").open("w")),
            start_new_session=True,
        )
        os.close(writing)
        assert os.read(reading, 9) == b"ready\n"
        identity = runner.identity_of(leader.pid)
        leader.kill()
        leader.wait()
        stack.callback(os.killpg, leader.pid, signal.SIGKILL)
        assert len(members_of(leader.pid)) == 2
        written(files, "identity").write_text(identity or "")
        command.take_over(files, shell())
        assert members_of(leader.pid) == set()


# The runner by itself.


class Runner:
    """runner.py as a process: `parent` is who it is told has started it, `ready` what it said before it began."""

    def __init__(
        self, files: Path, *words: str, parent: int | None = None, before: str = "", hear: bool = True
    ) -> None:
        for name in ("stdin", "stdout", "stderr"):
            if files.parent.exists():
                written(files, name).touch()
        script = f"import runpy, sys; sys.argv.pop(0); m = runpy.run_path(sys.argv[0]); {before}; m['main']()"
        python = [sys.executable, "-I", "-S", *(["-c", script] if before else [])]
        reading, writing = os.pipe()
        if not hear:
            os.close(reading)
        process = subprocess.Popen(
            [*python, runner.__file__, str(files), str(parent or os.getpid()), str(writing), *words],
            pass_fds=(writing,),
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        os.close(writing)
        self.ready = os.read(reading, 9) if hear else b""
        if hear:
            os.close(reading)
        self.had_identity = written(files, "identity").exists()
        self.pid = process.pid
        _, self.error = process.communicate(timeout=PATIENCE_S)


def test_the_runner_says_who_it_is_before_it_starts_anything_and_how_that_ended_after(files: Path) -> None:
    ran = Runner(files, "cat", str(written(files, "identity")))
    assert (ran.ready, ran.had_identity, ran.error) == (b"1", True, b"")
    identity = written(files, "stdout").read_text()
    assert identity == written(files, "identity").read_text()
    pid, started, boot = identity.split()
    assert int(pid) == ran.pid and started.isdecimal()
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert written(files, "status").read_text() == "exit 0"
    names = {path.suffix for path in files.parent.iterdir()}
    assert names == {".identity", ".status", ".stdin", ".stdout", ".stderr"}


def test_a_runner_whose_parent_has_gone_starts_nothing(files: Path, tmp_path: Path) -> None:
    ran = Runner(files, "touch", f"{tmp_path}/ran", parent=os.getppid())
    assert (ran.ready, ran.error) == (b"", b"")
    assert not (tmp_path / "ran").exists()
    assert command.read_end(files, shell()) == CommandEnd(was_started=False, complaint="the daemon had gone")


def test_a_runner_that_nobody_hears_starts_nothing(files: Path, tmp_path: Path) -> None:
    Runner(files, "touch", f"{tmp_path}/ran", hear=False)
    assert not (tmp_path / "ran").exists()
    assert command.read_end(files, shell()) == CommandEnd(was_started=False, complaint="the daemon had gone")


def test_a_runner_that_cannot_write_down_who_it_is_starts_nothing(tmp_path: Path) -> None:
    ran = Runner(tmp_path / "none" / "7-1", "touch", f"{tmp_path}/ran")
    assert ran.ready == b"" and b"FileNotFoundError" in ran.error
    assert not (tmp_path / "ran").exists()


def test_a_runner_that_cannot_tell_who_it_is_starts_nothing(files: Path, tmp_path: Path) -> None:
    # As it is where only the processes of /proc are to be seen (ProcSubset=pid), which hides the boot id.
    hidden = "g = m['identity_of'].__globals__; g['identity_of'] = lambda pid: None"
    ran = Runner(files, "touch", f"{tmp_path}/ran", before=hidden)
    assert ran.ready == b""
    assert not (tmp_path / "ran").exists() and not written(files, "identity").exists()
    end = command.read_end(files, shell())
    assert not end.was_started and "boot_id" in end.complaint


def test_a_process_that_is_not_there_has_no_identity(stranger: subprocess.Popen[bytes]) -> None:
    first = runner.identity_of(stranger.pid)
    assert first is not None and first == runner.identity_of(stranger.pid)
    stranger.kill()
    stranger.wait()
    assert runner.identity_of(stranger.pid) is None


def test_the_start_time_is_found_behind_any_name(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 ("
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "300"]) as process:
        wait_until(lambda: Path(f"/proc/{process.pid}/comm").read_text().strip() == program.name)
        identity = runner.identity_of(process.pid)
        process.kill()
    assert identity is not None
    ours = runner.identity_of(os.getpid())
    assert ours is not None and int(identity.split()[1]) >= int(ours.split()[1])


def test_a_default_meaning_is_one_that_a_route_may_name() -> None:
    assert {"retry", "fail"} == set(config.EXIT_STATUSES.values())
