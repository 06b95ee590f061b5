"""Who may talk to a lane, as the kernel tells it, and who learns its keys."""

import json

from brainlaned import events
from brainlaned.wire import Exit
from tests.systemd.installed import MEMBER, STRANGER, InstalledLane, only_debian13

KEY = "sk-canary-0123456789abcdef"
COMMAND = """
[routes.command]
kind = "command"
command = ["sh", "-c", "{}"]
"""


@only_debian13
def test_root_operates_a_member_submits_and_a_stranger_is_refused(lane: InstalledLane) -> None:
    lane.start()
    assert lane.brainctl("submit", "--wait", "of a member", user=MEMBER).stdout.strip() == "hello world"
    assert lane.brainctl("submit", "--wait", "of root").stdout.strip() == "hello world"
    jobs = {
        user: json.loads(lane.brainctl("--json", "show", job).stdout) for user, job in ((MEMBER, "1"), ("root", "2"))
    }
    for user, job in jobs.items():
        assert job["submitter"]["user"] == user
        assert str(job["submitter"]["uid"]) == lane.machine.run("id", "-u", user).stdout.strip()
    refusal = lane.brainctl("pause", user=MEMBER, check=False)
    assert refusal.status == Exit.PERMISSION, refusal
    assert lane.brainctl("pause").status == lane.brainctl("resume").status == 0
    assert "of root" not in lane.brainctl("show", "2", user=MEMBER).stdout
    for verb in (("list",), ("submit", "of a stranger")):
        refusal = lane.brainctl(
            *verb, user=STRANGER, check=False, env={"BRAINLANE_SOCKET": "/run/brainlane/control.sock"}
        )
        assert refusal.status == Exit.PERMISSION, refusal
        assert "group 'brainlane'" in refusal.stderr
    assert [each["prompt"] for each in lane.brain.requests] == ["of a member", "of root"]


@only_debian13
def test_a_stranger_who_gets_to_the_socket_is_refused_by_the_lane_itself(lane: InstalledLane) -> None:
    lane.drop_in("[Socket]", "SocketMode=0666", unit="brainlaned.socket")
    lane.machine.systemctl("restart", "brainlaned.socket")
    for verb in (("list",), ("submit", "of a stranger")):
        assert lane.brainctl(*verb, user=STRANGER, check=False).status == Exit.PERMISSION
    uid = lane.machine.run("id", "-u", STRANGER).stdout.strip()
    refusals = lane.journal(f"MESSAGE_ID={events.IDS['forbidden']}")
    assert len(refusals) == 2
    assert all(f"uid {uid} pid " in entry["MESSAGE"] for entry in refusals)
    assert lane.get("/v1/jobs").json["jobs"] == []


@only_debian13
def test_whoever_joins_the_group_may_submit_soon_after(lane: InstalledLane) -> None:
    lane.start()
    lane.machine.run("systemd-sysusers", "-", input=f"m {STRANGER} brainlane\n")
    assert lane.brainctl("submit", "--wait", "now a member", user=STRANGER).stdout.strip() == "hello world"


@only_debian13
def test_a_key_reaches_its_route_and_nothing_else(lane: InstalledLane) -> None:
    machine = lane.machine
    machine.put("/etc/brainlane/credentials/paid", f"{KEY}\n", 0o600)
    lane.shipped_drop_in("command-routes")
    lane.configure(
        lane='default_route = "local"',
        route='api_key = "paid"',
        more=COMMAND.format("env; cat /proc/self/environ; echo; echo asked"),
    )
    lane.brain.obey(by_prompt={"echo": {"step": "answer", "text": f"your key is {KEY}"}})
    lane.start()
    echoed = lane.brainctl("submit", "--wait", "echo", user=MEMBER).stdout
    assert echoed.startswith("your key is ")
    assert [each["headers"]["authorization"] for each in lane.brain.requests] == [f"Bearer {KEY}"]
    printed = lane.brainctl("submit", "--wait", "--route", "command", "x").stdout
    assert printed.endswith("asked\n")
    seen = echoed + printed
    seen += lane.brainctl("--json", "show", "1").stdout + lane.brainctl("--json", "status").stdout
    seen += machine.run("journalctl", "--no-pager", "--all", "--output=export").stdout
    seen += machine.run("cat", f"/proc/{lane.main_pid()}/environ", f"/proc/{lane.main_pid()}/cmdline").stdout
    seen += machine.systemctl("show", "brainlaned").stdout
    assert KEY not in seen
    kept = machine.run("grep", "-rlF", KEY, "/var", "/run", "/etc", "/tmp", check=False).stdout.split()  # noqa: S108
    assert [path for path in kept if not path.startswith("/run/credentials/")] == ["/etc/brainlane/credentials/paid"]
    for path in kept:
        assert machine.run("cat", path, user=MEMBER, check=False).status != 0


@only_debian13
def test_a_key_that_was_not_passed_is_named_to_the_client(lane: InstalledLane) -> None:
    lane.configure(route='api_key = "nowhere"')
    answer = lane.brainctl("list", user=MEMBER, check=False)
    assert answer.status == Exit.NO_LANE
    assert "routes.local.api_key names a credential that was not passed" in answer.stderr


@only_debian13
def test_a_user_without_a_runtime_directory_is_not_led_to_a_socket_that_anybody_could_put_into_tmp(
    lane: InstalledLane,
) -> None:
    lane.start()
    uid = lane.machine.run("id", "-u", MEMBER).stdout.strip()
    trap = f"/tmp/runtime-{uid}/brainlane"  # noqa: S108
    lane.machine.run("mkdir", "-p", trap, user=STRANGER)
    listen = "import socket; s = socket.socket(socket.AF_UNIX); s.bind('control.sock'); s.listen(); print(s.accept())"
    lane.machine.start_unit(
        "trap", "python3", "-c", listen, user=STRANGER, properties=[f"WorkingDirectory={trap}", "UMask=0"]
    )
    lane.machine.run("sh", "-c", f"until test -S {trap}/control.sock; do sleep 0.1; done")
    asked = lane.brainctl("submit", "--wait", "in confidence", user=MEMBER, check=False)
    assert (asked.stdout.strip(), asked.stderr) == ("hello world", "")
