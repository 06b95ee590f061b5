"""More than one lane on a machine, and lanes that an administrator changes by the drop-ins that come along."""

from collections.abc import Callable

from brainlaned.wire import Exit, Reason
from tests.lane import config_for
from tests.systemd.installed import MEMBER, InstalledLane, only_debian13
from tests.systemd.machine import Machine, wait_until

FORBIDDEN = ("NOTIFY_SOCKET", "WATCHDOG_", "LISTEN_", "CREDENTIALS_DIRECTORY", "STATE_DIRECTORY", "INVOCATION_ID")
COMMANDS = """
[routes.cat]
kind = "command"
command = ["cat"]

[routes.shell]
kind = "command"
command = ["sh", "-c", '''
eval "$(cat)"
''']
"""
LOOK_AROUND = """
env
echo descriptors $(ls /proc/self/fd | wc -l)
python3 -c '
import os, socket
path = os.environ.get("NOTIFY_SOCKET", "/run/systemd/notify")
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"STOPPING=1", path)
' 2>&1
echo told systemd
"""


@only_debian13
def test_two_lanes_live_side_by_side_and_one_stops_without_the_other(lane: InstalledLane) -> None:
    machine = lane.machine
    second = InstalledLane(machine, "second")
    second.configure()
    machine.systemctl("enable", "--now", "brainlaned@second.socket")
    lane.start()
    assert second.brainctl("submit", "--wait", "of the second", user=MEMBER).stdout.strip() == "hello world"
    assert lane.get("/v1/jobs").json["jobs"] == []
    lane.brain.obey(reset=True, default="hold")
    for each in (lane, second):
        for prompt in ("one", "two"):
            each.submit(prompt)
    # Each lane makes one call at a time, and neither waits for the other.
    wait_until(lambda: lane.brain.prompts() == ["one", "one"], "both lanes call")
    assert [each.get("/v1/status").json["counts"]["queued"] for each in (lane, second)] == [1, 1]
    lane.brain.release()
    lane.brain.obey(default="answer")
    for each in (lane, second):
        for job in each.get("/v1/jobs").json["jobs"]:
            each.has_moved(job["id"], "done")
    assert lane.brain.max_concurrent == 2
    assert "--lane second" in second.get("/v1/jobs/1").json["next_action"]

    pid = lane.main_pid()
    machine.systemctl("stop", "brainlaned@second.service", "brainlaned@second.socket")
    refusal = second.brainctl("list", check=False)
    assert refusal.status == Exit.NO_LANE
    assert "systemctl start brainlaned@second.socket" in refusal.stderr
    lane.answered()
    assert lane.main_pid() == pid
    owners = machine.run("stat", "-c", "%a %U", "/var/lib/brainlane", "/var/lib/brainlane-second").stdout
    assert owners == "700 brainlane\n" * 2


@only_debian13
def test_a_lane_without_its_configuration_is_refused_in_words(lane: InstalledLane) -> None:
    third = InstalledLane(lane.machine, "third")
    lane.machine.systemctl("start", "brainlaned@third.socket")
    answer = third.brainctl("list", check=False)
    assert answer.status == Exit.NO_LANE
    assert "/etc/brainlane/third.toml" in answer.stderr


@only_debian13
def test_a_local_lane_reaches_this_machine_and_nothing_else(boot: Callable[..., Machine]) -> None:
    lane = InstalledLane(boot(ebpf=True))
    machine = lane.machine
    # An address of this machine's own that is not the loopback's stands for the rest of the world.
    machine.run("ip", "addr", "add", "192.0.2.1/32", "dev", "lo")
    lane.brain.start()
    away = '[routes.away]\nbase_url = "http://192.0.2.1:9/v1"\nmodel = "m"\nretry_first_s = 1000\nconnect_s = 2'
    lane.configure(more=away)
    lane.shipped_drop_in("local-only")
    lane.start()
    lane.answered()
    job = lane.submit("to nobody", route="away")
    wait_until(lambda: lane.get(f"/v1/jobs/{job['id']}").json["waiting"] == "route-gated", "the route is closed")
    detail = lane.get(f"/v1/jobs/{job['id']}").json["attempts"][0]["detail"]
    # Nobody listens there: without the drop-in the connection would be refused.
    assert "refused" not in detail.lower(), detail


@only_debian13
def test_a_lane_with_commands_runs_them_apart_from_itself(lane: InstalledLane) -> None:
    lane.configure(config_for(lane.brain.base_url, lane='default_route = "cat"', more=COMMANDS))
    lane.shipped_drop_in("command-routes")
    lane.start()
    pid = lane.main_pid()
    assert lane.brainctl("submit", "--wait", "said back", user=MEMBER).stdout.strip() == "said back"
    around = lane.brainctl("submit", "--wait", "--route", "shell", LOOK_AROUND).stdout
    assert not [line for line in around.splitlines() if line.startswith(FORBIDDEN)]
    assert "HOME=/var/lib/brainlane" in around
    assert "descriptors 4" in around  # the three, and that of the directory itself
    assert "told systemd" in around
    assert lane.show("ActiveState", "SubState") == {"ActiveState": "active", "SubState": "running"}
    assert lane.main_pid() == pid
    wrote = lane.brainctl("submit", "--wait", "--route", "shell", "touch /etc/x /usr/x || echo no", check=False)
    assert wrote.stdout.strip() == "no"


@only_debian13
def test_a_command_is_not_started_without_its_drop_in_and_the_job_says_so(lane: InstalledLane) -> None:
    lane.configure(config_for(lane.brain.base_url, lane='default_route = "cat"', more=COMMANDS))
    lane.start()
    job = lane.submit("said back")
    wait_until(lambda: lane.get(f"/v1/jobs/{job['id']}").json["waiting"] == "route-gated", "the route is closed")
    assert "see the drop-in for command routes" in lane.get(f"/v1/jobs/{job['id']}").json["detail"]
    lane.shipped_drop_in("command-routes")
    lane.machine.systemctl("restart", "brainlaned")
    assert lane.has_moved(job["id"], "done")["reason"] == Reason.ANSWERED


@only_debian13
def test_a_command_dies_with_its_lane(lane: InstalledLane) -> None:
    lane.configure(config_for(lane.brain.base_url, lane='default_route = "shell"', more=COMMANDS))
    lane.shipped_drop_in("command-routes")
    lane.start()
    job = lane.submit("exec sleep 12345")
    wait_until(lambda: lane.machine.run("pgrep", "-f", "sleep 12345", check=False).status == 0, "the command runs")
    lane.machine.systemctl("kill", "--kill-whom=main", "--signal=KILL", "brainlaned")
    lane.has_moved(job["id"], "held")
    assert lane.machine.run("pgrep", "-f", "sleep 12345", check=False).status == 1
