"""Binds the two sockets of an instance, so that one daemon owns them and nobody can use them before their mode is
right.

A lock file is held for the life of the daemon: two daemons of one name cannot both start. A socket file that is left
over is connected to before it is replaced: a live one is never stolen, a stale one never blocks a start. The socket
is bound under another name with mode 0, given its mode and group, and renamed into place.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import socket
import stat
from pathlib import Path

from pdd.control import paths
from pdd.errors import AddressInUse, ConfigError, LimitError
from pdd.open_files import Listener

_CONTROL_MODE = 0o660
_STATUS_MODE = 0o666
_PROBE_SECONDS = 1.0


class ControlSockets:
    """The bound, listening sockets of one instance and its lock. Owner: the daemon's main loop."""

    def __init__(self, directory: Path, lock: int, control: socket.socket, status: socket.socket) -> None:
        self.directory = directory
        self.control = control
        self.status = status
        self._lock = lock
        self._inodes = {name: os.stat(directory / name).st_ino for name in (paths.CONTROL, paths.STATUS)}

    @classmethod
    def bind(cls, run_dir: Path, name: str, group: str = "") -> ControlSockets:
        """Takes RUN_DIR/NAME.

        Raises:
            AddressInUse: another daemon has it.
            LimitError: the directory cannot be made or written.
            ConfigError: there is no such group.
        """
        directory = run_dir / name
        gid = _group_id(group)
        try:
            for path in (run_dir, directory):
                _make_directory(path)
            lock = _take_lock(directory)
        except OSError as error:
            raise LimitError(
                f"cannot use {directory}: {error.strerror}", hint="Choose another with --run-dir or control.dir."
            ) from None
        bound: list[socket.socket] = []
        try:
            for file, mode in ((paths.CONTROL, _CONTROL_MODE), (paths.STATUS, _STATUS_MODE)):
                _refuse_live(directory / file)
                bound.append(_bind(directory / file, mode, gid if file == paths.CONTROL else None))
            return cls(directory, lock, *bound)
        except BaseException:
            for stream in bound:
                stream.close()
            os.close(lock)
            raise

    def close(self) -> None:
        """Removes the socket files that are still ours, then gives up the lock. Idempotent.

        The lock's file and the directory stay: whoever starts a node of this name may have opened the file already and will
        lock it as soon as we let go, while a third would make and lock another one. Clients go by the sockets.
        """
        if self._lock < 0:
            return
        for file, inode in self._inodes.items():
            with contextlib.suppress(OSError):
                if os.stat(self.directory / file).st_ino == inode:
                    os.unlink(self.directory / file)
        self.control.close()
        self.status.close()
        os.close(self._lock)
        self._lock = -1


def _group_id(group: str) -> int | None:
    if not group:
        return None
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(f"control.group: there is no group {group}", hint=f"groupadd --system {group}") from None


def _make_directory(path: Path) -> None:
    """A directory that everyone may pass and only its owner may change, whatever the umask. Not one of another user."""
    if path.is_dir():
        if path.stat().st_uid not in (0, os.geteuid()):
            raise LimitError(f"{path} belongs to another user", hint="Choose another with --run-dir or control.dir.")
        return
    path.mkdir(parents=True, exist_ok=True)
    os.chmod(path, 0o755)


def _take_lock(directory: Path) -> int:
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 32).decode(errors="replace").strip()
        os.close(lock)
        who = f"pid {holder}" if holder.isdigit() else "another process"
        raise AddressInUse(
            f"{directory} belongs to a running daemon ({who})",
            hint="Stop it, or give this node another --name or --run-dir.",
        ) from None
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    return lock


def _refuse_live(path: Path) -> None:
    """Raises AddressInUse if something listens at `path`; a dead socket file is left for rename to replace."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise AddressInUse(f"{path} is not a socket", hint="Remove it by hand if it is not needed.")
        paths.connect(path, _PROBE_SECONDS).close()
    except (FileNotFoundError, ConnectionRefusedError):
        return
    except OSError as error:
        # No permission, or a listener too busy to accept: not ours to replace.
        raise AddressInUse(
            f"{path} is in use: {error.strerror or error}", hint="Remove it by hand if it is stale."
        ) from None
    raise AddressInUse(f"{path} is in use by a live process", hint="Give this node another --name or --run-dir.")


def _bind(path: Path, mode: int, gid: int | None) -> socket.socket:
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        before = os.umask(0o777)
        try:
            with paths.reachable(temporary) as address:
                stream.bind(address)
        finally:
            os.umask(before)
        stream.listen(128)
        stream.setblocking(False)
        if gid is not None:
            os.chown(temporary, -1, gid)
        os.chmod(temporary, mode)
        os.rename(temporary, path)
    except PermissionError as error:
        stream.close()
        raise LimitError(
            f"cannot make {path}: {error.strerror}", hint="Is this user in the group of control.group?"
        ) from None
    except BaseException:
        stream.close()
        raise
    return Listener(stream, path.name, reserved=0)
