"""One daemon owns a control socket; a stale one never blocks a start, a live one is never stolen."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pdd.control import paths
from pdd.control.sockets import ControlSockets
from pdd.errors import AddressInUse, ConfigError, LimitError

Spawn = Callable[[str], "subprocess.Popen[str]"]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_modes_are_right_from_the_first_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = []
    chmod = os.chmod

    def spy(path: Path, mode: int) -> None:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            fresh.append(stat.S_IMODE(os.stat(path).st_mode))
        chmod(path, mode)

    monkeypatch.setattr(os, "chmod", spy)
    before = os.umask(0)  # a daemon started with a wide umask must not open the control socket to everyone
    try:
        sockets = ControlSockets.bind(tmp_path, "d0")
    finally:
        os.umask(before)
    assert fresh == [0, 0]  # nobody could connect before the mode was set
    assert mode(tmp_path / "d0" / "control.sock") == 0o660
    assert mode(tmp_path / "d0" / "status.sock") == 0o666
    assert mode(tmp_path / "d0") & 0o022 == 0
    assert sorted(os.listdir(tmp_path / "d0")) == ["control.sock", "lock", "status.sock"]
    sockets.close()


def test_a_narrow_umask_does_not_hide_the_status_socket(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        sockets = ControlSockets.bind(tmp_path / "run", "d0")
    finally:
        os.umask(before)
    assert (mode(tmp_path / "run"), mode(tmp_path / "run" / "d0")) == (0o755, 0o755)
    sockets.close()


def test_a_directory_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if tmp_path.stat().st_uid == 0:
        os.chown(tmp_path, 54321, -1)
    with pytest.raises(LimitError, match="belongs to another user"):
        ControlSockets.bind(tmp_path, "d0")


def test_a_second_daemon_of_the_name_is_refused_and_the_first_lives_on(tmp_path: Path) -> None:
    first = ControlSockets.bind(tmp_path, "d0")
    with pytest.raises(AddressInUse, match=f"pid {os.getpid()}") as caught:
        ControlSockets.bind(tmp_path, "d0")
    assert caught.value.exit_code == 73
    paths.connect(tmp_path / "d0" / "status.sock", 1).close()
    first.close()


def test_a_live_socket_without_a_lock_is_not_stolen(tmp_path: Path) -> None:
    (tmp_path / "d0").mkdir()
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(tmp_path / "d0" / "control.sock"))
        live.listen(1)
        inode = (tmp_path / "d0" / "control.sock").stat().st_ino
        with pytest.raises(AddressInUse, match="live process"):
            ControlSockets.bind(tmp_path, "d0")
        assert (tmp_path / "d0" / "control.sock").stat().st_ino == inode
    # The refusal gave the lock back: with the owner gone, the start works.
    ControlSockets.bind(tmp_path, "d0").close()


def test_a_file_that_is_no_socket_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "d0").mkdir()
    (tmp_path / "d0" / "control.sock").write_text("mine")
    with pytest.raises(AddressInUse):
        ControlSockets.bind(tmp_path, "d0")
    assert (tmp_path / "d0" / "control.sock").read_text() == "mine"


def test_a_killed_daemon_does_not_block_the_next(tmp_path: Path, spawn: Spawn) -> None:
    process = spawn("d0")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / "run" / "d0" / "control.sock").exists()
    spawn("d0")
    paths.connect(tmp_path / "run" / "d0" / "control.sock", 1).close()


def test_close_leaves_nothing_of_ours_and_nothing_of_others(tmp_path: Path) -> None:
    sockets = ControlSockets.bind(tmp_path, "d0")
    os.unlink(tmp_path / "d0" / "status.sock")
    (tmp_path / "d0" / "status.sock").write_text("another's")
    sockets.close()
    sockets.close()
    assert not (tmp_path / "d0" / "control.sock").exists()
    assert (tmp_path / "d0" / "status.sock").read_text() == "another's"


def test_a_path_longer_than_a_socket_address_works(tmp_path: Path) -> None:
    run_dir = tmp_path / ("x" * 120)
    sockets = ControlSockets.bind(run_dir, "d0")
    before = len(os.listdir("/proc/self/fd"))
    paths.connect(run_dir / "d0" / "status.sock", 1).close()
    assert len(os.listdir("/proc/self/fd")) == before
    sockets.close()


def test_a_group_that_does_not_exist_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no group nosuchgroup"):
        ControlSockets.bind(tmp_path, "d0", group="nosuchgroup")
