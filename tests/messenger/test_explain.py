"""A decoder asks its prefillers about attempts: over the link, bounded on both sides, and told why when there is no answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import pytest

from pdd.fabric.types import FlightLayer, FlightPlan
from pdd.messenger import asking, wire
from pdd.messenger.explain import FAILED, IN_FLIGHT, NOT_COMPUTED, NOT_POSTED, lacks
from pdd.messenger.versions import EXPLAIN_VERSION, Range
from tests.messenger.rig import Rig, finish, prompt, running, until, up


class Flight:
    """What a fabric remembers, as a test says it."""

    nic_names = ("10.0.0.1", "10.0.0.2")

    def __init__(self) -> None:
        self.found: list[FlightPlan] = []
        self.num_asked = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def plans(self, transfer: int) -> Sequence[FlightPlan]:
        self.num_asked += 1
        await self.gate.wait()
        return self.found


def layer(number: int, **known: object) -> FlightLayer:
    nothing = {"ready": None, "first_post": None, "last_post": None, "last_end": None, "posted": 0, "ok": 0, "failed": 0,
               "unknown": 0, "nics": (), "failed_nics": (), "in_flight": ()}
    return FlightLayer(number, **{**nothing, **known})  # type: ignore[arg-type]


def plan(first_value: int, *layers: FlightLayer, src: int = 5, dst: int = 0, units: int = 4) -> FlightPlan:
    return FlightPlan(1, 2, src, dst, first_value, len(layers), units, 10.0, layers)


# -- what is missing: pure --------------------------------------------------------------------------------------------
def test_neighbouring_layers_that_lack_the_same_are_one() -> None:
    done = layer(0, ready=11.0, posted=4, ok=4)
    found = lacks([plan(7, done, layer(1), layer(2), layer(3))], Flight.nic_names, (5,), 1, 12.0)
    assert found == [wire.Lack(NOT_COMPUTED, 0, 1, 3, 0, 0, "", 12, 2.0)]


def test_layers_with_a_good_one_between_them_are_two() -> None:
    bad, good = {"ready": 11.0, "posted": 4, "failed": 4, "last_end": 11.0, "failed_nics": (0,)}, layer(1, ready=11.0, posted=4, ok=4)
    found = lacks([plan(7, layer(0, **bad), good, layer(2, **bad))], Flight.nic_names, (5,), 1, 12.0)
    assert [(lack.first_layer, lack.last_layer, lack.units) for lack in found] == [(0, 0, 4), (2, 2, 4)]


def test_each_unit_is_in_one_state() -> None:
    mixed = layer(0, ready=11.0, posted=3, ok=1, first_post=11.5, in_flight=((1, 1), (0, 1)))
    found = lacks([plan(7, mixed)], Flight.nic_names, (5,), 1, 12.0)
    assert found == [
        wire.Lack(IN_FLIGHT, 0, 0, 0, 0, 0, "10.0.0.1", 1, 0.5), wire.Lack(IN_FLIGHT, 0, 0, 0, 0, 0, "10.0.0.2", 1, 0.5),
        wire.Lack(NOT_POSTED, 0, 0, 0, 0, 0, "", 1, 1.0),
    ]
    assert sum(lack.units for lack in found) + mixed.ok == 4


def test_ranks_and_chunks_are_told_apart() -> None:
    plans = [plan(1, layer(0), src=5, dst=0), plan(1, layer(0), src=6, dst=1), plan(9, layer(0), src=5, dst=0)]
    found = lacks(plans, Flight.nic_names, (5, 6), 2, 12.0)
    assert [(lack.chunk, lack.from_rank, lack.to_rank) for lack in found] == [(0, 0, 0), (0, 1, 1), (1, 0, 0)]


def test_a_rank_is_that_of_its_engine_whichever_engine_of_the_decoder_it_is_of() -> None:
    found = lacks([plan(1, layer(0), dst=region) for region in (2, 3)], Flight.nic_names, (5,), 2, 12.0)
    assert [lack.to_rank for lack in found] == [0, 1]


def test_a_failed_write_names_its_nics_and_the_layer_above_is_another_lack() -> None:
    refused = layer(2, ready=11.0, posted=4, ok=2, failed=2, last_end=11.75, failed_nics=(0, 1))
    found = lacks([plan(7, refused, layer(3, ready=11.0))], Flight.nic_names, (5,), 1, 12.0)
    assert found == [
        wire.Lack(FAILED, 0, 2, 2, 0, 0, "10.0.0.1+10.0.0.2", 2, 0.25), wire.Lack(NOT_POSTED, 0, 3, 3, 0, 0, "", 4, 1.0)
    ]


# -- over a link ------------------------------------------------------------------------------------------------------
@contextlib.asynccontextmanager
async def slow_pair(rig: Rig, flight: Flight | None = None, **changes: object):  # type: ignore[no-untyped-def]
    """A prefill that takes a while, and the attempt at it."""
    p, d = await rig.pair(layer_seconds=0.05, flight=flight, **changes)
    request = d.engine.generate("r", prompt(1, 60))
    await until(lambda: any(a.arrived_units for a in d.decoder.attempts()))
    yield p, d, d.decoder.attempts()[0].attempt
    assert await finish(request) == ["whole"]


async def test_a_prefiller_says_what_it_has_done() -> None:
    async with running() as rig:
        flight = Flight()
        async with slow_pair(rig, flight) as (p, d, attempt):
            flight.found = [plan(1, layer(0, ready=1.0, posted=4, ok=4), layer(1), src=1)]
            answer = await d.decoder.ask_about(attempt, "p1")
            assert isinstance(answer, wire.ExplainAnswer)
            assert (answer.state, answer.tokens, answer.steps) == ("pushing", 60, 1)
            assert 0 <= answer.computed_tokens < 60
            assert answer.queue_seconds is not None
            assert answer.send_seconds is None
            assert [lack.what for lack in answer.lacks] == [NOT_COMPUTED]
        flight.found = []
        await until(lambda: p.done != [])
        after = await d.decoder.ask_about(attempt, "p1")
        assert isinstance(after, wire.ExplainAnswer)
        assert (after.state, after.computed_tokens, after.ok_units) == ("done", 60, after.units)
        assert after.send_seconds is not None


async def test_a_prefiller_counts_the_ranks_of_an_engine_while_it_pushes_and_after() -> None:
    async with running() as rig:
        flight = Flight()
        p = await rig.prefiller(layer_seconds=0.05, flight=flight)
        d = await rig.decoder([p.port], groups=2, tp=2)
        await until(up(d))
        request = d.engines[1].generate("r", prompt(1, 60))
        await until(lambda: any(a.state == "pushing" for a in p.prefiller.jobs()))
        flight.found = [plan(1, layer(0), src=1, dst=3)]
        attempt = d.decoder.attempts()[0].attempt
        for _ in range(2):
            answer = await d.decoder.ask_about(attempt, "p1")
            assert isinstance(answer, wire.ExplainAnswer)
            assert [lack.to_rank for lack in answer.lacks] == [1]
            await until(lambda: p.done != [])
        await finish(request)


async def test_a_prefiller_of_the_first_version_is_not_asked() -> None:
    async with running() as rig, slow_pair(rig, versions=Range(1, EXPLAIN_VERSION - 1)) as (_, d, attempt):
        assert "speaks version 1" in str(await d.decoder.ask_about(attempt, "p1"))


async def test_questions_that_come_too_fast_are_dropped_and_cost_few_looks_at_the_fabric() -> None:
    async with running() as rig:
        flight = Flight()
        async with slow_pair(rig, flight) as (_, d, attempt):
            [link] = d.decoder.peers.usable_links()
            flight.gate.clear()
            for number in range(500):
                link.send(wire.ExplainRequest(ask=10_000 + number, attempt=attempt))
            await until(lambda: flight.num_asked > 0)
            await asyncio.sleep(0.1)
            assert flight.num_asked == asking.MOST_AT_ONCE
            flight.gate.set()
            began = asyncio.get_running_loop().time()
            for number in range(60):
                link.send(wire.ExplainRequest(ask=20_000 + number, attempt=attempt))
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.05)
            seconds = asyncio.get_running_loop().time() - began + 1.0
            assert flight.num_asked <= asking.BURST + seconds * asking.PER_SECOND
            assert link.is_up


async def test_one_answer_serves_all_who_want_to_know() -> None:
    async with running() as rig:
        flight = Flight()
        async with slow_pair(rig, flight) as (_, d, attempt):
            answers = await asyncio.gather(*(d.decoder.ask_about(attempt, "p1") for _ in range(8)))
            assert all(answer is answers[0] for answer in answers)
            assert flight.num_asked == 1


async def test_no_answer_is_told_and_waited_for_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "PATIENCE", 0.1)
    async with running() as rig:
        flight = Flight()
        async with slow_pair(rig, flight) as (_, d, attempt):
            flight.gate.clear()
            why = await d.decoder.ask_about(attempt, "p1")
            assert "p1 gave no answer within 0.1 s" in str(why)
            flight.gate.set()
            assert isinstance(await d.decoder.ask_about(attempt, "p1"), wire.ExplainAnswer)


async def test_a_link_that_ends_meanwhile_ends_the_question() -> None:
    async with running() as rig:
        flight = Flight()
        p, d = await rig.pair(layer_seconds=0.05, flight=flight)
        flight.gate.clear()
        request = d.engine.generate("r", prompt(1, 60))
        await until(lambda: any(a.arrived_units for a in d.decoder.attempts()))
        question = asyncio.create_task(d.decoder.ask_about(d.decoder.attempts()[0].attempt, "p1"))
        await until(lambda: flight.num_asked > 0)
        for link in p.prefiller.listener.links:
            link._stream.abort()
        assert "the link to p1 has ended" in str(await question)
        flight.gate.set()
        await until(up(d))
        assert await finish(request) == ["whole"]
        assert await d.decoder.ask_about(1, "nobody") == "nobody is not linked"


async def test_an_answer_that_nobody_asked_for_is_dropped() -> None:
    async with running() as rig:
        p, d = await rig.pair()
        [link] = p.prefiller.listener.links
        link.send(wire.ExplainAnswer(ask=77, attempt=1, known=True))
        assert await finish(d.engine.generate("r", prompt(1, 20))) == ["whole"]
        assert d.decoder.peers.peers[0].num_connects == 1


async def test_a_fabric_that_does_not_say_is_no_end_of_the_answer() -> None:
    class Broken(Flight):
        async def plans(self, transfer: int) -> Sequence[FlightPlan]:
            raise TimeoutError("no answer")

    async with running() as rig, slow_pair(rig, Broken()) as (_, d, attempt):
        answer = await d.decoder.ask_about(attempt, "p1")
        assert isinstance(answer, wire.ExplainAnswer)
        assert answer.known
        assert "the fabric does not say what it wrote" in answer.why
