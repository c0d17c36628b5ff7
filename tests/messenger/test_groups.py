"""A decoder of several engines: each one's KV comes into its own pages, whoever prefills and whatever goes wrong."""

from __future__ import annotations

from typing import Any

import pytest

from pdd.messenger import wire
from pdd.messenger.requests import check_request
from pdd.messenger.versions import Range
from tests.messenger.rig import DecoderNode, PrefillerNode, Rig, finish, geometry, prompt, running, until, up


async def decoder_of(rig: Rig, *prefillers: PrefillerNode, groups: int = 2, **changes: Any) -> DecoderNode:
    d = await rig.decoder([p.port for p in prefillers], groups=groups, **changes)
    await until(up(d, len(prefillers)))
    return d


def in_all(d: DecoderNode, number: int, length: int = 9, seed: int = 0) -> list[Any]:
    """`number` requests in each group."""
    return [
        engine.generate(f"g{engine.group}-{seed}-{n}", prompt(seed + 100 * engine.group + n, length + n))
        for n in range(number) for engine in d.engines
    ]


@pytest.mark.parametrize("groups", [2, 3])
async def test_each_group_s_kv_comes_into_its_own_pages(groups: int) -> None:
    """All pools are used from the same page number on: a write into another group's pages would be seen."""
    async with running() as rig:
        p1, p2 = await rig.prefiller("p1"), await rig.prefiller("p2")
        d = await decoder_of(rig, p1, p2, groups=groups)
        assert await finish(*in_all(d, 12)) == ["whole"] * 12 * groups
        await rig.settle()
        for engine in d.engines:
            assert len(engine.settled) == 12
            assert len(engine.free) == engine.num_pages
        assert p1.prefiller.counters.whole + p2.prefiller.counters.whole == 12 * groups


async def test_a_fence_quarantines_in_every_group_and_gives_back_to_each() -> None:
    async with running() as rig:
        p = await rig.prefiller(layer_seconds=0.02)
        proxy = await rig.proxy(p.port)
        d = await rig.decoder([proxy.port], groups=2)
        await until(up(d))
        d.fabric.close_delay = 0.3
        requests = in_all(d, 3, length=40)
        await until(lambda: rig.network.num_landed > 0)
        proxy.cut()
        await until(lambda: all(engine.quarantined for engine in d.engines))
        for engine in d.engines:
            engine.check_integrity()
        assert await finish(*requests) == ["whole"] * 6  # again, by the next link
        await rig.settle()
        assert [len(engine.free) for engine in d.engines] == [64, 64]


async def test_an_abort_in_one_group_leaves_the_other_alone() -> None:
    async with running() as rig:
        p = await rig.prefiller(layer_seconds=0.01)
        d = await decoder_of(rig, p)
        first, second = (engine.generate(f"r{engine.group}", prompt(engine.group, 40)) for engine in d.engines)
        await until(lambda: p.prefiller.num_jobs == 2)
        d.engines[1].abort("r1")
        assert await finish(first, second) == ["whole", "aborted"]
        await rig.settle()
        assert [len(engine.free) for engine in d.engines] == [64, 64]
        assert d.decoder.counters.cancels == 1


async def test_a_prefiller_of_the_version_before_groups_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """It would write the pages of all groups into those of the first. A decoder of one group works with it."""
    async with running() as rig:
        old = await rig.prefiller(versions=Range(1, 1))
        d = await rig.decoder([old.port], "d2", groups=2)
        await until(lambda: d.decoder.peers.peers[0].state == "incompatible")
        assert d.decoder.peers.peers[0].last_error == (
            "the peer speaks version 1 of the peer protocol and this node version 3 (engine.dp = 2 needs version 3): upgrade pdd "
            "on the peer"
        )
        told = "the peer speaks version 3 of the peer protocol and this node version 1: upgrade pdd on this node"
        await until(lambda: told in caplog.text)
        one = await decoder_of(rig, old, groups=1)
        assert [link.version for link in one.decoder.peers.usable_links()] == [1]
        assert await finish(one.engine.generate("r", prompt(1, 9))) == ["whole"]


async def test_a_request_for_a_group_that_the_decoder_does_not_have_is_refused() -> None:
    async with running() as rig:
        p = await rig.prefiller()
        d = await decoder_of(rig, p)
        (link,) = d.decoder.peers.usable_links()
        pages = wire.pack_u32([0, 1, 2])
        link.send(wire.PrefillRequest(
            attempt=999, key=7, epoch=d.context.node.epoch, tokens=wire.pack_u32(range(9)), pages=pages, skip_tokens=0,
            request_id="r", group=2,
        ))
        await until(lambda: p.prefiller.counters.refused == 1)
        assert p.prefiller.num_jobs == 0
        assert link.is_up


@pytest.mark.parametrize(("group", "groups", "page", "why"), [
    (0, 1, 63, ""), (1, 2, 63, ""), (1, 1, 0, "of engine 1 of a decoder that has 1"),
    (3, 2, 0, "of engine 3 of a decoder that has 2"), (1, 2, 64, "page 64 is beyond the decoder's pool of 64"),
])
def test_group_and_pages_are_held_against_the_peer_s_geometry(group: int, groups: int, page: int, why: str) -> None:
    node: Any = type("Node", (), {"geometry": geometry(), "max_tokens": 100})
    hello = wire.Hello("d", "decode", 5, "fake", geometry(groups=groups), b"d", "0.1.0")
    request = wire.PrefillRequest(
        attempt=1, key=1, epoch=5, tokens=wire.pack_u32([1]), pages=wire.pack_u32([page]), skip_tokens=0, request_id="r",
        group=group,
    )
    found = check_request(request, hello, node)
    assert why in getattr(found, "message", "")
    assert bool(why) == hasattr(found, "message")
    assert getattr(found, "retryable", False) is False
