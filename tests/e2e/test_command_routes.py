"""Local commands as brains of a real lane: every way in which one can end, and that none outlives its attempt.

Most routes here are a shell that reads its script on stdin, so the prompt says what the command does. What must be
counted or waited for goes through files in a directory of the test, since a command has no other way to us.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from brainlaned.brains.runner import identity_of
from tests.lane import Lane, members_of, running_lane, wait_until

PATIENCE_S = 60
"""More than anything here takes on a busy machine."""

CLOSED_S = 3600
"""The first wait of a route whose gate must be seen closed."""

SECRET = "CANARY-3f9/key+1"
MIB = 1024 * 1024


def command_route(name: str, *command: str, more: str = "", retry_first_s: float = 0.2) -> str:
    # Strings of JSON are strings of TOML.
    words = json.dumps(command or ["sh"])
    return f'[routes.{name}]\nkind = "command"\ncommand = {words}\nretry_first_s = {retry_first_s}\n{more}\n'


def config_of(*routes: str, lane: str = "") -> str:
    return "\n".join([f'[lane]\ndefault_route = "sh"\n{lane}', command_route("sh"), *routes])


ROUTES = [
    command_route("cat", "cat"),
    command_route("once", more="max_attempts = 1"),
    command_route("twice", more="max_attempts = 2"),
    command_route("again", more="may_run_twice = true"),
    command_route("later", more="max_attempts = 1"),
    command_route("closed", retry_first_s=CLOSED_S),
    command_route(
        "mapped", more='max_attempts = 1\n[routes.mapped.exit_status]\n3 = "retry"\n75 = "fail"\n2 = "error"'
    ),
    command_route("small", more="max_output_mib = 1"),
    command_route("short", more="total_s = 2"),
]


class Scratch:
    """Files through which a script tells what it did and is told to go on."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory

    def __str__(self) -> str:
        return shlex.quote(os.fspath(self._directory))

    @property
    def count_run(self) -> str:
        """A line of a script that writes down that it runs, with the number of its process."""
        return f"cd {self}; echo $$ >> runs;"

    @property
    def wait_to_go(self) -> str:
        return "until [ -e go ]; do sleep 0.05; done;"

    @property
    def runs(self) -> list[str]:
        file = self._directory / "runs"
        return file.read_text().split() if file.exists() else []

    def go(self) -> None:
        (self._directory / "go").touch()


@pytest.fixture
def scratch(tmp_path: Path) -> Scratch:
    return Scratch(tmp_path / "scratch")


@pytest.fixture(scope="module")
def lane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lane]:
    """One lane for all tests that neither stop it nor leave a gate closed."""
    with running_lane(tmp_path_factory.mktemp("commands"), config_of(*ROUTES)) as lane:
        yield lane
    assert "Traceback" not in lane.log.read_text()


@pytest.fixture
def own_lane(tmp_path: Path) -> Iterator[Lane]:
    """A lane of the test's own, not started; whatever its commands left is ended in the end."""
    lane = Lane(tmp_path / "lane", config_of())
    try:
        yield lane
    finally:
        groups = [group_of(lane, file.name) for file in (lane.state_dir / "spool").glob("*.identity")]
        if lane.process is not None and lane.process.poll() is None:
            lane.kill()
        for group in groups:
            with suppress(ProcessLookupError):
                if members_of(group):
                    os.killpg(group, signal.SIGKILL)
    assert "Traceback" not in lane.log.read_text()


def identity_file(lane: Lane, job: dict[str, Any]) -> Path:
    return lane.state_dir / "spool" / f"{job['id']}-1.identity"


def group_of(lane: Lane, name: str) -> int:
    """Return the process group that an identity names; 0 where it is forged or of an earlier boot."""
    pid = int((lane.state_dir / "spool" / name).read_text().split()[0])
    return pid if (identity_of(pid) or "") == (lane.state_dir / "spool" / name).read_text() else 0


def begun(lane: Lane, script: str, **fields: Any) -> tuple[dict[str, Any], int]:
    """Begin a script that prints something when it is ready. Return its job, and its process group, when it has."""
    job = lane.submit(script, **fields)
    output = lane.state_dir / "spool" / f"{job['id']}-1.stdout"
    wait_until(lambda: output.exists() and output.stat().st_size > 0)
    return job, group_of(lane, identity_file(lane, job).name)


def output(lane: Lane, job: dict[str, Any]) -> str:
    answer = lane.get(f"/v1/jobs/{job['id']}/output")
    assert answer.status == 200, answer.body
    return answer.body.decode()


def partial(lane: Lane, job: dict[str, Any]) -> str:
    answer = lane.get(f"/v1/jobs/{job['id']}/output?partial=1")
    assert answer.status == 200, answer.body
    return answer.body.decode()


def ended(lane: Lane, script: str, **fields: Any) -> dict[str, Any]:
    """Run a script to its end, and return the job with its attempts."""
    job = lane.submit(script, **fields)
    lane.wait(job["id"], PATIENCE_S)
    return attempted(lane, job)


def attempted(lane: Lane, job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = lane.get(f"/v1/jobs/{job['id']}").json
    return found


def said(job: dict[str, Any]) -> tuple[str, str]:
    return job["status"], job["reason"]


def of_attempts(job: dict[str, Any]) -> list[tuple[str, str, int | None]]:
    return [(each["status"], each["reason"], each["exit_status"]) for each in job["attempts"]]


def gate(lane: Lane, route: str) -> dict[str, Any]:
    (found,) = (each for each in lane.get("/v1/status").json["routes"] if each["route"] == route)
    return dict(found)


# Prompt and answer.


@pytest.mark.parametrize(
    "prompt",
    ["no line end", "\x00\x1b[31m\x7f", "a\r\nb\rc\n\n", "\ufeff\u2028\U0001f30d\ufffd", "x\n" * (MIB // 2)],
    ids=["no line end", "controls", "line ends", "beyond ASCII", "a mebibyte"],
)
def test_what_a_command_is_told_arrives_exactly_and_so_does_its_answer(lane: Lane, prompt: str) -> None:
    job = ended(lane, prompt, route="cat")
    assert said(job) == ("done", "answered")
    assert output(lane, job) == prompt
    assert of_attempts(job) == [("succeeded", "answered", 0)]
    assert job["flags"] == [] and job["model"] == "cat" and job["attempts"][0]["endpoint"] == "cat"


def test_several_messages_are_one_text_with_empty_lines_and_the_parts_of_one_are_not(lane: Lane) -> None:
    parts = [{"type": "text", "text": "two"}, {"type": "text", "text": " three"}]
    messages = [{"role": "system", "content": "one"}, {"role": "user", "content": parts}]
    job = ended(lane, request={"messages": messages}, script="", route="cat")
    assert output(lane, job) == "one\n\ntwo three"


def test_an_answer_that_is_no_text_is_shown_as_far_as_it_is_and_kept_as_it_came(lane: Lane) -> None:
    job = ended(lane, r"printf 'a\377b\0c'")
    assert (said(job), job["flags"]) == (("done", "answered"), ["invalid-bytes"])
    assert output(lane, job) == "a\ufffdb\x00c"
    (row,) = lane.rows("select raw from attempt_parts where job_id = ?", job["id"])
    assert row["raw"] == b"a\xffb\x00c"


def test_the_response_of_a_command_is_a_completion_like_any_other(lane: Lane) -> None:
    job = ended(lane, "echo hello")
    response = lane.get(f"/v1/jobs/{job['id']}/response").json
    assert response["object"] == "chat.completion"
    assert response["choices"][0]["message"] == {"role": "assistant", "content": "hello\n"}
    assert response["usage"] is None is job["usage"]


def test_the_command_line_of_llm_is_a_brain(tmp_path: Path) -> None:
    llm = shutil.which("llm")
    if llm is None or "Echo: echo" not in subprocess.check_output([llm, "models"], text=True, timeout=PATIENCE_S):
        pytest.skip("llm and its plugin llm-echo are not installed")
    more = f"[routes.llm.environment]\nLLM_USER_PATH = {json.dumps(os.fspath(tmp_path / 'llm'))}"
    config = config_of(command_route("llm", "llm", "-m", "echo", "--no-stream", more=more))
    with running_lane(tmp_path / "lane", config) as lane:
        job = ended(lane, "say this", route="llm")
        assert said(job) == ("done", "answered")
        assert "say this" in output(lane, job)


# Every way to end.


def test_a_command_that_says_nothing_is_held_with_what_it_complained_of(lane: Lane, scratch: Scratch) -> None:
    job = ended(lane, f"{scratch.count_run} echo no words >&2")
    assert said(job) == ("held", "answer-unreadable")
    assert of_attempts(job) == [("unknown", "answer-unreadable", 0)]
    assert "exit status 0 and no text: no words" in job["detail"]
    assert len(scratch.runs) == 1 and gate(lane, "sh")["open"]


def test_a_command_that_asks_for_a_later_try_is_tried_later_and_uses_no_attempt(lane: Lane, scratch: Scratch) -> None:
    job = ended(lane, f"{scratch.count_run} [ $(wc -l < runs) = 3 ] || exit 75; echo answer", route="later")
    assert (said(job), output(lane, job)) == (("done", "answered"), "answer\n")
    assert of_attempts(job) == [("failed", "asked-to-wait", 75)] * 2 + [("succeeded", "answered", 0)]
    assert (job["attempts_used"], len(scratch.runs)) == (1, 3)
    assert gate(lane, "later")["open"]


def test_while_it_is_to_be_tried_later_its_gate_is_closed_and_no_other(lane: Lane, scratch: Scratch) -> None:
    job = lane.submit(f"{scratch.count_run} echo come back >&2; exit 75", route="closed")
    wait_until(lambda: gate(lane, "closed")["open"] is False)
    waiting = attempted(lane, job)
    assert (waiting["status"], waiting["waiting"], waiting["attempts_used"]) == ("queued", "route-gated", 0)
    closed = gate(lane, "closed")
    assert closed["reason"] == "asked-to-wait" and closed["next_probe_at"] is not None
    assert "exit status 75: come back" in closed["detail"]
    behind = lane.submit("echo behind", route="closed")
    assert said(ended(lane, "echo beside")) == ("done", "answered")
    assert attempted(lane, behind)["attempts"] == []
    for each in (job, behind):
        lane.post(f"/v1/jobs/{each['id']}/cancel")
    assert lane.post("/v1/lane/resume", {"route": "closed"}).status == 200
    assert len(scratch.runs) == 1


def test_a_command_that_cannot_succeed_fails_at_once(lane: Lane, scratch: Scratch) -> None:
    job = ended(lane, f"{scratch.count_run} echo wrong usage >&2; exit 2")
    assert said(job) == ("failed", "bad-request")
    assert of_attempts(job) == [("failed", "bad-request", 2)]
    assert "exit status 2: wrong usage" in job["detail"]
    assert len(scratch.runs) == 1 and gate(lane, "sh")["open"]


def test_any_other_status_costs_an_attempt_until_none_is_left(lane: Lane, scratch: Scratch) -> None:
    job = ended(lane, f"{scratch.count_run} echo part; echo first >&2; echo and last >&2; exit 3", route="twice")
    assert said(job) == ("failed", "attempts-exhausted")
    assert of_attempts(job) == [("failed", "upstream-error", 3), ("failed", "attempts-exhausted", 3)]
    assert "exit status 3: first and last" in job["detail"]
    assert (job["attempts_used"], len(scratch.runs)) == (2, 2)
    assert partial(lane, job) == "part\n"


def test_a_status_that_another_try_does_not_give_is_forgotten(lane: Lane, scratch: Scratch) -> None:
    job = ended(lane, f"{scratch.count_run} [ $(wc -l < runs) = 2 ] || exit 1; echo answer", route="twice")
    assert (said(job), output(lane, job), job["attempts_used"]) == (("done", "answered"), "answer\n", 2)


def test_a_command_that_a_signal_ended_costs_an_attempt(lane: Lane) -> None:
    job = ended(lane, "echo part; kill -9 $$", route="once")
    assert said(job) == ("failed", "attempts-exhausted")
    assert of_attempts(job) == [("failed", "attempts-exhausted", -9)]
    assert "signal 9" in job["detail"]


def test_the_route_says_what_a_status_means(lane: Lane, scratch: Scratch) -> None:
    again = ended(lane, f"{scratch.count_run} [ $(wc -l < runs) = 2 ] || exit 3; echo answer", route="mapped")
    assert (said(again), again["attempts_used"]) == (("done", "answered"), 1)
    assert said(ended(lane, "exit 75", route="mapped")) == ("failed", "bad-request")
    assert said(ended(lane, "exit 2", route="mapped")) == ("failed", "attempts-exhausted")


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("no-such-program", "No such file or directory"),
        ("plain", "Permission denied"),
        ("directory", "Permission denied"),
    ],
)
def test_a_program_that_cannot_be_started_closes_its_gate_until_it_can_be(
    tmp_path: Path, program: str, cause: str
) -> None:
    path = tmp_path / program
    if program == "plain":
        path.write_text("#!/bin/sh\n")
    elif program == "directory":
        path.mkdir()
    broken = command_route("broken", os.fspath(path), more="max_attempts = 1", retry_first_s=CLOSED_S)
    with running_lane(tmp_path / "lane", config_of(broken)) as lane:
        job = lane.submit("hello", route="broken")
        wait_until(lambda: gate(lane, "broken")["open"] is False)
        waiting = attempted(lane, job)
        assert (waiting["status"], waiting["reason"], waiting["waiting"]) == ("queued", "not-executed", "route-gated")
        assert of_attempts(waiting) == [("interrupted", "not-executed", None)]
        assert waiting["attempts_used"] == 0
        assert f"not started: {path}: {cause}" in waiting["detail"]
        closed = gate(lane, "broken")
        assert closed["reason"] == "unreachable" and closed["next_probe_at"] is not None
        assert said(ended(lane, "echo beside")) == ("done", "answered")
        if program == "directory":
            path.rmdir()
        path.write_text("#!/bin/sh\ncat\n")
        path.chmod(0o755)
        assert lane.post("/v1/lane/resume", {"route": "broken"}).status == 200
        assert said(lane.wait(job["id"], PATIENCE_S)) == ("done", "answered")
        assert output(lane, job) == "hello" and gate(lane, "broken")["open"]


LOSES_ITS_RUNNER = "[ $(wc -l < runs) = 2 ] || { echo part; kill -9 $PPID; sleep 300; }; echo answer"


def test_a_command_whose_runner_was_killed_is_held_with_its_part(lane: Lane, scratch: Scratch) -> None:
    job = ended(lane, f"{scratch.count_run} {LOSES_ITS_RUNNER}")
    assert said(job) == ("held", "answer-incomplete")
    assert of_attempts(job) == [("unknown", "answer-incomplete", None)]
    assert (partial(lane, job), len(scratch.runs)) == ("part\n", 1)


def test_a_command_whose_runner_was_killed_runs_again_where_it_may(lane: Lane, scratch: Scratch) -> None:
    job = ended(lane, f"{scratch.count_run} {LOSES_ITS_RUNNER}", route="again")
    assert (said(job), output(lane, job)) == (("done", "answered"), "answer\n")
    assert of_attempts(job) == [("unknown", "asked-again", None), ("succeeded", "answered", 0)]
    assert (job["attempts_used"], len(scratch.runs)) == (2, 2)


# While it runs.


def test_text_is_streamed_before_the_command_ends(lane: Lane, scratch: Scratch) -> None:
    job, _ = begun(lane, f"{scratch.count_run} printf 'caf\\303'; {scratch.wait_to_go} printf '\\251 noir'")
    with closing(socket.socket(socket.AF_UNIX)) as client:
        client.settimeout(PATIENCE_S)
        client.connect(os.fspath(lane.socket))
        client.sendall(f"GET /v1/jobs/{job['id']}/stream HTTP/1.0\r\n\r\n".encode())
        seen = b""
        while b'"caf"' not in seen:
            seen += client.recv(65536)
        assert attempted(lane, job)["status"] == "running"
        assert partial(lane, job).startswith("caf")
        scratch.go()
        while data := client.recv(65536):
            seen += data
    body = seen.partition(b"\r\n\r\n")[2].decode()
    events = [dict(line.split(": ", 1) for line in event.splitlines() if ": " in line) for event in body.split("\n\n")]
    texts = [json.loads(event["data"])["text"] for event in events if event.get("event") == "text"]
    assert (texts[0], "".join(texts)) == ("caf", "caf\u00e9 noir")
    assert json.loads(next(event["data"] for event in events if event.get("event") == "end"))["status"] == "done"


@pytest.mark.parametrize("descriptor", [1, 2], ids=["stdout", "stderr"])
def test_a_flood_is_cut_at_the_limit_and_held(lane: Lane, descriptor: int) -> None:
    job = ended(lane, f"echo part; yes >&{descriptor}", route="small")
    assert said(job) == ("held", "answer-incomplete")
    assert job["attempts"][0]["reason"] == "output-limit"
    assert partial(lane, job).startswith("part\n")
    assert len(partial(lane, job)) == (MIB if descriptor == 1 else len("part\n"))


def test_a_command_that_lasts_too_long_is_ended_and_held(lane: Lane) -> None:
    job, group = begun(lane, "echo part; sleep 300 & sleep 300; wait", route="short")
    assert said(lane.wait(job["id"], PATIENCE_S)) == ("held", "answer-incomplete")
    assert attempted(lane, job)["attempts"][0]["reason"] == "total-limit"
    assert partial(lane, job) == "part\n"
    wait_until(lambda: members_of(group) == set())


def test_a_command_that_ends_well_because_we_ended_it_has_not_answered(lane: Lane) -> None:
    job = ended(lane, "trap 'exit 0' TERM; echo part; sleep 300 & wait", route="short")
    assert said(job) == ("held", "answer-incomplete")


def test_a_grandchild_that_keeps_the_output_open_does_not_hold_the_job_and_is_gone(
    lane: Lane, scratch: Scratch
) -> None:
    job = ended(lane, f"{scratch.count_run} sleep 300 & echo $! >> runs; echo x")
    assert (said(job), output(lane, job)) == (("done", "answered"), "x\n")
    assert len(scratch.runs) == 2
    wait_until(lambda: not any(is_running(pid) for pid in scratch.runs))


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("ignores", [False, True], ids=["that listens", "that ignores SIGTERM"])
def test_a_cancel_leaves_no_process_of_the_group(lane: Lane, ignores: bool) -> None:
    deafness = "trap '' TERM; " if ignores else ""
    job, group = begun(lane, f"{deafness}sleep 300 & echo part; sleep 300; wait")
    wait_until(lambda: len(members_of(group)) == 4)  # the runner, the shell and both of its children
    assert lane.post(f"/v1/jobs/{job['id']}/cancel").status == 200
    assert lane.wait(job["id"], PATIENCE_S)["status"] == "cancelled"
    wait_until(lambda: members_of(group) == set())
    assert partial(lane, job) == "part\n"
    assert attempted(lane, job)["attempts"][0]["status"] == "cancelled"


def test_a_job_that_was_cancelled_before_its_turn_is_never_started(lane: Lane, scratch: Scratch) -> None:
    first, _ = begun(lane, f"cd {scratch}; echo ready; {scratch.wait_to_go}")
    second = lane.submit(f"{scratch.count_run} echo ran")
    lane.post(f"/v1/jobs/{second['id']}/cancel")
    scratch.go()
    assert lane.wait(first["id"], PATIENCE_S)["status"] == "done"
    assert attempted(lane, second)["status"] == "cancelled"
    assert said(ended(lane, "echo next")) == ("done", "answered")
    assert scratch.runs == []


# After the daemon died.


def test_a_command_that_outlived_the_daemon_is_gone_before_anything_else_is_claimed(
    own_lane: Lane, scratch: Scratch
) -> None:
    own_lane.start()
    job, group = begun(own_lane, f"{scratch.count_run} echo part; sleep 300 & echo $! >> runs; sleep 300; wait")
    wait_until(lambda: len(members_of(group)) == 4)
    look = f'cd {scratch}; for pid in $(cat runs) {group}; do grep "State:.[^ZX]" /proc/$pid/status; done; echo looked'
    following = own_lane.submit(look)
    own_lane.kill()
    assert len(members_of(group)) == 4
    own_lane.start()
    assert members_of(group) == set()
    assert said(own_lane.wait(job["id"])) == ("held", "answer-incomplete")
    assert partial(own_lane, job) == "part\n"
    assert own_lane.wait(following["id"], PATIENCE_S)["status"] == "done"
    assert output(own_lane, following) == "looked\n"
    assert len(scratch.runs) == 2  # itself and its child
    assert [path.name for path in (own_lane.state_dir / "spool").iterdir()] == []


def test_a_command_that_outlived_the_daemon_is_run_again_only_by_leave_and_never_beside_itself(
    own_lane: Lane, scratch: Scratch
) -> None:
    own_lane.start()
    first_time = "[ $(wc -l < runs) = 2 ] || { echo part; sleep 300; }"
    script = f"{scratch.count_run} {first_time}; grep State /proc/$(head -n 1 runs)/status; echo end"
    job, group = begun(own_lane, script, may_run_twice=True)
    own_lane.kill()
    own_lane.start()
    assert own_lane.wait(job["id"], PATIENCE_S)["status"] == "done"
    assert members_of(group) == set() and len(scratch.runs) == 2
    assert output(own_lane, job) in {"end\n", "State:\tZ (zombie)\nend\n"}


def test_a_command_that_ended_without_the_daemon_has_answered(own_lane: Lane, scratch: Scratch) -> None:
    own_lane.start()
    job, _ = begun(own_lane, f"{scratch.count_run} echo ready; {scratch.wait_to_go} echo answer; echo why >&2")
    own_lane.kill()
    scratch.go()
    wait_until(identity_file(own_lane, job).with_suffix(".status").exists)
    own_lane.start()
    done = own_lane.wait(job["id"])
    assert (said(done), output(own_lane, job)) == (("done", "answered"), "ready\nanswer\n")
    assert of_attempts(attempted(own_lane, job)) == [("succeeded", "answered", 0)]
    assert len(scratch.runs) == 1


@pytest.mark.parametrize(
    ("status", "expected"),
    [(2, ("failed", "bad-request")), (3, ("queued", "upstream-error")), (75, ("queued", "asked-to-wait"))],
)
def test_a_status_that_was_written_without_the_daemon_means_what_it_always_means(
    own_lane: Lane, scratch: Scratch, status: int, expected: tuple[str, str]
) -> None:
    own_lane.config.write_text(config_of().replace("retry_first_s = 0.2", f"retry_first_s = {CLOSED_S}"))
    own_lane.start()
    job, _ = begun(own_lane, f"{scratch.count_run} echo ready; {scratch.wait_to_go} echo why >&2; exit {status}")
    own_lane.kill()
    scratch.go()
    wait_until(identity_file(own_lane, job).with_suffix(".status").exists)
    own_lane.start()
    found = attempted(own_lane, job)
    assert said(found) == expected and f"exit status {status}: why" in found["detail"]
    assert len(scratch.runs) == 1


def vanish_at(lane: Lane, cut: str, script: str) -> dict[str, Any]:
    lane.start(cut=cut)
    assert lane.post("/v1/lane/pause").status == 200
    job = lane.submit(script)
    lane.vanish()
    return job


def test_an_answer_that_was_complete_when_the_daemon_died_is_delivered_and_not_asked_for_again(
    own_lane: Lane, scratch: Scratch
) -> None:
    job = vanish_at(own_lane, "answered", f"{scratch.count_run} echo answer")
    own_lane.start()
    done = own_lane.wait(job["id"])
    assert (said(done), output(own_lane, job)) == (("done", "answered"), "answer\n")
    assert len(scratch.runs) == 1 and attempted(own_lane, job)["attempt_count"] == 1


def test_an_answer_that_was_stored_when_the_daemon_died_leaves_no_files(own_lane: Lane, scratch: Scratch) -> None:
    job = vanish_at(own_lane, "stored", f"{scratch.count_run} echo answer")
    assert list((own_lane.state_dir / "spool").iterdir()) != []
    own_lane.start()
    assert (output(own_lane, job), len(scratch.runs)) == ("answer\n", 1)
    assert list((own_lane.state_dir / "spool").iterdir()) == []


def test_a_command_that_was_not_started_when_the_daemon_died_is_run_once(own_lane: Lane, scratch: Scratch) -> None:
    job = vanish_at(own_lane, "armed", f"{scratch.count_run} echo answer")
    assert scratch.runs == []
    own_lane.start()
    done = own_lane.wait(job["id"], PATIENCE_S)
    assert (said(done), output(own_lane, job)) == (("done", "answered"), "answer\n")
    assert of_attempts(attempted(own_lane, job)) == [
        ("interrupted", "not-executed", None),
        ("succeeded", "answered", 0),
    ]
    assert (attempted(own_lane, job)["attempts_used"], len(scratch.runs)) == (1, 1)


@pytest.mark.parametrize("wrong", ["start time", "boot"])
def test_a_number_that_belongs_to_another_process_now_is_never_signalled(own_lane: Lane, wrong: str) -> None:
    own_lane.start()
    job, group = begun(own_lane, "echo part; sleep 300")
    own_lane.kill()
    os.killpg(group, signal.SIGKILL)
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as stranger:
        pid, started, boot = (identity_of(stranger.pid) or "").split()
        forged = f"{pid} {int(started) + 1} {boot}" if wrong == "start time" else f"{pid} {started} {boot[::-1]}"
        identity_file(own_lane, job).write_text(forged)
        own_lane.start()
        assert said(own_lane.wait(job["id"])) == ("held", "answer-incomplete")
        assert partial(own_lane, job) == "part\n"
        assert said(ended(own_lane, "echo next")) == ("done", "answered")
        assert stranger.poll() is None
        stranger.kill()


def test_a_grandchild_of_a_command_that_ended_without_the_daemon_is_gone_too(own_lane: Lane, scratch: Scratch) -> None:
    own_lane.start()
    job, group = begun(own_lane, f"cd {scratch}; sleep 300 & echo ready; {scratch.wait_to_go}")
    own_lane.kill()
    scratch.go()
    wait_until(identity_file(own_lane, job).with_suffix(".status").exists)
    try:
        own_lane.start()
        assert said(own_lane.wait(job["id"])) == ("done", "answered")
        assert members_of(group) == set()
    finally:
        if members_of(group):
            os.killpg(group, signal.SIGKILL)


# What it is given, and what it must not get.


LEFT_OUT = {
    "NOTIFY_SOCKET": "/no/such/socket",
    "WATCHDOG_USEC": "3600000000",
    "WATCHDOG_PID": "1",
    "LISTEN_FDS": "1",
    "LISTEN_PID": "1",
    "LISTEN_FDNAMES": "control",
    "BRAINLANE_CANARY": "ours",
    "PYTHONSTARTUP": "/no/such/file",
}


@pytest.fixture
def secret_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lane]:
    """A lane that has everything in its environment that systemd may put there, and a secret to pass on."""
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / "the-key").write_text(f"{SECRET}\n")
    for name, value in {**LEFT_OUT, "CREDENTIALS_DIRECTORY": os.fspath(credentials)}.items():
        monkeypatch.setenv(name, value)
    more = '[routes.{0}.environment]\nPLAIN = "a b"\n[routes.{0}.secrets]\nTHE_KEY = "the-key"'
    routes = [
        command_route("environment", "cat", "/proc/self/environ", more=more.format("environment")),
        command_route("keyed", more="max_attempts = 1\n" + more.format("keyed")),
        command_route("bare", "cat", "/proc/self/environ"),
    ]
    with running_lane(tmp_path / "lane", config_of(*routes)) as lane:
        yield lane


def test_the_environment_is_what_the_route_names_and_a_few_more(secret_lane: Lane) -> None:
    few = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ["HOME"],
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        "TERM": "dumb",
        "NO_COLOR": "1",
    }
    if few["LANG"] in {"", "C", "POSIX"}:
        few["LANG"] = "C.UTF-8"
    found = {}
    for route in ("bare", "environment"):
        job = ended(secret_lane, "", route=route)
        pairs = output(secret_lane, job).removesuffix("\0").split("\0")
        found[route] = dict(pair.split("=", 1) for pair in pairs)
    assert found == {"bare": few, "environment": {**few, "PLAIN": "a b", "THE_KEY": "[removed]"}}


def test_a_command_has_no_descriptor_above_two(lane: Lane) -> None:
    job = ended(lane, "ls /proc/$$/fd; ls /proc/$PPID/fd")
    # Low numbers only: a shell may put a descriptor of its own at 10 and above.
    assert [number for number in output(lane, job).split() if int(number) < 10] == ["0", "1", "2"] * 2


def test_a_secret_of_the_environment_stands_nowhere(secret_lane: Lane, scratch: Scratch) -> None:
    lane = secret_lane
    says = r'printf "%s" "$THE_KEY"; printf "\377 out %s\n" "$THE_KEY"; echo "err $THE_KEY" >&2;'
    whole = lane.submit(f"{says} true", route="keyed")
    failed = lane.submit(f"{says} exit 3", route="keyed")
    silent = lane.submit('echo "err $THE_KEY" >&2', route="keyed")
    for job in (whole, failed, silent):
        lane.wait(job["id"], PATIENCE_S)
    held, group = begun(lane, f"cd {scratch}; {says} {scratch.wait_to_go}", route="keyed")
    seen = [lane.get(f"/v1/jobs/{held['id']}/output?partial=1").body]
    lines = [Path(f"/proc/{pid}/cmdline") for pid in members_of(group)]
    assert len(lines) >= 2
    for line in lines:
        with suppress(FileNotFoundError):  # a sleep that has ended
            seen.append(line.read_bytes())
    streamed: list[bytes] = []
    stream = threading.Thread(target=lambda: streamed.append(lane.get(f"/v1/jobs/{held['id']}/stream").body))
    stream.start()
    scratch.go()
    stream.join(PATIENCE_S)
    assert output(lane, whole) == output(lane, held) == "[removed]\ufffd out [removed]\n"
    assert "err [removed]" in attempted(lane, failed)["detail"]
    assert "err [removed]" in attempted(lane, silent)["detail"]
    jobs = [job["id"] for job in (whole, failed, silent, held)]
    seen += streamed
    seen += [lane.get(f"/v1/jobs/{job}{what}").body for job in jobs for what in ("", "/response", "/stream")]
    seen.append(lane.get("/v1/status").body + lane.get("/v1/jobs").body)
    for words in (["list"], ["status"], ["recover"], *(["show", str(job)] for job in jobs)):
        how = [sys.executable, "-m", "brainctl", "--socket", str(lane.socket), *words]
        seen.append(subprocess.run(how, capture_output=True, timeout=PATIENCE_S, check=True).stdout)
    assert lane.stop() == 0
    seen += [file.read_bytes() for file in lane.directory.rglob("*") if file.is_file()]
    assert b"[removed]" in b"".join(seen)
    assert SECRET.encode() not in b"".join(seen)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"temperature": 0}, "request.temperature"),
        ({"max_tokens": 5}, "request.max_tokens"),
        ({"model": "another"}, "request.model"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "request.messages[0].content",
        ),
    ],
)
def test_what_no_command_can_be_told_is_refused_by_its_place(lane: Lane, request_: dict[str, Any], field: str) -> None:
    body = {"request": {"messages": [{"role": "user", "content": "hello"}], **request_}, "route": "cat"}
    answer = lane.post("/v1/jobs", body)
    assert (answer.status, answer.error["kind"]) == (422, "invalid")
    assert f"'{field}'" in answer.error["message"]


# At a stop.


def terminate(lane: Lane) -> None:
    """Send SIGTERM once, and return when the lane says that it is stopping."""
    assert lane.process is not None
    lane.process.send_signal(signal.SIGTERM)
    wait_until(lambda: lane.get("/v1/status").json["lane"]["state"] == "stopping")


def test_a_command_may_finish_after_sigterm(own_lane: Lane, scratch: Scratch) -> None:
    own_lane.start()
    job, _ = begun(own_lane, f"{scratch.count_run} echo ready; {scratch.wait_to_go} echo answer")
    following = own_lane.submit(f"{scratch.count_run} echo next")
    terminate(own_lane)
    assert attempted(own_lane, job)["status"] == "running"
    scratch.go()
    assert own_lane.process is not None and own_lane.process.wait(PATIENCE_S) == 0
    assert len(scratch.runs) == 1
    own_lane.start()
    assert output(own_lane, job) == "ready\nanswer\n"
    assert own_lane.wait(following["id"], PATIENCE_S)["status"] == "done"
    assert len(scratch.runs) == 2


@pytest.mark.parametrize(
    "deafness",
    [
        "",
        pytest.param(
            "trap '' TERM; ",
        ),
    ],
    ids=["that listens", "that ignores SIGTERM"],
)
def test_a_second_sigterm_ends_a_command_and_holds_its_job(own_lane: Lane, deafness: str) -> None:
    own_lane.start()
    job, group = begun(own_lane, f"{deafness}echo part; sleep 300 & sleep 300; wait")
    terminate(own_lane)
    assert own_lane.process is not None
    own_lane.process.send_signal(signal.SIGTERM)
    assert own_lane.process.wait(PATIENCE_S) == 0
    wait_until(lambda: members_of(group) == set())
    own_lane.start()
    held = attempted(own_lane, job)
    assert said(held) == ("held", "answer-incomplete")
    assert held["attempts"][0]["reason"] == "daemon-stopped"
    assert partial(own_lane, job) == "part\n"
