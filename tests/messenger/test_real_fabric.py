"""Decoder and prefillers in processes of their own, over real libfabric on loopback and through memory that they share:
the bytes, and a kill."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdd.engine.request import KvOutcome
from pdd.errors import NoPrefiller
from pdd.messenger import wire
from pdd.messenger.explain import FAILED, IN_FLIGHT, LOCAL_NIC
from tests.cluster import die_with_parent
from tests.messenger.rig import finish, prompt, until

native = pytest.importorskip("pdd.fabric._native")
try:
    native.library()
except native.FabricError as error:
    pytest.skip(str(error), allow_module_level=True)

from tests.messenger.real_node import GEOMETRY, RealDecoder, reshaped  # noqa: E402


class Process:
    """A prefiller process."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port

    @staticmethod
    async def start(
        name: str, via: str, port: int = 0, layer_seconds: float = 0.0, fault: str = "", **changes: Any
    ) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.messenger.real_node", name, str(port), str(layer_seconds), via,
            json.dumps(changes), fault,
            stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            preexec_fn=die_with_parent,
        )
        assert process.stdout is not None
        async with asyncio.timeout(30):
            line = await process.stdout.readline()
        assert line.startswith(b"ready"), line
        return Process(process, int(line.split()[1]))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        self.process._transport.close()  # type: ignore[attr-defined]


@pytest.fixture(params=["tcp", "local"])
def via(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def decoding(via: str, *processes: Process, **changes: Any) -> AsyncIterator[RealDecoder]:
    d = RealDecoder([process.port for process in processes], via, reshaped(**changes))
    await d.decoder.start()
    try:
        await until(lambda: len(d.decoder.peers.usable_links()) == len(processes), 10.0)
        assert {status.via for status in d.decoder.peer_status()} == {"tcp" if via == "rails" else via}
        yield d
        await until(lambda: d.decoder.attempts() == () and not d.engine.reservations, 10.0)
        assert d.engine.violations == []
        d.engine.check_integrity()
        assert d.memory.fabric.stats()["keys"] == 0
    finally:
        await d.close()
        for process in processes:
            await process.end()


async def test_bytes_arrive_whole(via: str) -> None:
    p = await Process.start("p", via)
    async with decoding(via, p) as d:
        lengths = (1, 15, 16, 17, 47, 48, 49, 95, 96, 97, 500, 1400)
        requests = [d.engine.generate(f"r{n}", prompt(n, n)) for n in lengths]
        assert await finish(*requests) == ["whole"] * len(lengths)
        assert d.decoder.counters.released == 0
        assert d.memory.fabric.stats()["stale_units"] == 0


async def test_killed_prefiller_is_fenced_and_another_serves(via: str) -> None:
    """In its pages, behind its address. Its own prompts fail at once: nobody waits for a port that is closed."""
    slow = await Process.start("slow", via, layer_seconds=0.03)
    async with decoding(via, slow) as d:
        requests = [d.engine.generate(f"r{n}", prompt(n, 400)) for n in range(3)]
        await until(lambda: any(a.arrived_units for a in d.decoder.attempts()))
        slow.signal(signal.SIGKILL)
        await until(lambda: any(outcome is KvOutcome.QUARANTINED for _, outcome in d.engine.settled))
        await until(lambda: d.engine.quarantined == 0)
        assert await finish(*requests) == ["error"] * 3
        assert all(isinstance(request.error, NoPrefiller) for request in requests)
        again = await Process.start("again", via, port=slow.port)
        await until(lambda: len(d.decoder.peers.usable_links()) == 1)
        assert await finish(*[d.engine.generate(f"s{n}", prompt(n, 400)) for n in range(3)]) == ["whole"] * 3
        assert d.decoder.peers.peers[0].num_connects == 2
        await again.end()


async def test_stopped_prefiller_is_fenced_and_its_late_writes_hit_nobody(via: str) -> None:
    slow, good = await Process.start("slow", via, layer_seconds=0.02), await Process.start("good", via)
    async with decoding(via, slow, good) as d:
        requests = [d.engine.generate(f"r{n}", prompt(n, 400)) for n in range(4)]
        await until(lambda: any(a.arrived_units and a.peer == "slow" for a in d.decoder.attempts()))
        slow.signal(signal.SIGSTOP)
        assert await finish(*requests) == ["whole"] * 4
        others = [d.engine.generate(f"s{n}", prompt(50 + n, 300)) for n in range(4)]
        slow.signal(signal.SIGCONT)
        assert await finish(*others) == ["whole"] * 4
        await until(lambda: len(d.decoder.peers.usable_links()) == 2, 10.0)
        assert await finish(*[d.engine.generate(f"t{n}", prompt(90 + n, 100)) for n in range(4)]) == ["whole"] * 4


@pytest.mark.parametrize("after", [0.0, 0.02, 0.06, 0.12])
async def test_cancel_gives_the_pages_back(after: float, via: str) -> None:
    p = await Process.start("p", via, layer_seconds=0.005)
    async with decoding(via, p) as d:
        requests = [d.engine.generate(f"r{n}", prompt(n, 500)) for n in range(2)]
        await asyncio.sleep(after)
        for request in requests:
            d.engine.abort(request.request_id)
        await until(lambda: len(d.engine.free) == GEOMETRY.num_pages, 10.0)
        assert d.decoder.counters.fences == 0
        assert await finish(d.engine.generate("next", prompt(9, 300))) == ["whole"]


# -- ranks of unequal shards ------------------------------------------------------------------------------------------
MLA = {"num_kv_heads": 1, "tiles": 1, "head_dim": 48}
SHAPES = {  # of the prefiller, of the decoder
    "2-1": ({"tp": 2}, {"tp": 1, "page_size": 32}),  # pages are put together of tiles of both ranks
    "1-2": ({"tp": 1, "page_size": 32}, {"tp": 2}),
    "2-2": ({"tp": 2, "page_size": 32}, {"tp": 2}),
    "2-4": ({"tp": 2}, {"tp": 4, "page_size": 64}),  # two copies of each head
    "mla 4-1": ({**MLA, "tp": 4}, {**MLA, "tp": 1, "page_size": 32}),  # spread over four copies
    "mla 2-4": ({**MLA, "tp": 2, "page_size": 64}, {**MLA, "tp": 4}),
}


def _in_default(*chosen: tuple[str, ...]) -> list[Any]:
    """All shapes over all ways; the slow suite has those that are not `chosen`."""
    cases = itertools.product(SHAPES, ("tcp", "local", "rails"))
    return [pytest.param(*case, marks=[] if case in chosen else pytest.mark.slow, id="-".join(case)) for case in cases]


@pytest.mark.parametrize(("shape", "via"), _in_default(("2-1", "tcp"), ("mla 2-4", "local"), ("2-4", "rails")))
async def test_every_rank_gets_its_shard(shape: str, via: str) -> None:
    source, destination = SHAPES[shape]
    p = await Process.start("p", via, **source)
    async with decoding(via, p, **destination) as d:
        lengths = (1, 15, 16, 17, 31, 33, 48, 65, 97, 500)
        requests = [d.engine.generate(f"r{n}", prompt(n, n)) for n in lengths]
        assert await finish(*requests) == ["whole"] * len(lengths)
        assert d.decoder.counters.released == 0
        assert d.memory.fabric.stats()["stale_units"] == 0


@pytest.mark.parametrize(("shape", "via"), _in_default(("2-1", "rails")))
async def test_a_write_that_fails_costs_the_attempt_and_no_page(shape: str, via: str) -> None:
    """One of the writes of one of the source ranks: the sums of both ends agree all the same, and the next try is whole."""
    source, destination = SHAPES[shape]
    p = await Process.start("p", via, fault="error:10", **source)
    async with decoding(via, p, **destination) as d:
        requests = [d.engine.generate(f"r{n}", prompt(n, 300)) for n in range(3)]
        assert await finish(*requests) == ["whole"] * 3
        assert (d.decoder.counters.retries, d.decoder.counters.released) == (1, 1)
        assert d.decoder.counters.fences == 0
        assert len(d.engine.free) == GEOMETRY.num_pages


@pytest.mark.parametrize("after", [pytest.param(0.02, marks=pytest.mark.slow), 0.1])
@pytest.mark.parametrize(("shape", "via"), _in_default(("1-2", "local")))
async def test_cancel_of_ranks_gives_the_pages_back(shape: str, via: str, after: float) -> None:
    source, destination = SHAPES[shape]
    p = await Process.start("p", via, layer_seconds=0.005, **source)
    async with decoding(via, p, **destination) as d:
        requests = [d.engine.generate(f"r{n}", prompt(n, 500)) for n in range(2)]
        await asyncio.sleep(after)
        for request in requests:
            d.engine.abort(request.request_id)
        await until(lambda: len(d.engine.free) == GEOMETRY.num_pages, 10.0)
        assert d.decoder.counters.fences == 0
        assert await finish(d.engine.generate("next", prompt(9, 300))) == ["whole"]


@pytest.mark.parametrize(("shape", "via"), _in_default(("2-1", "tcp")))
async def test_killed_prefiller_of_ranks_is_fenced(shape: str, via: str) -> None:
    source, destination = SHAPES[shape]
    slow, good = await Process.start("slow", via, layer_seconds=0.02, **source), await Process.start("good", via, **source)
    async with decoding(via, slow, good, **destination) as d:
        requests = [d.engine.generate(f"r{n}", prompt(n, 400)) for n in range(4)]
        await until(lambda: any(a.arrived_units and a.peer == "slow" for a in d.decoder.attempts()))
        slow.signal(signal.SIGKILL)
        assert await finish(*requests) == ["whole"] * 4
        await until(lambda: d.engine.quarantined == 0)


# -- explain ----------------------------------------------------------------------------------------------------------
async def test_a_failed_write_is_told_by_layer_chunk_and_nic(via: str) -> None:
    """A chunk of this engine is 48 tokens: three pages of each of four layers, merged or not."""
    p = await Process.start("p", via, fault="error:6")
    async with decoding(via, p) as d:
        request = d.engine.generate("r", prompt(1, 400))
        assert await finish(request) == ["whole"]  # by its second attempt
        [first] = [done for done in d.done if not done.whole]
        answer = await d.decoder.ask_about(first.attempt, "p")
        assert isinstance(answer, wire.ExplainAnswer)
        assert answer.known
        assert answer.failed_units > 0
        assert answer.failed_units + answer.ok_units <= answer.units
        failed = [lack for lack in answer.lacks if lack.what == FAILED]
        [lack] = failed
        assert answer.lacks[0] is lack
        assert lack.first_layer == lack.last_layer < GEOMETRY.num_layers
        assert (lack.from_rank, lack.to_rank) == (0, 0)
        assert lack.nic == ("127.0.0.1" if via == "tcp" else LOCAL_NIC)
        assert "injected fault" in answer.why
        other = await d.decoder.ask_about(first.attempt + 1000, "p")
        assert isinstance(other, wire.ExplainAnswer)
        assert not other.known


async def test_a_write_whose_completion_does_not_come_is_in_flight_for_ever_longer(via: str) -> None:
    """The decoder has all units, the prefiller still waits: it holds its pages, and says for what."""
    p = await Process.start("p", via, fault="hold:1")
    async with decoding(via, p) as d:
        assert await finish(d.engine.generate("r", prompt(1, 200))) == ["whole"]
        [done] = d.done
        await asyncio.sleep(0.2)
        answer = await d.decoder.ask_about(done.attempt, "p")
        assert isinstance(answer, wire.ExplainAnswer)
        [lack] = answer.lacks
        assert (lack.what, lack.chunk, lack.first_layer) == (IN_FLIGHT, 0, 0)
        assert lack.seconds >= 0.2
        assert answer.ok_units + lack.units == answer.units == done.expected_units
        arrivals = d.memory.fabric.read_arrivals(done.key)
        assert arrivals is not None
        assert arrivals.expected == done.expected_units
        assert arrivals.first <= max(at for at in arrivals.marks if at) == arrivals.last  # type: ignore[operator]


async def test_a_stopped_prefiller_is_told_with_its_silence(via: str) -> None:
    p = await Process.start("p", via, layer_seconds=0.02)
    async with decoding(via, p) as d:
        request = d.engine.generate("r", prompt(1, 400))
        await until(lambda: any(a.arrived_units for a in d.decoder.attempts()))
        [attempt] = d.decoder.attempts()
        live = await d.decoder.ask_about(attempt.attempt, "p")
        assert isinstance(live, wire.ExplainAnswer)
        assert live.state == "pushing"
        assert any(lack.what == "not computed" for lack in live.lacks)
        p.signal(signal.SIGSTOP)
        why = await d.decoder.ask_about(attempt.attempt, "p")
        assert isinstance(why, str)
        assert "p gave no answer" in why or "p has been silent" in why
        await asyncio.sleep(0.5)
        assert "p has been silent for" in str(await d.decoder.ask_about(attempt.attempt, "p"))
        p.signal(signal.SIGCONT)
        assert await finish(request) == ["whole"]
