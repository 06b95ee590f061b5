"""A lane as a service: started by its first client, restarted under its clients, stopped and cut off in a call.

Also what it refuses to start with, and what its clients learn then.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from operator import gt
from typing import Any

import pytest

from brainlaned import events, wire
from brainlaned.wire import DaemonExit, ErrorKind, Exit, Reason
from tests.systemd.installed import MEMBER, TESTS_INSIDE, InstalledLane, only_debian13
from tests.systemd.machine import Machine, wait_until

CLIENTS = 10
RESTARTING_S = 20.0
STARTS = 100
ORDERED_STARTS = 3
STARTS_S = 550.0
STOP_LIMIT_S = 10
SHORT_STOP_LIMIT_S = 3


def side_by_side(number: int, client: Callable[[int], None]) -> tuple[list[threading.Thread], list[BaseException]]:
    """Start clients, each in a thread; what one of them raises is in the list."""
    failures: list[BaseException] = []

    def run(index: int) -> None:
        try:
            client(index)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=[index]) for index in range(number)]
    for thread in threads:
        thread.start()
    return threads, failures


def inode(lane: InstalledLane) -> str:
    return lane.machine.run("stat", "-c", "%d:%i %a %U:%G", f"/run/{lane.place}/control.sock").stdout.strip()


def waiting(lane: InstalledLane) -> int:
    """How many clients wait in the queue of the socket for somebody to accept them."""
    lines = lane.machine.run("ss", "--listening", "--unix", "--no-header").stdout.splitlines()
    (line,) = [line.split() for line in lines if f"/run/{lane.place}/control.sock" in line]
    return int(line[2])


# Starting


def test_the_first_client_starts_the_service(lane: InstalledLane) -> None:
    assert lane.show("ActiveState", "NRestarts") == {"ActiveState": "inactive", "NRestarts": "0"}
    asked = lane.brainctl("submit", "--wait", "are you there?", user=MEMBER)
    assert asked.stdout.strip() == "hello world"
    assert lane.show("ActiveState", "StatusText")["ActiveState"] == "active"
    assert lane.starts() == 1


@pytest.mark.parametrize("debian", [12], ids=["debian12"], indirect=True)
def test_whoever_asks_when_a_start_has_returned_is_answered_by_it_a_hundred_times_of_a_hundred(
    lane: InstalledLane,
) -> None:
    # The note about a stop is a Python of its own each time, and not what is asked here.
    lane.drop_in("[Service]", "ExecStopPost=")
    script = f"{TESTS_INSIDE}/systemd/starting.py"
    found = lane.machine.run("python3", script, str(STARTS), timeout=STARTS_S).json
    print(f"{STARTS} starts took {found['took_s']:.0f} s")
    assert [answer for answer in found["answers"] if answer[0] != 200] == []
    # Each by a run of its own, and none came up without having been started.
    assert len({run for _, run in found["answers"]}) == lane.starts() == STARTS


@only_debian13
def test_whoever_is_ordered_after_the_service_finds_it_answering(lane: InstalledLane) -> None:
    after = ("Requires=brainlaned.service", "After=brainlaned.service")
    for turn in range(ORDERED_STARTS):
        listed = lane.machine.unit_run("brainctl", "--json", "list", properties=after)
        assert listed.json == {"jobs": [], "next": None}
        assert lane.show("ActiveState", "SubState") == {"ActiveState": "active", "SubState": "running"}
        lane.machine.systemctl("stop", "brainlaned.service", "brainlaned.socket")
        assert lane.starts() == turn + 1


@only_debian13
def test_ready_says_where_it_listens_and_nothing_odd_precedes_it(lane: InstalledLane) -> None:
    lane.start()
    (ready,) = lane.journal(f"MESSAGE_ID={events.IDS['ready']}")
    assert "/run/brainlane/control.sock" in ready["MESSAGE"]
    assert {entry.get("SYSLOG_IDENTIFIER") for entry in lane.journal()} <= {"systemd", "brainlaned"}
    assert "Warning" not in lane.said()


@only_debian13
def test_the_status_line_is_kept_current(lane: InstalledLane) -> None:
    lane.start()
    job = lane.call_in_flight()
    lane.submit("next")
    running = f"Running job {job['id']}, 1 waiting, 0 held."
    wait_until(lambda: lane.show("StatusText")["StatusText"] == running, "the running job is shown")
    lane.brain.release()
    idle = "Waiting for work, 0 waiting, 0 held."
    wait_until(lambda: lane.show("StatusText")["StatusText"] == idle, "that nothing runs is shown")


# Restarting


@only_debian13
def test_ten_clients_that_come_during_a_restart_are_all_answered_by_the_same_socket(lane: InstalledLane) -> None:
    lane.start()
    # The call in flight holds up the restart, so that all of them come in the middle of it.
    job = lane.call_in_flight()
    before, pid = inode(lane), lane.main_pid()
    with lane.machine.popen("systemctl", "restart", "brainlaned") as restart:
        wait_until(lambda: lane.show("ActiveState")["ActiveState"] == "deactivating", "the restart has begun")
        clients, failures = side_by_side(CLIENTS, lambda index: lane.submit(f"client {index}") and None)
        lane.brain.release()
        assert restart.wait(60) == 0
    for client in clients:
        client.join()
    assert failures == []
    assert lane.main_pid() != pid
    assert inode(lane) == before
    assert before.endswith(" 660 brainlane:brainlane")
    assert lane.has_moved(job["id"], "done")["attempt_count"] == 1
    for index in range(CLIENTS):
        lane.has_moved(job["id"] + 1 + index, "done")
    assert lane.brain.max_concurrent == 1


def moment(entry: dict[str, Any]) -> str:
    """Return when something was said in the journal, as the lane writes times."""
    return wire.format_time(datetime.fromtimestamp(int(entry["__REALTIME_TIMESTAMP"]) / 1_000_000, UTC))


def everything(lane: InstalledLane) -> list[dict[str, Any]]:
    """Return all jobs, the newest first."""
    jobs: list[dict[str, Any]] = []
    after = ""
    while True:
        page = lane.get(f"/v1/jobs?limit=500{after}").json
        jobs += page["jobs"]
        if page["next"] is None:
            return jobs
        after = f"&after={page['next']}"


@only_debian13
def test_restarts_under_load_refuse_nobody_lose_nothing_and_ask_nothing_twice(lane: InstalledLane) -> None:
    # Each call takes a while, so that the stops come in the middle of one.
    lane.brain.obey(default={"step": "answer", "text": "word " * 20, "gap_s": 0.02})
    lane.start()
    over = threading.Event()
    accepted: list[dict[str, int]] = [{}, {}, {}]
    first = lane.submit("first", key="first")["id"]
    looks = [0, 0]

    def submitter(index: int) -> None:
        number = 0
        while not over.is_set():
            key = f"{index}-{number}"
            job = lane.submit(key, key=key)
            again = lane.submit(key, key=key)
            assert (again["id"], again["replayed"]) == (job["id"], True)
            accepted[index][key] = job["id"]
            number += 1
            # So that what waits stays short; it ends early when the lane is stopped.
            lane.get(f"/v1/jobs/{job['id']}?wait=60")

    def looker(index: int) -> None:
        while not over.is_set():
            assert lane.get("/v1/jobs?limit=20").status == 200
            assert lane.submit("first", key="first")["id"] == first
            looks[index] += 1
            over.wait(0.01)  # so that the others get on, too

    def progress() -> list[int]:
        return [*map(len, accepted), *looks]

    clients, failures = side_by_side(5, lambda index: submitter(index) if index < 3 else looker(index - 3))
    restarts = 0
    try:
        end = time.monotonic() + RESTARTING_S
        while time.monotonic() < end and not failures:
            before = progress()
            lane.machine.systemctl("restart", "brainlaned")
            restarts += 1
            # Each of the clients has been through the restart.
            wait_until(lambda: all(map(gt, progress(), before)) or bool(failures), "they go on")  # noqa: B023
    finally:
        over.set()
        for each in clients:
            each.join()
    assert failures == []
    assert lane.starts() == restarts + 1
    assert lane.journal(f"MESSAGE_ID={events.IDS['last_run_died']}") == []

    keys = accepted[0] | accepted[1] | accepted[2] | {"first": first}
    for job_id in keys.values():
        lane.has_moved(job_id, "done")
    jobs = everything(lane)
    assert len(jobs) == len(keys)
    assert {job["key"]: job["id"] for job in jobs} == keys
    # A stop lets the call finish, so that not one of them was begun twice.
    attempts = []
    for job in jobs:
        (attempt,) = lane.get(f"/v1/jobs/{job['id']}").json["attempts"]
        assert (attempt["status"], attempt["reason"]) == ("succeeded", Reason.ANSWERED)
        attempts.append(attempt)
    assert Counter(lane.brain.prompts()) == Counter(list(keys))
    assert lane.brain.max_concurrent == 1
    stops = [moment(entry) for entry in lane.journal(f"MESSAGE_ID={events.IDS['stopping']}")]
    in_a_call = [stop for stop in stops if any(each["started_at"] < stop < each["ended_at"] for each in attempts)]
    assert in_a_call, "no stop came in the middle of a call, so this has shown little"
    print(f"{restarts} restarts, {len(in_a_call)} of them in a call, {len(keys)} jobs, {sum(looks)} looks")


# Stopping in the middle of a call


@only_debian13
def test_a_call_in_flight_ends_well_before_a_restart(lane: InstalledLane) -> None:
    lane.start()
    job = lane.call_in_flight()
    with lane.machine.popen("systemctl", "restart", "brainlaned") as restart:
        wait_until(lambda: "Letting the call" in lane.show("StatusText")["StatusText"], "it says what it waits for")
        later = lane.submit("later")  # answered by a lane that is stopping
        lane.brain.release()
        assert restart.wait(60) == 0
    assert lane.has_moved(job["id"], "done")["reason"] == Reason.ANSWERED
    lane.has_moved(later["id"], "done")
    lane.brain.wait_for("long", "later")
    assert "stopped by SIGTERM" in lane.brainctl("status").stdout


@only_debian13
def test_a_call_that_systemd_kills_is_held_and_not_made_again(lane: InstalledLane) -> None:
    lane.drop_in("[Service]", f"TimeoutStopSec={STOP_LIMIT_S}")
    lane.start()
    job = lane.call_in_flight()
    lane.machine.systemctl("restart", "brainlaned")
    held = lane.has_moved(job["id"], "held")
    assert held["reason"] == Reason.SENT_OUTCOME_UNKNOWN
    assert "systemd killed it" in held["attempts"][0]["detail"]
    lane.answered()
    assert lane.brain.prompts() == ["long", "still there?"]
    assert "systemd killed it, since it took too long" in lane.brainctl("status").stdout


@only_debian13
def test_a_second_signal_abandons_the_call_and_keeps_its_part(lane: InstalledLane) -> None:
    lane.start()
    lane.brain.obey(by_prompt={"long": {"step": "endless", "word": "again ", "gap_s": 0.05}})
    job = lane.submit("long")
    wait_until(lambda: lane.get(f"/v1/jobs/{job['id']}/output?partial=1").body != b"", "a part has come")
    with lane.machine.popen("systemctl", "stop", "brainlaned") as stop:
        wait_until(lambda: lane.show("ActiveState")["ActiveState"] == "deactivating", "the stop has begun")
        lane.machine.systemctl("kill", "--signal=TERM", "brainlaned")
        assert stop.wait(60) == 0
    assert lane.show("Result") == {"Result": "success"}
    held = lane.has_moved(job["id"], "held")
    assert held["reason"] == Reason.ANSWER_INCOMPLETE
    assert lane.get(f"/v1/jobs/{job['id']}/output?partial=1").body.startswith(b"again ")


@pytest.mark.parametrize("how", [Machine.reboot, Machine.lose_power], ids=["reboot", "power-cut"])
@only_debian13
def test_a_call_in_which_the_machine_goes_down_is_judged_by_its_evidence(
    lane: InstalledLane, how: Callable[[Machine], None]
) -> None:
    lane.drop_in("[Service]", f"TimeoutStopSec={SHORT_STOP_LIMIT_S}")  # else the reboot would wait for the call
    lane.machine.systemctl("enable", "--now", "brainlaned.service")
    later = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    free = lane.submit("free", not_before=later)
    job = lane.call_in_flight()
    waiting = lane.submit("waiting")
    how(lane.machine)
    lane.brain.start()
    held = lane.has_moved(job["id"], "held")
    assert held["reason"] == Reason.SENT_OUTCOME_UNKNOWN
    lane.has_moved(waiting["id"], "done")
    assert lane.get(f"/v1/jobs/{free['id']}").json["status"] == "queued"
    assert lane.brain.prompts() == ["waiting"]
    assert lane.show("ActiveState")["ActiveState"] == "active"
    if how is Machine.lose_power:
        assert "the power went" in lane.get("/v1/status").json["last_run"]["ending"]


# Starts that fail, and starts that are refused


@only_debian13
def test_a_service_that_fails_again_and_again_keeps_its_socket_and_serves_once_it_is_mended(
    lane: InstalledLane,
) -> None:
    lane.drop_in("[Service]", "ExecStart=", "ExecStart=/bin/false")
    before = inode(lane)
    with lane.machine.popen("brainctl", "--answer-within", "100", "submit", "patient") as patient:
        wait_until(lambda: lane.starts() > 3, "it has been tried again and again")
        late = lane.machine.run("brainctl", "--answer-within", "2", "list", check=False)
        assert late.status == Exit.NO_LANE
        assert "systemctl status brainlaned" in late.stderr
        assert len(late.stderr.splitlines()) <= 2
        assert inode(lane) == before
        assert lane.machine.systemctl("is-active", "brainlaned.socket").stdout == "active\n"
        lane.undo_drop_in()
        assert patient.communicate(timeout=100) == ("1\n", "")
    lane.has_moved(1, "done")


def refused(lane: InstalledLane, status: DaemonExit, *words: str) -> None:
    """See that each of the next two clients is told why the lane does not start, and causes one start."""
    before = lane.starts()

    def started(times: int) -> None:
        wait_until(lambda: lane.show("ActiveState")["ActiveState"] == "failed", "the service has ended")
        assert lane.show("ExecMainStatus") == {"ExecMainStatus": str(int(status))}
        assert lane.starts() == before + times

    answer = lane.brainctl("submit", "anybody?", user=MEMBER, check=False)
    assert answer.status == Exit.NO_LANE, answer
    assert all(word in answer.stderr for word in words), answer.stderr
    started(1)
    answer = lane.get("/v1/healthz")
    assert (answer.status, answer.error["kind"]) == (503, ErrorKind.START_REFUSED)
    started(2)
    assert lane.machine.systemctl("is-active", "brainlaned.socket").stdout == "active\n"
    refusals = [entry["MESSAGE"] for entry in lane.journal(f"MESSAGE_ID={events.IDS['start_refused']}")]
    assert sum(all(word in refusal for word in words) for refusal in refusals) == 2


@only_debian13
def test_a_refused_configuration_is_told_to_every_client_and_tried_once_for_each(lane: InstalledLane) -> None:
    lane.configure(lane="stop_grace_seconds = 5")
    refused(lane, DaemonExit.CONFIGURATION, "lane.stop_grace_seconds", "/etc/brainlane/brainlaned.toml")
    lane.configure()
    lane.answered()


@only_debian13
def test_ten_clients_that_wait_together_are_refused_by_one_start(lane: InstalledLane) -> None:
    lane.configure("[lane]\nnonsense = 1\n")
    # Until the first of them is answered, the start that it causes is held up.
    lane.drop_in("[Service]", "ExecStartPre=+/bin/sh -c 'until test -e /run/go; do sleep 0.1; done'")
    answers: list[tuple[int, str]] = []

    def client(_: int) -> None:
        answer = lane.get("/v1/healthz")
        answers.append((answer.status, answer.error["kind"]))

    clients, failures = side_by_side(CLIENTS, client)
    wait_until(lambda: waiting(lane) == CLIENTS, "all of them wait")
    lane.machine.run("touch", "/run/go")
    for each in clients:
        each.join()
    assert failures == []
    assert answers == [(503, ErrorKind.START_REFUSED)] * CLIENTS
    wait_until(lambda: lane.show("ActiveState")["ActiveState"] == "failed", "the service has ended")
    assert lane.starts() == 1


@only_debian13
def test_a_state_that_cannot_be_written_is_refused_and_brainctl_needs_none_of_it(lane: InstalledLane) -> None:
    lane.drop_in("[Service]", "ReadOnlyPaths=/var/lib/brainlane")
    refused(lane, DaemonExit.PERMISSION, "/var/lib/brainlane", "read-only")
    lane.undo_drop_in()
    lane.start()
    lane.answered()
    assert lane.machine.run("ls", "/var/lib/brainlane", user=MEMBER, check=False).status != 0
    assert lane.brainctl("list", user=MEMBER).status == 0


@only_debian13
def test_a_state_that_cannot_be_written_is_said_once(lane: InstalledLane) -> None:
    lane.drop_in("[Service]", "ReadOnlyPaths=/var/lib/brainlane")
    lane.machine.systemctl("start", "brainlaned", check=False)
    wait_until(lambda: lane.show("ActiveState")["ActiveState"] == "failed", "the service has ended")
    assert len(lane.journal(f"MESSAGE_ID={events.IDS['start_refused']}")) == 1


@only_debian13
def test_side_files_that_somebody_else_left_are_refused_by_name(lane: InstalledLane) -> None:
    lane.start()
    lane.answered()
    lane.machine.systemctl("stop", "brainlaned.service")
    for name in ("brainlane.db-wal", "brainlane.db-shm"):
        lane.machine.put(f"/var/lib/brainlane/{name}", "", 0o644)
        refused(lane, DaemonExit.PERMISSION, f"/var/lib/brainlane/{name}", "root", "0644", "brainlane")
        lane.machine.run("rm", f"/var/lib/brainlane/{name}")
    assert lane.answered()["id"] == 2


@only_debian13
def test_a_socket_path_that_is_too_long_is_refused_once(lane: InstalledLane) -> None:
    path = f"/run/{'x' * 120}/control.sock"
    restart = ("Restart=always", "RestartPreventExitStatus=64 65 69 77 78", "RemainAfterExit=no")
    lane.machine.start_unit("long", "brainlaned", "--socket", path, "--state-dir", "/root/state", properties=restart)
    said = lambda: "\n".join(str(each["MESSAGE"]) for each in lane.machine.journal("long.service"))  # noqa: E731
    wait_until(lambda: "Failed with result" in said(), "the service has ended")
    assert f"has {len(path)} bytes, and 107 is the limit" in said()
    assert said().count("cannot bind socket") == 1
    answer = lane.machine.run("brainctl", "--socket", path, "list", check=False)
    assert answer.status == Exit.USAGE
    assert f"{len(path)} bytes" in answer.stderr


# The descriptors that systemd passes


@only_debian13
def test_the_control_socket_is_found_by_its_name_among_others(lane: InstalledLane) -> None:
    listen = ["ListenStream=/run/other.sock", "FileDescriptorName=another", "Service=brainlaned.service"]
    lane.machine.put("/etc/systemd/system/a-other.socket", "\n".join(["[Socket]", *listen, ""]))
    lane.drop_in("[Service]", "Sockets=a-other.socket brainlaned.socket")
    lane.machine.systemctl("start", "a-other.socket")
    lane.start()
    lane.answered()
    assert lane.machine.run("test", "-S", "/run/other.sock").status == 0


@only_debian13
def test_a_descriptor_of_the_wrong_kind_is_refused_in_words(lane: InstalledLane) -> None:
    lane.machine.systemctl("stop", "brainlaned.socket")
    wrong = ("[Socket]", "ListenStream=", "ListenDatagram=/run/brainlane/control.sock")
    lane.drop_in(*wrong, unit="brainlaned.socket")
    lane.machine.systemctl("start", "brainlaned", check=False)
    wait_until(lambda: lane.show("ActiveState")["ActiveState"] == "failed", "the service has ended")
    assert lane.show("ExecMainStatus") == {"ExecMainStatus": str(int(DaemonExit.CONFIGURATION))}
    (refusal,) = lane.journal(f"MESSAGE_ID={events.IDS['start_refused']}")
    assert "none is a listening stream socket named 'control'" in refusal["MESSAGE"]
    assert lane.starts() == 1


@only_debian13
def test_a_hangup_is_no_stop(lane: InstalledLane) -> None:
    lane.start()
    pid = lane.main_pid()
    lane.machine.systemctl("kill", "--signal=HUP", "brainlaned")
    lane.answered()
    assert (lane.main_pid(), lane.starts()) == (pid, 1)
