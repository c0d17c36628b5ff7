"""Which bytes of which page go from which source rank to which destination rank, and how many units that is.

One pure planner for both ends: the prefiller posts what `plan_node_writes` lists, the decoder waits for `node_units`,
which is the sum of the units in those very lists. Neither side ever sends the other the number.

    H heads over T ranks     T <= H: rank r holds heads [r*H/T, (r+1)*H/T)
                             T >  H: R = T/H copies of each head; rank r holds head r // R
    replica set k            ranks i*R + k: the fewest ranks that together hold all heads (all ranks when T <= H)

A decoder rank is fed by every rank of a source replica set that shares a head with it. The unit of transfer is u =
min(source, destination page size) tokens. With equal page sizes the shared heads of a page are one run of bytes, all
their tiles included. With unequal page sizes a unit is u tokens of a longer tile on one side, so it is one run for each
tile (K and V; of MLA the latent one) of each shared head. Entries come in token order, so a chunk of the prompt is a
slice.

The decoder says which source set S(g) feeds each of its own sets g (`choose_source_sets`), so that many decoders load
all copies alike. Where it has fewer sets than the source, one prompt is spread over all copies: block b of neighbouring
units comes from set (S(g) + b) mod R, and a block is long enough that its pages, when adjacent, merge into writes that
a fast NIC likes. Neither changes a count: every set holds the same heads in the same order.

Layers are not in the plan: every layer is the same entries at another base (`src_layer_stride`, `dst_layer_stride`).
It does not merge neighbours, choose NICs or post anything.
Source: facts of the transfer, "Sharded KV cache transfers"; every case of a grid is checked byte by byte in the tests.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from pdd.kv.layout import KvLayout, KvShape, heads_divide, heads_of_rank

KV_FIELDS = tuple(field.name for field in dataclasses.fields(KvShape))
MAX_EXPECTED_UNITS = 1 << 31  # of one attempt; counters are wider, this is the bound both sides agree on
SPREAD_BYTES = 64 << 10  # of one layer that a source set sends in a row before the next has its turn

_Ints = npt.NDArray[np.int64]


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
        return heads_of_rank(self.num_kv_heads, rank, self.tp)

    def replica_set(self, index: int) -> range:
        """Ranks that together hold every head once. `index` is taken modulo the number of sets."""
        return range(index % self.copies, self.tp, self.copies)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class UnitIndex:
    """Which entries of a plan belong to which tokens: what is left to ask once the plan is with the fabric."""

    num_tokens: int
    unit_tokens: int
    unit_numbers: _Ints  # units of the prompt that the plan has, ascending
    entries_per_unit: int

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
        first, last = self.unit_numbers.searchsorted((begin, end)).tolist()
        return first * self.entries_per_unit, last * self.entries_per_unit


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ShardWrites:
    """The writes of one layer from one source rank to one destination rank, in token order.

    Entry i copies `nbytes[i]` bytes from `src_offset[i]` of the source rank's region to `dst_offset[i]` of the
    destination's, and is worth `units[i]`. Layer l adds l times each stride. The arrays are read-only.
    """

    src_rank: int
    dst_rank: int
    src_offset: _Ints
    dst_offset: _Ints
    nbytes: _Ints
    units: _Ints
    src_layer_stride: int  # bytes
    dst_layer_stride: int  # bytes
    num_layers: int
    index: UnitIndex

    def __len__(self) -> int:
        return len(self.nbytes)

    def entries(self, begin_token: int, end_token: int) -> tuple[int, int]:
        return self.index.entries(begin_token, end_token)


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
            units = node_units(source, destination, most)
            if units > MAX_EXPECTED_UNITS:
                limit = destination.num_pages * MAX_EXPECTED_UNITS // units
                said = {id(spec): str(spec.num_pages) for spec in (ours, theirs)}
                said[id(destination)] += f" (more than the {limit} that can be counted)"
                found.append(("num_pages", said[id(ours)], said[id(theirs)]))
                break
    return found


def choose_source_sets(src: ShardSpec, dst: ShardSpec, rng: random.Random) -> tuple[int, ...]:
    """S(g) for each replica set g of `dst`: at random, and each source set as often as any other. Empty: there is one."""
    if src.copies == 1:
        return ()
    order = rng.sample(range(src.copies), src.copies)
    return tuple(order[g % src.copies] for g in range(dst.copies))


def source_ranks(src: ShardSpec, dst: ShardSpec, dst_rank: int, source_set: int = 0) -> tuple[int, ...]:
    """Ranks of one source replica set that share a head with `dst_rank`."""
    wanted = dst.heads(dst_rank)
    return tuple(rank for rank in src.replica_set(source_set) if _overlap(src.heads(rank), wanted))


def expected_units(src: ShardSpec, dst: ShardSpec, dst_rank: int, num_tokens: int, skip_tokens: int = 0) -> int:
    """Units that `dst_rank` must count before the KV of `num_tokens` tokens is whole in all layers.

    Depends on the sharding only, never on chunks, merging, NICs or which source sets send.
    """
    first, last = _unit_range(src, dst, num_tokens, skip_tokens)
    runs = sum(_entries_per_unit(src, dst, rank, dst_rank) for rank in source_ranks(src, dst, dst_rank))
    return src.num_layers * runs * (last - first)


def node_units(src: ShardSpec, dst: ShardSpec, num_tokens: int, skip_tokens: int = 0) -> int:
    """Units that all ranks of `dst` count together: each of its replica sets as many as the first."""
    one_set = sum(expected_units(src, dst, rank, num_tokens, skip_tokens) for rank in dst.replica_set(0))
    return dst.copies * one_set


def node_bytes(src: ShardSpec, dst: ShardSpec, num_tokens: int, skip_tokens: int = 0) -> int:
    """Bytes of the writes that `node_units` counts: whole units, the unused slots of the last one included."""
    first, last = _unit_range(src, dst, num_tokens, skip_tokens)
    unit_bytes = dst.tiles * min(src.page_size, dst.page_size) * dst.layout.token_bytes  # of one head
    return dst.num_layers * dst.tp * dst.heads_per_rank * (last - first) * unit_bytes


def plan_node_writes(
    src: ShardSpec, dst: ShardSpec, *, num_tokens: int, skip_tokens: int = 0, src_pages: Sequence[int],
    dst_pages: Sequence[int], source_sets: Sequence[int] = (),
) -> tuple[ShardWrites, ...]:
    """The writes of every pair of ranks that exchange something, the first `skip_tokens` tokens left out.

    `src_pages` and `dst_pages` are in token order and start at token 0 on both sides. The tail page goes whole; what it
    holds past the last token is not meant. `source_sets` is S(g) for each replica set g of `dst`, any numbers; none: 0.
    All plans together are worth `node_units`.

    Raises:
        ValueError: too few pages, a page outside its region, or a skip that is no whole number of units.
    """
    unit = min(src.page_size, dst.page_size)
    first, last = _unit_range(src, dst, num_tokens, skip_tokens)
    numbers = np.arange(first, last, dtype=np.int64)
    src_base = _unit_offsets(numbers * unit, src, dst, src_pages, "source")
    dst_base = _unit_offsets(numbers * unit, dst, src, dst_pages, "destination")
    plans = []
    for source_set, dst_set, share in _shares(src, dst, numbers, source_sets):
        mine, src_at, dst_at = numbers[share], src_base[share], dst_base[share]
        for dst_rank in dst.replica_set(dst_set):
            for src_rank in source_ranks(src, dst, dst_rank, source_set):
                src_runs, dst_runs, run_bytes = _runs(src, dst, src_rank, dst_rank)
                count = len(mine) * len(src_runs)
                plans.append(ShardWrites(
                    src_rank=src_rank, dst_rank=dst_rank, src_offset=_offsets(src_at, src_runs),
                    dst_offset=_offsets(dst_at, dst_runs), nbytes=_filled(count, run_bytes), units=_filled(count, 1),
                    src_layer_stride=src.layout.layer_bytes, dst_layer_stride=dst.layout.layer_bytes,
                    num_layers=src.num_layers, index=UnitIndex(num_tokens, unit, mine, len(src_runs)),
                ))
    return tuple(plans)


# -- arithmetic -------------------------------------------------------------------------------------------------------
def _shards_evenly(spec: ShardSpec) -> bool:
    return spec.tp >= 1 and heads_divide(spec.num_kv_heads, spec.tp)


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


def _shares(
    src: ShardSpec, dst: ShardSpec, numbers: _Ints, source_sets: Sequence[int]
) -> Iterator[tuple[int, int, _Ints | slice]]:
    """(source set, destination set, which of the units the one sends to the other)."""
    chosen = [source_sets[g % len(source_sets)] if source_sets else 0 for g in range(dst.copies)]
    if dst.copies >= src.copies:
        for g, source_set in enumerate(chosen):
            yield source_set % src.copies, g, slice(None)
        return
    unit_bytes = src.tiles * min(src.page_size, dst.page_size) * src.layout.token_bytes  # a rank that has copies has one head
    blocks = numbers // -(-SPREAD_BYTES // unit_bytes)
    shares = [np.flatnonzero(blocks % src.copies == turn) for turn in range(src.copies)]
    for g, source_set in enumerate(chosen):
        for turn, share in enumerate(shares):
            if len(share):
                yield (source_set + turn) % src.copies, g, share


def _unit_offsets(starts: _Ints, spec: ShardSpec, other: ShardSpec, pages: Sequence[int], side: str) -> _Ints:
    """Byte offset, within layer 0, of head 0 of each unit, which begins with the tokens `starts`."""
    table = np.asarray(pages, dtype=np.int64)
    needed = int(starts[-1]) // spec.page_size + 1 if len(starts) else 0
    if len(table) < needed:
        raise ValueError(f"{len(table)} {side} pages are too few: {needed} are needed")
    used: _Ints = table[starts // spec.page_size]
    if len(used) and (used.min() < 0 or used.max() >= spec.num_pages):
        raise ValueError(f"a {side} page lies outside the pool of {spec.num_pages}")
    used *= spec.layout.page_bytes
    if spec.page_size > other.page_size:
        used += starts % spec.page_size * spec.layout.token_bytes
    return used


def _runs(src: ShardSpec, dst: ShardSpec, src_rank: int, dst_rank: int) -> tuple[_Ints, _Ints, int]:
    """The runs of bytes that a unit is: (offsets from head 0 of the source, of the destination, bytes of each)."""
    src_heads, dst_heads = src.heads(src_rank), dst.heads(dst_rank)
    shared = _overlap(src_heads, dst_heads)
    sides = (src_heads, src.layout), (dst_heads, dst.layout)
    if src.page_size == dst.page_size:  # heads are neighbours on both sides, the tiles of a head too
        at, to = (np.array([(shared.start - held.start) * layout.head_bytes]) for held, layout in sides)
        return at, to, len(shared) * src.layout.head_bytes
    at, to = (_tile_offsets(shared, held, layout) for held, layout in sides)
    return at, to, min(src.page_size, dst.page_size) * src.layout.token_bytes


def _tile_offsets(shared: range, held: range, layout: KvLayout) -> _Ints:
    """Offset within a page of the tiles of each shared head: K, V, K, V, ..."""
    heads = np.arange(shared.start - held.start, shared.stop - held.start, dtype=np.int64)
    tiles: _Ints = heads[:, None] * layout.head_bytes + np.arange(layout.tiles, dtype=np.int64) * layout.tile_bytes
    return tiles.reshape(-1)


def _offsets(bases: _Ints, runs: _Ints) -> _Ints:
    """Of all runs of all units."""
    return _frozen((bases[:, None] + runs).reshape(-1))


def _filled(count: int, value: int) -> _Ints:
    return _frozen(np.full(count, value, dtype=np.int64))


def _frozen(array: _Ints) -> _Ints:
    array.flags.writeable = False
    return array
