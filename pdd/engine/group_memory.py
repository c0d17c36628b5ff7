"""The memory in which the ranks of one group work together. The daemon makes it and hands it to every rank. No torch.

    a cache line per rank: how often it has come to the barrier (native/watch/barrier.h)
    two turns of a slot per rank: what it gives to the others; a turn is used again when all are through with it

The daemon only looks at the lines, and only when a rank is late.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Collection

from pdd import memfd

LINE_BYTES = 64
SLOT_BYTES = 1 << 20  # larger tensors go in pieces; about what a core's own cache holds
TURNS = 2


def header_bytes(world: int) -> int:
    """Of the lines, up to the slots."""
    return -(-world * LINE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


def num_bytes(world: int) -> int:
    return header_bytes(world) + TURNS * world * SLOT_BYTES


def create(world: int) -> int:
    """A new descriptor of it, sealed; the caller closes it. Raises OSError when it cannot be."""
    return memfd.sealed("pdd-ranks", num_bytes(world))


def arrivals(fd: int, world: int) -> tuple[int, ...]:
    """How often each rank has come to the barrier."""
    return tuple(int.from_bytes(os.pread(fd, 8, rank * LINE_BYTES), sys.byteorder) for rank in range(world))


def who_is_awaited(arrived: tuple[int, ...], late: Collection[int]) -> tuple[int, ...]:
    """Those of the `late` ranks that the others wait for; all of them when none waits for another."""
    behind = tuple(rank for rank in late if arrived[rank] < max(arrived))
    return behind or tuple(late)
