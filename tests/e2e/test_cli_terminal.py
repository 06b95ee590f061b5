"""A person at a terminal of 80 columns: what he sees, that it fits, and that nothing in it is obeyed."""

import json
import re
import time
from collections.abc import Mapping
from typing import Any

import pytest

from tests.brainserver import BrainServer, answer, close_before_answer
from tests.commandline import Terminal, run, unfolded
from tests.lane import Lane

# A terminal's child is forked from a process with threads, which it leaves at once for another program.
pytestmark = pytest.mark.filterwarnings("ignore:.*forkpty:DeprecationWarning")


def fits(terminal: Terminal) -> bool:
    return all(len(line) <= 80 for line in terminal.lines)


def looking_at(lane: Lane, **more: str) -> Mapping[str, str]:
    """The environment of a person who has set his lane once and does not want colours."""
    return {"BRAINLANE_SOCKET": str(lane.socket), "NO_COLOR": "1", **more}


def test_a_person_sees_progress_then_live_text_escaped(
    shared_lane: Lane, shared_server: BrainServer, halting: Any
) -> None:
    blocking = shared_server.hold()
    step, held = halting(shared_server, "first \x1b[31m ", "second\u202e")
    shared_server.script(blocking, step)
    shared_lane.submit("in the way")
    assert blocking.arrived.wait(20)
    terminal = Terminal("submit", "--wait", "slow", env=looking_at(shared_lane))
    terminal.until("waiting-turn, number 1 in line, 0:")
    blocking.release()
    terminal.until("first \\x1b[31m ")
    held.release()
    assert terminal.end() == 0
    # The line of progress is wiped before the text begins, which is escaped.
    assert re.search(r"\r +\rfirst \\x1b\[31m second\\u202e\r\n$", terminal.seen)
    assert "\x1b" not in terminal.seen and fits(terminal)


def test_a_person_who_presses_ctrl_c_is_told_that_the_job_goes_on(
    shared_lane: Lane, shared_server: BrainServer
) -> None:
    held = shared_server.hold()
    shared_server.script(held)
    terminal = Terminal("--socket", str(shared_lane.socket), "submit", "--wait", "slow")
    assert held.arrived.wait(20)
    terminal.until("job ")
    terminal.press("\x03")
    assert terminal.end() == 130
    assert re.search(r"goes on(; next:|\r\n  next:) brainctl", terminal.seen)


def test_output_on_a_terminal_is_escaped_unless_raw_is_asked_for(shared_lane: Lane, shared_server: BrainServer) -> None:
    shared_server.script(answer("a\x1b[31mb\x00\uffffc"))
    number = str(shared_lane.submit("hello")["id"])
    shared_lane.wait(int(number))
    words = ["--socket", str(shared_lane.socket), "output", number]
    escaped, raw, document = Terminal(*words), Terminal(*words, "--raw"), Terminal("--json", *words)
    assert (escaped.end(), raw.end(), document.end()) == (0, 0, 0)
    assert escaped.seen == "a\\x1b[31mb\\x00\\uffffc\r\n"
    assert raw.seen == "a\x1b[31mb\x00\uffffc"
    assert json.loads(document.seen)["choices"][0]["message"]["content"] == "a\x1b[31mb\x00\uffffc"


def test_colours_are_for_terminals_and_for_those_who_want_them(shared_lane: Lane) -> None:
    number = str(shared_lane.submit("hello")["id"])
    shared_lane.wait(int(number))
    words = ["--socket", str(shared_lane.socket), "list", "--limit", "5"]
    coloured, plain, dumb = (
        Terminal(*words),
        Terminal(*words, env={"NO_COLOR": "1"}),
        Terminal(*words, env={"TERM": "dumb"}),
    )
    assert (coloured.end(), plain.end(), dumb.end()) == (0, 0, 0)
    assert "\x1b[32mdone\x1b[0m" in coloured.seen
    assert "\x1b" not in plain.seen + dumb.seen
    assert all(len(line) <= 80 for line in plain.lines)


def test_a_session_from_submit_to_a_decision_fits_the_terminal_and_holds_no_escape_sequence(
    shared_lane: Lane, shared_server: BrainServer
) -> None:
    env = looking_at(shared_lane)
    shared_server.script(close_before_answer(), answer("the seas, at last"))
    sessions = [Terminal("submit", "--wait", "--label", "where=" + "x" * 90, "which seas?", env=env)]
    assert sessions[0].end() == 3
    command = re.search(r"next: (brainctl recover (\d+))\r\n$", sessions[0].seen)
    assert command is not None
    number = command[2]

    def typed(*words: str) -> str:
        sessions.append(Terminal(*words, env=env))
        assert sessions[-1].end() == 0, sessions[-1].seen
        return sessions[-1].seen

    assert f"job {number} held" in typed("status")
    assert "sent-outcome-unknown" in typed("list")
    assert "may be a second charge" in typed("recover", number)
    assert typed("recover", number, "--resend", "--reason", "nobody else has asked " * 8) == f"{number} queued\r\n"
    assert typed("follow", number).endswith("the seas, at last\r\n")
    assert "nobody else has asked" in typed("show", number)
    assert typed("output", number) == "the seas, at last\r\n"
    for session in sessions:
        assert "\x1b" not in session.seen
        assert fits(session), session.seen


def test_what_is_to_be_typed_next_can_be_pasted_though_it_is_longer_than_a_line(
    shared_lane: Lane, shared_server: BrainServer
) -> None:
    shared_server.script(close_before_answer())
    number = str(shared_lane.submit("hello")["id"])
    shared_lane.wait(int(number))
    words = ["--socket", str(shared_lane.socket)]
    for verb in (["wait", number], ["show", number], ["recover", number], ["status"]):
        terminal = Terminal(*words, *verb, env={"NO_COLOR": "1"})
        terminal.end()
        command = re.search(rf"brainctl --socket (\S+) recover {number}\b", unfolded(terminal.seen))
        assert command is not None, terminal.seen
        assert command[1] == str(shared_lane.socket)
        assert fits(terminal), terminal.seen


def test_who_leaves_a_job_that_he_follows_is_told_how_to_come_back_and_the_job_goes_on(
    shared_lane: Lane, shared_server: BrainServer, halting: Any
) -> None:
    step, held = halting(shared_server, "first ", "second")
    shared_server.script(step)
    number = shared_lane.submit("slow")["id"]
    terminal = Terminal("follow", str(number), env=looking_at(shared_lane))
    terminal.until("first ")
    terminal.press("\x03")
    assert terminal.end() == 130
    assert f"job {number} goes on; next: brainctl wait {number}" in terminal.seen
    assert fits(terminal) and "\x1b" not in terminal.seen
    held.release()
    assert shared_lane.wait(number)["status"] == "done"


@pytest.mark.parametrize("words", [["status"], ["list"], ["show"], ["recover"], ["submit", "--wait", "hello"]])
def test_nothing_in_a_pipe_is_coloured_or_rewritten(
    shared_lane: Lane, shared_server: BrainServer, words: list[str]
) -> None:
    shared_server.script(close_before_answer())
    number = shared_lane.submit("hello")["id"]
    shared_lane.wait(number)
    ended = run(
        *words, *([str(number)] if words == ["show"] else []), env={"BRAINLANE_SOCKET": str(shared_lane.socket)}
    )
    assert not {"\x1b", "\r"} & set(ended.text + ended.err)


def test_a_dumb_terminal_gets_no_line_of_progress(shared_lane: Lane, shared_server: BrainServer) -> None:
    held = shared_server.hold()
    shared_server.script(held)
    terminal = Terminal("submit", "--wait", "slow", env=looking_at(shared_lane, TERM="dumb"))
    assert held.arrived.wait(20)
    time.sleep(2.5)  # for a line of progress to be due, which is after a second
    held.release()
    assert terminal.end() == 0
    assert "line" not in terminal.seen and "running" not in terminal.seen
