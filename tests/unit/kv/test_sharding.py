"""What a plan is, what both ends count, and what is refused. Every byte of it: test_sharding_grid.py."""

from __future__ import annotations

import dataclasses
import random

import pytest

from pdd.kv.sharding import (
    ShardSpec,
    ShardWrites,
    choose_source_sets,
    expected_units,
    incompatibilities,
    node_bytes,
    plan_node_writes,
    source_ranks,
)

BASE = ShardSpec(num_layers=2, num_kv_heads=4, head_dim=2, dtype="bfloat16", page_size=4, num_pages=12, tp=1)


def only(plans: tuple[ShardWrites, ...]) -> ShardWrites:
    (plan,) = plans
    return plan


def test_a_page_goes_with_the_chunk_that_computes_its_last_token() -> None:
    plan = only(plan_node_writes(BASE, BASE, num_tokens=10, src_pages=[5, 6, 7], dst_pages=[1, 2, 9]))
    assert plan.entries(0, 3) == (0, 0)
    assert plan.entries(3, 4) == (0, 1)
    assert plan.entries(4, 9) == (1, 2)
    assert plan.entries(9, 10) == (2, 3)  # the tail, half a page, with the last
    page_bytes = BASE.layout.page_bytes
    assert plan.src_offset.tolist() == [5 * page_bytes, 6 * page_bytes, 7 * page_bytes]
    assert plan.nbytes.tolist() == [page_bytes] * 3
    with pytest.raises(ValueError, match="read-only"):
        plan.units[0] = 2
    with pytest.raises(ValueError, match="chunk"):
        plan.entries(9, 11)


def test_the_example_of_the_facts() -> None:
    src = ShardSpec(num_layers=80, num_kv_heads=8, head_dim=128, dtype="bfloat16", page_size=64, num_pages=64, tp=8)
    dst = dataclasses.replace(src, tp=4)
    assert expected_units(src, dst, 0, 4096) == 80 * 2 * 64  # K and V together in our layout


def test_source_sets_share_the_load_and_change_no_count() -> None:
    src = dataclasses.replace(BASE, num_kv_heads=2, tp=8)
    dst = dataclasses.replace(BASE, num_kv_heads=2, tp=4)
    assert [source_ranks(src, dst, 0, k) for k in range(5)] == [(0,), (1,), (2,), (3,), (0,)]
    chosen = [choose_source_sets(src, dst, random.Random(seed)) for seed in range(40)]
    assert all(len(sets) == 2 and len(set(sets)) == 2 for sets in chosen)  # the two copies of the decoder: never one source
    assert {sets[0] for sets in chosen} == {0, 1, 2, 3}
    assert choose_source_sets(dst, src, random.Random(0)) in ((0, 1, 0, 1), (1, 0, 1, 0))
    assert choose_source_sets(BASE, src, random.Random(0)) == ()  # there is one copy


@pytest.mark.parametrize(("dst_tp", "sets", "feeders"), [
    (4, (3, 1), {0: {0, 1, 2, 3}, 1: {0, 1, 2, 3}, 2: {4, 5, 6, 7}, 3: {4, 5, 6, 7}}),
    (8, (3, 1, 0, 2), {0: {3}, 1: {1}, 2: {0}, 3: {2}, 4: {7}, 5: {5}, 6: {4}, 7: {6}}),
    (8, (), {rank: {rank // 4 * 4} for rank in range(8)}),  # an older decoder has no wish: set 0
    (8, (5,), {rank: {rank // 4 * 4 + 1} for rank in range(8)}),
])
def test_who_feeds_whom(dst_tp: int, sets: tuple[int, ...], feeders: dict[int, set[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads over eight ranks are four copies; fewer copies on the other side take from all of them in turn."""
    monkeypatch.setattr("pdd.kv.sharding.SPREAD_BYTES", 1)
    src = dataclasses.replace(BASE, num_kv_heads=2, tp=8)
    dst = dataclasses.replace(src, tp=dst_tp)
    plans = plan_node_writes(src, dst, num_tokens=32, src_pages=range(8), dst_pages=range(8), source_sets=sets)
    found: dict[int, set[int]] = {rank: set() for rank in range(dst_tp)}
    for plan in plans:
        found[plan.dst_rank].add(plan.src_rank)
    assert found == feeders


def test_bytes_are_those_of_the_smaller_pages_whichever_side_has_them() -> None:
    small, large = dataclasses.replace(BASE, page_size=2), dataclasses.replace(BASE, page_size=4)
    assert node_bytes(small, large, 9) == node_bytes(large, small, 9) == node_bytes(small, small, 9)
    assert node_bytes(large, large, 9) == node_bytes(small, small, 12)
    assert node_bytes(small, large, 9, 8) == node_bytes(small, large, 2)


@pytest.mark.parametrize(("field", "value"), [
    ("num_layers", 3), ("num_kv_heads", 8), ("head_dim", 4), ("dtype", "float32"), ("page_size", 6), ("tp", 3), ("tiles", 1),
])
def test_a_refusal_names_the_field(field: str, value: object) -> None:
    other = dataclasses.replace(BASE, **{field: value})
    (refusal,) = incompatibilities(BASE, other)
    assert refusal[0] == field
    assert [r[0] for r in incompatibilities(other, BASE)] == [field]


def test_pools_and_degrees_may_differ() -> None:
    assert not incompatibilities(BASE, dataclasses.replace(BASE, num_pages=7, tp=8, page_size=16))
    huge = dataclasses.replace(BASE, num_pages=1 << 31)
    assert [r[0] for r in incompatibilities(BASE, huge)] == ["num_pages"]


def test_what_is_counted_is_the_whole_node() -> None:
    """All ranks of a node count on one key: eight copies of a cache that one rank could count are too many."""
    one = dataclasses.replace(BASE, num_kv_heads=1, num_layers=1, num_pages=1 << 29)
    assert not incompatibilities(one, dataclasses.replace(one, tp=4))
    (refusal,) = incompatibilities(one, dataclasses.replace(one, tp=8))
    assert refusal == ("num_pages", str(1 << 29), f"{1 << 29} (more than the {1 << 28} that can be counted)")


@pytest.mark.parametrize(("change", "match"), [
    ({"skip_tokens": 3}, "skip"), ({"skip_tokens": 12}, "skip"), ({"src_pages": [0, 1]}, "source pages are too few"),
    ({"dst_pages": [0]}, "destination pages are too few"), ({"dst_pages": [0, 1, 12]}, "destination page lies"),
    ({"src_pages": [0, -1, 2]}, "source page lies"),
])
def test_no_write_outside_a_region_is_ever_planned(change: dict[str, object], match: str) -> None:
    arguments = {"num_tokens": 9, "src_pages": [0, 1, 2], "dst_pages": [0, 1, 2]}
    plan_node_writes(BASE, BASE, **arguments)
    with pytest.raises(ValueError, match=match):
        plan_node_writes(BASE, BASE, **(arguments | change))
