"""Where a lane may live, and where it is refused before anything is created."""

import os
import stat
from pathlib import Path

import pytest

from brainlaned import errors, filesystem
from brainlaned.wire import DaemonExit

MOUNTS = r"""
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 21 0:30 / /mnt/share rw,relatime shared:2 - {kind} server:/export rw
31 30 8:2 / /mnt/share/disk rw,relatime shared:3 - xfs /dev/sdb1 rw
32 21 0:32 / /mnt/with\040space rw,relatime shared:4 - {kind} //server/share rw
33 21 8:3 / /srv rw - ext4 /dev/sdc1 rw
34 33 0:34 / /srv rw - {kind} server:/srv rw
"""


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTS.format(kind="nfs4").strip() + "\n")
    return path


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p"])
def test_a_network_file_system_is_refused_naming_path_type_and_setting(tmp_path: Path, kind: str) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.format(kind=kind).strip() + "\n")
    with pytest.raises(errors.StartRefused) as refused:
        filesystem.check_local(Path("/mnt/share/brainlane"), mounts)
    assert refused.value.status is DaemonExit.CONFIGURATION
    assert "'/mnt/share/brainlane'" in str(refused.value) and f"({kind})" in str(refused.value)
    assert "--state-dir" in refused.value.next_action


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/brainlane", "ext4"),
        ("/mnt/share", "nfs4"),
        ("/mnt/share-not/brainlane", "ext4"),
        ("/mnt/share/disk/brainlane", "xfs"),
        ("/mnt/share/disk/../brainlane", "nfs4"),
        ("/mnt/with space/brainlane", "nfs4"),
        ("/srv/brainlane", "nfs4"),
    ],
)
def test_the_nearest_mount_decides_and_of_two_on_one_place_the_later(mounts: Path, path: str, kind: str) -> None:
    assert filesystem.type_of(Path(path), mounts) == kind


def test_where_nobody_says_what_is_mounted_nothing_is_refused(tmp_path: Path) -> None:
    filesystem.check_local(tmp_path, tmp_path / "no-mountinfo")


def test_a_real_directory_of_this_machine_is_taken(tmp_path: Path) -> None:
    filesystem.check_local(tmp_path / "state")
    filesystem.check_writable(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files that another user may not write")
@pytest.mark.parametrize("name", ["brainlane.db", "brainlane.db-wal", "brainlane.db-shm", "spool", "."])
def test_what_the_lane_may_not_write_is_named_with_owner_mode_and_the_owner_it_needs(tmp_path: Path, name: str) -> None:
    state = tmp_path / "state"
    state.mkdir()
    os.chown(state, 65534, 65534)
    path = state / name
    if name == "spool":
        path.mkdir()
    elif name != ".":
        path.touch()
    os.chown(path, 0, 0)
    path.chmod(0o755 if path.is_dir() else 0o644)
    for parent in [tmp_path, *tmp_path.parents][:4]:
        parent.chmod(stat.S_IMODE(parent.stat().st_mode) | 0o755)
    mode = "0755" if path.is_dir() else "0644"
    said = f"cannot write '{path}': it belongs to root with mode {mode}, and must belong to nobody"
    child = os.fork()
    if child == 0:
        os.setgid(65534)
        os.setuid(65534)
        try:
            filesystem.check_writable(state)
        except errors.StartRefused as refusal:
            os._exit(refusal.status if str(refusal) == said else 2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == DaemonExit.PERMISSION


# Room, and what a lane has left


def test_what_is_free_is_what_the_kernel_says_we_may_write(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    free = filesystem.Reserve(tmp_path, 1).free()
    # Others write here as well.
    assert abs(free - found.f_bavail * found.f_frsize) < 2**30
    assert free <= found.f_bfree * found.f_frsize + 2**30


def test_a_reserve_that_no_disk_has_is_low_and_one_of_a_mebibyte_is_not(tmp_path: Path) -> None:
    assert filesystem.Reserve(tmp_path, 2**40).is_low()
    assert not filesystem.Reserve(tmp_path, 1).is_low()


def test_a_place_that_cannot_be_asked_has_no_room(tmp_path: Path) -> None:
    reserve = filesystem.Reserve(tmp_path / "gone", 1)
    assert (reserve.free(), reserve.is_low()) == (0, True)


def test_a_spool_without_its_database_is_refused_naming_the_way_back(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    with pytest.raises(errors.StartRefused) as refused:
        filesystem.check_not_emptied(tmp_path, has_database=False)
    assert refused.value.status is DaemonExit.DATABASE
    assert f"'{tmp_path / 'brainlane.db'}'" in str(refused.value)
    assert os.fspath(tmp_path / "spool") in refused.value.next_action
    filesystem.check_not_emptied(tmp_path, has_database=True)


def test_a_place_where_no_lane_has_lived_is_taken(tmp_path: Path) -> None:
    filesystem.check_not_emptied(tmp_path, has_database=False)
    filesystem.check_not_emptied(tmp_path / "not-there", has_database=False)
