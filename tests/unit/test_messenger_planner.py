"""What both ends count is what one end plans, through the geometries of a handshake."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.kv import sharding
from pdd.kv.sharding import MAX_EXPECTED_UNITS
from pdd.messenger import wire
from pdd.messenger.handshake import Refusal
from pdd.messenger.planner import ShardPlanner, compare, shard_spec


def geometry(**changes: Any) -> wire.Geometry:
    fields = {
        "model": "m", "dtype": "bfloat16", "num_layers": 5, "num_kv_heads": 4, "head_dim": 16, "page_size": 16, "tp": 1,
        "num_pages": 64, "vocab_size": 1000,
    }
    return wire.Geometry(**{**fields, **changes})


@given(
    tp=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8])),
    page_size=st.tuples(st.sampled_from([8, 16, 32]), st.sampled_from([8, 16, 32])),
    num_tokens=st.integers(1, 200), skip_units=st.integers(0, 3), cut=st.integers(0, 200), seed=st.integers(0, 99),
)
def test_units_planned_are_units_expected(
    tp: tuple[int, int], page_size: tuple[int, int], num_tokens: int, skip_units: int, cut: int,
    seed: int,
) -> None:
    src, dst = (geometry(tp=t, page_size=s) for t, s in zip(tp, page_size, strict=True))
    skip_tokens = min(skip_units, num_tokens // min(page_size)) * min(page_size)
    plans: list[dict[str, Any]] = []
    planner = ShardPlanner(range(100, 100 + tp[0]), lambda **plan: plans.append(plan) or plan)
    sets = planner.choose_source_sets(src, dst, random.Random(seed))
    pushes = planner.plan(src, dst, range(40), range(40), num_tokens, skip_tokens, sets)
    expected = planner.expected_units(src, dst, num_tokens, skip_tokens)
    assert sum(int(plan["units"].sum()) * plan["num_layers"] for plan in plans) == expected
    if expected:  # else there is nothing to send
        assert {plan["dst_region"] for plan in plans} == set(range(tp[1]))
    assert {plan["src_region"] for plan in plans} <= set(range(100, 100 + tp[0]))
    cut = min(cut, num_tokens - 1)  # no chunk is empty
    for push, plan in zip(pushes, plans, strict=True):  # two chunks tile the plan
        (a, b), (c, d) = push.entries(0, cut), push.entries(cut, num_tokens)
        assert (a, b, d) == (0, c, len(plan["units"]))


def test_a_decoder_is_fed_by_the_copies_that_it_chose() -> None:
    src = dst = geometry(tp=8)  # two copies of each of four heads
    planner = ShardPlanner(range(8), lambda **plan: plan)
    chosen = {planner.choose_source_sets(src, dst, random.Random(seed)) for seed in range(20)}
    assert chosen == {(0, 1), (1, 0)}
    for sets in chosen:
        pushes = planner.plan(src, dst, range(2), range(2), 20, 0, sets)
        assert {push.native["dst_region"]: push.native["src_region"] for push in pushes} == {
            rank: rank // 2 * 2 + sets[rank % 2] for rank in range(8)
        }


@pytest.mark.parametrize(("source_tp", "tp", "group"), [(1, 1, 0), (1, 1, 2), (2, 1, 1), (1, 2, 1), (2, 4, 3)])
def test_a_group_s_pages_are_in_the_regions_of_its_ranks(source_tp: int, tp: int, group: int) -> None:
    """Region group * tp + rank; the writes are otherwise those of any group."""
    src, dst = geometry(tp=source_tp), geometry(tp=tp, groups=4)
    planner = ShardPlanner(range(100, 100 + source_tp), lambda **plan: plan)
    plans, first = ([push.native for push in planner.plan(src, dst, range(4), range(4), 50, 0, group=each)] for each in (group, 0))
    assert {plan["dst_region"] for plan in plans} == set(range(group * tp, (group + 1) * tp))
    assert {plan["src_region"] for plan in plans} <= set(range(100, 100 + source_tp))
    for mine, theirs in zip(plans, first, strict=True):
        assert mine["dst_region"] - group * tp == theirs["dst_region"]
        assert mine["dst_offset"].tolist() == theirs["dst_offset"].tolist()


def test_what_runs_is_what_the_brute_force_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/unit/kv checks node_units and plan_node_writes byte by byte: nothing else may plan."""
    src, dst = geometry(tp=2), geometry(tp=4)
    (writes, *_) = sharding.plan_node_writes(
        shard_spec(src), shard_spec(dst), num_tokens=20, src_pages=range(2), dst_pages=range(2)
    )
    monkeypatch.setattr(sharding, "node_units", lambda *_: 4711)
    monkeypatch.setattr(sharding, "plan_node_writes", lambda *_, **__: (writes,))
    planner = ShardPlanner(range(2), lambda **plan: plan)
    assert planner.expected_units(src, dst, 20, 0) == 4711
    (push,) = planner.plan(src, dst, range(2), range(2), 20, 0)
    assert push.native["src_offset"] is writes.src_offset
    assert push.index is writes.index


@pytest.mark.parametrize(
    "changes",
    [{"model": "n"}, {"dtype": "float32"}, {"num_layers": 6}, {"num_kv_heads": 8}, {"head_dim": 32}, {"page_size": 24},
     {"vocab_size": 1001}, {"tp": 3}, {"tiles": 1}],
)
def test_misfit_is_named(changes: dict[str, Any]) -> None:
    (field,) = changes
    assert [diff.field for diff in compare(geometry(), geometry(**changes))] == [field]


def test_a_pool_too_large_to_be_counted_is_told_without_asking_for_equal_pools() -> None:
    huge = geometry(num_pages=1 << 31)
    for ours, theirs, text in ((geometry(), huge, "num_pages {0} here, {1} there"), (huge, geometry(), "num_pages {1} here, {0} there")):
        diff = compare(ours, theirs)
        too_many = f"{1 << 31} (more than the {MAX_EXPECTED_UNITS // geometry().num_layers} that can be counted)"
        assert [str(each) for each in diff] == [text.format(geometry().num_pages, too_many)]
        assert "need not be equal" in Refusal("", diff).hint
    assert "divides the number of KV heads" in Refusal("", compare(geometry(), geometry(tp=3))).hint
    assert "same model and dtype" in Refusal("", compare(geometry(), geometry(model="n"))).hint


def test_pools_and_sharding_may_differ() -> None:
    assert compare(geometry(), geometry(num_pages=7, tp=2, page_size=32)) == ()
