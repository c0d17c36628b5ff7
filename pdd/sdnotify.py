"""Tells systemd how the service is doing: READY=1, STATUS=…, STOPPING=1, EXTEND_TIMEOUT_USEC=…, WATCHDOG=1.

A datagram to $NOTIFY_SOCKET, as sd_notify(3) describes. Without the variable (no systemd) every call does nothing.
Delivery is not proved: a service manager that is gone must not take the node down.
"""

from __future__ import annotations

import os
import socket

_PATIENCE = 0.2  # seconds: a service manager that does not read must not hold the main loop up


def notify(*assignments: str) -> bool:
    """Sends the lines, for example notify("READY=1", "STATUS=serving"). Returns whether they were sent."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return False
    address = "\0" + path[1:] if path.startswith("@") else path  # @ marks an abstract socket
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.settimeout(_PATIENCE)
            channel.sendto("\n".join(assignments).encode(), address)
    except OSError:
        return False
    return True


def watchdog_seconds() -> float | None:
    """How often WATCHDOG=1 must come at the latest: half of what systemd allows. None: no watchdog for this process."""
    usec = os.environ.get("WATCHDOG_USEC", "")
    pid = os.environ.get("WATCHDOG_PID", "")
    if not usec.isdigit() or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 2e6
