"""brainctl as a process, through a real socket to a real lane: every command and every exit status.

A person at a terminal, backups and what a shell completes stand in files of their own. Where the lane has to misbehave
in a way that brainlaned does not, a scripted socket takes its place.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timedelta, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from brainctl import cli
from brainlaned.wire import VERSION, Status, system_socket
from tests.brainserver import BrainServer, answer, close_before_answer, status
from tests.commandline import LIMIT_S, ROOT, Run, environment, python, run, unfolded
from tests.lane import Lane, wait_until
from tests.unit.brainctl.scripted import ScriptedLane, answered, http, read_request, refused


@pytest.fixture
def ask(shared_lane: Lane) -> Any:
    """Run brainctl against the lane that the tests of this module share."""

    def asked(*words: str | bytes, **options: Any) -> Run:
        return run("--socket", str(shared_lane.socket), *words, **options)

    return asked


# Submitting.


def test_submit_prints_the_id_alone(ask: Any, shared_lane: Lane) -> None:
    done = ask("submit", "hello")
    assert (done.code, done.err) == (0, "")
    assert re.fullmatch(r"[1-9][0-9]*\n", done.text)
    assert shared_lane.wait(int(done.text))["status"] == "done"


def test_submit_wait_prints_the_answer_byte_for_byte(ask: Any, shared_server: BrainServer) -> None:
    shared_server.script(answer("né\x00\x1b[31m 好\u202e no newline"))
    done = ask("submit", "--wait", "hello")
    assert (done.code, done.out, done.err) == (0, "né\x00\x1b[31m 好\u202e no newline".encode(), "")


@pytest.mark.parametrize("form", ["argument", "file", "stdin", "file -"])
def test_a_prompt_comes_from_wherever_it_is_unchanged(
    ask: Any, shared_server: BrainServer, tmp_path: Path, form: str
) -> None:
    prompt = "né\r\n 好 🌍\n"
    (tmp_path / "prompt").write_bytes(prompt.encode())
    words = {"argument": [prompt], "file": ["-f", str(tmp_path / "prompt")], "stdin": ["-"], "file -": ["--file", "-"]}
    given = prompt.encode() if form in {"stdin", "file -"} else None
    assert ask("submit", "--wait", *words[form], given=given).code == 0
    assert shared_server.requests[-1].prompt == prompt


def test_everything_that_submit_can_say_arrives(ask: Any, shared_lane: Lane, shared_server: BrainServer) -> None:
    options = ["--system", "be brief", "--param", "temperature=0.5", "--param", 'stop=["x"]', "--model", "mine"]
    options += ["--priority", "high", "--label", "a=b", "--label", "c=d=e", "--max-attempts", "2", "--may-run-twice"]
    options += [
        "--require-complete",
        "--key",
        "the key",
        "--route",
        "other",
        "--not-before",
        "2020-01-01T00:00:00+02:00",
    ]
    done = ask("submit", *options, "hello")
    job = shared_lane.wait(int(done.text))
    wanted = {
        "key": "the key",
        "priority": "high",
        "labels": {"a": "b", "c": "d=e"},
        "max_attempts": 2,
        "model": "mine",
    }
    wanted |= {"may_run_twice": True, "require_complete": True, "route": "other", "status": "done"}
    assert {name: job[name] for name in wanted} == wanted
    assert job["not_before"] == "2019-12-31T22:00:00.000000Z"
    sent = shared_server.requests[-1].json
    assert (sent["temperature"], sent["stop"], sent["model"]) == (0.5, ["x"], "mine")
    assert sent["messages"][0] == {"role": "system", "content": "be brief"}


def test_the_same_key_is_the_same_job_and_another_prompt_with_it_is_refused(ask: Any) -> None:
    first, again = ask("submit", "--key", "one", "hello"), ask("submit", "--key", "one", "hello")
    assert first.out == again.out
    other = ask("submit", "--key", "one", "goodbye")
    assert (other.code, other.out) == (6, b"")
    assert "'one'" in other.err


def test_submit_wait_ends_as_the_job_ended(ask: Any, shared_server: BrainServer) -> None:
    shared_server.script(status(400))
    failed = ask("submit", "--wait", "a")
    assert (failed.code, failed.out) == (1, b"")
    shared_server.script(close_before_answer())
    held = ask("submit", "--wait", "b")
    assert (held.code, held.out) == (3, b"")
    assert "sent-outcome-unknown" in held.err and "brainctl" in held.err
    shared_server.script(answer("half a sen", finish="length"))
    cut = ask("submit", "--wait", "c")
    assert (cut.code, cut.out) == (0, b"half a sen")
    assert "truncated" in cut.err
    shared_server.script(answer("half a sen", finish="length"))
    strict = ask("submit", "--wait", "--require-complete", "d")
    assert (strict.code, strict.out) == (3, b"")
    assert "answer-truncated" in strict.err


def test_submit_wait_for_too_long_exits_7_and_the_job_goes_on(
    ask: Any, shared_lane: Lane, shared_server: BrainServer
) -> None:
    held = shared_server.hold()
    shared_server.script(held)
    late = ask("submit", "--wait", "--timeout", "0.5", "slow")
    assert late.code == 7
    number = re.search(r"job (\d+) is still running", late.err)
    assert number is not None
    held.release()
    assert shared_lane.wait(int(number[1]))["status"] == "done"


def test_submit_wait_with_json_prints_the_job(ask: Any, shared_server: BrainServer) -> None:
    shared_server.script(status(400))
    failed = ask("--json", "submit", "--wait", "a")
    assert (failed.code, failed.json["status"]) == (1, "failed")


def test_ctrl_c_while_waiting_says_that_the_job_goes_on(shared_lane: Lane, shared_server: BrainServer) -> None:
    held = shared_server.hold()
    shared_server.script(held)
    words = ["-m", "brainctl", "--socket", str(shared_lane.socket), "submit", "--wait", "slow"]
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), cwd="/"
    )
    assert held.arrived.wait(20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, b""), err
    found = re.fullmatch(
        r"brainctl: stopped waiting, job (\d+) goes on; next: brainctl --socket (\S+) wait \1\n", err.decode()
    )
    assert found is not None and found[2] == str(shared_lane.socket)
    held.release()
    assert shared_lane.wait(int(found[1]))["status"] == "done"


# Bad input: refused before anything is stored, by name, in one line.


@pytest.mark.parametrize(
    ("words", "code", "names"),
    [
        (["submit"], 2, "no prompt"),
        (["submit", ""], 2, "empty"),
        (["submit", "a", "-f", "/dev/null"], 2, "twice"),
        (["submit", "-f", "/dev/null"], 2, "empty"),
        (["submit", "-f", "/no/such/file"], 2, "'/no/such/file'"),
        (["submit", b"gr\xc3\xbc\xff"], 2, "byte 4"),
        (["submit", "a", "--system", b"\xff"], 2, "system"),
        (["submit", "a", "--param", "x"], 2, "--param"),
        (["submit", "a", "--param", "x=1", "--param", "x=2"], 2, "'x' is given twice"),
        (["submit", "a", "--label", "x=1", "--label", "x=2"], 2, "--label"),
        (["submit", "a", "--not-before", "2026-01-31T22:00"], 2, "--not-before"),
        (["submit", "a", "--priority", "urgent"], 2, "--priority"),
        (["submit", "a", "--max-attempts", "0"], 2, "--max-attempts"),
        (["submit", "a", "--timeout", "5"], 2, "--timeout"),
        (["submit", "a", "--wait", "--timeout", "nan"], 2, "nan"),
        (["submit", "a", "--nope"], 2, "--nope"),
        (["submit", "a", "b"], 2, "b"),
        (["submit", "a", "--json"], 2, "before the verb"),
        (["submit", "a", "--route", "nowhere"], 6, "nowhere"),
        (["submit", "a", "--param", "stream=true"], 6, "stream"),
        (["submit", "a", "--param", "n=2"], 6, "n"),
        (["submit", "a", "--label", "Bad Key=1"], 6, "label"),
        (["submit", "a", "--key", ""], 6, "key"),
        (["show", "0"], 2, "'0'"),
        (["show", "1_0"], 2, "'1_0'"),
        (["show", "x"], 2, "'x'"),
        (["show", "-1"], 2, "-1"),
        (["show", "1", "2"], 2, "2"),
        (["wait"], 2, "ID"),
        (["cancel"], 2, "ID"),
        (["retry"], 2, "ID"),
        (["list", "--limit", "0"], 2, "--limit"),
        (["list", "--limit", "501"], 2, "--limit"),
        (["list", "--status", "gone"], 2, "--status"),
        (["list", "--label", "x"], 6, "label"),
        (["list", "--since", "yesterday"], 2, "--since"),
        (["list", "--since", "2026-01-31T22:00:00"], 2, "offset"),
        (["list", "--until", "99999999w"], 2, "'99999999w'"),
        (["list", "--submitter", b"\xff"], 2, "--submitter"),
        (["forget"], 2, "ID"),
        (["forget", "1", "--reason", b"\xff"], 2, "--reason"),
        (["backup"], 2, "FILE"),
        (["output", "1", "--partial", "--response"], 2, "--response"),
        (["recover", "--resend"], 2, "ID"),
        (["recover", "1", "--resend", "--fail"], 2, "--fail"),
        (["recover", "1", "--reason", "x"], 2, "--resend"),
        (["recover", "1", "--complete", "/no/such/file"], 2, "'/no/such/file'"),
        (["resume", "--route", "nowhere"], 6, "nowhere"),
        (["lst"], 2, "'list'"),
        (["--lane", "x", "list"], 2, "--lane"),
        (["--lane", "../x"], 2, "--lane"),
        (["--answer-within", "x", "list"], 2, "'x'"),
    ],
)
def test_bad_input_is_refused_by_name_in_one_line_and_stores_nothing(
    ask: Any, shared_lane: Lane, words: list[str | bytes], code: int, names: str
) -> None:
    before = shared_lane.rows("select count(*) as n from jobs")
    refusal = ask(*words) if words[0] != "--lane" or words[1] == "x" else run(*words)
    assert (refusal.code, refusal.out) == (code, b"")
    assert names in refusal.err
    assert shared_lane.rows("select count(*) as n from jobs") == before


@pytest.mark.parametrize("form", [["-"], ["-f", "-"]])
def test_standard_input_that_is_not_utf_8_is_refused_by_its_offset(ask: Any, form: list[str]) -> None:
    refusal = ask("submit", *form, given=b"ab\xff")
    assert refusal.code == 2
    assert "standard input: byte 2 " in refusal.err


def test_a_prompt_larger_than_a_request_may_be_is_refused(ask: Any) -> None:
    assert ask("submit", "-", given=b"x" * (9 * 1024 * 1024)).code == 6
    # This one can be read, but as JSON it is too long: the lane refuses it while it is still being sent.
    assert ask("submit", "-", given=b'"' * (5 * 1024 * 1024)).code == 6


def test_an_error_is_an_object_for_a_program_and_a_line_for_a_person(ask: Any) -> None:
    for words, kind in ((["show", "x"], "usage"), (["show", "999999"], "no-such-job"), (["submit", "-"], "usage")):
        refusal = ask("--json", *words)
        assert refusal.json["error"]["kind"] == kind
        assert set(refusal.json["error"]) >= {"kind", "message", "next_action", "retry_safe"}


# Looking.


def test_no_verb_means_status(ask: Any) -> None:
    bare, named = ask(), ask("status")
    assert bare.code == 0
    # It may have grown a second older in between.
    uptime = re.compile(r"\bup\s+[0-9ms]+")
    assert uptime.sub("up", bare.text) == uptime.sub("up", named.text) != bare.text
    assert bare.lines[0] == "lane      open"


def test_version_and_help_need_no_lane() -> None:
    assert run("--socket", "/nowhere", "--version").text == f"brainctl {VERSION}\n"
    page = run("--help").text
    assert all(re.search(rf"^  {verb} ", page, re.M) for verb in cli.COMMANDS)
    for verb in cli.COMMANDS:
        helped = run(verb, "--help")
        assert helped.code == 0
        assert f"Usage: brainctl {verb}" in helped.text
        assert all(len(line) <= 80 for line in helped.lines), verb


def test_the_socket_is_taken_from_the_environment_unless_a_lane_is_named(shared_lane: Lane) -> None:
    env = {"BRAINLANE_SOCKET": str(shared_lane.socket)}
    assert run("status", env=env).code == 0
    assert "brainlane-some" in run("--lane", "some", "status", env=env).err


def test_json_is_the_wire_object_unchanged(ask: Any, shared_lane: Lane) -> None:
    number = ask("--json", "submit", "--wait", "--label", "w=é", "hello").json["id"]
    for words, path in (
        (["list", "--label", "w=é"], "/v1/jobs?label=w%3D%C3%A9"),
        (["show", str(number)], f"/v1/jobs/{number}"),
        (["wait", str(number)], f"/v1/jobs/{number}"),
        (["output", str(number)], f"/v1/jobs/{number}/response"),
        (["output", "--response", str(number)], f"/v1/jobs/{number}/response"),
    ):
        assert ask("--json", *words).out == shared_lane.get(path).body + b"\n"


def test_list_filters_and_fits_80_columns(ask: Any) -> None:
    numbers = [ask("submit", "--label", f"n={n}", "--label", "set=filters", "x" * 100).text.strip() for n in range(3)]
    ask("wait", *numbers)
    listed = ask("list", "--label", "set=filters", "--limit", "2")
    assert [line.split()[0] for line in listed.lines] == ["ID", *reversed(numbers[1:])]
    assert all(len(line) <= 80 for line in listed.lines)
    assert ask("list", "--label", "set=filters", "--status", "failed").lines[1:] == []
    older = ask("list", "--label", "set=filters", "--after", numbers[1])
    assert [line.split()[0] for line in older.lines[1:]] == [numbers[0]]
    assert ask("list", "--route", "other", "--label", "set=filters").lines[1:] == []


def test_list_finds_jobs_by_who_submitted_them_and_when(ask: Any, shared_lane: Lane) -> None:
    mine = shared_lane.submit("hello", labels={"set": "mine"})
    shared_lane.wait(mine["id"])
    only, name = ["list", "--label", "set=mine"], mine["submitter"]["user"] or str(os.geteuid())

    def found(*more: str) -> bool:
        listed = ask(*only, *more)
        assert listed.code == 0, listed.err
        return len(listed.lines) == 2

    assert found("--submitter", name) and found("--submitter", str(os.geteuid()))
    assert not found("--submitter", "4000000000")
    unknown = ask(*only, "--submitter", "somebody-else")
    assert (unknown.code, "somebody-else" in unknown.err) == (6, True)
    at = mine["created_at"]
    assert found("--since", at) and not found("--until", at)
    assert found("--since", "7d") and found("--since", "1h", "--until", "0s") and not found("--until", "30m")
    # Another way to write the same moment.
    later = datetime.fromisoformat(at).astimezone(timezone(timedelta(hours=5, minutes=30))).isoformat()
    assert found("--since", later) and not found("--until", later)
    assert not found("--since", "2999-01-31T22:00:00Z")


def test_list_shows_place_reason_and_age_of_what_waits(ask: Any) -> None:
    assert ask("pause").code == 0
    numbers = [ask("submit", "--label", "set=places", "hello").text.strip() for _ in range(2)]
    held_up = [line.split() for line in ask("list", "--label", "set=places").lines[1:]]
    assert [line[:4] for line in held_up] == [
        [number, "queued", "lane-paused", f"#{place}"] for number, place in ((numbers[1], 2), (numbers[0], 1))
    ]
    assert all(re.fullmatch(r"\d+[sm]", line[4]) for line in held_up)


def test_show_request_prints_the_prompt_as_json(ask: Any, shared_lane: Lane) -> None:
    number = ask("submit", "--system", "be brief", "--param", "temperature=0.5", "né 好").text.strip()
    for words in (["show", number, "--request"], ["--json", "show", "--request", number]):
        shown_ = ask(*words)
        assert (shown_.code, shown_.err) == (0, "")
        assert shown_.json == {
            "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "né 好"}],
            "temperature": 0.5,
        }
    assert ask("show", "--request", number).out == shared_lane.get(f"/v1/jobs/{number}/request").body + b"\n"
    assert ask("show", "--request", "999999").code == 5


def test_show_tells_the_whole_story_of_a_held_job(ask: Any, shared_lane: Lane, shared_server: BrainServer) -> None:
    shared_server.script(close_before_answer())
    number = ask("submit", "--label", "a=b", "hello").text.strip()
    assert ask("wait", number).code == 3
    page = ask("show", number)
    marks = re.findall(r"^ +\d+\.\d{3}  (\S+)", page.text, re.M)
    assert marks == ["accepted", "claimed", "armed", "sent", "ended"]
    assert page.lines[0].startswith(f"job {number}  held  sent-outcome-unknown")
    assert re.fullmatch(rf"next: brainctl .*{number}.*", unfolded(page.text).splitlines()[-1])
    assert "billed: possibly" in page.text
    assert all(len(line) <= 80 for line in page.lines)


def test_output_is_refused_while_there_is_none(ask: Any, shared_server: BrainServer) -> None:
    held = shared_server.hold()
    shared_server.script(held)
    number = ask("submit", "slow").text.strip()
    assert held.arrived.wait(20)
    assert ask("output", number).code == 6
    assert ask("output", "--partial", number).code in {0, 6}
    assert ask("output", "--response", number).code == 6


def test_a_part_can_be_read_while_the_rest_is_on_its_way(
    ask: Any, shared_lane: Lane, shared_server: BrainServer, halting: Any
) -> None:
    step, held = halting(shared_server, "first ", "second")
    shared_server.script(step)
    number = ask("submit", "slow").text.strip()
    assert held.arrived.wait(20)
    deadline = time.monotonic() + 20
    while (part := ask("output", "--partial", number)).code != 0:
        assert time.monotonic() < deadline
    assert part.text == "first "
    held.release()
    followed = ask("follow", number)
    assert (followed.code, followed.text) == (0, "first second")


def test_follow_passes_text_on_as_it_comes_and_ends_as_the_job(
    shared_lane: Lane, shared_server: BrainServer, halting: Any
) -> None:
    step, held = halting(shared_server, "first ", "second")
    shared_server.script(step)
    job = shared_lane.submit("slow")
    process = subprocess.Popen(
        [sys.executable, "-m", "brainctl", "--socket", str(shared_lane.socket), "follow", str(job["id"])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        cwd="/",
    )
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 100) == b"first "
    held.release()
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, b"second", b"")


# Waiting, cancelling, pausing.


def test_wait_ends_as_the_worst_of_its_jobs(ask: Any, shared_server: BrainServer) -> None:
    shared_server.script(answer(), status(400), close_before_answer())
    done, failed, held = (ask("submit", word).text.strip() for word in "abc")
    assert (ask("wait", done).code, ask("wait", failed).code, ask("wait", held).code) == (0, 1, 3)
    every = ask("wait", done, held, failed)
    assert every.code == 1
    assert every.lines == [f"{done} done", f"{held} held", f"{failed} failed"]
    assert "(and 1 more)" in every.err
    assert ask("wait", held, done).code == 3
    assert ask("wait", done, "999999").code == 5


def test_wait_for_too_long_exits_7_and_says_where_the_job_stands(ask: Any) -> None:
    assert ask("pause").code == 0
    number = ask("submit", "hello").text.strip()
    late = ask("wait", number, "--timeout", "0.3")
    assert (late.code, late.text) == (7, f"{number} queued\n")
    assert "lane-paused" in late.err and "brainctl" in late.err
    assert ask("resume").text == "lane open\n"
    assert ask("wait", number).code == 0


def test_cancel_says_what_it_achieved_for_each_job(ask: Any, shared_server: BrainServer) -> None:
    done = ask("submit", "hello").text.strip()
    ask("wait", done)
    held = shared_server.hold()
    shared_server.script(held)
    running = ask("submit", "slow").text.strip()
    assert held.arrived.wait(20)
    queued = ask("submit", "hello").text.strip()
    both = ask("cancel", queued, running)
    assert both.code == 0
    assert both.lines[0] == f"{queued} cancelled"
    assert both.lines[1] in {f"{running} cancelling: its call is being closed", f"{running} cancelled"}
    assert ask("wait", running).code == 4
    late = ask("cancel", done, queued, "999999")
    assert late.code == 6
    assert late.lines == [f"{done} too-late", f"{queued} too-late", "999999 no-such-job"]
    assert ask("cancel", "999999").code == 5
    assert [json.loads(line)["error"]["kind"] for line in ask("--json", "cancel", done, "999999").lines] == [
        "too-late",
        "no-such-job",
    ]


def test_forget_erases_prompt_and_answer_of_what_is_over_and_keeps_the_record(
    ask: Any, shared_lane: Lane, shared_server: BrainServer
) -> None:
    shared_server.script(answer("a secret"), close_before_answer())
    done, held = (ask("submit", word).text.strip() for word in ("ask", "other"))
    ask("wait", done, held)
    both = ask("forget", done, held, "999999", "--reason", "it was private")
    assert both.code == 6
    assert both.lines == [f"{done} forgotten", f"{held} moved-on", "999999 no-such-job"]
    assert "(and 1 more)" in both.err and f"next: brainctl --socket {shared_lane.socket} show {held}\n" in both.err
    page = ask("show", done).text
    assert "the prompt and the answer are gone" in page and "it was private" in page
    assert (ask("output", done).code, ask("show", "--request", done).code) == (6, 6)
    again = ask("--json", "forget", done)
    assert (again.code, again.json["id"], again.json["status"]) == (0, int(done), "done")
    assert again.json["erased_at"] is not None
    assert [json.loads(line)["error"]["kind"] for line in ask("--json", "forget", held).lines] == ["moved-on"]


def test_every_decision_about_a_held_job_is_taken_and_recorded(
    ask: Any, shared_lane: Lane, shared_server: BrainServer, tmp_path: Path
) -> None:
    (tmp_path / "answer").write_text("mine\n")
    cut = answer("half", finish="length")
    for words, status_, text in (
        (["--resend"], "queued", "brought by the second attempt"),
        (["--accept"], "done", "half"),
        (["--complete", str(tmp_path / "answer")], "done", "mine\n"),
        (["--fail"], "failed", None),
        (["--cancel"], "cancelled", None),
    ):
        shared_server.script(cut, answer("brought by the second attempt"))
        number = ask("submit", "--require-complete", "hello").text.strip()
        assert ask("wait", number).code == 3
        decided = ask("recover", number, *words, "--reason", "seen by me")
        assert (decided.code, decided.text) == (0, f"{number} {status_}\n")
        shared_lane.wait(int(number))
        made = ask("--json", "show", number).json["decisions"]
        assert [(each["action"], each["reason"], each["uid"]) for each in made] == [
            (words[0].removeprefix("--"), "seen by me", os.geteuid())
        ]
        output = ask("output", number)
        assert (output.code, output.text) == ((0, text) if text is not None else (6, "")), output.err
        late = ask("recover", number, *words)
        assert late.code == 6 and f"brainctl --socket {shared_lane.socket} " in late.err
        shared_server.control({"reset": True, "default": "answer", "by_prompt": {}})


def test_a_failed_job_is_retried_once_and_only_while_it_is_failed(ask: Any, shared_server: BrainServer) -> None:
    shared_server.script(status(400))
    number = ask("submit", "hello").text.strip()
    assert ask("wait", number).code == 1
    again = ask("retry", number)
    assert (again.code, again.text) == (0, f"{number} queued\n")
    assert "cannot be a second charge" in again.err
    assert ask("wait", number).code == 0
    assert ask("retry", number).code == 6
    assert ask("retry", "999999").code == 5


def test_pause_is_seen_with_its_reason_and_ended_by_resume(ask: Any) -> None:
    assert ask("pause", "--reason", "the GPU is \x1b[31mhot").text.startswith("lane paused since ")
    page = ask("status").text
    assert "because: the GPU is \\x1b[31mhot" in page
    assert ask("--json", "status").json["lane"]["state"] == "paused"
    assert ask("--json", "resume").json["lane"]["state"] == "open"
    assert ask("resume", "--route", "local").text == "route local open\n"


def test_recover_shows_every_held_job_with_its_risk_and_its_ways_out(ask: Any, shared_server: BrainServer) -> None:
    assert ask("recover").text == "nothing is held\n"
    shared_server.script(close_before_answer(), answer("half", finish="length"))
    sent, cut = ask("submit", "a").text.strip(), ask("submit", "--require-complete", "b").text.strip()
    ask("wait", sent, cut)
    sheet = ask("recover")
    assert sheet.code == 0
    assert "may be a second charge" in sheet.text and "certainly a second charge" in sheet.text
    for verb in ("--resend", "--complete FILE", "--fail", "--cancel"):
        assert f"recover {sent} {verb} --attempt 1" in unfolded(sheet.text)
    one = ask("recover", cut)
    assert one.code == 0 and f"job {cut}  held" in one.text and f"job {sent} " not in one.text
    assert [job["id"] for job in ask("--json", "recover").json["jobs"]] == [int(cut), int(sent)]
    assert ask("recover", "999999").code == 5


# The lane at a glance.


def test_the_status_page_tells_what_is_in_the_way_with_the_command_that_removes_it(
    make_lane: Any, server: BrainServer
) -> None:
    lane = make_lane(more=f'[routes.closed]\nbase_url = "{server.base_url}"\nmodel = "m"')
    to_it = f"brainctl --socket {lane.socket}"

    def page() -> str:
        ended = run("--socket", str(lane.socket), "status")
        assert ended.code == 0
        assert all(len(line) <= 80 for line in ended.lines), ended.text
        return unfolded(ended.text)

    assert "for the queue" not in page()
    lane.wait(lane.submit("something to go by")["id"])
    server.script(status(401), close_before_answer())
    lane.submit("with a bad key", route="closed")
    lane.wait_for_status(lane.submit("it breaks off")["id"], "held")
    held = server.hold()
    server.script(held)
    running = lane.submit("slow")["id"]
    assert held.arrived.wait(20)
    lane.submit("waits")
    run("--socket", str(lane.socket), "pause", "--reason", "the GPU is wanted elsewhere")
    seen = page()
    for words in (
        r"^lane      paused since \d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ by \S+$",
        r"^          because: the GPU is wanted elsewhere$",
        rf"^          {to_it} resume$",
        rf"^running   job {running}, attempt 1 on local \(test-model\), \d+:\d\d",
        r"^queued    2, the oldest is job \d+, accepted \d+s ago",
        r"^others    1 held, 0 failed, 1 done, 0 cancelled$",
        r"^route     closed closed for \d+[sm]: key-refused, 1 queued$",
        rf"^          {to_it} resume --route closed$",
        r"^route     local open, 1 queued",
        rf"^    {to_it} recover \d+$",
    ):
        assert re.search(words, seen, re.M), (words, seen)
    lane.post("/v1/lane/resume")
    server.release()


def test_the_status_page_says_how_much_has_arrived_and_how_long_the_queue_may_take(
    shared_lane: Lane, shared_server: BrainServer, halting: Any, ask: Any
) -> None:
    shared_lane.wait(shared_lane.submit("something to go by")["id"])
    step, held = halting(shared_server, "first " * 20, "second")
    shared_server.script(step)
    shared_lane.submit("slow")
    assert held.arrived.wait(20)
    shared_lane.submit("waits")
    wait_until(lambda: shared_lane.get("/v1/status").json["running"]["tokens"])
    page = ask("status").text
    assert re.search(r"^running   job \d+, .*about \d+ tokens$", unwrapped(page), re.M), page
    assert re.search(r"^queued    1, .*about \d+ s for the queue$", unwrapped(page), re.M), page


def unwrapped(page: str) -> str:
    """Return a page whose entries stand on one line each."""
    return re.sub(r"\n {10}", " ", page)


def test_the_status_page_says_how_the_last_run_ended(make_lane: Any) -> None:
    lane = make_lane()
    lane.kill()
    lane.start()
    killed = run("--socket", str(lane.socket), "status").text
    lane.stop()
    lane.start()
    stopped = run("--socket", str(lane.socket), "status").text
    ends = [re.search(r"^last run  (.*)$", page, re.M) for page in (killed, stopped)]
    assert ends[0] is not None and ends[1] is not None and ends[0][1] != ends[1][1]


# Decisions: what exactly is sent, and what is made of the answer.


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[ScriptedLane]:
    lane = ScriptedLane(tmp_path / "s")
    yield lane
    lane.close()


def shown(number: int, where: str, attempts: int = 2) -> bytes:
    return answered({"id": number, "status": where, "attempt_count": attempts, "attempts": [], "final": False})


def test_a_decision_names_the_attempt_that_was_read_just_before(scripted: ScriptedLane, tmp_path: Path) -> None:
    (tmp_path / "answer").write_text("mine\n")
    for words, body in (
        (["--resend"], {"action": "resend", "attempt": 2}),
        (["--accept", "--reason", "good enough"], {"action": "accept", "attempt": 2, "reason": "good enough"}),
        (["--complete", str(tmp_path / "answer")], {"action": "complete", "text": "mine\n", "attempt": 2}),
        (["--fail"], {"action": "fail", "attempt": 2}),
        (["--cancel"], {"action": "cancel", "attempt": 2}),
    ):
        scripted.requests.clear()
        scripted.script(shown(5, "held"), shown(5, "queued"))
        decided = run("--socket", scripted.path, "recover", "5", *words)
        assert (decided.code, decided.text) == (0, "5 queued\n")
        assert scripted.targets == ["GET /v1/jobs/5", "POST /v1/jobs/5/recover"]
        assert json.loads(scripted.requests[1].partition(b"\r\n\r\n")[2]) == body


def test_a_decision_about_a_named_attempt_reads_nothing_and_may_come_too_late(scripted: ScriptedLane) -> None:
    scripted.script(refused("moved-on", 409))
    late = run("--socket", scripted.path, "recover", "5", "--resend", "--attempt", "1")
    assert (late.code, scripted.targets) == (6, ["POST /v1/jobs/5/recover"])


def test_a_retry_says_what_may_be_paid_twice(scripted: ScriptedLane) -> None:
    scripted.script(shown(5, "failed"), shown(5, "queued"))
    again = run("--socket", scripted.path, "retry", "5")
    assert (again.code, again.text) == (0, "5 queued\n")
    assert "second charge" in again.err
    assert json.loads(scripted.requests[1].partition(b"\r\n\r\n")[2]) == {"attempt": 2}


# E-3: an answer that got lost.


def test_an_answer_that_got_lost_is_asked_for_again_and_makes_one_job(tmp_path: Path, shared_lane: Lane) -> None:
    before = shared_lane.rows("select count(*) as n from jobs")[0]["n"]
    lost = threading.Event()
    with relay(tmp_path / "r", shared_lane.socket, lose=lambda: not lost.is_set() and not lost.set()) as path:
        done = run("--socket", path, "submit", "hello")
    assert done.code == 0 and lost.is_set()
    assert shared_lane.rows("select count(*) as n from jobs")[0]["n"] == before + 1
    assert shared_lane.get(f"/v1/jobs/{done.text.strip()}").json["key"].startswith("brainctl-")


def test_an_unclear_end_prints_the_key_and_the_command_that_finds_out(tmp_path: Path, shared_lane: Lane) -> None:
    with relay(tmp_path / "r", shared_lane.socket, lose=lambda: True) as path:
        unclear = run("--socket", path, "submit", "hello", "--label=a=b")
        assert unclear.code == 9
    found = re.search(
        r"may have been stored, under the key '(brainctl-[0-9a-f]{32})'.*then brainctl (.*)\n", unclear.err
    )
    assert found is not None
    command = found[2].replace(path, str(shared_lane.socket)).split()
    assert f"--key={found[1]}" in command
    again = run(*command)
    assert again.code == 0
    assert shared_lane.get(f"/v1/jobs/{again.text.strip()}").json["key"] == found[1]
    assert shared_lane.rows("select count(*) as n from jobs where key = ?", found[1]) == [{"n": 1}]


def test_ctrl_c_before_the_answer_prints_the_key(scripted: ScriptedLane) -> None:
    taken, done = threading.Event(), threading.Event()

    def never(connection: socket.socket) -> None:
        read_request(connection)
        taken.set()
        done.wait(20)

    scripted.script(never)
    process = subprocess.Popen(
        [sys.executable, "-m", "brainctl", "--socket", scripted.path, "submit", "hello"],
        stderr=subprocess.PIPE,
        env=environment(),
        cwd="/",
    )
    assert taken.wait(20)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=20)[1].decode()
    done.set()
    assert process.returncode == 130
    assert re.fullmatch(r"brainctl: interrupted [^\n]*'brainctl-[0-9a-f]{32}'[^\n]*--key=[^\n]*\n", err)


@contextmanager
def relay(path: Path, behind: Path, *, lose: Any) -> Iterator[str]:
    """Pass connections on to the lane behind; where `lose()`, its answer is swallowed once it has been given."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as lane:
                lane.connect(str(behind))
                lane.sendall(read_request(connection))
                reply = b"".join(iter(lambda: lane.recv(65536), b""))
                if not lose():
                    connection.sendall(reply)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield str(path)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        listener.close()


# E-5 and E-2: nobody answers.


def timed(*words: str, **options: Any) -> Run:
    started = time.monotonic()
    ended = run(*words, **options)
    assert time.monotonic() - started < 6  # 5 s, and a start of Python on a machine with other things to do
    return ended


def test_the_ways_in_which_no_lane_answers_are_told_apart(
    make_lane: Any, scripted: ScriptedLane, tmp_path: Path
) -> None:
    lines: dict[str, str] = {}

    def down(kind: str, code: int, path: object, **options: Any) -> None:
        for verb in (["list"], ["submit", "hello"]):
            ended = timed("--json", "--socket", str(path), *verb, **options)
            assert (ended.code, ended.json["error"]["kind"]) == (code, kind)
            maybe = verb[0] == "submit" and kind == "no-answer"
            assert ("may have been stored" in ended.err) is maybe
            assert ("nothing was stored" in ended.err) is (
                verb[0] == "submit" and kind not in {"no-answer", "start-refused"}
            )
            assert ended.json["error"]["next_action"]
        lines[kind] = ended.err

    down("no-socket", 9, tmp_path / "nothing")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead"))
    down("dead-socket", 9, tmp_path / "dead")
    scripted.script(refused("start-refused", 503))
    down("start-refused", 9, scripted.path)
    scripted.script(http(200, b"<html>", protocol=None))
    for verb in ("list", "submit"):
        assert run("--socket", scripted.path, verb, *["x"] * (verb == "submit")).code == 9
    lane = make_lane()
    os.kill(lane.process.pid, signal.SIGSTOP)
    try:
        down("no-answer", 9, lane.socket)
    finally:
        os.kill(lane.process.pid, signal.SIGCONT)
    assert len(set(lines.values())) == len(lines)


@pytest.mark.skipif(not os.access("/run", os.W_OK), reason="only root may put a socket where systemd does")
def test_a_service_that_has_failed_behind_its_socket_is_told_apart(tmp_path: Path) -> None:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text("#!/bin/sh\necho ActiveState=failed\necho SubState=failed\necho Result=exit-code\n")
    systemctl.chmod(0o755)
    name = f"test-{os.getpid()}"
    place = system_socket(name)
    place.parent.mkdir()
    try:
        # As systemd holds it: connections are taken into the queue, and nobody comes for them.
        with socket.socket(socket.AF_UNIX) as held:
            held.bind(str(place))
            held.listen()
            for verb in (["list"], ["submit", "hello"]):
                ended = timed("--json", "--lane", name, *verb, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
                assert (ended.code, ended.json["error"]["kind"]) == (9, "lane-failed")
                assert f"brainlaned@{name}" in ended.err and "exit-code" in ended.err
                assert ("may have been stored" in ended.err) is (verb[0] == "submit")
    finally:
        place.unlink(missing_ok=True)
        place.parent.rmdir()


def test_what_to_try_names_the_lane_that_was_asked(scripted: ScriptedLane) -> None:
    scripted.script(lambda connection: time.sleep(1) and None)  # for the client to have given up
    silent = run("--socket", scripted.path, "--answer-within", "0.3", "list")
    assert f", or brainctl --socket {scripted.path} --answer-within 60 " in silent.err
    scripted.script(refused("too-late", 409))
    late = run("--json", "--socket", scripted.path, "cancel", "5")
    assert late.err.endswith(f"next: brainctl --socket {scripted.path} status\n")
    # What the lane said is passed on unchanged.
    assert late.json["error"]["next_action"] == "brainctl status"


AS_NOBODY = """
import grp, json, os, sys
from brainctl import __main__, cli, client, errors, out, render, request, session, unreachable
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.exit(__main__.main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming somebody else takes root")
def test_a_socket_that_may_not_be_used_exits_8() -> None:
    # Not in tmp_path, whose parents nobody may search: both the socket and a directory must be told of.
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "s")
        lane = ScriptedLane(path)
        path.chmod(0o600)
        for mode in (0o711, 0o700):
            Path(directory).chmod(mode)
            ended = python("-c", AS_NOBODY, "--json", "--socket", str(path), "submit", "hello")
            assert (ended.returncode, json.loads(ended.stdout)["error"]["kind"]) == (8, "no-permission"), ended.stderr
            assert re.fullmatch(
                r"brainctl: cannot reach the lane: no permission [^\n]*nothing was stored[^\n]*\n", ended.stderr
            )
        lane.close()


def test_a_patient_client_waits_longer_when_told_to(scripted: ScriptedLane) -> None:
    def slow(connection: socket.socket) -> None:
        read_request(connection)
        time.sleep(1.0)
        connection.sendall(answered({"jobs": [], "next": None}))

    scripted.script(slow)
    assert run("--socket", scripted.path, "--answer-within", "0.3", "list").code == 9
    assert run("--socket", scripted.path, "--answer-within", "20", "list").code == 0


def test_a_socket_path_over_the_limit_exits_2_with_its_length(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 80)
    refusal = run("--socket", str(path), "list")
    assert refusal.code == 2
    assert str(path) in refusal.err and f"{len(os.fsencode(path))} bytes" in refusal.err and "107" in refusal.err


def test_waiting_survives_a_restart_of_the_lane(make_lane: Any) -> None:
    lane = make_lane()
    lane.post("/v1/lane/pause")
    job = lane.submit("hello")
    process = subprocess.Popen(
        [sys.executable, "-m", "brainctl", "--socket", str(lane.socket), "wait", str(job["id"])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        cwd="/",
    )
    time.sleep(1)  # for it to have asked once
    lane.stop()
    time.sleep(1)  # for it to find nobody
    lane.start()
    lane.post("/v1/lane/resume")
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, f"{job['id']} done\n".encode(), b"")


# The reader of standard output.


def test_a_reader_who_leaves_ends_it_like_any_filter(ask: Any, shared_lane: Lane) -> None:
    for words in (["list"], ["--help"]):
        read, write = os.pipe()
        os.close(read)
        ended = subprocess.run(
            [sys.executable, "-m", "brainctl", "--socket", str(shared_lane.socket), *words],
            stdout=write,
            stderr=subprocess.PIPE,
            env=environment(),
            cwd="/",
            timeout=LIMIT_S,
            check=False,
        )
        os.close(write)
        assert (ended.returncode, ended.stderr) == (-signal.SIGPIPE, b"")


def test_a_full_disk_behind_standard_output_is_one_line(shared_lane: Lane) -> None:
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "brainctl", "--socket", str(shared_lane.socket), "list"],
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(),
            cwd="/",
            timeout=LIMIT_S,
            check=False,
        )
    assert ended.returncode == 10
    assert ended.stderr.decode().count("\n") == 1 and b"No space left" in ended.stderr


def test_what_a_terminal_cannot_show_is_escaped_and_not_a_traceback(ask: Any) -> None:
    number = ask("submit", "--label", "where=Århus 好", "hello").text.strip()
    listed = ask("list", "--label", "where=Århus 好", env={"PYTHONIOENCODING": "ascii"})
    assert listed.code == 0
    assert number in listed.text and "\\xc5rhus" in listed.text


# The demonstration.


def alive_with(mark: str) -> list[int]:
    """The processes that have this in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


@pytest.mark.local_model
@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="the extra `local` is not installed")
def test_the_demo_prints_a_real_answer_and_its_timeline_and_leaves_nothing(tmp_path: Path) -> None:
    done = run("demo", "Say hello.", env={"TMPDIR": str(tmp_path), "MARK": f"demo-{tmp_path}"})
    assert done.code == 0
    heading, said, timeline = re.split(r"^== .*$", done.text, flags=re.M)
    assert heading.strip() == ""
    assert said.strip()
    assert re.findall(r"^ +\d+\.\d{3}  (\S+)", timeline, re.M)[-2:] == ["ended", "done"]
    assert list(tmp_path.iterdir()) == []
    assert alive_with(f"demo-{tmp_path}") == []


@pytest.mark.local_model
@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="the extra `local` is not installed")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("after", ["", "== job"])
def test_a_demo_that_is_stopped_leaves_nothing(tmp_path: Path, number: int, code: int, after: str) -> None:
    env = environment({"TMPDIR": str(tmp_path), "MARK": f"demo-{tmp_path}", "PYTHONUNBUFFERED": "1"})
    process = subprocess.Popen(
        [sys.executable, "-m", "brainctl", "demo", "Tell me a long story."],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        cwd="/",
    )
    assert process.stdout is not None
    if after:
        while after.encode() not in (line := process.stdout.readline()):
            assert line
    else:
        deadline = time.monotonic() + 20
        while len(alive_with(f"demo-{tmp_path}")) < 2:
            assert time.monotonic() < deadline
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert re.fullmatch(r"brainctl: [^\n]+\n", err.decode())
    assert list(tmp_path.iterdir()) == []
    assert alive_with(f"demo-{tmp_path}") == []


def test_a_demo_without_the_model_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "xllamacpp.py").write_text("raise ImportError('No module named xllamacpp')")
    refusal = run("demo", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert (refusal.code, refusal.out) == (9, b"")
    assert "pip install 'brainlane[local]'" in refusal.err


# Start-up.


def test_a_command_loads_only_what_it_needs(shared_lane: Lane) -> None:
    for words in (["submit", "hello"], ["list"], ["status"]):
        ended = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "brainctl", "--socket", str(shared_lane.socket), *words],
            capture_output=True,
            text=True,
            env=environment(),
            cwd="/",
            timeout=LIMIT_S,
            check=True,
        )
        loaded = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines() if "|" in line}
        heavy = {
            "sqlite3",
            "starlette",
            "uvicorn",
            "httpx",
            "rich",
            "http",
            "ssl",
            "email",
            "asyncio",
            "logging",
            "pydantic",
        }
        assert not heavy & {name.split(".")[0] for name in loaded}
        assert {name for name in loaded if name.startswith("brainlaned")} == {"brainlaned", "brainlaned.wire"}


def test_every_status_of_the_contract_can_be_filtered_by(ask: Any) -> None:
    for each in Status:
        assert ask("list", "--status", each).code == 0
