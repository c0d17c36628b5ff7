"""Memory that two processes of this host map: a memfd that neither can shrink under the other."""

from __future__ import annotations

import fcntl
import os


def sealed(name: str, num_bytes: int) -> int:
    """A new descriptor of `num_bytes` zeros, which take memory when first written. Raises OSError when it cannot be."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd
