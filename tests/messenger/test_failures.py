"""What goes wrong between a decoder and a prefiller, one kind at a time, and what must still hold."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from pdd.address import Address
from pdd.engine.request import KvOutcome
from pdd.errors import NoPrefiller, PeerLost, PrefillRefused, RequestTimeout
from pdd.messenger import wire
from pdd.messenger.frames import FrameStream
from pdd.messenger.link import PeerLink
from pdd.messenger.peers import Backoff, PeerTable
from tests.messenger.rig import DECODER, FAST, DecoderNode, finish, prompt, running, stuck, until, up


def outcomes(node: DecoderNode, attempt: int) -> list[KvOutcome]:
    return [outcome for number, outcome in node.engine.settled if number == attempt]


# -- the client leaves ------------------------------------------------------------------------------------------------
async def test_cancel_of_a_queued_prefill_frees_both_sides() -> None:
    async with running() as rig:
        p, d = await rig.pair()
        p.engine.paused.clear()
        front, behind = d.engine.generate("front", prompt(1, 9)), d.engine.generate("behind", prompt(2, 9))
        await until(lambda: p.prefiller.num_jobs == 2)
        d.engine.abort("behind")
        await until(lambda: p.prefiller.num_jobs == 1)  # though the engine does not step
        await until(lambda: len(d.engine.reservations) == 1)
        p.engine.paused.set()
        assert await finish(front, behind) == ["whole", "aborted"]
        assert outcomes(d, behind.attempts[0]) == [KvOutcome.RELEASED]


async def test_cancel_in_mid_push_is_released_by_exact_counts() -> None:
    async with running() as rig:
        p, d = await rig.pair(layer_seconds=0.002, chunk=4)
        request = d.engine.generate("r", prompt(1, 60))
        await until(lambda: rig.network.num_landed > 5)
        d.engine.abort("r")
        assert await finish(request) == ["aborted"]
        await rig.settle()
        assert outcomes(d, request.attempts[0]) == [KvOutcome.RELEASED]
        assert p.prefiller.counters.cancelled == 1
        assert rig.network.num_landed < 45


async def test_cancel_waits_for_units_that_are_on_the_way() -> None:
    """The answer to a cancel overtakes writes: pages go back only when the last of them has landed."""
    async with running() as rig:
        rig.network.least_landing = 0.15
        _, d = await rig.pair(layer_seconds=0.01)
        request = d.engine.generate("r", prompt(1, 40))
        await until(lambda: len(rig.network.in_flight) > 5)
        d.engine.abort("r")
        await rig.settle()
        assert "draining" in d.states("attempt")
        assert outcomes(d, request.attempts[0]) == [KvOutcome.RELEASED]
        assert d.decoder.counters.fences == 0


async def test_cancel_that_races_with_the_last_unit_ends_once() -> None:
    async with running() as rig:
        _, d = await rig.pair()
        for n in range(40):
            request = d.engine.generate(f"r{n}", prompt(n, 9))
            for _ in range(n):
                await asyncio.sleep(0.0003)
            d.engine.abort(f"r{n}")
            await finish(request)
            await rig.settle()
        assert all(len(outcomes(d, r.attempts[0])) == 1 for r in d.engine.requests.values() if r.attempts)
        assert d.decoder.counters.fences == 0


async def test_cancel_that_overtakes_its_request_leaves_a_tombstone() -> None:
    async with running() as rig:
        p, proxy, d = await rig.proxied_pair()
        (link,) = d.decoder.peers.usable_links()
        link.send(wire.Cancel(attempt=1))
        request = d.engine.generate("r", prompt(1, 9))
        assert await finish(request) == ["whole"]  # its second attempt
        assert len(request.attempts) == 2
        assert p.prefiller.counters.jobs == 1
        assert [type(m).__name__ for way, m in proxy.seen if way == "to_d"].count("PrefillEnded") == 2


async def test_unanswered_cancel_fences_the_link() -> None:
    async with running() as rig:
        p = await rig.prefiller()
        proxy = await rig.proxy(p.port)
        proxy.verdict = lambda way, n, m: "drop" if isinstance(m, wire.PrefillEnded) else "pass"
        d = await rig.decoder([proxy.port])
        (request,) = await stuck(p, d)
        d.engine.abort("r")
        p.engine.paused.set()
        await rig.settle()
        assert outcomes(d, request.attempts[0]) == [KvOutcome.QUARANTINED, KvOutcome.RELEASED]
        assert d.decoder.counters.fences == 1
        await until(up(d))  # the peer is used again
        proxy.verdict = lambda way, n, m: "pass"
        assert await finish(d.engine.generate("s", prompt(2, 9))) == ["whole"]


# -- writes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("nth", [1, 7, 12])
async def test_failed_write_is_tried_again_under_a_new_key(nth: int) -> None:
    async with running() as rig:
        p, d = await rig.pair()
        p.fabric.inject_fault("error", nth)
        request = d.engine.generate("r", prompt(1, 16))
        assert await finish(request) == ["whole"]
        assert len(request.attempts) == 2
        assert outcomes(d, request.attempts[0]) == [KvOutcome.RELEASED]
        assert d.decoder.counters.fences == 0


async def test_failed_write_goes_to_another_prefiller_first() -> None:
    async with running() as rig:
        bad, good = await rig.prefiller("bad"), await rig.prefiller("good")
        bad.fabric.inject_fault("error", 1, 1000)
        d = await rig.decoder([bad.port, good.port])
        await until(up(d, 2))
        requests = [d.engine.generate(f"r{n}", prompt(n, 10)) for n in range(12)]
        assert await finish(*requests) == ["whole"] * 12
        assert max(len(request.attempts) for request in requests) == 2
        assert bad.prefiller.counters.failed > 0


async def test_attempts_are_bounded_and_the_error_says_why() -> None:
    async with running() as rig:
        p = await rig.prefiller()
        p.fabric.inject_fault("error", 1, 1000)
        d = await rig.decoder([p.port])
        request = d.engine.generate("r", prompt(1, 10))
        assert await finish(request) == ["error"]
        assert len(request.attempts) == 3
        assert isinstance(request.error, PrefillRefused)
        assert "3 attempts" in str(request.error)
        assert "injected error" in str(request.error)


async def test_local_prefill_follows_the_last_attempt_when_allowed() -> None:
    async with running() as rig:
        p = await rig.prefiller()
        p.fabric.inject_fault("error", 1, 1000)
        d = await rig.decoder([p.port], decoding=dataclasses.replace(DECODER, local_fallback=True))
        request = d.engine.generate("r", prompt(1, 10))
        assert await finish(request) == ["local"]
        assert len(request.attempts) == 3


async def test_lost_write_is_noticed_before_the_stall_deadline() -> None:
    """The prefiller thinks that all went well, and its heartbeats no longer list the attempt."""
    async with running() as rig:
        p, d = await rig.pair(decoding=dataclasses.replace(DECODER, prefill_stall_timeout=60.0))
        p.fabric.inject_fault("lost", 5)
        request = d.engine.generate("r", prompt(1, 16))
        assert await finish(request) == ["whole"]
        # The cancel is answered with more units than have come: nobody knows where they are.
        assert outcomes(d, request.attempts[0]) == [KvOutcome.QUARANTINED, KvOutcome.RELEASED]
        assert d.decoder.counters.stalls == 1


async def test_withheld_completion_pins_the_source_and_stalls_nobody_else() -> None:
    async with running() as rig:
        p, d = await rig.pair()
        p.fabric.inject_fault("hold", 5)
        first = d.engine.generate("r", prompt(1, 16))
        assert await finish(first) == ["whole"]  # all landed; the decoder needs no completion
        assert p.prefiller.num_jobs == 1  # but the prefiller does
        assert await finish(d.engine.generate("s", prompt(2, 16))) == ["whole"]
        assert len(p.engine.held) == 1
        await d.decoder.close()
        await until(lambda: p.prefiller.num_jobs == 0 and not p.engine.held)


async def test_overrun_is_never_used() -> None:
    async with running() as rig:
        p, d = await rig.pair()
        p.engine.paused.clear()
        request = d.engine.generate("r", prompt(1, 16))
        await until(lambda: p.prefiller.num_jobs == 1)
        (slot,) = d.fabric.slots.values()
        slot.arrived = slot.expected + 1  # type: ignore[operator]
        d.fabric._judge(next(iter(d.fabric.slots)))
        p.engine.paused.set()
        assert await finish(request) == ["whole"]
        assert outcomes(d, request.attempts[0]) == [KvOutcome.QUARANTINED, KvOutcome.RELEASED]
        assert d.decoder.counters.overruns == 1


async def test_endpoint_failure_ends_its_link_only() -> None:
    async with running() as rig:
        _, _, d = await rig.trio()
        links = d.decoder.peers.usable_links()
        d.fabric.fail_endpoint(links[0].endpoint or 0, "completion queue overrun")
        await until(lambda: not links[0].is_up)
        assert "completion queue overrun" in str(links[0].error)
        assert links[1].is_up
        await until(up(d, 2))


async def test_unknown_units_fence_even_when_the_counts_agree() -> None:
    async with running() as rig:
        p, d = await rig.pair()
        (request,) = await stuck(p, d)
        p.prefiller.listener.links[0].send(
            wire.PrefillEnded(attempt=request.attempts[0], reason=wire.EndReason.FAILED, message="x", unknown_units=1)
        )
        await until(lambda: outcomes(d, request.attempts[0]) != [])
        p.engine.paused.set()
        assert await finish(request) == ["whole"]
        assert outcomes(d, request.attempts[0]) == [KvOutcome.QUARANTINED, KvOutcome.RELEASED]
        assert d.decoder.counters.fences == 1


# -- peers that die, stop or come back --------------------------------------------------------------------------------
async def test_killed_prefiller_costs_its_own_attempts_only() -> None:
    async with running() as rig:
        p1, p2, d = await rig.trio()
        p1.engine.paused.clear()
        p2.engine.paused.clear()
        requests = [d.engine.generate(f"r{n}", prompt(n, 9)) for n in range(10)]
        await until(lambda: p1.prefiller.num_jobs == 5 and p2.prefiller.num_jobs == 5)
        before = {status.attempt for status in d.decoder.attempts() if status.peer == "p2"}
        await rig.kill(p1)
        await until(lambda: len({r.attempts[-1] for r in requests} - {r.attempts[0] for r in requests}) == 5)
        assert before <= {status.attempt for status in d.decoder.attempts()}
        p2.engine.paused.set()
        assert await finish(*requests) == ["whole"] * 10


async def test_pages_of_a_killed_prefiller_wait_for_the_fence() -> None:
    async with running() as rig:
        rig.network.most_delay = 0.3
        p1, p2 = await rig.prefiller("p1"), await rig.prefiller("p2")
        d = await rig.decoder([p1.port])
        d.fabric.close_delay = 1.5
        request = d.engine.generate("r", prompt(1, 40))
        await until(lambda: len(rig.network.in_flight) > 10)
        await rig.kill(p1)
        await until(lambda: d.engine.quarantined == 10)
        await until(lambda: d.engine.quarantined == 0)
        assert outcomes(d, request.attempts[0]) == [KvOutcome.QUARANTINED, KvOutcome.RELEASED]
        assert await finish(request) == ["error"]
        assert isinstance(request.error, NoPrefiller)
        assert str(p1.port) in str(request.error)
        assert p2.prefiller.num_jobs == 0


async def test_fence_that_never_comes_keeps_pages_quarantined_for_ever() -> None:
    async with running() as rig:
        p, proxy, d = await rig.proxied_pair()
        (request,) = await stuck(p, d)
        d.fabric.never_close = True
        endpoints = list(d.fabric.endpoints)
        proxy.cut()
        await until(lambda: len(request.attempts) == 2)
        p.engine.paused.set()
        assert await finish(request) == ["whole"]
        await asyncio.sleep(FAST.dead_after * 2)
        assert d.engine.quarantined == 3
        d.fabric.never_close = False
        for endpoint in endpoints:
            d.fabric._closed(endpoint)


async def test_silent_prefiller_is_suspect_then_dead() -> None:
    async with running() as rig:
        p, proxy, d = await rig.proxied_pair()
        (request,) = await stuck(p, d)
        proxy.silence(True)
        await until(lambda: d.decoder.peers.peers[0].state == "suspect")
        assert d.decoder.peers.usable_links() == []
        assert outcomes(d, request.attempts[0]) == []  # suspicion gives up nothing
        await until(lambda: outcomes(d, request.attempts[0]) != [])
        assert d.engine.settled[0] == (request.attempts[0], KvOutcome.QUARANTINED)
        # The prefiller heard nothing either.
        await until(lambda: [job.state for job in p.prefiller.jobs()] == ["cancelling"])
        proxy.silence(False)
        p.engine.paused.set()
        assert await finish(request) == ["whole"]


async def test_short_silence_aborts_nothing() -> None:
    async with running() as rig:
        p, proxy, d = await rig.proxied_pair()
        requests = await stuck(p, d, 3)
        proxy.silence(True)
        await until(lambda: d.decoder.peers.peers[0].state == "suspect")
        proxy.silence(False)
        await until(lambda: d.decoder.peers.peers[0].state == "up")
        p.engine.paused.set()
        assert await finish(*requests) == ["whole"] * 3
        assert [len(request.attempts) for request in requests] == [1, 1, 1]


async def test_own_pause_is_not_held_against_peers() -> None:
    async with running() as rig:
        p, d = await rig.pair()
        (link,) = d.decoder.peers.usable_links()
        (request,) = await stuck(p, d)
        rig.skew = 3600.0  # the process was stopped for an hour
        await asyncio.sleep(FAST.heartbeat * 2)
        assert link.is_up
        p.engine.paused.set()
        assert await finish(request) == ["whole"]
        assert len(request.attempts) == 1


async def test_restarted_prefiller_is_used_again_as_a_new_epoch() -> None:
    async with running() as rig:
        p, d = await rig.pair()
        epochs = set()
        for n in range(5):
            request = d.engine.generate(f"r{n}", prompt(n, 9))
            assert await finish(request) == ["whole"]
            epochs.add(d.decoder.peers.peers[0].epoch)
            await rig.settle()
            await rig.kill(p)
            p = await rig.prefiller(port=p.port)
        assert len(epochs) == 5


async def test_request_waits_for_a_prefiller_that_is_coming_back() -> None:
    async with running() as rig:
        _, proxy, d = await rig.proxied_pair()
        proxy.refusing = True
        proxy.cut()
        await until(lambda: not d.decoder.peers.usable_links())
        request = d.engine.generate("r", prompt(1, 9))
        await until(lambda: [a.state for a in d.decoder.attempts()] == ["choosing"])
        proxy.refusing = False
        assert await finish(request) == ["whole"]
        assert len(request.attempts) == 1


async def test_request_fails_at_once_when_the_prefiller_is_long_gone() -> None:
    async with running() as rig:
        p, d = await rig.pair()
        await rig.kill(p)
        first = d.engine.generate("r", prompt(1, 9))
        assert await finish(first) == ["error"]
        second = d.engine.generate("s", prompt(2, 9))
        for _ in range(3):  # no tick and no dial lies between
            await asyncio.sleep(0)
        assert second.outcome == "error"
        assert isinstance(second.error, NoPrefiller)
        assert "cannot connect" in str(second.error)


async def test_nobody_waits_for_a_prefiller_whose_port_is_closed() -> None:
    """What a killed prefiller had in hand and what comes right after fails by the next dial, not by a timer."""
    async with running() as rig:
        p = await rig.prefiller()
        d = await rig.decoder([p.port], settings=dataclasses.replace(FAST, connect_timeout=600.0))
        await until(up(d))
        p.engine.paused.clear()
        in_hand = d.engine.generate("r", prompt(1, 9))
        await until(lambda: p.prefiller.num_jobs == 1)
        p.engine.paused.set()
        await rig.kill(p)
        after = d.engine.generate("s", prompt(2, 9))
        assert await finish(in_hand, after) == ["error", "error"]
        for request in (in_hand, after):
            assert isinstance(request.error, NoPrefiller)
            assert "cannot connect" in str(request.error)


async def test_a_decoder_that_never_met_its_prefiller_says_so_at_once() -> None:
    async with running() as rig:
        d = await rig.decoder([1], settings=dataclasses.replace(FAST, connect_timeout=600.0))
        request = d.engine.generate("r", prompt(1, 9))
        assert await finish(request) == ["error"]
        assert isinstance(request.error, NoPrefiller)


async def test_abandoned_while_no_prefiller_is_up() -> None:
    async with running() as rig:
        async def say_nothing(stream: FrameStream) -> None:
            await asyncio.sleep(60)

        port = await rig.listen(say_nothing)
        d = await rig.decoder([port], settings=dataclasses.replace(FAST, connect_timeout=60.0))
        request = d.engine.generate("r", prompt(1, 9))
        await until(lambda: len(d.decoder.attempts()) == 1)
        d.engine.abort("r")
        await until(lambda: d.decoder.attempts() == ())
        assert outcomes(d, request.attempts[0]) == [KvOutcome.RELEASED]


async def test_killed_decoder_frees_the_prefiller() -> None:
    async with running() as rig:
        p, proxy, d = await rig.proxied_pair(layer_seconds=0.002, chunk=4)
        for n in range(4):
            d.engine.generate(f"r{n}", prompt(n, 50))
        await until(lambda: p.prefiller.num_jobs == 4 and rig.network.num_landed > 3)
        proxy.refusing = True
        proxy.cut()
        await until(lambda: p.prefiller.num_jobs == 0 and len(p.engine.free) == 64)
        proxy.refusing = False


async def test_link_ends_while_the_engine_opens_a_transfer() -> None:
    """The transfer is over before the main loop has heard that it was opened."""
    async with running() as rig:
        p, _, d = await rig.proxied_pair(post_seconds=0.1, layer_seconds=0.02)
        request = d.engine.generate("r", prompt(1, 9))
        await until(lambda: p.fabric.transfers != {})
        p.prefiller.listener.links[0].fence(PeerLost("for the test"))
        await until(lambda: p.prefiller._early_ends != {})
        assert await finish(request) == ["whole"]
        await until(lambda: p.prefiller.num_jobs == 0 and len(p.engine.free) == 64)


async def test_transfer_that_cannot_open_gives_its_pages_back_and_says_why() -> None:
    async with running() as rig:
        p = await rig.prefiller()
        p.fabric.fail_open_transfer = True
        d = await rig.decoder([p.port])
        request = d.engine.generate("r", prompt(1, 9))
        assert await finish(request) == ["error"]
        assert "is not connected" in str(request.error)
        await until(lambda: p.prefiller.num_jobs == 0 and len(p.engine.free) == 64)
        p.fabric.fail_open_transfer = False
        assert await finish(d.engine.generate("s", prompt(1, 9))) == ["whole"]


async def test_a_decoder_ticks_for_attempts_alone() -> None:
    async with running() as rig:
        _, d = await rig.pair()
        ticks: list[None] = []
        plain = d.decoder.tick

        def tick() -> None:
            ticks.append(None)
            plain()

        d.decoder.tick = tick  # type: ignore[method-assign]
        await asyncio.sleep(2 * FAST.heartbeat)
        assert ticks == []
        for _ in range(2):  # and again after it was idle
            assert await finish(d.engine.generate("r", prompt(1, 40))) == ["whole"]
            await until(lambda: bool(ticks) and not d.decoder._has_attempts.is_set())
            ticks.clear()


# -- stalls -----------------------------------------------------------------------------------------------------------
async def test_stuck_prefill_ends_at_the_deadline() -> None:
    async with running() as rig:
        p, d = await rig.pair(decoding=dataclasses.replace(DECODER, max_attempts=1))
        p.engine.paused.clear()
        request = d.engine.generate("r", prompt(1, 9))
        await until(lambda: d.decoder.counters.stalls == 1)
        p.engine.paused.set()  # only now can the engine let go, and the cancel be answered
        assert await finish(request) == ["error"]
        assert isinstance(request.error, RequestTimeout | PeerLost)


async def test_queue_behind_a_working_engine_is_not_a_stall() -> None:
    async with running() as rig:
        _, d = await rig.pair(layer_seconds=0.03, chunk=4, decoding=dataclasses.replace(DECODER, prefill_stall_timeout=0.4))
        requests = [d.engine.generate(f"r{n}", prompt(n, 16)) for n in range(4)]  # 0.36 s each, one after the other
        assert await finish(*requests) == ["whole"] * 4
        assert d.decoder.counters.stalls == 0


# -- refusals ---------------------------------------------------------------------------------------------------------
async def test_engine_refusal_reaches_the_decoder() -> None:
    async with running() as rig:
        p = await rig.prefiller()
        p.engine.refuse = RuntimeError("the queue is full")
        d = await rig.decoder([p.port])
        request = d.engine.generate("r", prompt(1, 9))
        assert await finish(request) == ["error"]
        assert "the queue is full" in str(request.error)
        assert outcomes(d, request.attempts[0]) == [KvOutcome.RELEASED]


async def test_operator_abort_at_the_prefiller_reaches_the_decoder() -> None:
    async with running() as rig:
        p, d = await rig.pair(layer_seconds=0.002, chunk=4, decoding=dataclasses.replace(DECODER, max_attempts=1))
        request = d.engine.generate("r", prompt(1, 60))
        await until(lambda: rig.network.num_landed > 3)
        p.engine.abort(p.prefiller.jobs()[0].request_id)
        await until(lambda: request.outcome == "error")
        assert "aborted on the prefiller" in str(request.error)
        assert d.decoder.counters.fences == 0


async def test_draining_prefiller_gets_no_new_work_and_finishes_the_old() -> None:
    async with running() as rig:
        p1, p2, d = await rig.trio()
        p1.engine.paused.clear()
        p2.engine.paused.clear()
        old = [d.engine.generate(f"o{n}", prompt(n, 9)) for n in range(2)]
        await until(lambda: p1.prefiller.num_jobs == 1 and p2.prefiller.num_jobs == 1)
        p1.prefiller.drain()
        await until(up(d, 1))
        p2.engine.paused.set()
        assert await finish(*[d.engine.generate(f"n{n}", prompt(n, 9)) for n in range(4)]) == ["whole"] * 4
        assert p1.prefiller.num_jobs == 1
        p1.engine.paused.set()
        assert await finish(*old) == ["whole"] * 2
        assert p1.prefiller.counters.jobs == 1
        p1.prefiller.resume()
        await until(up(d, 2))


async def test_request_that_crosses_the_drain_goes_elsewhere() -> None:
    async with running() as rig:
        p1, _, d = await rig.trio()
        p1.prefiller._draining = True  # the heartbeat has not told yet
        requests = [d.engine.generate(f"n{n}", prompt(n, 9)) for n in range(6)]
        assert await finish(*requests) == ["whole"] * 6
        assert p1.prefiller.counters.jobs == 0


async def test_lone_draining_prefiller_is_named_in_the_error() -> None:
    async with running() as rig:
        p, d = await rig.pair()
        p.prefiller.drain()
        await until(up(d, 0))
        request = d.engine.generate("r", prompt(1, 9))
        assert await finish(request) == ["error"]
        assert "draining" in str(request.error)


async def test_bug_in_a_handler_ends_the_link_and_not_the_dialling() -> None:
    async with running() as rig:
        p = await rig.prefiller()
        d = await rig.decoder([])
        handler, calls = d.decoder.link_up, []

        def link_up(link: PeerLink) -> None:
            calls.append(link)
            handler(link)
            if len(calls) == 1:
                raise KeyError("for the test")

        d.decoder.link_up = link_up  # type: ignore[method-assign]
        table = PeerTable([Address("127.0.0.1", p.port)], d.context, d.decoder, backoff=Backoff(first=0.02))
        table.start()
        await until(lambda: len(calls) == 2)
        await until(lambda: table.usable_links() != [])
        await table.close()


async def test_closing_a_decoder_settles_everything() -> None:
    async with running() as rig:
        p, d = await rig.pair()
        requests = await stuck(p, d, 3)
        await d.decoder.close()
        assert await finish(*requests) == ["error"] * 3
        p.engine.paused.set()
        await until(lambda: p.prefiller.num_jobs == 0)
        late = d.engine.generate("late", prompt(9, 9))
        assert await finish(late) == ["error"]
