"""The time of day, and whether the kernel thinks that somebody keeps it right (adjtimex(2), which reads only)."""

from __future__ import annotations

import ctypes
import os
import struct
import time
from pathlib import Path

from pdd import version
from pdd.doctor.facts import Clock

_TIMEX_BYTES = 512  # more than any struct timex
_STATUS_AT = struct.calcsize("@illll")  # of its `status`: after modes, offset, freq, maxerror, esterror
_STA_UNSYNC = 0x40


def read(root: Path = Path("/")) -> Clock:
    """Of a live system alone can the kernel be asked."""
    born = Path(version.__file__).stat().st_mtime
    if root != Path("/"):
        return Clock(time.time(), born, None, "another machine")
    synchronised, why = _ask_kernel()
    return Clock(time.time(), born, synchronised, why)


def _ask_kernel() -> tuple[bool | None, str]:
    data = ctypes.create_string_buffer(_TIMEX_BYTES)  # modes 0: change nothing
    if ctypes.CDLL(None, use_errno=True).adjtimex(data) < 0:
        return None, f"adjtimex: {os.strerror(ctypes.get_errno())}"
    (status,) = struct.unpack_from("@i", data.raw, _STATUS_AT)
    return not status & _STA_UNSYNC, ""
