"""The failure of one consumer costs nobody an event, and no page is lost with it."""

from __future__ import annotations

import asyncio
import logging
import threading
import types
from typing import Any

import pytest

from pdd.config_load import load
from pdd.daemon.dispatch import Dispatch
from pdd.daemon.engines import Engines
from pdd.daemon.group import EngineGroup
from pdd.daemon.node import Node
from pdd.engine.limits import SchedulerLimits
from pdd.engine.request import (
    EngineEvent,
    Finished,
    FinishReason,
    GenerateSpec,
    KvOutcome,
    KvReserved,
    PrefillSpec,
    SamplingParams,
    TokenOutput,
    Tokens,
)
from pdd.engine.snapshot import EngineSnapshot, Totals
from pdd.errors import RequestCancelled
from pdd.kv.pool import PageCounts

EVENTS = [
    Tokens("a", (TokenOutput(1),)),
    KvReserved("b", 7, (1, 2), (3,)),
    Finished("a", FinishReason.STOP),
]


def node_of(role: str = "both") -> Node:
    sets = ["peers.static=127.0.0.1:1"] if role == "decode" else []
    config, _ = load(env={"PDD_NODE__ROLE": role}, assignments=sets, demo=True, search=False)
    return Node(config, demo=True)


def test_every_consumer_gets_every_event_whatever_another_does(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[EngineEvent] = []

    def broken(event: EngineEvent) -> None:
        raise KeyError("boom")

    dispatch = Dispatch()
    for consumer in (broken, seen.append, broken):
        dispatch.add(consumer)
    with caplog.at_level(logging.ERROR):
        dispatch.take(EVENTS)
    assert seen == EVENTS
    assert len(caplog.records) == 6
    assert all(record.exc_info for record in caplog.records)
    assert "Tokens of a could not be taken" in caplog.text


def test_only_a_reservation_that_its_fetcher_failed_at_is_given_back() -> None:
    lost: list[tuple[KvReserved, Exception]] = []

    def broken(event: EngineEvent) -> None:
        raise KeyError("boom")

    dispatch = Dispatch()
    dispatch.add(broken)
    dispatch.add_fetcher(lambda event: None, lambda event, error: lost.append((event, error)))
    dispatch.take(EVENTS)
    assert lost == []
    dispatch.add_fetcher(lambda event: broken(event), lambda event, error: lost.append((event, error)))
    dispatch.take(EVENTS)
    assert [event.attempt for event, _ in lost] == [7]
    assert isinstance(lost[0][1], KeyError)


class FakeEngine:
    busy_since = None

    def __init__(self, *, joins: tuple[bool, ...] = (True,)) -> None:
        self.requests: tuple[Any, ...] = ()
        self.settled: list[tuple[int, KvOutcome, Exception | None]] = []
        self.aborted: list[str] = []
        self.stopped = False
        self._joins = list(joins)

    def kv_settled(self, attempt: int, outcome: KvOutcome, *, retry: Any = None, error: Exception | None = None) -> None:
        self.settled.append((attempt, outcome, error))

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def submit_prefill(self, spec: PrefillSpec) -> None:
        pass

    def submit(self, spec: GenerateSpec) -> None:
        pass

    def stop(self) -> None:
        self.stopped = True

    def join(self, timeout: float) -> bool:
        return self._joins.pop(0)


    @property
    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(0.0, {}, PageCounts(1, 0, 0, 0, 0, 0), 0, 0, 0.0, 0, Totals(), self.requests)


def group_of(loop: Any, executor: Any = None, ranks: tuple[Any, ...] = ()) -> EngineGroup:
    return EngineGroup(0, executor, ranks, loop=loop)


def engines_of(*engines: Any) -> Engines:
    return Engines(engines, SchedulerLimits(page_size=16, max_context=64))


@pytest.mark.parametrize("asked", [False, True])
async def test_pages_of_a_failed_reservation_go_back_unless_a_write_may_land(asked: bool) -> None:
    """Of the engine that has it, by the way that everything goes to an engine: it keeps no route of what is over."""
    node: Any = node_of("decode")
    other, engine = FakeEngine(), FakeEngine()
    attempts = (types.SimpleNamespace(attempt=7),) if asked else ()
    decoder: Any = types.SimpleNamespace(attempts=lambda: attempts)
    node.groups, node.decoder, node._engines = (group_of(other), group_of(engine)), decoder, engines_of(other, engine)
    for request_id in ("a", "b"):
        node._engines.submit(GenerateSpec(request_id, (1, 2), SamplingParams(max_tokens=1)))
    reserved = KvReserved("b", 7, (1, 2), (3,), group=1)
    node._engines.engine_event(reserved)
    node._not_fetched(reserved, KeyError("boom"))
    assert (other.settled, other.aborted) == ([], [])
    assert node._engines._of_attempt == ({7: 1} if asked else {})
    if asked:
        assert engine.settled == []
        assert engine.aborted == ["b"]
    else:
        [(attempt, outcome, error)] = engine.settled
        assert (attempt, outcome) == (7, KvOutcome.RELEASED)
        assert "boom" in str(error)


@pytest.mark.parametrize("request_id", ["abc", "pf3-abc"])
async def test_a_prefill_is_cancelled_by_its_decoders_id_and_by_its_own(request_id: str) -> None:
    node: Any = node_of()
    job = types.SimpleNamespace(request_id="pf3-abc", client_id="abc")
    engine = FakeEngine()
    engine.requests = (types.SimpleNamespace(request_id="pf3-abc"),)
    node.groups, node._engines = (group_of(engine),), engines_of(engine)
    node._engines.submit_prefill(PrefillSpec("pf3-abc", (1,), node))
    node.prefiller = types.SimpleNamespace(jobs=lambda: (job,))
    assert node.cancel(request_id, RequestCancelled("x"))
    assert engine.aborted == ["pf3-abc"]
    assert not node.cancel("other", RequestCancelled("x"))


# -- close -------------------------------------------------------------------------------------------------------------
class Part:
    def __init__(self, closed: list[str], name: str, *, fails: bool = False) -> None:
        self._closed, self._name, self._fails = closed, name, fails

    def detach(self) -> None:
        self._closed.append(f"{self._name} detached")

    def close(self) -> None:
        self._closed.append(self._name)
        if self._fails:
            raise RuntimeError(f"{self._name} is broken")


class AsyncPart(Part):
    async def close(self, seconds: float) -> None:  # type: ignore[override]
        super().close()


async def test_a_part_that_fails_to_close_keeps_no_other_open(caplog: pytest.LogCaptureFixture) -> None:
    closed: list[str] = []
    node: Any = node_of()
    node.decoder, node.prefiller = (AsyncPart(closed, name, fails=True) for name in ("decoder", "prefiller"))
    engines = FakeEngine(), FakeEngine()
    node.groups = group_of(engines[0], Part(closed, "ranks", fails=True)), group_of(engines[1], Part(closed, "ranks"))
    node.fabric = Part(closed, "fabric", fails=True)
    await node.close()
    assert closed == ["decoder", "prefiller", "fabric detached", "fabric", "ranks", "ranks"]
    assert all(engine.stopped for engine in engines)
    assert all(f"{name} could not be closed" in caplog.text for name in ("decoder", "prefiller", "fabric"))


async def test_ranks_of_all_groups_are_closed_at_once() -> None:
    node: Any = node_of()
    together = threading.Barrier(2)
    ranks: Any = types.SimpleNamespace(close=lambda: together.wait(10))
    node.groups = group_of(FakeEngine(), ranks), group_of(FakeEngine(), ranks)
    await node.close()
    assert not together.broken


async def test_descriptors_of_a_step_that_does_not_end_stay_open() -> None:
    """First its rank is killed, which ends it; when that does not help, nothing it uses is closed."""
    for joins, expected in (((False, True), ["ranks"]), ((False, False), [])):
        closed: list[str] = []
        node: Any = node_of()
        rank = await asyncio.create_subprocess_exec("sleep", "60")
        ready: Any = types.SimpleNamespace(ready=types.SimpleNamespace(pid=rank.pid))
        node.groups = (group_of(FakeEngine(joins=joins), Part(closed, "ranks"), (ready,)),)
        await node.close()
        assert await rank.wait() == -9
        assert closed == expected
