"""A silent socket is told apart from a service that has failed behind it, and every hint fits the place."""

import os
from pathlib import Path

import pytest

from brainctl import unreachable
from brainctl.errors import Problem
from brainlaned.wire import ErrorKind, system_socket

SYSTEM = str(system_socket())


def silent_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, path: str = SYSTEM) -> Problem:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n{script}\n')
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return unreachable.silent(path, 4, maybe_done=True)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("ActiveState=failed\\nSubState=failed\\nResult=exit-code", ErrorKind.LANE_FAILED),
        ("ActiveState=activating\\nSubState=auto-restart\\nResult=signal", ErrorKind.LANE_FAILED),
        ("ActiveState=active\\nSubState=running\\nResult=success", ErrorKind.NO_ANSWER),
        ("nonsense", ErrorKind.NO_ANSWER),
    ],
)
def test_a_failed_unit_behind_a_live_socket_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, kind: ErrorKind
) -> None:
    problem = silent_with(tmp_path, monkeypatch, f"printf '{said}\\n'")
    assert (problem.kind, problem.exit_status, problem.maybe_done) == (kind, 9, True)
    assert "systemctl status brainlaned" in problem.line
    assert (tmp_path / "asked").read_text().endswith(" brainlaned.service\n")


@pytest.mark.parametrize("script", ["exit 4", "sleep 5"])
def test_a_systemctl_that_fails_or_hangs_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    assert silent_with(tmp_path, monkeypatch, script).kind == ErrorKind.NO_ANSWER


def test_systemctl_is_asked_about_the_lane_that_is_meant_and_about_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent_with(tmp_path, monkeypatch, "exit 1", str(tmp_path / "control.sock"))
    silent_with(tmp_path, monkeypatch, "exit 1", str(tmp_path / "brainlane" / "control.sock"))
    assert not (tmp_path / "asked").exists()
    silent_with(tmp_path, monkeypatch, "exit 1", str(system_socket("gpu")))
    assert (tmp_path / "asked").read_text().endswith(" brainlaned@gpu.service\n")


def test_a_hint_names_the_unit_or_the_command_of_the_place(tmp_path: Path) -> None:
    gone = FileNotFoundError(2, "gone")
    assert "systemctl start brainlaned@gpu.socket" in unreachable.not_connected(str(system_socket("gpu")), gone, 4).line
    own = str(tmp_path / "control.sock")
    assert f"brainlaned --socket {own}" in unreachable.not_connected(own, gone, 4).line


def test_who_may_not_use_a_socket_is_told_which_group_may(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.touch(mode=0o600)
    problem = unreachable.not_connected(str(path), PermissionError(13, "no"), 4)
    assert (problem.kind, problem.exit_status) == (ErrorKind.NO_PERMISSION, 8)
    assert "as the user who runs the lane" in problem.line
    path.chmod(0o660)
    assert "membership in the group" in unreachable.not_connected(str(path), PermissionError(13, "no"), 4).line
    missing = unreachable.not_connected(str(system_socket("not-there")), PermissionError(13, "no"), 4)
    assert "'brainlane'" in missing.line
