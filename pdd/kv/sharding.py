"""Which bytes of which page go from which source rank to which destination rank, and how many units that is.

One pure planner for both ends: the prefiller posts what `plan_writes` lists, the decoder waits for `expected_units`,
which is the sum of the units in those very lists. Neither side ever sends the other the number.

    H heads over T ranks     T <= H: rank r holds heads [r*H/T, (r+1)*H/T)
                             T >  H: R = T/H copies of each head; rank r holds head r // R
    replica set k            ranks i*R + k: the fewest ranks that together hold all heads (all ranks when T <= H)

A decoder rank is fed by every rank of *one* source replica set that shares a head with it. The unit of transfer is
u = min(source, destination page size) tokens. With equal page sizes the shared heads of a page are one run of bytes, all
their tiles included. With unequal page sizes a unit is u tokens of a longer tile on one side, so it is one run for each
tile (K and V; of MLA the latent one) of each shared head. Entries come in token order, so a chunk of the prompt is a
slice.

Layers are not in the plan: every layer is the same entries at another base (`src_layer_stride`, `dst_layer_stride`).
It does not merge neighbours, choose NICs or post anything.
Source: facts of the transfer, "Sharded KV cache transfers"; every case of a grid is checked byte by byte in the tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdd.kv.layout import KvLayout, KvShape

KV_FIELDS = tuple(field.name for field in dataclasses.fields(KvShape))
MAX_EXPECTED_UNITS = 1 << 31  # of one attempt; counters are wider, this is the bound both sides agree on


@dataclasses.dataclass(frozen=True, slots=True)
class ShardSpec(KvShape):
    """How one node spreads the KV of a model over its ranks."""

    page_size: int  # tokens
    num_pages: int  # of every rank
    tp: int = 1

    @property
    def copies(self) -> int:
        """Ranks that hold the same head; the number of replica sets."""
        return self.copies_over(self.tp)

    @property
    def heads_per_rank(self) -> int:
        return self.heads_over(self.tp)

    @property
    def layout(self) -> KvLayout:
        """The region of each rank."""
        return self.layout_over(self.tp, self.page_size, self.num_pages)

    def heads(self, rank: int) -> range:
        """Heads of the model that `rank` holds."""
        first = rank // self.copies * self.heads_per_rank
        return range(first, first + self.heads_per_rank)

    def replica_set(self, index: int) -> range:
        """Ranks that together hold every head once. `index` is taken modulo the number of sets."""
        return range(index % self.copies, self.tp, self.copies)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ShardWrites:
    """The writes of one layer from one source rank to one destination rank, in token order.

    Entry i copies `nbytes[i]` bytes from `src_offset[i]` of the source rank's region to `dst_offset[i]` of the
    destination's, and is worth `units[i]`. Layer l adds l times each stride. The arrays are read-only.
    """

    src_rank: int
    dst_rank: int
    src_offset: npt.NDArray[np.uint64]
    dst_offset: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint32]
    units: npt.NDArray[np.uint32]
    src_layer_stride: int  # bytes
    dst_layer_stride: int  # bytes
    num_layers: int
    num_tokens: int
    unit_tokens: int
    first_unit: int  # units of `unit_tokens` tokens that are skipped
    entries_per_unit: int

    def __len__(self) -> int:
        return len(self.nbytes)

    def entries(self, begin_token: int, end_token: int) -> tuple[int, int]:
        """[begin, end) of the entries to send once tokens [begin_token, end_token) are computed.

        A unit goes with the chunk that computes its last token; the tail goes with the last chunk. Chunks that follow
        each other therefore give slices that follow each other, whatever their sizes.
        """
        if not 0 <= begin_token <= end_token <= self.num_tokens:
            raise ValueError(f"chunk [{begin_token}, {end_token}) is not within {self.num_tokens} tokens")
        begin, end = begin_token // self.unit_tokens, end_token // self.unit_tokens
        if end_token == self.num_tokens:
            end = -(-end_token // self.unit_tokens)
        begin, end = max(begin, self.first_unit), max(end, self.first_unit)
        return (begin - self.first_unit) * self.entries_per_unit, (end - self.first_unit) * self.entries_per_unit


def incompatibilities(ours: ShardSpec, theirs: ShardSpec) -> list[tuple[str, str, str]]:
    """Why KV cannot go between two nodes, as (field, ours, theirs). Empty: it can."""
    found = []
    for field in KV_FIELDS:
        a, b = getattr(ours, field), getattr(theirs, field)
        if a != b:
            found.append((field, str(a), str(b)))
    if max(ours.page_size, theirs.page_size) % min(ours.page_size, theirs.page_size):
        found.append(("page_size", str(ours.page_size), str(theirs.page_size)))
    if not (_shards_evenly(ours) and _shards_evenly(theirs)):
        found.append(("tp", f"{ours.tp} for {ours.num_kv_heads} heads", f"{theirs.tp} for {theirs.num_kv_heads} heads"))
    if not found:
        for source, destination in ((ours, theirs), (theirs, ours)):
            most = destination.num_pages * destination.page_size
            units = expected_units(source, destination, 0, most)
            if units > MAX_EXPECTED_UNITS:
                limit = destination.num_pages * MAX_EXPECTED_UNITS // units
                said = {id(spec): str(spec.num_pages) for spec in (ours, theirs)}
                said[id(destination)] += f" (more than the {limit} that can be counted)"
                found.append(("num_pages", said[id(ours)], said[id(theirs)]))
                break
    return found


def source_ranks(src: ShardSpec, dst: ShardSpec, dst_rank: int, source_set: int = 0) -> tuple[int, ...]:
    """Ranks of one source replica set that share a head with `dst_rank`: those that write to it."""
    wanted = dst.heads(dst_rank)
    return tuple(rank for rank in src.replica_set(source_set) if _overlap(src.heads(rank), wanted))


def expected_units(
    src: ShardSpec, dst: ShardSpec, dst_rank: int, num_tokens: int, skip_tokens: int = 0, source_set: int = 0
) -> int:
    """Units that `dst_rank` must count before the KV of `num_tokens` tokens is whole in all layers.

    Depends on the sharding only, never on chunks, merging, NICs or which source set sends. A node's expectation is the
    sum over its ranks.
    """
    first, last = _unit_range(src, dst, num_tokens, skip_tokens)
    runs = sum(
        _entries_per_unit(src, dst, rank, dst_rank) for rank in source_ranks(src, dst, dst_rank, source_set)
    )
    return src.num_layers * runs * (last - first)


def plan_writes(
    src: ShardSpec, dst: ShardSpec, *, src_rank: int, dst_rank: int, num_tokens: int, skip_tokens: int = 0,
    src_pages: Sequence[int], dst_pages: Sequence[int],
) -> ShardWrites:
    """What `src_rank` writes to `dst_rank` for `num_tokens` tokens, the first `skip_tokens` of them left out.

    `src_pages` and `dst_pages` are in token order and start at token 0 on both sides. The tail page goes whole; what it
    holds past the last token is not meant.

    Raises:
        ValueError: too few pages, a page outside its region, or a skip that is no whole number of units.
    """
    unit = min(src.page_size, dst.page_size)
    first, last = _unit_range(src, dst, num_tokens, skip_tokens)
    starts = np.arange(first, last, dtype=np.int64) * unit  # first token of each unit
    src_base = _page_offsets(starts, src, src_pages, "source")
    dst_base = _page_offsets(starts, dst, dst_pages, "destination")
    src_heads, dst_heads = src.heads(src_rank), dst.heads(dst_rank)
    shared = _overlap(src_heads, dst_heads)
    token_bytes = src.layout.token_bytes
    if not shared:
        src_runs = dst_runs = run_bytes = np.zeros(0, np.int64)
    elif src.page_size == dst.page_size:  # heads are neighbours on both sides, K and V of a head too
        src_runs = np.array([(shared.start - src_heads.start) * src.layout.head_bytes])
        dst_runs = np.array([(shared.start - dst_heads.start) * dst.layout.head_bytes])
        run_bytes = np.array([len(shared) * src.layout.head_bytes])
    else:
        src_runs = _tile_offsets(shared, src_heads, src.layout) + (starts % src.page_size * token_bytes)[:, None]
        dst_runs = _tile_offsets(shared, dst_heads, dst.layout) + (starts % dst.page_size * token_bytes)[:, None]
        run_bytes = np.full(src.tiles * len(shared), unit * token_bytes)
    src_offset = (src_base[:, None] + src_runs).reshape(-1)
    dst_offset = (dst_base[:, None] + dst_runs).reshape(-1)
    return ShardWrites(
        src_rank=src_rank, dst_rank=dst_rank,
        src_offset=_offsets(src_offset), dst_offset=_offsets(dst_offset),
        nbytes=_sizes(np.tile(run_bytes, last - first)), units=_sizes(np.ones_like(src_offset)),
        src_layer_stride=src.layout.layer_bytes, dst_layer_stride=dst.layout.layer_bytes, num_layers=src.num_layers,
        num_tokens=num_tokens, unit_tokens=unit, first_unit=first,
        entries_per_unit=_entries_per_unit(src, dst, src_rank, dst_rank),
    )


def node_units(src: ShardSpec, dst: ShardSpec, num_tokens: int, skip_tokens: int = 0) -> int:
    """Units that all ranks of `dst` count together."""
    return sum(expected_units(src, dst, rank, num_tokens, skip_tokens) for rank in range(dst.tp))


def node_bytes(src: ShardSpec, dst: ShardSpec, num_tokens: int, skip_tokens: int = 0) -> int:
    """Bytes of the writes that `node_units` counts: whole units, the unused slots of the last one included."""
    first, last = _unit_range(src, dst, num_tokens, skip_tokens)
    unit_bytes = dst.tiles * min(src.page_size, dst.page_size) * dst.layout.token_bytes  # of one head
    return dst.num_layers * dst.tp * dst.heads_per_rank * (last - first) * unit_bytes


def plan_node_writes(
    src: ShardSpec, dst: ShardSpec, *, num_tokens: int, skip_tokens: int = 0, src_pages: Sequence[int],
    dst_pages: Sequence[int], source_set: int = 0,
) -> tuple[ShardWrites, ...]:
    """The plans of every pair of ranks that exchange something; together they are worth `node_units`."""
    return tuple(
        plan_writes(src, dst, src_rank=src_rank, dst_rank=dst_rank, num_tokens=num_tokens, skip_tokens=skip_tokens,
                    src_pages=src_pages, dst_pages=dst_pages)
        for dst_rank in range(dst.tp)
        for src_rank in source_ranks(src, dst, dst_rank, source_set)
    )


# -- arithmetic -------------------------------------------------------------------------------------------------------
def _shards_evenly(spec: ShardSpec) -> bool:
    return spec.tp >= 1 and (spec.num_kv_heads % spec.tp == 0 or spec.tp % spec.num_kv_heads == 0)


def _overlap(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _entries_per_unit(src: ShardSpec, dst: ShardSpec, src_rank: int, dst_rank: int) -> int:
    shared = len(_overlap(src.heads(src_rank), dst.heads(dst_rank)))
    if src.page_size == dst.page_size:
        return min(shared, 1)  # 0 when the two share nothing
    return src.tiles * shared


def _unit_range(src: ShardSpec, dst: ShardSpec, num_tokens: int, skip_tokens: int) -> tuple[int, int]:
    unit = min(src.page_size, dst.page_size)
    if not 0 <= skip_tokens <= num_tokens or skip_tokens % unit:
        raise ValueError(f"cannot skip {skip_tokens} of {num_tokens} tokens in units of {unit}")
    return skip_tokens // unit, -(-num_tokens // unit)


def _page_offsets(
    starts: npt.NDArray[np.int64], spec: ShardSpec, pages: Sequence[int], side: str
) -> npt.NDArray[np.int64]:
    """Byte offset, within layer 0, of the page that holds each of the tokens `starts`."""
    table = np.asarray(pages, dtype=np.int64)
    needed = int(starts[-1]) // spec.page_size + 1 if len(starts) else 0
    if len(table) < needed:
        raise ValueError(f"{len(table)} {side} pages are too few: {needed} are needed")
    used: npt.NDArray[np.int64] = table[starts // spec.page_size]
    if len(used) and (used.min() < 0 or used.max() >= spec.num_pages):
        raise ValueError(f"a {side} page lies outside the pool of {spec.num_pages}")
    used *= spec.layout.page_bytes
    return used


def _tile_offsets(shared: range, held: range, layout: KvLayout) -> npt.NDArray[np.int64]:
    """Offset within a page of the tiles of each shared head: K, V, K, V, ..."""
    heads = np.arange(shared.start - held.start, shared.stop - held.start, dtype=np.int64)
    tiles = heads[:, None] * layout.head_bytes + np.arange(layout.tiles, dtype=np.int64) * layout.tile_bytes
    return tiles.reshape(1, -1)


def _offsets(values: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    array = np.ascontiguousarray(values, dtype=np.uint64)
    array.flags.writeable = False
    return array


def _sizes(values: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    array = np.ascontiguousarray(values, dtype=np.uint32)
    array.flags.writeable = False
    return array
