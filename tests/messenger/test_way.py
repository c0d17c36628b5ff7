"""Which way KV goes on a link: memory between nodes of one host that both allow it, else the fabric, and never nothing."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pdd.errors import PeerLost
from pdd.messenger.link import LinkState
from tests.messenger.rig import DecoderNode, PrefillerNode, Rig, finish, prompt, running, until, up


async def linked(rig: Rig) -> tuple[PrefillerNode, DecoderNode]:
    p = await rig.prefiller()
    d = await rig.decoder([p.port])
    await until(up(d))
    await until(lambda: len(p.prefiller.listener.links) == 1)
    return p, d


def ways(p: PrefillerNode, d: DecoderNode) -> set[str]:
    """As both sides' statuses call it."""
    return {status.via for status in (*p.prefiller.peer_status(), *d.decoder.peer_status())}


async def expect_works(p: PrefillerNode, d: DecoderNode, via: str) -> None:
    assert ways(p, d) == {via}
    assert await finish(*[d.engine.generate(f"r{n}", prompt(n, 9 + n)) for n in range(3)]) == ["whole"] * 3
    await until(lambda: len(p.done) >= 3)
    assert {done.via for done in (*p.done, *d.done)} == {via}
    assert [len(node.fabric.endpoints) for node in (p, d)] == [1, 1], "what was not chosen is closed"
    assert [endpoint.local for node in (p, d) for endpoint in node.fabric.endpoints.values()] == [via == "local"] * 2


async def test_two_nodes_of_one_host_share_memory_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running() as rig:
        rig.hosts = {"p1": "one", "d1": "one"}
        p, d = await linked(rig)
        await expect_works(p, d, "local")
        assert p.fabric.num_opened == {False: 0, True: 1}
    assert caplog.text.count("KV over local") == 2


@pytest.mark.parametrize(
    "hosts", [{"p1": "one", "d1": "another"}, {"p1": "one"}, {"d1": "one"}, {}], ids=["another host", "d off", "p off", "both off"]
)
async def test_nodes_of_two_hosts_and_nodes_that_may_not_take_the_fabric(hosts: dict[str, str]) -> None:
    async with running() as rig:
        rig.hosts = hosts
        p, d = await linked(rig)
        await expect_works(p, d, "fake")
        assert p.fabric.num_opened == {False: 1, True: 0}, "nobody tried what cannot be"


@pytest.mark.parametrize("how", ["unreachable", "p cannot open", "d cannot open"])
async def test_a_way_that_cannot_be_had_is_told_once_and_the_fabric_serves(how: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running() as rig:
        rig.hosts = {"p1": "one", "d1": "one"}
        p = await rig.prefiller()
        d = await rig.decoder([])
        fabric = d.fabric if how == "d cannot open" else p.fabric
        if how == "unreachable":
            fabric.fail_connect_local = "it lives in a container"
        else:
            fabric.fail_open_local = "it lives in a container"
        d.decoder.peers.set_members([rig.address(p)])
        await until(up(d))
        await until(lambda: len(p.prefiller.listener.links) == 1)
        await expect_works(p, d, "fake")
    assert caplog.text.count("it lives in a container") == 1
    assert "it is on this host, but" in caplog.text


async def test_a_way_that_fails_after_it_was_chosen_is_not_tried_again_in_this_life(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as rig:
        rig.hosts = {"p1": "one", "d1": "one"}
        p = await rig.prefiller()
        d = await rig.decoder([])
        d.fabric.fail_connect_local = "the ring has 3 bytes"
        d.decoder.peers.set_members([rig.address(p)])
        await until(up(d))
        assert "its memory cannot be used: the ring has 3 bytes" in caplog.text
        await until(lambda: len(p.fabric.endpoints) == 1)
        await expect_works(p, d, "fake")
        (link,) = d.decoder.peers.usable_links()
        link.fence(PeerLost("for the test"))
        await until(lambda: link.state is LinkState.CLOSED)
        await until(up(d))
        assert d.fabric.num_opened[True] == 1
        d.fabric.fail_connect_local = ""
        await rig.kill(p)
        again = await rig.prefiller(port=p.port)
        await until(lambda: any(link.peer.epoch == again.context.node.epoch for link in d.decoder.peers.usable_links()))
        (link,) = d.decoder.peers.usable_links()
        link.fence(PeerLost("for the test"))
        await until(lambda: link.state is LinkState.CLOSED)
        await until(lambda: up(d)() and ways(again, d) == {"local"})  # another life, another try


async def test_a_peer_that_is_refused_before_anyone_looks_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    """The worker refuses a caller as soon as it hears of it: maybe before this node has read the peer's hello."""
    async with running() as rig:
        rig.hosts = {"p1": "one", "d1": "one"}
        p = await rig.prefiller()
        d = await rig.decoder([])
        p.fabric.may_connect.clear()
        d.decoder.peers.set_members([rig.address(p)])
        await until(lambda: any(endpoint.local for endpoint in p.fabric.endpoints.values()))
        (ours,) = [number for number, endpoint in d.fabric.endpoints.items() if endpoint.local]
        d.fabric.fail_endpoint(ours, "it speaks version 2")
        await asyncio.sleep(0.05)
        p.fabric.may_connect.set()
        await until(up(d))
        await until(lambda: len(p.fabric.endpoints) == 1)
        await expect_works(p, d, "fake")
        assert "its memory cannot be used: it speaks version 2" in caplog.text


@pytest.mark.parametrize("side", ["p", "d"])
async def test_a_way_that_breaks_before_it_has_proved_good_is_not_taken_again(side: str) -> None:
    async with running() as rig:
        rig.hosts = {"p1": "one", "d1": "one"}
        p, d = await linked(rig)
        for proved in (True, False):
            if proved:
                await expect_works(p, d, "local")
            broken = p if side == "p" else d
            (link,) = d.decoder.peers.usable_links()
            broken.fabric.fail_endpoint(next(iter(broken.fabric.endpoints)), "no reader")
            await until(lambda link=link: link.state is LinkState.CLOSED)  # type: ignore[misc]
            await until(up(d))
            await until(lambda via="local" if proved else "fake": ways(p, d) == {via})  # type: ignore[misc]


@pytest.mark.parametrize("gate", ["may_open", "may_describe", "may_connect"])
@pytest.mark.parametrize("side", ["p", "d"])
async def test_a_link_that_ends_while_it_chooses_leaves_no_endpoint(gate: str, side: str) -> None:
    """Checked at the end, when every node must be without one."""
    async with running() as rig:
        rig.hosts = {"p1": "one", "d1": "one"}
        p = await rig.prefiller()
        d = await rig.decoder([])
        held = getattr((p if side == "p" else d).fabric, gate)
        held.clear()
        d.decoder.peers.set_members([rig.address(p)])
        await asyncio.sleep(0.1)
        d.decoder.peers.set_members([])
        await asyncio.sleep(0.05)
        held.set()
        await until(lambda: not p.fabric.endpoints and not d.fabric.endpoints)


async def test_a_fence_waits_for_an_endpoint_that_was_not_chosen_and_is_still_opening() -> None:
    async with running() as rig:
        rig.hosts = {"p1": "one", "d1": "one"}
        p = await rig.prefiller()
        d = await rig.decoder([])
        p.fabric.may_open.clear()  # the acceptor tries the local one first
        d.decoder.peers.set_members([rig.address(p)])
        fencing = p.context.fencing
        await until(lambda: bool(fencing.pending()))  # its handshake took too long
        d.decoder.peers.set_members([])
        await asyncio.sleep(0.05)
        assert fencing.pending()
        p.fabric.may_open.set()
        await until(lambda: not fencing.pending() and not p.fabric.endpoints and not d.fabric.endpoints)
