import grp
import io
import logging
import os
import pwd
import socket
import subprocess
import sys
from pathlib import Path

import freezegun
import pytest

from brainlaned import access, config, events
from brainlaned.access import AccessList, Person, Role


def somebody() -> pwd.struct_passwd:
    """A user of this machine who is neither root nor ourselves, and is in a group of a name."""
    for user in pwd.getpwall():
        if user.pw_uid not in {0, os.geteuid()} and pwd.getpwuid(user.pw_uid).pw_name == user.pw_name:
            try:
                grp.getgrgid(user.pw_gid)
            except KeyError:
                continue
            return user
    pytest.skip("this machine has no other user")


def unused_uid() -> int:
    taken = {user.pw_uid for user in pwd.getpwall()} | {os.geteuid()}
    return next(uid for uid in range(54321, 64321) if uid not in taken)


def who_may(**named: tuple[str, ...]) -> AccessList:
    return AccessList(config.Access(**{"observe": (), "submit": (), "operate": (), **named}))


def group_of(user: pwd.struct_passwd) -> str:
    return f"@{grp.getgrgid(user.pw_gid).gr_name}"


def known_as(user: pwd.struct_passwd, role: Role | None) -> Person:
    """What is known of a user whom no list of readers names."""
    return Person(user.pw_name, role, reads_others=role is Role.OPERATE)


def test_the_kernel_tells_who_is_at_the_other_end() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert access.peer_of(one) == (os.geteuid(), os.getpid())


def test_another_process_is_named_by_its_own_number(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        listener.bind(os.fspath(tmp_path / "s"))
        listener.listen()
        script = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); sys.stdin.read()"
        command = [sys.executable, "-c", script, os.fspath(tmp_path / "s")]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
            listener.settimeout(30)
            connection, _ = listener.accept()
            with connection:
                assert access.peer_of(connection) == (os.geteuid(), child.pid)


@pytest.mark.parametrize("uid", [0, os.geteuid()])
def test_root_and_the_service_user_operate_whatever_the_configuration_says(uid: int) -> None:
    assert who_may().look_up(uid) == Person(pwd.getpwuid(uid).pw_name, Role.OPERATE, reads_others=True)


@pytest.mark.parametrize("role", list(Role))
def test_a_user_who_is_named_may_what_the_list_says(role: Role) -> None:
    user = somebody()
    assert who_may(**{role.name.lower(): (user.pw_name,)}).look_up(user.pw_uid) == known_as(user, role)


@pytest.mark.parametrize("role", list(Role))
def test_a_member_of_a_group_that_is_named_may_what_the_list_says(role: Role) -> None:
    user = somebody()
    assert who_may(**{role.name.lower(): (group_of(user),)}).look_up(user.pw_uid) == known_as(user, role)


def test_the_highest_role_counts() -> None:
    user = somebody()
    named = who_may(observe=(user.pw_name,), operate=(group_of(user),), submit=("nobody-at-all",))
    assert named.look_up(user.pw_uid) == known_as(user, Role.OPERATE)


def test_who_is_named_nowhere_may_nothing() -> None:
    user = somebody()
    strangers = ("nobody-at-all", "@no-such-group", f"@{user.pw_name}-x", f"{user.pw_name}-x", "")
    assert who_may(observe=strangers).look_up(user.pw_uid) == known_as(user, None)


def test_a_group_and_a_user_of_the_same_name_are_two_things() -> None:
    user = somebody()
    group = group_of(user).removeprefix("@")
    named = who_may(observe=(group,)) if group != user.pw_name else who_may(observe=(f"@{user.pw_name}-x",))
    assert named.look_up(user.pw_uid).role is None


def test_a_uid_without_a_name_may_nothing() -> None:
    assert who_may(observe=("@users",), operate=("@root", "root")).look_up(unused_uid()) == Person(None, None, False)


def test_what_is_of_others_is_read_by_who_is_named_for_it_and_by_who_operates() -> None:
    user = somebody()
    for name in (user.pw_name, group_of(user)):
        reader = who_may(observe=(user.pw_name,), read=(name, "nobody-at-all")).look_up(user.pw_uid)
        assert (reader.role, reader.reads_others) == (Role.OBSERVE, True)
    assert who_may(operate=(user.pw_name,)).look_up(user.pw_uid).reads_others
    assert not who_may(submit=(user.pw_name,), read=("@no-such-group",)).look_up(user.pw_uid).reads_others


def test_to_be_named_among_the_readers_gives_no_role() -> None:
    user = somebody()
    assert who_may(read=(user.pw_name,)).look_up(user.pw_uid).role is None


def test_by_default_nobody_reads_what_is_of_others() -> None:
    assert config.Access().read == ()


def test_each_role_may_do_what_the_ones_before_it_may() -> None:
    assert Role.OBSERVE < Role.SUBMIT < Role.OPERATE


def test_a_look_up_is_remembered_for_a_short_time_only() -> None:
    user = somebody()
    named = who_may(submit=(user.pw_name,))
    assert named.known(user.pw_uid) is None
    with freezegun.freeze_time("2026-03-01T12:00:00Z") as clock:
        named.look_up(user.pw_uid)
        assert named.known(user.pw_uid) == known_as(user, Role.SUBMIT)
        clock.tick(access.GROUPS_KEPT_S - 0.5)
        assert named.known(user.pw_uid) == known_as(user, Role.SUBMIT)
        clock.tick(1)
        assert named.known(user.pw_uid) is None


def test_a_refusal_is_remembered_as_well() -> None:
    user = somebody()
    named = who_may()
    named.look_up(user.pw_uid)
    assert named.known(user.pw_uid) == known_as(user, None)


def test_an_unknown_group_is_a_warning_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    user = somebody()
    logger = logging.getLogger("brainlaned")
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(logger, name, getattr(logger, name))  # so that it is put back
    journal = io.StringIO()
    events.start(journal)
    try:
        who_may(observe=("@no-such-group", group_of(user), "nobody-at-all")).warn_of_unknown_groups()
    finally:
        events.stop()
    (line,) = journal.getvalue().splitlines()
    assert line.startswith("<4>")
    assert "'no-such-group'" in line
