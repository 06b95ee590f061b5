"""The machines that the other tests here stand on."""

import subprocess
from pathlib import Path

import pytest

from tests.systemd.machine import CommandFailed, Machine, wait_until


def test_a_machine_runs_the_systemd_python_and_journal_of_its_debian(debian: int, machine: Machine) -> None:
    assert machine.systemctl("is-system-running").stdout.strip() == "running"
    assert f'VERSION_ID="{debian}"' in machine.read("/etc/os-release")
    version = machine.run("python3", "-c", "import sys; print(sys.version_info[1])").stdout.strip()
    assert version == {12: "11", 13: "13"}[debian]
    machine.unit_run("logger", "--journald", input="MESSAGE=good day\nBRAINLANE_JOB=17\n", user="daemon")
    (entry,) = machine.journal(None, "BRAINLANE_JOB=17")
    assert (entry["MESSAGE"], entry["_UID"]) == ("good day", "1")


def test_commands_have_a_user_an_input_and_a_status(machine: Machine) -> None:
    assert machine.run("id", "-un", user="daemon").stdout.strip() == "daemon"
    assert machine.run("sh", "-c", "cat; exit 3", input="words", check=False).stdout == "words"
    with pytest.raises(CommandFailed, match="status 3"):
        machine.unit_run("sh", "-c", "exit 3")
    with pytest.raises(subprocess.TimeoutExpired):
        machine.run("sleep", "100", user="daemon", timeout=0.5)
    wait_until(lambda: machine.run("pgrep", "sleep", check=False).status == 1, "nothing of that command is left")


def test_a_reboot_and_a_power_cut_keep_the_files_and_the_journal(machine: Machine) -> None:
    machine.put("/root/kept", "words\n", 0o640, owner="root:daemon")
    for again, boots in ((machine.reboot, 2), (machine.lose_power, 3)):
        machine.unit_run("true")
        machine.run("sync")
        again()
        assert machine.run("stat", "-c", "%a %U:%G", "/root/kept").stdout == "640 root:daemon\n"
        assert machine.read("/root/kept") == "words\n"
        assert len({entry["_BOOT_ID"] for entry in machine.journal()}) == boots


def test_machines_at_the_same_time_share_nothing(debian: int, debian_roots: dict[int, Path]) -> None:
    with Machine(debian_roots[debian]) as one, Machine(debian_roots[debian]) as other:
        for machine in (one, other):
            machine.start_unit("sleeper", "sleep", "1000")
        one.run("touch", "/root/mine")
        one.systemctl("stop", "sleeper")
        assert other.run("test", "-e", "/root/mine", check=False).status == 1
        assert other.show("sleeper", "ActiveState") == {"ActiveState": "active"}
