"""What a shell offers while a command line is typed: jobs with which the command can do something, and routes.

The words go to brainctl as the three shells hand them over; bash, and each other shell that is installed, is also run.
"""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.brainserver import BrainServer, close_before_answer, status
from tests.commandline import LIMIT_S, environment
from tests.lane import Lane
from tests.unit.brainctl.scripted import ScriptedLane, answered, read_request, refused

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[ScriptedLane]:
    lane = ScriptedLane(tmp_path / "s")
    yield lane
    lane.close()


def asked_by(shell: str, line: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Ask as the shell does with the cursor at the end of the line."""
    words = line.split(" ")
    handed_over = {
        "bash": {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "brainctl"],
        capture_output=True,
        text=True,
        env=environment({"_BRAINCTL_COMPLETE": f"complete_{shell}", **handed_over, **more}),
        cwd="/",
        timeout=LIMIT_S,
        check=False,
    )


def offered(shell: str, line: str, **more: str) -> list[str]:
    """Return the words that are offered, each with its help where the shell shows it."""
    ended = asked_by(shell, line, **more)
    noise = [line for line in ended.stderr.splitlines() if not line.startswith("import time:")]
    assert (ended.returncode, noise) == (0, [])
    return [line for line in ended.stdout.splitlines() if line]


@pytest.fixture
def jobs(shared_lane: Lane, shared_server: BrainServer) -> dict[str, str]:
    """A lane with one job in every status, by status."""
    shared_server.script(status(400), close_before_answer())
    found = {"failed": shared_lane.submit("a")["id"], "held": shared_lane.submit("b")["id"]}
    for number in found.values():
        shared_lane.wait(number)
    found["done"] = shared_lane.submit("c")["id"]
    shared_lane.wait(found["done"])
    held = shared_server.hold()
    shared_server.script(held)
    found["running"] = shared_lane.submit("d")["id"]
    assert held.arrived.wait(20)
    found["queued"] = shared_lane.submit("e")["id"]
    found["cancelled"] = shared_lane.submit("f")["id"]
    shared_lane.post(f"/v1/jobs/{found['cancelled']}/cancel")
    return {where: str(number) for where, number in found.items()}


@pytest.mark.parametrize(
    ("verb", "statuses"),
    [
        ("show", {"queued", "running", "held", "done", "failed", "cancelled"}),
        ("output", {"done"}),
        ("follow", {"queued", "running"}),
        ("wait", {"queued", "running"}),
        ("cancel", {"queued", "running", "held"}),
        ("retry", {"failed"}),
        ("recover", {"held"}),
        ("forget", {"done", "failed", "cancelled"}),
    ],
)
def test_a_verb_is_offered_the_jobs_with_which_it_can_do_something(
    shared_lane: Lane, jobs: dict[str, str], verb: str, statuses: set[str]
) -> None:
    words = offered("bash", f"brainctl --socket {shared_lane.socket} {verb} ")
    # Other tests of this module have left jobs as well.
    assert {where for where, number in jobs.items() if number in words} == statuses
    assert words == sorted(words, key=int, reverse=True)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_where_a_job_stands_is_shown_beside_it(shared_lane: Lane, jobs: dict[str, str], shell: str) -> None:
    words = "\n".join(offered(shell, f"brainctl --socket {shared_lane.socket} cancel "))
    between = {"zsh": '":"', "fish": "\t"}[shell]
    assert f"{jobs['held']}{between}held, sent-outcome-unknown" in words
    assert f"{jobs['queued']}{between}queued, waiting-turn #1" in words


def test_what_was_erased_is_not_offered_where_nothing_of_it_is_left(shared_lane: Lane, jobs: dict[str, str]) -> None:
    before = f"brainctl --socket {shared_lane.socket}"
    shared_lane.post(f"/v1/jobs/{jobs['done']}/forget")
    assert jobs["done"] not in offered("bash", f"{before} output ") + offered("bash", f"{before} forget ")
    assert jobs["done"] in offered("bash", f"{before} show ")


def test_only_what_begins_as_typed_is_offered(shared_lane: Lane, jobs: dict[str, str]) -> None:
    begun = jobs["held"][:1]
    words = offered("bash", f"brainctl --socket {shared_lane.socket} show {begun}")
    assert jobs["held"] in words and all(word.startswith(begun) for word in words)


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("line", ["submit --route ", "list --route ", "resume --route "])
def test_routes_are_those_of_the_lane(shared_lane: Lane, shell: str, line: str) -> None:
    words = offered(shell, f"brainctl --socket {shared_lane.socket} {line}")
    assert len(words) == 2
    assert "local" in words[0] and "other" in words[1]
    if shell != "bash":
        assert "open" in words[0]


def test_commands_options_and_statuses_are_offered() -> None:
    assert {"submit", "forget", "backup"} <= set(offered("bash", "brainctl "))
    assert offered("bash", "brainctl recov") == ["recover"]
    # A word that is also a command's name does not hide the others.
    assert offered("bash", "brainctl --lane show rec") == ["recover"]
    assert "--submitter" in offered("bash", "brainctl list --s")
    assert offered("bash", "brainctl list --status q") == ["queued"]


def test_the_lane_is_the_one_that_the_line_or_the_environment_names(
    shared_lane: Lane, jobs: dict[str, str], tmp_path: Path
) -> None:
    here = {"BRAINLANE_SOCKET": str(shared_lane.socket)}
    assert jobs["held"] in offered("bash", "brainctl recover ", **here)
    assert offered("bash", f"brainctl --socket {tmp_path}/nothing recover ", **here) == []
    assert offered("bash", "brainctl --lane not-there recover ", **here) == []


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("line", ["show ", "resume --route "])
def test_a_lane_that_does_not_answer_gives_no_words_and_no_noise(
    scripted: ScriptedLane, tmp_path: Path, shell: str, line: str
) -> None:
    nothing = {"bash": [], "zsh": ["_files"], "fish": []}[shell]
    over = threading.Event()

    def silent(connection: Any) -> None:
        read_request(connection)
        over.wait(LIMIT_S)

    acts = (silent, refused("forbidden", 403), answered({"jobs": 1, "routes": None}), answered([]), b"SSH-2.0\r\n")
    try:
        assert offered(shell, f"brainctl --socket {tmp_path}/nothing {line}") == nothing
        assert offered(shell, f"brainctl --lane ../x {line}") == nothing
        for act in acts[1:] if shell != "bash" else acts:
            scripted.script(act)
            assert offered(shell, f"brainctl --socket {scripted.path} {line}") == nothing
            over.set()
    finally:
        over.set()


def test_completing_loads_only_what_it_needs(shared_lane: Lane) -> None:
    for line in ("brainctl show ", "brainctl resume --route ", "brainctl "):
        ended = asked_by("fish", line, BRAINLANE_SOCKET=str(shared_lane.socket))
        loaded = {each.rpartition("|")[2].strip() for each in ended.stderr.splitlines() if "|" in each}
        assert "brainctl.cli" in loaded
        assert not {"rich", "sqlite3", "http", "ssl", "email", "asyncio"} & {name.split(".")[0] for name in loaded}


# The shells themselves, with the scripts that are installed.


def test_zsh_finds_in_the_first_line_what_its_script_is_for() -> None:
    script = asked_by("zsh", "", _BRAINCTL_COMPLETE="source_zsh").stdout
    assert script.splitlines()[0] == "#compdef brainctl"
    # Loaded at the first key that asks for words, it has to give them as well.
    assert "loadautofunc" in script


IN_A_SHELL = {
    "bash": (
        "{script}\nCOMP_WORDS=(brainctl --socket {socket} recover ''); COMP_CWORD=4; "
        '_brainctl_completion brainctl; printf "%s\\n" "${{COMPREPLY[@]}}"'
    ),
    "fish": "{script}\ncomplete -C 'brainctl --socket {socket} recover '",
}


@pytest.mark.parametrize("shell", IN_A_SHELL)
def test_a_shell_that_has_read_its_script_offers_the_jobs(
    shared_lane: Lane, jobs: dict[str, str], tmp_path: Path, shell: str
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    program = tmp_path / "brainctl"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m brainctl "$@"\n')
    program.chmod(0o755)
    env = environment({"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)})
    script = subprocess.run(
        [program], env={**env, "_BRAINCTL_COMPLETE": f"source_{shell}"}, capture_output=True, text=True, check=True
    ).stdout
    ended = subprocess.run(
        [shell, "-c", IN_A_SHELL[shell].format(script=script, socket=shared_lane.socket)],
        capture_output=True,
        text=True,
        env=env,
        cwd="/",
        timeout=LIMIT_S,
        check=True,
    )
    words = [line.split("\t") for line in ended.stdout.splitlines()]
    assert jobs["held"] in {word[0] for word in words}
    assert jobs["done"] not in {word[0] for word in words}
    assert shell == "bash" or "held, sent-outcome-unknown" in {word[1] for word in words}
