"""How neighbouring entries of a plan become one write. Pure.

The fabric does it while it posts (`native/fabric/write_plan.cpp`); this is the same rule for those who want to know
beforehand, of writes of one piece. It changes how many writes there are, never their bytes or the sum of their units.
"""

from __future__ import annotations

import dataclasses

from pdd.kv.sharding import ShardWrites

MAX_UNITS = 255  # of one write: what its immediate can say
MAX_BYTES = 1 << 20  # of a merged write; a single entry may be larger


@dataclasses.dataclass(frozen=True, slots=True)
class MergedWrite:
    """One write of one layer."""

    src_offset: int
    dst_offset: int
    nbytes: int
    units: int


def merge(writes: ShardWrites, begin: int, end: int) -> list[MergedWrite]:
    """Entries [begin, end) as writes of layer 0, in their order. A chunk merges with no other: it is sent before that."""
    columns = (column[begin:end].tolist() for column in (writes.src_offset, writes.dst_offset, writes.nbytes, writes.units))
    found: list[MergedWrite] = []
    for src, dst, nbytes, units in zip(*columns, strict=True):
        if found:
            last = found[-1]
            follows = last.src_offset + last.nbytes == src and last.dst_offset + last.nbytes == dst
            if follows and last.nbytes + nbytes <= MAX_BYTES and last.units + units <= MAX_UNITS:
                found[-1] = MergedWrite(last.src_offset, last.dst_offset, last.nbytes + nbytes, last.units + units)
                continue
        found.append(MergedWrite(src, dst, nbytes, units))
    return found
