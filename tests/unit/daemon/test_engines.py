"""Several engines behind one inbox: who gets a request, and that all that is said of it later goes there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from pdd.daemon.engines import Engines
from pdd.engine.limits import SchedulerLimits
from pdd.engine.request import (
    Finished,
    FinishReason,
    GenerateSpec,
    KvOutcome,
    KvReserved,
    KvSource,
    PrefillSpec,
    SamplingParams,
)
from pdd.engine.scheduler import Scheduler
from pdd.engine.snapshot import EngineSnapshot, RequestRow, Totals, take_snapshot
from pdd.kv.pool import PageCounts, PagePool

LIMITS = SchedulerLimits(page_size=16, max_context=4096, max_batch_size=4)


class FakeEngine:
    """Remembers what it was asked; its snapshot is what a test makes it."""

    def __init__(self, free: int = 64, total: int = 64) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.see(free=free, total=total)

    def see(self, *request_ids: str, free: int, total: int = 64, state: str = "running") -> None:
        rows = tuple(RequestRow(each, "generate", state, 0.0, 0.0, 16) for each in request_ids)
        pages = PageCounts(free, 0, 0, total - free, 0, 0)
        self.snapshot = EngineSnapshot(0.0, {state: len(rows)}, pages, 0, 0, 0.0, 0, Totals(), rows)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: self.asked.append((name, arguments[0]))


def spec(request_id: str, length: int = 16, max_tokens: int = 8) -> GenerateSpec:
    return GenerateSpec(request_id, tuple(range(length)), SamplingParams(max_tokens=max_tokens), KvSource.REMOTE)


def over(*engines: FakeEngine) -> tuple[Engines, dict[str, int]]:
    placed: dict[str, int] = {}
    everyone: Sequence[Any] = engines
    return Engines(everyone, LIMITS, placed.__setitem__), placed


def test_a_burst_is_spread_though_no_snapshot_has_it_yet() -> None:
    inbox, placed = over(FakeEngine(), FakeEngine(), FakeEngine())
    for n in range(9):
        inbox.submit(spec(f"r{n}"))
    assert [placed[f"r{n}"] for n in range(9)] == [0, 1, 2] * 3


def test_what_was_handed_over_since_a_snapshot_takes_room() -> None:
    inbox, placed = over(FakeEngine(), FakeEngine())
    inbox.submit(spec("big", length=320))  # 20 of 64 pages
    for n in range(4):
        inbox.submit(spec(f"small{n}", length=32))
    assert list(placed.values()) == [0] + [1] * 4


def test_equals_take_turns() -> None:
    first, second = FakeEngine(), FakeEngine()
    inbox, placed = over(first, second)
    for n in range(4):
        inbox.submit(spec(f"r{n}"))
        inbox.engine_event(Finished(f"r{n}", FinishReason.STOP))
    assert list(placed.values()) == [0, 1, 0, 1]


def test_what_a_snapshot_shows_is_not_counted_twice() -> None:
    first, second = FakeEngine(), FakeEngine()
    inbox, placed = over(first, second)
    inbox.submit(spec("big", length=320))  # 20 pages, in the first
    first.see("big", free=44)
    second.see(free=40)
    inbox.submit(spec("small"))  # 44 against 40: counted twice it would be 24 against 40
    assert placed == {"big": 0, "small": 0}


def test_a_request_that_ended_before_any_snapshot_leaves_no_trace() -> None:
    first, second = FakeEngine(), FakeEngine()
    inbox, placed = over(first, second)
    inbox.submit(spec("short", length=160))
    inbox.engine_event(Finished("short", FinishReason.STOP))
    second.see(free=63)
    inbox.submit(spec("next"))
    assert placed["next"] == 0


def test_a_group_that_can_never_hold_it_is_not_chosen() -> None:
    small, large = FakeEngine(8, 8), FakeEngine(1)
    inbox, placed = over(small, large)
    inbox.submit(spec("long", length=120, max_tokens=10))  # 129 tokens of KV at its end: 9 pages
    inbox.submit(spec("fits", length=120, max_tokens=9))
    assert placed == {"long": 1, "fits": 0}


def test_what_no_group_can_hold_is_answered_by_one_of_them() -> None:
    first, second = FakeEngine(8, 8), FakeEngine(8, 8)
    inbox, _ = over(first, second)
    inbox.submit(spec("endless", length=900))
    assert [name for name, _ in first.asked + second.asked] == ["submit"]


def test_a_request_stays_with_its_engine_to_the_end() -> None:
    first, second = FakeEngine(), FakeEngine(free=60)
    inbox, placed = over(first, second)
    inbox.submit(spec("a"))
    second.see(free=64)
    inbox.submit(spec("b"))
    assert placed == {"a": 0, "b": 1}
    inbox.engine_event(KvReserved("a", 7, (1,), (0,), group=0))
    inbox.engine_event(KvReserved("b", 8, (1,), (0,), group=1))
    inbox.kv_settled(8, KvOutcome.QUARANTINED, retry=KvSource.REMOTE)
    inbox.kv_settled(7, KvOutcome.WHOLE)
    inbox.kv_settled(8, KvOutcome.RELEASED)
    inbox.abort("b")
    inbox.abort("a")
    inbox.abort("nobody")
    assert first.asked[1:] == [("kv_settled", 7), ("abort", "a")]
    assert second.asked[1:] == [("kv_settled", 8), ("kv_settled", 8), ("abort", "b")]
    for request_id in ("a", "b"):
        inbox.engine_event(Finished(request_id, FinishReason.ABORT))
    inbox.abort("a")
    assert first.asked[-1] == ("abort", "a")
    assert len(first.asked) == 3
    assert inbox._of_request == inbox._of_attempt == {}


def test_pages_of_a_request_that_is_gone_come_back_to_its_engine() -> None:
    """Its attempt outlives it: what is told of that still has an address."""
    first, second = FakeEngine(free=1), FakeEngine()
    inbox, _ = over(first, second)
    inbox.submit(spec("a"))
    inbox.engine_event(KvReserved("a", 7, (1,), (0,), group=1))
    inbox.engine_event(Finished("a", FinishReason.ABORT))
    inbox.kv_settled(7, KvOutcome.RELEASED)
    assert second.asked[-1] == ("kv_settled", 7)


def test_prefills_for_decoders_are_the_first_engine_s() -> None:
    engine = FakeEngine()
    inbox, _ = over(engine)
    sink: Any = None
    inbox.submit_prefill(PrefillSpec("pf1-r", (1, 2), sink))
    inbox.abort("pf1-r")
    inbox.engine_event(Finished("pf1-r", FinishReason.ABORT))
    inbox.prefill_settled("pf1-r")
    assert [name for name, _ in engine.asked] == ["submit_prefill", "abort", "prefill_settled"]


@pytest.mark.parametrize("shared", [True, False])
def test_attempts_and_rows_of_all_groups_are_told_apart(shared: bool) -> None:
    """Ids come from one count: two counts would give two groups the same attempt."""
    count = itertools.count()
    schedulers = [
        Scheduler(PagePool(64), LIMITS, ids=count.__next__ if shared else None, group=group) for group in range(2)
    ]
    attempts = []
    for group, scheduler in enumerate(schedulers):
        for n in range(3):
            scheduler.submit(spec(f"g{group}-{n}"), 0.0)
        for event in scheduler.schedule(0.0).effects:
            if isinstance(event, KvReserved):
                attempts.append(event.attempt)
                assert event.group == group
        picture = take_snapshot(scheduler, 0.0, batch_size=0, batch_tokens=0, last_step_seconds=0.0, totals=Totals())
        assert [row.group for row in picture.requests] == [group] * 3
    assert len(attempts) == 6
    assert (len(set(attempts)) == 6) is shared
