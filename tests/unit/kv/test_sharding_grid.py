"""The planner against brute force: every (layer, head, tile, token) of every rank of a decoder is written exactly once,
with the right bytes, and the closed formula equals the count."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pdd.kv import sharding
from pdd.kv.merge import MAX_BYTES, MAX_UNITS, MergedWrite, merge
from pdd.kv.sharding import (
    ShardSpec,
    choose_source_sets,
    expected_units,
    incompatibilities,
    node_bytes,
    node_units,
    plan_node_writes,
)
from tests.unit.kv.grid import BASE, Written, names, page_tables

HEADS = range(1, 9)
RANKS = range(1, 17)
PAGE_SIZES = ((16, 16), (32, 16), (16, 64))  # tokens, source and destination
LENGTHS = ((1, 0), (16, 0), (33, 16), (65, 0), (100, 64), (64, 64))  # tokens, and how many of them are skipped
STRIDE = 31  # of the default suite's part; prime to everything above


@dataclasses.dataclass(frozen=True)
class Case:
    src: ShardSpec
    dst: ShardSpec
    num_tokens: int
    skip_tokens: int


def cases() -> Iterator[Case]:
    for tiles, heads, (a, b), (num_tokens, skip) in itertools.product((2, 1), HEADS, PAGE_SIZES, LENGTHS):
        fitting = [tp for tp in RANKS if heads % tp == 0 or tp % heads == 0]
        for src_tp, dst_tp in itertools.product(fitting, fitting):
            src = dataclasses.replace(BASE, num_kv_heads=heads, tiles=tiles, tp=src_tp, page_size=a)
            dst = dataclasses.replace(src, tp=dst_tp, page_size=b, num_pages=9)
            yield Case(src, dst, num_tokens, skip // max(a, b) * max(a, b))


def units_by_formula(src: ShardSpec, dst: ShardSpec, num_tokens: int, skip_tokens: int) -> int:
    """Of one rank of the destination, for shards of which one divides the other. Source: facts, 5.3."""
    heads = src.num_kv_heads
    feeders = max(1, min(src.tp, heads) // min(dst.tp, heads))
    unit = min(src.page_size, dst.page_size)
    runs = 1 if src.page_size == dst.page_size else src.tiles * min(src.heads_per_rank, dst.heads_per_rank)
    return src.num_layers * feeders * runs * (-(-num_tokens // unit) - skip_tokens // unit)


def check(case: Case, rng: random.Random) -> None:
    src, dst, num_tokens, skip = case.src, case.dst, case.num_tokens, case.skip_tokens
    assert not incompatibilities(src, dst)
    src_pages, dst_pages = page_tables(src, dst, num_tokens, rng)
    sets = choose_source_sets(src, dst, rng)
    assert not sets if src.copies == 1 else len(sets) == dst.copies
    plans = plan_node_writes(src, dst, num_tokens=num_tokens, skip_tokens=skip, src_pages=src_pages, dst_pages=dst_pages,
                             source_sets=sets)
    written = Written(dst, [names(src, rank, src_pages, num_tokens) for rank in range(src.tp)])
    for plan in plans:
        written.apply(plan)
    written.check(dst_pages, num_tokens, skip)
    assert written.units == node_units(src, dst, num_tokens, skip)
    assert sum(int(plan.nbytes.sum()) for plan in plans) * src.num_layers == node_bytes(src, dst, num_tokens, skip)
    if max(min(src.tp, src.num_kv_heads), min(dst.tp, dst.num_kv_heads)) % min(src.tp, dst.tp, src.num_kv_heads) == 0:
        for rank in range(dst.tp):
            assert expected_units(src, dst, rank, num_tokens, skip) == units_by_formula(src, dst, num_tokens, skip)
    if num_tokens > skip and dst.copies >= src.copies:
        assert {plan.src_rank for plan in plans} == set(range(src.tp)), "a source rank has nothing to do"


def test_there_are_as_many_cases_as_the_facts_have() -> None:
    assert sum(1 for _ in cases()) >= 14_880


@pytest.mark.parametrize("spread_bytes", [1, 100])
def test_every_slot_is_written_exactly_once(spread_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default suite's part of the grid."""
    monkeypatch.setattr(sharding, "SPREAD_BYTES", spread_bytes)
    rng = random.Random(spread_bytes)
    for case in itertools.islice(cases(), spread_bytes % STRIDE, None, STRIDE):
        check(case, rng)


@pytest.mark.slow
def test_every_slot_of_the_whole_grid_is_written_exactly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)
    for case in cases():
        monkeypatch.setattr(sharding, "SPREAD_BYTES", rng.choice([1, 100, 1000]))
        check(case, rng)


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    fitting = st.sampled_from([tp for tp in range(1, 25) if heads % tp == 0 or tp % heads == 0])
    smaller = draw(st.sampled_from([1, 4, 16]))
    sizes = draw(st.permutations([smaller, smaller * draw(st.sampled_from([1, 2, 4]))]))
    src = dataclasses.replace(BASE, num_layers=1, num_kv_heads=heads, tiles=draw(st.sampled_from([1, 2])), tp=draw(fitting),
                              page_size=sizes[0], num_pages=130)
    dst = dataclasses.replace(src, tp=draw(fitting), page_size=sizes[1], num_pages=140)
    num_tokens = draw(st.integers(1, 120))
    return Case(src, dst, num_tokens, draw(st.integers(0, num_tokens // smaller)) * smaller)


@given(random_cases(), st.data())
def test_chunks_merging_and_source_sets_change_nothing(case: Case, data: st.DataObject) -> None:
    """Whatever a prefiller does with a plan: the slices of its chunks, merged, are the same bytes and the same sum."""
    src, dst, num_tokens = case.src, case.dst, case.num_tokens
    seed = data.draw(st.integers(0, 1 << 16))
    rng = random.Random(seed)
    src_pages, dst_pages = page_tables(src, dst, num_tokens, rng)
    if data.draw(st.booleans()):  # neighbours, which merge
        src_pages, dst_pages = list(range(len(src_pages))), list(range(3, 3 + len(dst_pages)))
    sets = data.draw(st.one_of(st.just(()), st.just(choose_source_sets(src, dst, rng)), st.lists(st.integers(0, 99), max_size=4)))
    block = data.draw(st.sampled_from([1, 64, 500]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "SPREAD_BYTES", block)
        plans = plan_node_writes(src, dst, num_tokens=num_tokens, skip_tokens=case.skip_tokens, src_pages=src_pages,
                                 dst_pages=dst_pages, source_sets=sets)
    cuts = sorted({0, num_tokens, *data.draw(st.lists(st.integers(0, num_tokens), max_size=5))})
    unit = min(src.page_size, dst.page_size)
    written = Written(dst, [names(src, rank, src_pages, num_tokens) for rank in range(src.tp)])
    for plan in plans:
        at = 0
        for begin, end in itertools.pairwise(cuts):
            first, last = plan.entries(begin, end)
            assert (first, last) == (at, max(at, last))
            at = last
            if last and end < num_tokens:  # nothing leaves before its last token is computed
                assert (plan.index.unit_numbers[last // plan.index.entries_per_unit - 1] + 1) * unit <= end
            written.apply(plan, first, last)
            _check_merged(merge(plan, first, last), plan, first, last)
        assert at == len(plan)
    written.check(dst_pages, num_tokens, case.skip_tokens)
    assert written.units == node_units(src, dst, num_tokens, case.skip_tokens)


def _check_merged(found: list[MergedWrite], plan: sharding.ShardWrites, first: int, last: int) -> None:
    entries = slice(first, last)
    assert sum(write.units for write in found) == plan.units[entries].sum()
    assert all(write.units <= MAX_UNITS and write.nbytes <= MAX_BYTES for write in found)
    pieces = [(write.src_offset + at, write.dst_offset + at) for write in found for at in range(0, write.nbytes, 4)]
    whole = [(src + at, dst + at) for src, dst, nbytes in
             zip(plan.src_offset[entries].tolist(), plan.dst_offset[entries].tolist(), plan.nbytes[entries].tolist(), strict=True)
             for at in range(0, nbytes, 4)]
    assert pieces == whole


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 1 << 16))
def test_many_prompts_load_all_source_ranks_alike(src_copies: int, dst_copies: int, seed: int) -> None:
    """MLA, whose cache every rank has: with enough pages all ranks send, and no rank more than its share of blocks."""
    src = dataclasses.replace(BASE, num_kv_heads=1, tiles=1, tp=src_copies, num_pages=64)
    dst = dataclasses.replace(src, tp=dst_copies)
    assume(src_copies != dst_copies)
    pages = range(64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "SPREAD_BYTES", 1)
        plans = plan_node_writes(src, dst, num_tokens=1024, src_pages=pages, dst_pages=pages,
                                 source_sets=choose_source_sets(src, dst, random.Random(seed)))
    sent = np.zeros(src_copies, int)
    for plan in plans:
        sent[plan.src_rank] += len(plan)
    assert sent.min() > 0
    if dst_copies < src_copies:  # spread page by page
        assert sent.max() - sent.min() <= dst_copies
    else:  # whole prompts, as evenly as their number allows
        assert sent.max() - sent.min() <= 64


def test_a_merged_write_says_no_more_units_than_an_immediate_holds() -> None:
    spec = dataclasses.replace(BASE, num_pages=600)
    (plan,) = plan_node_writes(spec, spec, num_tokens=9600, src_pages=range(600), dst_pages=range(600))
    assert [write.units for write in merge(plan, 0, 600)] == [255, 255, 90]


def test_neighbouring_pages_stay_together_when_a_prompt_is_spread() -> None:
    """Pages of 18 KiB of DeepSeek's cache: four at a time, so that a merged write is worth a fast NIC's while."""
    src = ShardSpec(num_layers=1, num_kv_heads=1, head_dim=576, dtype="bfloat16", tiles=1, page_size=16, num_pages=64, tp=4)
    dst = dataclasses.replace(src, tp=1)
    plans = plan_node_writes(src, dst, num_tokens=1024, src_pages=range(64), dst_pages=range(64), source_sets=(2,))
    assert [plan.src_rank for plan in plans] == [2, 3, 0, 1]
    assert plans[0].index.unit_numbers.tolist() == [0, 1, 2, 3, 16, 17, 18, 19, 32, 33, 34, 35, 48, 49, 50, 51]
    assert [(write.nbytes, write.units) for write in merge(plans[0], 0, 16)] == [(4 * 16 * 576 * 2, 4)] * 4
