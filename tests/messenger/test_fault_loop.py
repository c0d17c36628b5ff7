"""For every message and every write: lose it, delay it, cut the link at it. Then the books must still balance.

In the manner of SQLite's tests: the fault moves one call further each round, until a round ends without meeting it.
What every round checks (see `running`): each attempt is settled once for good, no page is given up and no key retired
while a write that names it can land, what is whole holds the right bytes, and in the end no key, transfer, endpoint,
job, page or task is left.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from pdd.messenger import wire
from pdd.messenger.attempt import AttemptState
from tests.messenger.rig import DecoderNode, PrefillerNode, Proxy, Rig, finish, prompt, running, until, up


class NthFrame:
    """Hurts the n-th frame of one direction that is not a heartbeat, once."""

    def __init__(self, way: str, nth: int, what: str | float) -> None:
        self.way, self.left, self.what = way, nth, what
        self.fired = False

    def __call__(self, way: str, number: int, message: wire.Message | None) -> str | float:
        if way != self.way or isinstance(message, wire.Heartbeat) or self.fired:
            return "pass"
        self.left -= 1
        self.fired = self.left == 0
        return self.what if self.fired else "pass"


async def traffic(d: DecoderNode) -> None:
    """Five prompts, two of which nobody waits for."""
    requests = [d.engine.generate(f"r{n}", prompt(n, 7 + 5 * n)) for n in range(5)]
    await asyncio.sleep(0.01)
    d.engine.abort("r1")
    await asyncio.sleep(0.01)
    d.engine.abort("r4")
    results = await finish(*requests)
    assert set(results) <= {"whole", "aborted", "error"}


async def pair(rig: Rig) -> tuple[PrefillerNode, Proxy, DecoderNode]:
    p = await rig.prefiller(layer_seconds=0.001)
    proxy = await rig.proxy(p.port)
    return p, proxy, await rig.decoder([proxy.port])


@pytest.mark.parametrize("what", ["drop", 0.1, "cut"])
@pytest.mark.parametrize("way", ["to_p", "to_d"])
async def test_nth_frame(way: str, what: str | float) -> None:
    for nth in range(1, 30):
        async with running(seed=nth) as rig:
            _, proxy, d = await pair(rig)
            fault = NthFrame(way, nth, what)
            proxy.verdict = fault
            await traffic(d)
            await until(up(d))
            probe = d.engine.generate("probe", prompt(99, 13))
            assert await finish(probe) == ["whole"]
            await rig.settle()
        if not fault.fired:
            assert nth > 2
            return


@pytest.mark.parametrize("kind", ["error", "lost", "hold"])
async def test_nth_write(kind: str) -> None:
    for nth in range(1, 100, 7):
        async with running(seed=nth) as rig:
            p, proxy, d = await pair(rig)
            p.fabric.inject_fault(kind, nth)
            await traffic(d)
            fired = p.fabric.faults == []
            assert await finish(d.engine.generate("probe", prompt(99, 13))) == ["whole"]
            if kind == "hold":  # the source stays pinned until the link goes
                proxy.cut()
            await rig.settle()
        if not fired:
            return


ATTEMPT_STATES = [s.value for s in AttemptState if s not in (AttemptState.ARMED, AttemptState.DONE)]


@pytest.mark.parametrize("state", ATTEMPT_STATES)
@pytest.mark.parametrize("what", ["cut", "silence", "kill"])
async def test_link_ends_in_each_state(state: str, what: str) -> None:
    async with running() as rig:
        p, proxy, d = await pair(rig)
        d.fabric.close_delay = 0.05
        rig.network.least_landing = 0.02
        if state == "choosing":
            proxy.refusing = True
            proxy.cut()
        requests = [d.engine.generate(f"r{n}", prompt(n, 30)) for n in range(3)]
        if state in ("cancelling", "draining"):
            await until(lambda: rig.network.in_flight != set())
            d.engine.abort("r0")
        if state == "fencing":
            await until(lambda: rig.network.in_flight != set())
            proxy.cut()
        await until(lambda: state in d.states("attempt"))
        if what == "cut":
            proxy.cut()
        elif what == "silence":
            proxy.silence(True)
            await asyncio.sleep(0.6)
            proxy.silence(False)
        else:
            await rig.kill(p)
            await rig.prefiller(port=p.port)
        proxy.refusing = False
        await finish(*requests)
        await rig.settle()
        assert await finish(d.engine.generate("probe", prompt(99, 13))) in (["whole"], ["error"])


@pytest.mark.parametrize("seed", range(12))
async def test_chaos(seed: int) -> None:
    """Three prefillers, two decoders, small pools; links cut, silenced, frames lost, writes failed, clients gone."""
    rng = random.Random(seed)
    async with running(seed) as rig:
        rig.network.most_delay = 0.02
        prefillers = [
            await rig.prefiller(f"p{i}", layer_seconds=0.001, num_pages=24, post_seconds=[None, 0.004, 0.03][i])
            for i in range(3)
        ]
        proxies = [[await rig.proxy(p.port) for p in prefillers] for _ in range(2)]
        decoders = [await rig.decoder([x.port for x in row], f"d{i}", num_pages=20) for i, row in enumerate(proxies)]
        requests = []
        for turn in range(40):
            d = rng.choice(decoders)
            name = f"{seed}-{turn}"
            requests.append(d.engine.generate(name, prompt(turn, rng.randrange(1, 40))))
            if rng.random() < 0.25:
                asyncio.get_running_loop().call_later(rng.random() * 0.05, d.engine.abort, name)
            proxy = rng.choice(rng.choice(proxies))
            fate = rng.random()
            if fate < 0.06:
                proxy.cut()
            elif fate < 0.10:
                proxy.silence(True)
                asyncio.get_running_loop().call_later(rng.random() * 0.8, proxy.silence, False)
            elif fate < 0.16:
                proxy.verdict = NthFrame(rng.choice(["to_p", "to_d"]), rng.randrange(1, 4), rng.choice(["drop", 0.05]))
            elif fate < 0.24:
                victim = rng.choice(prefillers)
                victim.fabric.inject_fault(rng.choice(["error", "lost", "hold"]), rng.randrange(1, 30))
            for node in decoders:
                node.engine.check_integrity()
            await asyncio.sleep(rng.random() * 0.02)
        results = await finish(*requests)
        assert set(results) <= {"whole", "aborted", "error"}
        assert results.count("whole") > 10
        for p in prefillers:
            p.fabric.faults.clear()
        for row in proxies:
            for proxy in row:
                proxy.silence(False)
                proxy.verdict = lambda way, n, m: "pass"
                proxy.cut()  # frees what a withheld completion pins
        await rig.settle()
        for d in decoders:
            await until(lambda d=d: len(d.decoder.peers.usable_links()) == 3)
            assert await finish(d.engine.generate("probe", prompt(99, 13))) == ["whole"]
            assert all(len([o for n, o in d.engine.settled if n == a]) <= 2 for a in range(1, 200))
