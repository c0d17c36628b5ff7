"""The way of a prompt's KV from prefiller to decoder, when nothing goes wrong."""

from __future__ import annotations

from pdd.errors import PromptTooLong
from pdd.states import Facts
from tests.messenger.rig import finish, prompt, running, until, up


async def test_kv_arrives_whole() -> None:
    async with running() as rig:
        p = await rig.prefiller()
        d = await rig.decoder([p.port])
        requests = [d.engine.generate(f"r{n}", prompt(n, n)) for n in (1, 3, 4, 5, 8, 9, 31, 32, 33)]
        assert await finish(*requests) == ["whole"] * 9
        await rig.settle()
        assert d.decoder.counters.whole == 9
        assert p.prefiller.counters.whole == 9
        assert d.decoder.counters.tokens == sum(len(r.tokens) for r in requests)


async def test_nobody_is_told_of_success() -> None:
    async with running() as rig:
        p = await rig.prefiller()
        proxy = await rig.proxy(p.port)
        d = await rig.decoder([proxy.port])
        assert await finish(d.engine.generate("r", prompt(1, 10))) == ["whole"]
        await rig.settle()
        kinds = {type(message).__name__ for direction, message in proxy.seen if direction == "to_d"}
        assert kinds == {"Greeting", "Hello", "Heartbeat"}


async def test_changes_are_recorded_with_peer_key_and_units() -> None:
    async with running() as rig:
        p = await rig.prefiller()
        d = await rig.decoder([p.port])
        request = d.engine.generate("r", prompt(1, 9))
        assert await finish(request) == ["whole"]
        await rig.settle()
        attempts = [(c.after, c.facts) for c in d.changes if c.kind == "attempt"]
        assert [after for after, _ in attempts] == ["choosing", "armed", "requested", "done"]
        assert attempts[0][1] == Facts()
        first, last = attempts[1][1], attempts[-1][1]
        assert (first.peer, first.attempt, first.units) == ("p1", request.attempts[0], 0)
        assert first.key is not None
        jobs = [(c.after, c.facts) for c in p.changes if c.kind == "job"]
        assert [after for after, _ in jobs][-1] == "done"
        done = jobs[-1][1]
        assert (done.peer, done.attempt, done.key) == ("d1", first.attempt, first.key)
        assert done.units == last.units == 9
        assert {c.facts.peer for c in d.changes if c.kind == "link" and c.after == "up"} == {"p1"}


async def test_many_decoders_and_prefillers_share_the_work() -> None:
    async with running() as rig:
        prefillers = [await rig.prefiller(f"p{i}", layer_seconds=0.001) for i in range(3)]
        decoders = [await rig.decoder([p.port for p in prefillers], f"d{i}") for i in range(2)]
        for d in decoders:
            await until(up(d, 3))
        requests = [
            d.engine.generate(f"{i}-{n}", prompt(100 * i + n, 5 + n)) for i, d in enumerate(decoders) for n in range(30)
        ]
        assert await finish(*requests) == ["whole"] * 60
        await rig.settle()
        assert all(p.prefiller.counters.jobs >= 10 for p in prefillers)


async def test_least_loaded_prefiller_is_asked() -> None:
    async with running() as rig:
        p1, p2 = await rig.prefiller("p1"), await rig.prefiller("p2")
        d = await rig.decoder([p1.port, p2.port])
        await until(up(d, 2))
        p1.engine.paused.clear()
        first = d.engine.generate("big", prompt(1, 60))
        await until(lambda: len(d.decoder.attempts()) == 1 and d.decoder.attempts()[0].state == "requested")
        chosen = p1 if d.decoder.attempts()[0].peer == "p1" else p2
        other = p2 if chosen is p1 else p1
        assert await finish(*[d.engine.generate(f"s{n}", prompt(n, 6)) for n in range(5)]) == ["whole"] * 5
        assert other.prefiller.counters.jobs == 5
        p1.engine.paused.set()
        assert await finish(first) == ["whole"]


async def test_long_prompt_fits_a_frame_and_is_refused_by_a_small_prefiller() -> None:
    async with running() as rig:
        p = await rig.prefiller(num_pages=30000, max_tokens=0)  # it does not say
        d = await rig.decoder([p.port], num_pages=30000)
        await until(up(d))
        object.__setattr__(p.context.node, "max_tokens", 200)
        request = d.engine.generate("r", prompt(1, 100_000))  # a frame larger than any handshake allows
        assert await finish(request) == ["error"]
        assert isinstance(request.error, PromptTooLong)
        assert "100000 tokens are more than this prefiller takes (200)" in str(request.error)
        assert d.decoder.peers.peers[0].num_connects == 1
        assert p.prefiller.counters.refused == 1


async def test_status_shows_peers_attempts_and_jobs() -> None:
    async with running() as rig:
        p = await rig.prefiller()
        d = await rig.decoder([p.port])
        p.engine.paused.clear()
        request = d.engine.generate("r", prompt(1, 10))
        await until(lambda: p.prefiller.num_jobs == 1)
        (peer,), (attempt,), (job,) = d.decoder.peer_status(), d.decoder.attempts(), p.prefiller.jobs()
        assert (peer.name, peer.state, peer.via) == ("p1", "up", "fake")
        assert (peer.outstanding, peer.outstanding_tokens) == (1, 10)
        assert (attempt.state, attempt.peer, attempt.num_pages, attempt.expected_units) == ("requested", "p1", 3, 9)
        assert (job.peer, job.num_tokens) == ("d1", 10)
        (caller,) = p.prefiller.peer_status()
        assert (caller.name, caller.state, caller.outstanding) == ("d1", "up", 1)
        await until(lambda: d.decoder.peer_status()[0].rtt_seconds is not None)
        await until(lambda: p.prefiller.peer_status()[0].rtt_seconds is not None)
        p.engine.paused.set()
        assert await finish(request) == ["whole"]


async def test_the_prefiller_plans_with_the_copies_that_the_decoder_chose() -> None:
    async with running() as rig:
        p = await rig.prefiller()
        d = await rig.decoder([p.port])
        d.decoder._planner.wish = (3, 0)
        assert await finish(d.engine.generate("r", prompt(1, 10))) == ["whole"]
        assert p.prefiller._planner.heard == [(3, 0)]
