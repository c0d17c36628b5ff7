"""How links end: whatever fails in a handler, a dial or the fabric, the fence comes, or its absence is told."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from pdd.address import Address
from pdd.engine.request import KvOutcome
from pdd.errors import PeerLost
from pdd.fabric.types import EndpointFailed
from pdd.messenger import fencing, peers, wire
from pdd.messenger.link import LinkState, PeerLink
from tests.messenger.rig import DecoderNode, finish, prompt, running, until, up


def raising(times: int, instead_of: Callable[..., Any]) -> Callable[..., Any]:
    """Raises at the first calls, then does what it replaces."""
    left = [times]

    def call(*args: Any, **kwargs: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise KeyError("a bug for the test")
        return instead_of(*args, **kwargs)

    return call


# -- handlers that raise ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("callback", ["link_up", "link_message", "link_down", "link_closed", "pulse"])
@pytest.mark.parametrize("side", ["decoder", "prefiller"])
async def test_handler_that_raises_costs_a_link_and_never_the_peer(
    callback: str, side: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as rig:
        p = await rig.prefiller()
        d = await rig.decoder([p.port])
        await until(up(d))
        (link,) = d.decoder.peers.usable_links()
        handler: Any = d.decoder if side == "decoder" else p.prefiller
        raise_once = raising(1, getattr(handler, callback))
        monkeypatch.setattr(handler, callback, raise_once)
        if callback != "pulse":  # what comes next by itself
            link.fence(PeerLost("for the test"))
        await until(lambda: link.state is LinkState.CLOSED)
        await until(lambda: "a bug for the test" in caplog.text)
        assert "Traceback" in caplog.text
        await until(up(d))
        assert len(d.fabric.endpoints) == 1
        await until(lambda: len(p.fabric.endpoints) == 1)
        assert await finish(d.engine.generate("r", prompt(1, 9))) == ["whole"]


async def test_dial_that_fails_strangely_is_a_failed_dial(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as rig:
        p = await rig.prefiller()
        d = await rig.decoder([p.port])
        await until(up(d))
        table = d.decoder.peers
        monkeypatch.setattr(table, "_connect", raising(3, peers.open_tcp))
        table.usable_links()[0].fence(PeerLost("for the test"))
        await until(lambda: "a bug for the test" in table.peers[0].last_error)
        await until(lambda: table.peers[0].num_failures >= 3)
        await until(up(d))
        assert caplog.text.count("Traceback") == 1  # one cause, told once


async def test_attempt_that_cannot_be_handled_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a link ends, each of its attempts is told, though the engine's inbox raises for the first."""
    async with running() as rig:
        p1 = await rig.prefiller("p1")
        d = await rig.decoder([p1.port])
        p1.engine.paused.clear()
        requests = [d.engine.generate(f"r{n}", prompt(n, 9)) for n in range(3)]
        await until(lambda: p1.prefiller.num_jobs == 3)
        settle, words = d.engine.kv_settled, []

        def kv_settled(attempt: int, outcome: KvOutcome, **verdict: Any) -> None:
            words.append((attempt, outcome))
            settle(attempt, outcome, **verdict)
            if len(words) == 1:
                raise KeyError("a bug for the test")

        monkeypatch.setattr(d.engine, "kv_settled", kv_settled)
        d.decoder.peers.usable_links()[0].fence(PeerLost("for the test"))
        assert [outcome for _, outcome in words[:3]] == [KvOutcome.QUARANTINED] * 3
        p1.engine.paused.set()
        assert await finish(*requests) == ["whole"] * 3


async def test_attempt_that_cannot_be_placed_is_given_up_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as rig:
        p = await rig.prefiller()
        d = await rig.decoder([p.port])
        await until(up(d))
        monkeypatch.setattr(d.decoder._planner, "expected_units", raising(1, d.decoder._planner.expected_units))
        bad, good = d.engine.generate("bad", prompt(1, 9)), d.engine.generate("good", prompt(2, 9))
        assert await finish(bad, good) == ["error", "whole"]
        assert "a bug for the test" in str(bad.error)
        monkeypatch.setattr(d.fabric, "imm_arm", raising(1, d.fabric.imm_arm))
        assert await finish(d.engine.generate("again", prompt(3, 9))) == ["whole"]  # by its second attempt
        assert d.decoder.counters.quarantined == 1


# -- fences that fail -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["at once", "later"])
async def test_fence_that_fails_is_told_and_keeps_the_pages(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fencing, "ALARM_SECONDS", 0.05)
    async with running() as rig:
        p = await rig.prefiller()
        d = await rig.decoder([p.port])
        p.engine.paused.clear()
        request = d.engine.generate("r", prompt(1, 9))
        await until(lambda: p.prefiller.num_jobs == 1)
        (link,) = d.decoder.peers.usable_links()
        endpoint = link.endpoint
        assert endpoint is not None
        d.fabric.fail_close = how
        link.fence(PeerLost("for the test"))
        d_status = d.decoder.peer_status
        await until(lambda: "fi_close" in d_status()[0].fence_error)
        d.fabric.fail_close = ""
        p.engine.paused.set()
        await until(up(d))  # the peer is used again, and the old link is not forgotten for it
        assert await finish(request) == ["whole"]
        assert "fi_close" in d_status()[0].fence_error
        await until(lambda: any(record.levelno == logging.ERROR for record in caplog.records))
        (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert "p1" in record.message
        assert "fi_close" in record.message
        assert link.state is LinkState.CLOSING
        (stuck,) = d.decoder.attempts()
        assert (stuck.state, d.engine.quarantined) == ("fencing", 3)
        assert "fi_close" in stuck.fence_error
        fences = d.context.fencing.status(link.since + 7.0)
        assert (fences.pending, fences.oldest_seconds, fences.overdue, fences.alarms) == (1, 7.0, 1, 1)
        d.fabric._closed(endpoint)  # it comes after all
        await rig.settle()
        assert link.state is LinkState.CLOSED
        assert d.context.fencing.status(0.0) == fencing.FenceStatus(alarms=1)
        assert d_status()[0].fence_error == ""
        assert d.engine.quarantined == 0


async def test_fence_that_never_comes_is_told_again_and_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The fabric says nothing at all, not even an error."""
    monkeypatch.setattr(fencing, "ALARM_SECONDS", 0.05)
    monkeypatch.setattr(fencing, "REPEAT_SECONDS", 0.1)
    async with running() as rig:
        p = await rig.prefiller()
        d = await rig.decoder([p.port])
        await until(up(d))
        (link,) = d.decoder.peers.usable_links()
        endpoint = link.endpoint
        assert endpoint is not None
        d.fabric.never_close = True
        link.fence(PeerLost("for the test"))
        await until(lambda: len([r for r in caplog.records if "has not said that its endpoint is closed" in r.message]) >= 3)
        status = d.context.fencing.status(link.since)
        assert (status.overdue, status.alarms) == (1, 1)
        assert not await d.context.fencing.wait(0.01)
        d.fabric.never_close = False
        d.fabric._closed(endpoint)
        assert await d.context.fencing.wait(3.0)


async def test_decoder_that_cannot_be_fenced_stays_in_the_list() -> None:
    async with running() as rig:
        p = await rig.prefiller()
        d = await rig.decoder([p.port])
        await until(lambda: len(p.prefiller.listener.links) == 1)
        (link,) = p.prefiller.listener.links
        p.fabric.fail_close = "later"
        link.fence(PeerLost("for the test"))
        await until(lambda: link.fence_error != "")
        p.fabric.fail_close = ""
        await until(up(d))
        await until(lambda: sorted(s.state for s in p.prefiller.peer_status()) == ["closing", "up"])
        assert {bool(status.fence_error) for status in p.prefiller.peer_status()} == {True, False}
        assert link.endpoint is not None
        p.fabric._closed(link.endpoint)
        await until(lambda: [s.state for s in p.prefiller.peer_status()] == ["up"])


async def test_error_of_an_endpoint_that_closes_all_the_same_is_no_alarm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer that dies breaks its endpoint and its TCP connection in any order."""
    monkeypatch.setattr(fencing, "ALARM_SECONDS", 0.05)
    async with running() as rig:
        p = await rig.prefiller()
        d = await rig.decoder([p.port])
        await until(up(d))
        (link,) = d.decoder.peers.usable_links()
        assert link.endpoint is not None
        d.fabric.close_delay = 0.02
        link.fence(PeerLost("for the test"))
        d.fabric.fail_endpoint(link.endpoint, "connection reset")
        await until(lambda: link.state is LinkState.CLOSED)
        await until(up(d))
        await asyncio.sleep(0.1)
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# -- a provider that takes its time -----------------------------------------------------------------------------------
@pytest.mark.parametrize("call", ["open", "describe", "connect"])
@pytest.mark.parametrize("side", ["decoder", "prefiller"])
async def test_slow_fabric_call_stops_nobody_and_leaks_nothing(call: str, side: str) -> None:
    async with running() as rig:
        p = await rig.prefiller()
        other = await rig.prefiller("other")
        d = await rig.decoder([p.port, other.port])
        await until(up(d, 2))
        node = d if side == "decoder" else p
        gate = getattr(node.fabric, f"may_{call}")
        gate.clear()
        victim = next(link for link in d.decoder.peers.usable_links() if link.label == f"127.0.0.1:{p.port}")
        victim.fence(PeerLost("for the test"))
        await until(lambda: "did not end within" in d.decoder.peers.peers[0].last_error, 20.0)
        assert d.decoder.peers.peers[1].link is not None
        assert d.decoder.peers.peers[1].link.is_up  # its heartbeats went on
        assert await finish(d.engine.generate("r", prompt(1, 9))) == ["whole"]
        gate.set()
        await until(up(d, 2))
        await until(lambda: len(d.fabric.endpoints) == 2)  # those that came too late are closed
        await until(lambda: len(p.fabric.endpoints) == 1)


@pytest.mark.parametrize("fails", [False, True])
async def test_close_waits_for_an_endpoint_that_is_being_opened(fails: bool) -> None:
    async with running() as rig:
        p = await rig.prefiller()
        d = await rig.decoder([])
        d.fabric.may_open.clear()
        d.decoder.peers.set_members([Address("127.0.0.1", p.port)])
        link = await _dialled(d)
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(d.decoder.close())
        await until(lambda: link.state is LinkState.CLOSING)
        await asyncio.sleep(0.05)
        assert not closing.done()
        d.fabric.fail_open_endpoint = fails
        d.fabric.may_open.set()
        await closing
        assert link.state is LinkState.CLOSED
        assert d.fabric.endpoints == {}


async def test_failure_before_the_endpoint_has_an_owner_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as rig:
        p = await rig.prefiller()
        d = await rig.decoder([])
        loop, opened = asyncio.get_running_loop(), d.fabric.open_endpoint

        def open_and_fail() -> int:
            monkeypatch.undo()
            ident = opened()
            loop.call_soon_threadsafe(d.fabric._emit, EndpointFailed(ident, "the NIC is gone"))
            loop.call_soon_threadsafe(d.context.events.pump)
            time.sleep(0.05)
            return ident

        monkeypatch.setattr(d.fabric, "open_endpoint", open_and_fail)
        d.decoder.peers.set_members([Address("127.0.0.1", p.port)])
        await until(lambda: "the NIC is gone" in d.decoder.peers.peers[0].last_error)
        await until(up(d))


async def _dialled(d: DecoderNode) -> PeerLink:
    (peer,) = d.decoder.peers.peers
    await until(lambda: peer.link is not None)
    assert peer.link is not None
    return peer.link


# -- members ----------------------------------------------------------------------------------------------------------
async def test_members_are_kept_dialled_and_ended() -> None:
    async with running() as rig:
        p1, p2, p3 = [await rig.prefiller(name) for name in ("p1", "p2", "p3")]
        a1, a2, a3 = (Address("127.0.0.1", p.port) for p in (p1, p2, p3))
        d = await rig.decoder([p1.port, p2.port])
        table = d.decoder.peers
        await until(up(d, 2))
        kept, ended = (peer.link for peer in (table.peers[1], table.peers[0]))
        assert kept is not None
        assert ended is not None
        for p in (p1, p2):
            p.engine.paused.clear()
        requests = [d.engine.generate(f"r{n}", prompt(n, 9)) for n in range(2)]
        await until(lambda: p1.prefiller.num_jobs == 1 and p2.prefiller.num_jobs == 1)
        table.set_members([a2, a3, a3])
        assert [peer.address for peer in table.peers] == [a2, a3]
        assert ended.state is not LinkState.UP
        assert "no longer listed" in str(ended.error)
        await until(up(d, 2))
        assert table.peers[0].link is kept
        assert kept.state is LinkState.UP
        for p in (p1, p2):
            p.engine.paused.set()
        assert await finish(*requests) == ["whole"] * 2  # that of the member that went is tried elsewhere
        await until(lambda: ended.state is LinkState.CLOSED)
        await until(lambda: len(p1.prefiller.listener._links) == 0)
        await asyncio.sleep(0.2)
        assert len(p1.prefiller.listener._links) == 0  # it is dialled no more
        table.set_members([a1])
        await until(lambda: [link.name for link in table.usable_links()] == ["p1"])
        table.set_members([])
        failed = d.engine.generate("nobody", prompt(9, 9))
        assert await finish(failed) == ["error"]
        assert "no prefiller is configured" in str(failed.error)


async def test_a_link_that_comes_or_goes_is_told_at_once_with_its_reason() -> None:
    async with running() as rig:
        p, d = await rig.pair()
        assert [usable for usable, _ in d.heard] == [1]
        address = d.decoder.peers.peers[0].address
        await p.close()
        rig.nodes.remove(p)
        await until(lambda: len(d.heard) == 2)
        usable, why = d.heard[1]
        assert usable == 0
        assert why.startswith(f"{address} is down (")
        assert "goodbye" in why


async def test_member_that_is_being_dialled_can_be_dropped() -> None:
    async with running() as rig:
        d = await rig.decoder([1])  # nobody listens
        await until(lambda: d.decoder.peers.peers[0].num_failures > 0)
        d.decoder.peers.set_members([])
        await until(lambda: not d.decoder.peers._tasks)
        assert d.decoder.peer_status() == ()


# -- what is shown ----------------------------------------------------------------------------------------------------
async def test_live_rows_say_whose_they_are_and_how_far() -> None:
    async with running() as rig:
        p = await rig.prefiller(chunk=8)
        d = await rig.decoder([p.port])
        await until(up(d))
        p.engine.paused.clear()
        request = d.engine.generate("chat-1", prompt(1, 20))
        await until(lambda: p.prefiller.num_jobs == 1)
        (job,) = p.prefiller.jobs()
        assert (job.client_id, job.peer, job.computed_tokens) == ("chat-1", "d1", 0)
        stepped = asyncio.Event()

        def one_chunk() -> None:
            if p.engine.counter.value == 3:  # the last layer of the first chunk
                p.engine.paused.clear()
                stepped.set()

        p.engine.counter.on_bump.append(one_chunk)
        p.engine.paused.set()
        await stepped.wait()
        await until(lambda: d.decoder.attempts()[0].arrived_units == 6, 1.0)
        (slot,) = d.fabric.slots.values()
        assert d.decoder.attempts()[0].arrived_units == slot.arrived
        slot.arrived = 7
        assert d.decoder.attempts()[0].arrived_units == 7  # at once, not at the next look
        slot.arrived = 6
        assert d.decoder.attempts()[0].expected_units == 15
        (link,) = p.prefiller.listener.links
        (sink,) = [job.sink for job in p.prefiller._jobs.values()]
        assert (sink.armed_tokens, sink.computed_tokens) == (8, 0)  # nothing has told yet that the step has ended
        p.engine.counter.on_bump.remove(one_chunk)
        seen: set[tuple[int, int]] = set()
        p.engine.counter.on_bump.append(lambda: seen.update(p.prefiller.pulse(link).progress))
        p.engine.paused.set()
        assert await finish(request) == ["whole"]
        assert seen == {(1, 8), (1, 16)}  # while the second and the third chunk ran
        assert isinstance(p.prefiller.pulse(link).load, wire.Load)
