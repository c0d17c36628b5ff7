"""The planner against a byte-by-byte copy: every (head, tile, token) of every decoder rank is written exactly once."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest

from pdd.kv.sharding import (
    ShardSpec,
    ShardWrites,
    expected_units,
    incompatibilities,
    node_bytes,
    node_units,
    plan_node_writes,
    plan_writes,
    source_ranks,
)

BASE = ShardSpec(num_layers=2, num_kv_heads=4, head_dim=2, dtype="bfloat16", page_size=4, num_pages=12, tp=1)
HEADS = (1, 2, 3, 4, 6, 8)
RANKS = (1, 2, 3, 4, 6, 8)
PAGE_SIZES = ((4, 4), (8, 4), (4, 8), (2, 8), (16, 4))  # tokens, source and destination


def pairs() -> list[tuple[ShardSpec, ShardSpec]]:
    found = []
    for heads, src_tp, dst_tp, (src_page, dst_page) in itertools.product(HEADS, RANKS, RANKS, PAGE_SIZES):
        tiles = 1 + len(found) % 2
        src = dataclasses.replace(BASE, num_kv_heads=heads, tp=src_tp, page_size=src_page, tiles=tiles)
        dst = dataclasses.replace(BASE, num_kv_heads=heads, tp=dst_tp, page_size=dst_page, tiles=tiles, num_pages=15)
        if not incompatibilities(src, dst):
            found.append((src, dst))
    return found


def page_tables(src: ShardSpec, dst: ShardSpec, num_tokens: int, rng: random.Random) -> tuple[list[int], list[int]]:
    return (rng.sample(range(src.num_pages), src.layout.num_pages_for(num_tokens)),
            rng.sample(range(dst.num_pages), dst.layout.num_pages_for(num_tokens)))


def region(spec: ShardSpec, rank: int, pages: list[int], num_tokens: int) -> np.ndarray:
    """A rank's region, `[layer, page, head, tile, token, byte]`: each slot of the prompt names what it holds."""
    layout = spec.layout
    shape = (*layout.shape[:-1], layout.token_bytes)
    memory = np.zeros(shape, np.uint8)
    for token in range(num_tokens):
        page, slot = pages[token // spec.page_size], token % spec.page_size
        for local, head in enumerate(spec.heads(rank)):
            for part in range(spec.tiles):
                for layer in range(spec.num_layers):
                    name = (1 + layer, 1 + head, 1 + part, 1 + token)  # token_bytes is 4
                    memory[layer, page, local, part, slot] = name
    return memory


def apply(plan: ShardWrites, source: np.ndarray, destination: np.ndarray, hits: np.ndarray) -> int:
    """Does the writes of all layers; returns their units. `hits` counts how often each byte was written."""
    src, dst, hit = source.reshape(-1), destination.reshape(-1), hits.reshape(-1)
    units = 0
    for layer in range(plan.num_layers):
        for i in range(len(plan)):
            a = int(plan.src_offset[i]) + layer * plan.src_layer_stride
            b = int(plan.dst_offset[i]) + layer * plan.dst_layer_stride
            n = int(plan.nbytes[i])
            assert a + n <= src.size
            assert b + n <= dst.size
            dst[b : b + n] = src[a : a + n]
            hit[b : b + n] += 1
            units += int(plan.units[i])
    return units


def expected_by_formula(src: ShardSpec, dst: ShardSpec, num_tokens: int, skip_tokens: int) -> int:
    """The closed form, for shards of which one divides the other."""
    heads = src.num_kv_heads
    feeders = max(1, min(src.tp, heads) // min(dst.tp, heads))
    shared = min(src.heads_per_rank, dst.heads_per_rank)
    unit = min(src.page_size, dst.page_size)
    runs = 1 if src.page_size == dst.page_size else src.tiles * shared
    return src.num_layers * feeders * runs * (-(-num_tokens // unit) - skip_tokens // unit)


def test_every_byte_of_every_decoder_rank_is_written_exactly_once() -> None:
    rng = random.Random(7)
    cases = pairs()
    assert len(cases) > 400
    for src, dst in cases * 3:
        unit = min(src.page_size, dst.page_size)
        num_tokens = rng.choice([1, unit - 1, unit, unit + 1, 2 * unit, 2 * dst.page_size + 1, rng.randint(1, 24)])
        num_tokens = max(1, min(num_tokens, 24))
        skip = rng.choice([0, 0, num_tokens // unit * unit, unit if unit <= num_tokens else 0])
        src_pages, dst_pages = page_tables(src, dst, num_tokens, rng)
        source_set = rng.randrange(src.copies)
        sources = {rank: region(src, rank, src_pages, num_tokens) for rank in src.replica_set(source_set)}
        for dst_rank in range(dst.tp):
            whole = region(dst, dst_rank, dst_pages, num_tokens)
            got, hits = np.zeros_like(whole), np.zeros_like(whole, dtype=np.int32)
            units = 0
            for src_rank in source_ranks(src, dst, dst_rank, source_set):
                plan = plan_writes(src, dst, src_rank=src_rank, dst_rank=dst_rank, num_tokens=num_tokens,
                                   skip_tokens=skip, src_pages=src_pages, dst_pages=dst_pages)
                units += apply(plan, sources[src_rank], got, hits)
            assert units == expected_units(src, dst, dst_rank, num_tokens, skip, source_set)
            if max(src.tp, dst.tp) % min(src.tp, dst.tp) == 0:
                assert units == expected_by_formula(src, dst, num_tokens, skip)
            assert hits.max(initial=0) <= 1
            for token in range(num_tokens):
                where = (slice(None), dst_pages[token // dst.page_size], slice(None), slice(None),
                         token % dst.page_size)
                if token >= skip:
                    assert (hits[where] == 1).all()
                    assert (got[where] == whole[where]).all()
                else:
                    assert (hits[where] == 0).all()
            untouched = set(range(dst.num_pages)) - set(dst_pages)
            assert not hits[:, sorted(untouched)].any()


def test_chunks_cover_the_entries_in_order_whatever_their_sizes() -> None:
    rng = random.Random(11)
    for src, dst in rng.sample(pairs(), 120):
        num_tokens = rng.randint(1, 40)
        src = dataclasses.replace(src, num_pages=64)
        dst = dataclasses.replace(dst, num_pages=64)
        unit = min(src.page_size, dst.page_size)
        skip = rng.randrange(num_tokens // unit + 1) * unit
        src_pages, dst_pages = page_tables(src, dst, num_tokens, rng)
        plan = plan_writes(src, dst, src_rank=0, dst_rank=0, num_tokens=num_tokens, skip_tokens=skip,
                           src_pages=src_pages, dst_pages=dst_pages)
        for _ in range(4):
            cuts = sorted({0, num_tokens, *(rng.randint(0, num_tokens) for _ in range(rng.randint(0, 6)))})
            at = 0
            for begin, end in itertools.pairwise(cuts):
                first, last = plan.entries(begin, end)
                assert first == at
                assert last >= first
                at = last
                if plan.entries_per_unit and end < num_tokens:  # nothing leaves before its last token is computed
                    sent_units = last // plan.entries_per_unit + plan.first_unit
                    assert sent_units * unit <= max(end, skip)
            assert at == len(plan)


def test_a_page_goes_with_the_chunk_that_computes_its_last_token() -> None:
    plan = plan_writes(BASE, BASE, src_rank=0, dst_rank=0, num_tokens=10, src_pages=[5, 6, 7], dst_pages=[1, 2, 9])
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
    dst = dataclasses.replace(BASE, num_kv_heads=2, tp=1)
    assert [source_ranks(src, dst, 0, k) for k in range(5)] == [(0, 4), (1, 5), (2, 6), (3, 7), (0, 4)]
    assert {expected_units(src, dst, 0, 9, 0, k) for k in range(4)} == {expected_units(src, dst, 0, 9)}


def test_a_node_is_the_sum_of_its_ranks() -> None:
    rng = random.Random(3)
    for src, dst in rng.sample(pairs(), 60):
        src_pages, dst_pages = page_tables(src, dst, 21, rng)
        plans = plan_node_writes(src, dst, num_tokens=21, src_pages=src_pages, dst_pages=dst_pages,
                                 source_set=rng.randrange(8))
        assert sum(int(plan.units.sum()) for plan in plans) * src.num_layers == node_units(src, dst, 21)
        assert sum(int(plan.nbytes.sum()) for plan in plans) * src.num_layers == node_bytes(src, dst, 21)


def test_bytes_are_those_of_the_smaller_pages_whichever_side_has_them() -> None:
    small, large = dataclasses.replace(BASE, page_size=2), dataclasses.replace(BASE, page_size=4)
    assert node_bytes(small, large, 9) == node_bytes(large, small, 9) == node_bytes(small, small, 9)
    assert node_bytes(large, large, 9) == node_bytes(small, small, 12)
    assert node_bytes(small, large, 9, 8) == node_bytes(small, large, 2)


def test_ranks_that_share_no_head_exchange_nothing() -> None:
    src = dataclasses.replace(BASE, tp=4)
    plan = plan_writes(src, src, src_rank=0, dst_rank=3, num_tokens=9, src_pages=[0, 1, 2], dst_pages=[0, 1, 2])
    assert len(plan) == 0
    assert plan.entries(0, 9) == (0, 0)


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


@pytest.mark.parametrize(("change", "match"), [
    ({"skip_tokens": 3}, "skip"), ({"skip_tokens": 12}, "skip"), ({"src_pages": [0, 1]}, "source pages are too few"),
    ({"dst_pages": [0]}, "destination pages are too few"), ({"dst_pages": [0, 1, 12]}, "destination page lies"),
    ({"src_pages": [0, -1, 2]}, "source page lies"),
])
def test_no_write_outside_a_region_is_ever_planned(change: dict[str, object], match: str) -> None:
    arguments = {"src_rank": 0, "dst_rank": 0, "num_tokens": 9, "src_pages": [0, 1, 2], "dst_pages": [0, 1, 2]}
    plan_writes(BASE, BASE, **arguments)
    with pytest.raises(ValueError, match=match):
        plan_writes(BASE, BASE, **(arguments | change))
