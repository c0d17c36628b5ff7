"""Where an instance's sockets lie: RUN_DIR/NAME/{control,status}.sock. Stdlib only; shared by client and server.

RUN_DIR is /run/pdd for root, else $XDG_RUNTIME_DIR/pdd, else a private directory under the temporary one. A client of
another user than root also finds the nodes in /run/pdd.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

CONTROL = "control.sock"
STATUS = "status.sock"
SYSTEM_RUN_DIR = Path("/run/pdd")
_SUN_PATH_MAX = 107  # bytes of sockaddr_un.sun_path less the final zero


def default_run_dir() -> Path:
    """Of the nodes that this user starts."""
    if os.geteuid() == 0:
        return SYSTEM_RUN_DIR
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "pdd" if runtime else Path(tempfile.gettempdir()) / f"pdd-{os.geteuid()}"


def run_dirs() -> list[Path]:
    """Where a client looks: at this user's own nodes, then at those that systemd runs."""
    own = default_run_dir()
    return [own] if own == SYSTEM_RUN_DIR else [own, SYSTEM_RUN_DIR]


def instances(run_dir: Path) -> list[str]:
    """Names that have a socket, alive or stale."""
    try:
        return sorted(entry.name for entry in run_dir.iterdir() if (entry / STATUS).exists())
    except OSError:
        return []


def answers(instance_dir: Path) -> bool:
    """Whether a daemon takes connections there; a socket that a dead one left behind takes none."""
    try:
        connect(instance_dir / STATUS, 1.0).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def reachable(path: Path) -> Iterator[str]:
    """`path` in a form that fits a socket address: long paths go through a descriptor of their directory."""
    if len(os.fsencode(path)) <= _SUN_PATH_MAX:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def connect(path: Path, timeout: float | None) -> socket.socket:
    """A stream connected to the socket at `path`. Raises OSError as connect(2) does."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        stream.settimeout(timeout)
        with reachable(path) as address:
            stream.connect(address)
    except BaseException:
        stream.close()
        raise
    return stream
