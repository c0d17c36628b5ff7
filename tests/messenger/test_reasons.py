"""What is reported of attempts and jobs that are over: why they ended, and what came; and what a request is told."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from pdd.errors import NoPrefiller, PeerProtocol, PromptTooLong
from pdd.messenger import wire
from pdd.metrics import FAILURE_REASONS
from tests.messenger.fake_engines import UNIT_BYTES
from tests.messenger.rig import DECODER, FAST, NUM_LAYERS, DecoderNode, PrefillerNode, Rig, finish, prompt, running, until, up

ONCE = dataclasses.replace(DECODER, max_attempts=1)


SLOW = {"layer_seconds": 0.005, "chunk": 4}


# -- why they end -----------------------------------------------------------------------------------------------------
async def _whole(rig: Rig, d: DecoderNode, p: PrefillerNode) -> None:
    """Nothing is in the way."""


async def _refused(rig: Rig, d: DecoderNode, p: PrefillerNode) -> None:
    p.engine.refuse = PromptTooLong("it is too long for this engine")


async def _failed(rig: Rig, d: DecoderNode, p: PrefillerNode) -> None:
    p.fabric.inject_fault("error", 3)


async def _cancelled(rig: Rig, d: DecoderNode, p: PrefillerNode) -> None:
    asyncio.get_running_loop().call_later(0.03, d.engine.abort, "r")


async def _stalled(rig: Rig, d: DecoderNode, p: PrefillerNode) -> None:
    p.engine.paused.clear()
    asyncio.get_running_loop().call_later(DECODER.prefill_stall_timeout + 0.2, p.engine.paused.set)


async def _peer_lost(rig: Rig, d: DecoderNode, p: PrefillerNode) -> None:
    asyncio.get_running_loop().call_later(0.03, p.prefiller.listener.links[0]._stream.abort)


async def _overrun(rig: Rig, d: DecoderNode, p: PrefillerNode) -> None:
    def twice() -> None:
        (key,) = d.fabric.slots
        d.fabric.slots[key].arrived = 1000
        d.fabric._judge(key)

    asyncio.get_running_loop().call_later(0.03, twice)


async def _no_prefiller(rig: Rig, d: DecoderNode, p: PrefillerNode) -> None:
    p.prefiller.drain()
    await until(up(d, 0))


CASES = {  # how -> reason of the attempt, of the job (None: there is none)
    _whole: ("", ""),
    _refused: ("refused", "refused"),
    _failed: ("failed", "failed"),
    _cancelled: ("cancelled", "cancelled"),
    _stalled: ("stalled", "cancelled"),
    _peer_lost: ("peer_lost", "peer_lost"),
    _overrun: ("overrun", "peer_lost"),
    _no_prefiller: ("no_prefiller", None),
}


@pytest.mark.parametrize("how", CASES)
async def test_reason_is_that_of_what_happened(how) -> None:  # type: ignore[no-untyped-def]
    of_attempt, of_job = CASES[how]
    async with running() as rig:
        p, d = await rig.pair(decoding=ONCE, **SLOW)
        await how(rig, d, p)
        request = d.engine.generate("r", prompt(1, 40))
        await finish(request)
        await until(lambda: len(d.done) == 1)
        assert [(done.reason, done.whole) for done in d.done] == [(of_attempt, not of_attempt)]
        await until(lambda: len(p.done) == (of_job is not None))
        assert [done.reason for done in p.done] == ([] if of_job is None else [of_job])
        assert all(bool(done.error) == bool(done.reason) for done in p.done)
        counters = dataclasses.asdict(p.prefiller.counters)
        if of_job is not None:
            assert counters[of_job or "whole"] == 1
        assert sum(counters[name] for name in ("whole", "refused", "failed", "cancelled", "peer_lost")) == len(p.done)


def test_every_reason_has_a_way_to_it() -> None:
    assert {reason for reason, _ in CASES.values()} - {""} == set(FAILURE_REASONS)


async def test_overrun_is_what_the_request_is_told() -> None:
    async with running() as rig:
        p, d = await rig.pair(decoding=ONCE, **SLOW)
        await _overrun(rig, d, p)
        request = d.engine.generate("r", prompt(1, 40))
        assert await finish(request) == ["error"]
        assert isinstance(request.error, PeerProtocol)
        assert "units arrived where 30 were expected" in str(request.error)


# -- what came --------------------------------------------------------------------------------------------------------
async def test_bytes_are_those_of_the_plan_whatever_a_page_is() -> None:
    async with running() as rig:
        p, d = await rig.pair(decoding=ONCE, **SLOW)
        seen = [0]

        def look() -> None:
            seen.append(d.decoder.bytes_received)

        p.engine.counter.on_bump.append(look)
        first = d.engine.generate("r", prompt(1, 40))
        assert await finish(first) == ["whole"]
        whole = 10 * NUM_LAYERS * UNIT_BYTES
        assert [(done.bytes, done.pages) for done in d.done] == [(whole, 10)]
        await until(lambda: len(p.done) == 1)
        assert [done.pages for done in p.done] == [10]
        assert d.decoder.bytes_received == whole
        await _cancelled(rig, d, p)
        await finish(d.engine.generate("r", prompt(2, 40)))
        await rig.settle()
        look()
        assert seen == sorted(seen)
        assert len(set(seen)) > 10  # it moves while units arrive
        assert d.decoder.bytes_received == sum(done.bytes for done in d.done) == sum(d.units for d in d.done) * UNIT_BYTES


async def test_bytes_of_an_attempt_in_quarantine_are_counted_once() -> None:
    async with running() as rig:
        p, d = await rig.pair(decoding=ONCE, **SLOW)
        d.fabric.close_delay = 0.3
        await _peer_lost(rig, d, p)
        request = d.engine.generate("r", prompt(1, 40))
        assert await finish(request) == ["error"]
        assert d.engine.quarantined == 10
        assert d.decoder.bytes_received == sum(done.bytes for done in d.done) > 0


# -- prompts that are too long ----------------------------------------------------------------------------------------
async def test_prompt_that_no_prefiller_can_hold_is_the_clients_error_at_once() -> None:
    async with running() as rig:
        small, tiny = await rig.prefiller("small", max_tokens=40), await rig.prefiller("tiny", num_pages=5)
        d = await rig.decoder([small.port, tiny.port])
        await until(up(d, 2))
        request = d.engine.generate("r", prompt(1, 41))
        assert await finish(request) == ["error"]
        assert isinstance(request.error, PromptTooLong)
        assert f"127.0.0.1:{small.port} takes at most 40" in str(request.error)
        assert f"127.0.0.1:{tiny.port} takes at most 20" in str(request.error)
        assert "41 tokens" in str(request.error)
        assert len(request.attempts) == 1
        assert small.prefiller.counters.refused + tiny.prefiller.counters.refused == 0  # nobody was asked
        assert await finish(d.engine.generate("s", prompt(2, 40)), d.engine.generate("t", prompt(3, 20))) == ["whole"] * 2


async def test_long_prompt_goes_to_the_prefiller_that_can_hold_it() -> None:
    async with running() as rig:
        small, large = await rig.prefiller("small", max_tokens=16), await rig.prefiller("large")
        d = await rig.decoder([small.port, large.port])
        await until(up(d, 2))
        requests = [d.engine.generate(f"r{n}", prompt(n, 17)) for n in range(4)]
        assert await finish(*requests) == ["whole"] * 4
        assert small.prefiller.counters.jobs + small.prefiller.counters.refused == 0
        large.prefiller.drain()
        await until(up(d, 1))
        later = d.engine.generate("later", prompt(9, 17))
        assert await finish(later) == ["error"]
        assert isinstance(later.error, NoPrefiller)  # it may be taken once `large` is back


async def test_long_prompt_waits_for_a_prefiller_that_is_coming_back() -> None:
    async with running() as rig:
        small, large = await rig.prefiller("small", max_tokens=16), await rig.prefiller("large")
        proxy = await rig.proxy(large.port)
        d = await rig.decoder([small.port, proxy.port])
        await until(up(d, 2))
        proxy.refusing = True
        proxy.cut()
        await until(up(d, 1))
        request = d.engine.generate("r", prompt(1, 17))
        await until(lambda: [a.state for a in d.decoder.attempts()] == ["choosing"])
        proxy.refusing = False
        assert await finish(request) == ["whole"]


async def test_nobody_waits_for_a_prefiller_that_is_too_small_anyway() -> None:
    async with running() as rig:
        here, gone = await rig.prefiller("here", max_tokens=16), await rig.prefiller("gone", max_tokens=16)
        proxy = await rig.proxy(gone.port)
        d = await rig.decoder([here.port, proxy.port], settings=dataclasses.replace(FAST, connect_timeout=600.0))
        await until(up(d, 2))
        proxy.refusing = True
        proxy.cut()
        await until(up(d, 1))
        request = d.engine.generate("r", prompt(1, 17))
        assert await finish(request) == ["error"]
        assert isinstance(request.error, PromptTooLong)


async def test_refusals_cost_no_try_and_the_last_one_is_the_clients_error() -> None:
    """Prefillers of which nobody knew that they are too small: more of them than tries."""
    async with running() as rig:
        ps = [await rig.prefiller(f"p{n}") for n in range(4)]
        for p in ps:
            p.engine.refuse = PromptTooLong("it is too long for this engine")
        d = await rig.decoder([p.port for p in ps], decoding=ONCE)
        await until(up(d, 4))
        request = d.engine.generate("r", prompt(1, 17))
        assert await finish(request) == ["error"]
        assert isinstance(request.error, PromptTooLong)
        assert str(request.error).count("too long for this engine") == 4
        assert len(request.attempts) == 4
        ps[2].engine.refuse = None
        assert await finish(d.engine.generate("s", prompt(1, 17))) == ["whole"]


async def test_local_prefill_takes_what_no_prefiller_can_hold_when_allowed() -> None:
    async with running() as rig:
        p = await rig.prefiller(max_tokens=16)
        d = await rig.decoder([p.port], decoding=dataclasses.replace(DECODER, local_fallback=True))
        await until(up(d))
        assert await finish(d.engine.generate("r", prompt(1, 17))) == ["local"]
        assert p.prefiller.counters.refused == 0


async def test_hello_without_a_limit_means_the_pool() -> None:
    async with running() as rig:
        p = await rig.prefiller(max_tokens=0)
        d = await rig.decoder([p.port])
        await until(up(d))
        assert isinstance(d.decoder.peers.peers[0].link.peer, wire.Hello)  # type: ignore[union-attr]
        assert d.decoder.peers.peers[0].most_tokens == 256
