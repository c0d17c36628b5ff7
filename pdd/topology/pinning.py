"""Keeps threads and memory on the NUMA node that a plan chose for them. Linux; no libnuma needed.

A system may refuse (a cpuset that changed, a seccomp filter, a kernel without NUMA): that costs speed, not the node, so
the answer is a warning in words and never an exception.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Collection

from pdd.topology import cpus as cpu_sets

_MBIND = {"x86_64": 237, "aarch64": 235, "ppc64le": 259, "s390x": 268, "riscv64": 235}  # the system call's number
_MPOL_PREFERRED = 1  # not MPOL_BIND: a pool larger than the node must spill over, not end by the OOM killer
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def pin_thread(wanted: Collection[int]) -> str | None:
    """Runs this thread, and those it starts later, on the CPUs `wanted` that it may run on. Returns a warning."""
    if not wanted:
        return None
    try:
        usable = os.sched_getaffinity(0).intersection(wanted)
        if not usable:
            return f"none of the CPUs {cpu_sets.as_list(sorted(wanted))} is for this process: it stays where it may run"
        os.sched_setaffinity(0, usable)
    except OSError as error:
        return f"the system refuses to pin a thread to CPUs {cpu_sets.as_list(sorted(wanted))}: {error.strerror}"
    return None


def place_memory(memory: mmap.mmap, node: int | None) -> str | None:
    """Pages of the mapping that are not written yet will lie on NUMA node `node` while it has room, whoever writes them
    first. Returns a warning. None, or a node that no machine has: nothing is done."""
    if node is None:
        return None
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"KV memory is not placed on NUMA node {node}: unknown system calls of {platform.machine()}"
    words = (ctypes.c_ulong * (node // _BITS + 1))()
    words[node // _BITS] = 1 << node % _BITS
    start = ctypes.c_char.from_buffer(memory)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        refused = libc.syscall(
            ctypes.c_long(number), ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_ulong(len(memory)),
            ctypes.c_long(_MPOL_PREFERRED), words, ctypes.c_ulong(len(words) * _BITS + 1), ctypes.c_ulong(0),
        )
        if refused:
            why = os.strerror(ctypes.get_errno())
            return f"the system refuses to place KV memory on NUMA node {node}: {why}"
    finally:
        del start  # or the mapping could never be closed
    return None
