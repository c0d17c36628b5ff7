"""Who listens at a TCP port, from /proc below any root. Another user's processes can be seen by root alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pdd.doctor.facts import Process

_LISTEN = "0A"
_TABLES = ("proc/net/tcp", "proc/net/tcp6")


def of_port(port: int, root: Path = Path("/")) -> Process | None:
    """The first process found; None where there is none, or none that may be seen."""
    inodes = {inode for table in _TABLES for number, inode in _listening(root / table) if number == port}
    if not inodes:
        return None
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for pid in _pids(root):
        if any(target in wanted for target in _descriptors(root / "proc" / str(pid) / "fd")):
            return Process(pid, name_of(pid, root))
    return None


def name_of(pid: int, root: Path = Path("/")) -> str:
    """The command's name; "" when it is gone."""
    try:
        return (root / "proc" / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""


def _listening(table: Path) -> Iterator[tuple[int, str]]:
    """(port, inode) of each listening socket."""
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        words = line.split()
        if len(words) > 9 and words[3] == _LISTEN:
            yield int(words[1].rpartition(":")[2], 16), words[9]


def _pids(root: Path) -> list[int]:
    return sorted(int(name) for name in os.listdir(root / "proc") if name.isdigit())


def _descriptors(folder: Path) -> Iterator[str]:
    try:
        names = os.listdir(folder)
    except OSError:  # another user's, or it has just ended
        return
    for name in names:
        try:
            yield os.readlink(folder / name)
        except OSError:
            continue
