"""Brings the pure planner of `pdd.kv.sharding` together with the geometry of a handshake and the fabric's plans."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

from pdd.kv import sharding
from pdd.messenger import wire
from pdd.messenger.handshake import FieldDiff

_NODE_FIELDS = ("model", "vocab_size")  # what sharding does not look at


def shard_spec(geometry: wire.Geometry) -> sharding.ShardSpec:
    return sharding.ShardSpec(
        **{name: getattr(geometry, name) for name in sharding.KV_FIELDS},
        page_size=geometry.page_size, num_pages=geometry.num_pages, tp=geometry.tp,
    )


def compare(ours: wire.Geometry, theirs: wire.Geometry) -> tuple[FieldDiff, ...]:
    """Every field that forbids two nodes to exchange KV."""
    found = [
        (name, str(getattr(ours, name)), str(getattr(theirs, name)))
        for name in _NODE_FIELDS
        if getattr(ours, name) != getattr(theirs, name)
    ]
    found += sharding.incompatibilities(shard_spec(ours), shard_spec(theirs))
    return tuple(FieldDiff(*diff) for diff in found)


@dataclasses.dataclass(frozen=True, slots=True)
class ShardPush:
    """PushPlan of one pair of ranks. The fabric has the entries; nothing here keeps them a second time."""

    native: Any
    index: sharding.UnitIndex

    def entries(self, begin_token: int, end_token: int) -> tuple[int, int]:
        return self.index.entries(begin_token, end_token)


class ShardPlanner:
    """Planner over `sharding.node_units` and `plan_node_writes`. `regions` are this node's fabric regions, one per rank."""

    def __init__(self, regions: Sequence[int], make_native: Callable[..., Any]) -> None:
        self._regions = tuple(regions)
        self._make_native = make_native  # WritePlan

    def expected_units(
        self, source: wire.Geometry, destination: wire.Geometry, num_tokens: int, skip_tokens: int
    ) -> int:
        return sharding.node_units(shard_spec(source), shard_spec(destination), num_tokens, skip_tokens)

    def expected_bytes(
        self, source: wire.Geometry, destination: wire.Geometry, num_tokens: int, skip_tokens: int
    ) -> int:
        return sharding.node_bytes(shard_spec(source), shard_spec(destination), num_tokens, skip_tokens)

    def choose_source_sets(
        self, source: wire.Geometry, destination: wire.Geometry, rng: random.Random
    ) -> tuple[int, ...]:
        return sharding.choose_source_sets(shard_spec(source), shard_spec(destination), rng)

    def plan(
        self, source: wire.Geometry, destination: wire.Geometry, source_pages: Sequence[int],
        destination_pages: Sequence[int], num_tokens: int, skip_tokens: int, source_sets: Sequence[int] = (),
        group: int = 0,
    ) -> Sequence[ShardPush]:
        writes = sharding.plan_node_writes(
            shard_spec(source), shard_spec(destination), num_tokens=num_tokens, skip_tokens=skip_tokens,
            src_pages=source_pages, dst_pages=destination_pages, source_sets=source_sets,
        )
        return tuple(self._push(each, group * destination.tp + each.dst_rank) for each in writes)

    def _push(self, writes: sharding.ShardWrites, dst_region: int) -> ShardPush:
        native = self._make_native(
            src_region=self._regions[writes.src_rank], dst_region=dst_region, src_offset=writes.src_offset,
            dst_offset=writes.dst_offset, nbytes=writes.nbytes, units=writes.units,
            src_layer_stride=writes.src_layer_stride, dst_layer_stride=writes.dst_layer_stride,
            num_layers=writes.num_layers,
        )
        return ShardPush(native, writes.index)
