"""Handshakes that must fail, garbage on the port, and what each costs: one log line and one connection."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pdd.errors import PeerLost
from pdd.messenger import endings, wire
from pdd.messenger.frames import FrameStream
from pdd.messenger.versions import OURS, PROTOCOL_VERSION, Range
from tests.messenger.rig import FAST, Rig, finish, geometry, prompt, running, until, up

TOKEN = b"correct horse battery staple"


def greeting(protocol: int = PROTOCOL_VERSION, **fields: Any) -> bytes:
    return msgspec.msgpack.encode(
        {"type": "greeting", "protocol": protocol, "nonce": os.urandom(32), "authenticated": False, **fields}
    )


def frame(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


# -- nodes that do not fit --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "ours", "theirs"),
    [
        ({"page_size": 6}, "4", "6"),
        ({"dtype": "bfloat16"}, "float32", "bfloat16"),
        ({"model": "other"}, "tiny-1", "other"),
        ({"num_layers": 4}, "3", "4"),
        ({"head_dim": 16}, "8", "16"),
        ({"num_kv_heads": 4}, "2", "4"),
        ({"vocab_size": 999}, "1000", "999"),
    ],
)
async def test_misfit_is_refused_on_both_sides_by_name(changes: dict[str, Any], ours: str, theirs: str) -> None:
    async with running() as rig:
        p = await rig.prefiller(**changes)
        d = await rig.decoder([p.port])
        await until(lambda: d.decoder.peers.peers[0].state == "incompatible")
        (status,) = d.decoder.peer_status()
        (field,) = changes
        assert [(diff.field, diff.ours, diff.theirs) for diff in status.diff] == [(field, ours, theirs)]
        assert field in status.last_error
        assert not d.fabric.endpoints or not p.fabric.endpoints
        request = d.engine.generate("r", prompt(1, 9))
        assert await finish(request) == ["error"]
        assert field in str(request.error)
        assert p.fabric.endpoints == {}  # the prefiller never opened one


async def test_misfit_that_is_replaced_by_a_fit_is_used() -> None:
    async with running() as rig:
        p = await rig.prefiller(dtype="bfloat16")
        d = await rig.decoder([p.port])
        await until(lambda: d.decoder.peers.peers[0].state == "incompatible")
        await rig.kill(p)
        await rig.prefiller(port=p.port)
        await until(up(d))
        assert d.decoder.peer_status()[0].diff == ()


async def test_one_misfit_does_not_disturb_the_others() -> None:
    async with running() as rig:
        bad, good = await rig.prefiller("bad", page_size=6), await rig.prefiller("good")
        d = await rig.decoder([bad.port, good.port])
        await until(lambda: d.decoder.peers.peers[0].state == "incompatible")
        assert await finish(*[d.engine.generate(f"r{n}", prompt(n, 9)) for n in range(5)]) == ["whole"] * 5


async def test_two_addresses_of_one_prefiller_are_told_apart() -> None:
    async with running() as rig:
        p = await rig.prefiller()
        proxy = await rig.proxy(p.port)
        d = await rig.decoder([p.port, proxy.port])
        await until(lambda: any("same node as" in peer.last_error for peer in d.decoder.peers.peers))
        await asyncio.sleep(0.3)
        connects = sum(peer.num_connects for peer in d.decoder.peers.peers)
        await asyncio.sleep(0.5)
        assert sum(peer.num_connects for peer in d.decoder.peers.peers) == connects  # they do not push each other out
        assert await finish(d.engine.generate("r", prompt(1, 9))) == ["whole"]


async def test_local_fabric_fault_backs_off_and_names_itself() -> None:
    async with running() as rig:
        p = await rig.prefiller()
        d = await rig.decoder([p.port])
        await until(up(d))
        d.fabric.fail_open_endpoint = True
        d.decoder.peers.usable_links()[0].fence(PeerLost("for the test"))
        await until(lambda: "no such device" in d.decoder.peers.peers[0].last_error)
        await asyncio.sleep(0.5)
        assert d.decoder.peers.peers[0].num_failures <= 12
        d.fabric.fail_open_endpoint = False
        await until(up(d))


# -- tokens -----------------------------------------------------------------------------------------------------------
async def test_shared_token_lets_nodes_work() -> None:
    async with running() as rig:
        p = await rig.prefiller(token=TOKEN)
        d = await rig.decoder([p.port], token=TOKEN)
        assert await finish(d.engine.generate("r", prompt(1, 9))) == ["whole"]


@pytest.mark.parametrize(("ours", "theirs"), [(TOKEN, None), (None, TOKEN), (TOKEN, b"another one")])
async def test_token_that_is_missing_or_wrong_reveals_nothing(
    ours: bytes | None, theirs: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as rig:
        p = await rig.prefiller(token=theirs)
        proxy = await rig.proxy(p.port)
        d = await rig.decoder([proxy.port], token=ours)
        await until(lambda: "token" in d.decoder.peers.peers[0].last_error)
        assert d.decoder.peers.peers[0].state == "auth"
        await until(lambda: any("token" in record.message for record in caplog.records if "listener" in record.name))
        assert {type(m).__name__ for _, m in proxy.seen} <= {"Greeting", "Proof", "Goodbye"}
        assert not d.fabric.endpoints
        assert not p.fabric.endpoints
        for secret in (TOKEN, b"another one"):
            assert secret.decode() not in caplog.text
            assert secret.decode() not in repr(d.context.node) + repr(p.context.node)


async def test_proof_of_the_acceptor_is_checked_too() -> None:
    """Somebody who listens at the prefiller's address and has no token plays the decoder's own proof back."""
    seen: list[wire.Message] = []

    async def impostor(stream: FrameStream) -> None:
        theirs = await stream.receive()
        assert isinstance(theirs, wire.Greeting)
        stream.send(wire.Greeting(protocol=PROTOCOL_VERSION, nonce=theirs.nonce, authenticated=True))
        stream.send(await stream.receive())
        seen.append(await stream.receive())

    async with running() as rig:
        d = await rig.decoder([await rig.listen(impostor)], token=TOKEN)
        await until(lambda: seen != [])
        assert isinstance(seen[0], wire.Goodbye)
        await until(lambda: "token" in d.decoder.peers.peers[0].last_error)
        assert not d.fabric.endpoints


# -- versions ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("versions", "behind"), [((PROTOCOL_VERSION + 1, 0), "this node"), ((9999, 9998), "this node"), ((0, 0), "the peer")])
async def test_ranges_that_do_not_meet_get_one_clear_error(versions: tuple[int, int], behind: str) -> None:
    protocol, oldest = versions
    async with running() as rig:
        p = await rig.prefiller()
        reader, writer = await rig.connect(p.port)
        stream = FrameStream(reader, writer)
        writer.write(frame(greeting(protocol, oldest=oldest, a_field_of_the_future=[1, {"x": 3}])))
        assert isinstance(await stream.receive(), wire.Greeting)
        goodbye = await stream.receive()
        assert isinstance(goodbye, wire.Goodbye)
        assert str(Range(oldest or protocol, protocol)) in goodbye.reason
        assert f"this node {OURS}: upgrade pdd on {behind}" in goodbye.reason
        assert goodbye.cause is wire.Cause.INCOMPATIBLE


@pytest.mark.parametrize("prefiller", [Range(1, 1), Range(1, 3), Range(2, 3), Range(3, 9)], ids=str)
async def test_nodes_of_two_releases_speak_the_newest_that_both_know(prefiller: Range) -> None:
    """Both ends come to the same, whichever of them is the newer."""
    async with running() as rig:
        for ours, theirs in ((Range(1, 3), prefiller), (prefiller, Range(1, 3))):
            p = await rig.prefiller(f"p{ours}{theirs}", versions=theirs)
            d = await rig.decoder([p.port], f"d{ours}{theirs}", versions=ours)
            await until(up(d))
            (theirs_link,), (ours_link,) = p.prefiller.listener.links, d.decoder.peers.usable_links()
            assert ours_link.version == theirs_link.version == min(3, prefiller.newest)
            assert await finish(d.engine.generate("r", prompt(1, 9))) == ["whole"]


async def test_both_nodes_say_which_of_them_is_behind(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as rig:
        p = await rig.prefiller(versions=Range(3, 4))
        d = await rig.decoder([p.port], versions=Range(1, 2))
        await until(lambda: d.decoder.peers.peers[0].state == "incompatible")
        assert d.decoder.peers.peers[0].last_error == (
            "the peer speaks versions 3 to 4 of the peer protocol and this node versions 1 to 2: upgrade pdd on this node"
        )
        told = "the peer speaks versions 1 to 2 of the peer protocol and this node versions 3 to 4: upgrade pdd on the peer"
        await until(lambda: told in caplog.text)


async def test_a_node_from_before_ranges_is_a_node_of_one_version() -> None:
    """Its greeting has no `oldest`, and it skips ours."""
    async with running() as rig:
        p = await rig.prefiller(versions=Range(1, 7))
        stream = await _admitted(rig, p.port)
        await until(lambda: [link.version for link in p.prefiller.listener.links] == [PROTOCOL_VERSION])
        stream.send(a_request())
        await until(lambda: p.prefiller.counters.whole == 1)


async def test_a_reason_of_a_newer_prefiller_is_a_failure_like_any_other() -> None:
    """The counts decide what becomes of the pages, and `retryable` what becomes of the request."""

    async def newer(stream: FrameStream) -> None:
        await stream.receive()
        stream.send(wire.Greeting(protocol=9, nonce=os.urandom(32), authenticated=False, oldest=1))
        await stream.receive()
        stream.send(wire.Hello("p", "prefill", 78, "fake", geometry(), struct.pack(">4sIQ", b"fake", 1, 1), "9.0"))
        request = await _answer(stream)
        assert isinstance(request, wire.PrefillRequest)
        news = {"type": "ended", "attempt": request.attempt, "reason": "migrated", "message": "it has moved", "to": "p2",
                "retryable": False}
        stream._writer.write(frame(msgspec.msgpack.encode(news)))

    async with running() as rig:
        d = await rig.decoder([await rig.listen(newer)])
        request = d.engine.generate("r", prompt(1, 9))
        assert await finish(request) == ["error"]
        assert "it has moved" in str(request.error)
        assert len(d.engine.free) == d.context.node.geometry.num_pages


# -- garbage ----------------------------------------------------------------------------------------------------------
GARBAGE: dict[str, bytes] = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "huge length": b"\xff\xff\xff\xff",
    "length zero": b"\0\0\0\0",
    "beyond a stranger's limit": struct.pack(">I", wire.MAX_HANDSHAKE_BYTES + 1),
    "random": os.urandom(4096),
    "not msgpack": frame(b"\xc1\xc1\xc1"),
    "deep nesting": frame(b"\x91" * 100_000),
    "a map of nothing": frame(b"\x80"),
    "unknown type": frame(msgspec.msgpack.encode({"type": "surprise", "protocol": 1})),
    "greeting without nonce": frame(msgspec.msgpack.encode({"type": "greeting", "protocol": 1})),
    "a range that is none": frame(greeting(1, oldest=2)),
    "an oldest below zero": frame(greeting(1, oldest=-1)),
    "short nonce": frame(greeting(nonce=b"x")),
    "no greeting first": frame(wire.encode(wire.Cancel(attempt=1))),
    "two greetings": frame(greeting()) * 2,
    "prefill before hello": frame(greeting()) + frame(wire.encode(wire.Cancel(attempt=1))),
    "half a frame": frame(greeting())[:20],
}


@pytest.mark.parametrize("kind", GARBAGE)
async def test_garbage_costs_one_connection_and_one_line(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running() as rig:
        p = await rig.prefiller()
        d = await rig.decoder([p.port])
        await until(up(d))
        caplog.clear()
        reader, writer = await rig.connect(p.port)
        writer.write(GARBAGE[kind])
        if kind == "half a frame":
            writer.write_eof()
        async with asyncio.timeout(3):
            await reader.read(-1)  # it hangs up
        writer.close()
        await until(lambda: len(p.prefiller.listener._links) == 1)
        assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 1
        assert all(record.exc_info is None for record in caplog.records)
        assert len(p.fabric.endpoints) == 1
        assert await finish(d.engine.generate("r", prompt(1, 9))) == ["whole"]


FORGED = "bye\n12:00:00.000 ERROR pdd: all is lost \x1b[31m \u202e"


@pytest.mark.parametrize(
    "message",
    [
        wire.Goodbye(FORGED),
        wire.Hello(FORGED, "decode", 7, "fake", geometry(page_size=6), b"x", "0.1.0"),
        wire.Hello("d", "decode", 7, "fake", geometry(dtype=FORGED), b"x", "0.1.0"),
    ],
    ids=["goodbye", "name", "geometry"],
)
async def test_a_stranger_forges_no_log_line(message: wire.Message, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running() as rig:
        p = await rig.prefiller()
        _, writer = await rig.connect(p.port)
        writer.write(frame(greeting()) + frame(wire.encode(message)))
        await until(lambda: any("ended" in record.getMessage() for record in caplog.records))
        assert all(record.getMessage().isprintable() for record in caplog.records)


async def test_strangers_who_say_nothing_time_out() -> None:
    async with running() as rig:
        p = await rig.prefiller()
        for _ in range(70):
            await rig.connect(p.port)
        await until(lambda: len(p.prefiller.listener._links) >= 60)
        await until(lambda: len(p.prefiller.listener._links) <= 64)  # the oldest made room
        await until(lambda: len(p.prefiller.listener._links) == 0, FAST.connect_timeout + 3)


async def test_silent_strangers_do_not_shut_out_a_decoder() -> None:
    async with running() as rig:
        p = await rig.prefiller(settings=dataclasses.replace(FAST, connect_timeout=60.0))
        for _ in range(70):
            await rig.connect(p.port)
        await until(lambda: len(p.prefiller.listener._links) >= 60)
        d = await rig.decoder([p.port])
        await until(up(d))
        assert await finish(d.engine.generate("r", prompt(1, 9))) == ["whole"]


async def test_a_burst_of_strangers_leaves_nothing_behind() -> None:
    """Accepted in one turn of the loop: some make room before their own tasks have begun."""
    async with running() as rig:
        p = await rig.prefiller(settings=dataclasses.replace(FAST, connect_timeout=60.0))
        strangers = [socket.create_connection(("127.0.0.1", p.port)) for _ in range(90)]
        await until(lambda: len(p.prefiller.listener._links) == 64)
        for stranger in strangers:
            stranger.close()
        await until(lambda: len(p.prefiller.listener._links) == 0)


async def test_many_strangers_write_few_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as rig:
        p = await rig.prefiller()
        for _ in range(50):
            reader, writer = await rig.connect(p.port)
            writer.write(GARBAGE["http"])
            await reader.read(-1)
            writer.close()
        await until(lambda: len(p.prefiller.listener._links) == 0)
        assert len(caplog.records) <= 3


async def test_peer_that_is_down_writes_few_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as rig:
        d = await rig.decoder([1])
        await until(lambda: d.decoder.peers.peers[0].num_failures > 8)
        lines = [record.message for record in caplog.records]
        assert len(lines) == 1
        assert "Connect call failed" in lines[0] or "refused" in lines[0].lower()


async def _admitted(rig: Rig, port: int, epoch: int = 77) -> FrameStream:
    """A decoder that has passed the handshake and now may misbehave."""
    stream = FrameStream(*await rig.connect(port))
    stream.send(wire.Greeting(protocol=PROTOCOL_VERSION, nonce=os.urandom(32), authenticated=False))
    await stream.receive()
    descriptor = struct.pack(">4sIQ", b"fake", 1, 1)
    stream.send(wire.Hello("rogue", "decode", epoch, "fake", geometry(), descriptor, "0.1.0"))
    assert isinstance(await stream.receive(), wire.Hello)
    return stream


def a_request(**changes: Any) -> wire.PrefillRequest:
    fields = {
        "attempt": 1, "key": 5, "epoch": 77, "tokens": wire.pack_u32(range(9)), "pages": wire.pack_u32((3, 1, 2)),
        "skip_tokens": 0, "request_id": "x",
    }
    return wire.PrefillRequest(**{**fields, **changes})


async def _answer(stream: FrameStream) -> wire.Message:
    async with asyncio.timeout(3):
        while isinstance(message := await stream.receive(), wire.Heartbeat):
            pass
    return message


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"epoch": 78}, "another life"),
        ({"tokens": b""}, "no tokens"),
        ({"tokens": b"12345"}, "no whole number"),
        ({"pages": b"123"}, "no whole number"),
        ({"tokens": wire.pack_u32([1, 1000])}, "vocabulary"),
        ({"pages": wire.pack_u32((1, 2))}, "2 pages where 9 tokens need 3"),
        ({"pages": wire.pack_u32((1, 2, 3, 4))}, "4 pages"),
        ({"pages": wire.pack_u32((1, 2, 64))}, "beyond the decoder's pool of 64"),
        ({"pages": wire.pack_u32((1, 2, 1))}, "twice"),
        ({"skip_tokens": 9}, "skipped"),
        ({"skip_tokens": 3}, "skipped"),
        ({"tokens": wire.pack_u32(range(201)), "pages": wire.pack_u32(range(51))}, "more than this prefiller takes"),
    ],
)
async def test_request_that_cannot_be_right_is_refused(changes: dict[str, Any], word: str) -> None:
    async with running() as rig:
        p = await rig.prefiller()
        stream = await _admitted(rig, p.port)
        stream.send(a_request(**changes))
        ended = await _answer(stream)
        assert isinstance(ended, wire.PrefillEnded)
        assert (ended.reason.value, ended.ok_units, ended.unknown_units) == ("refused", 0, 0)
        assert word in ended.message
        assert p.prefiller.counters.jobs == 0


def _twice(stream: FrameStream) -> None:
    stream.send(a_request())
    stream.send(a_request(key=6))


def _cancels(stream: FrameStream) -> None:
    for attempt in range(5000):
        stream.send(wire.Cancel(attempt=attempt))


ROGUES: dict[str, tuple[Callable[[FrameStream], None], str]] = {
    "one attempt twice": (_twice, "came twice"),
    "more cancels than anyone needs": (_cancels, "were cancelled"),
    "an answer where a question must be": (
        lambda s: s.send(wire.PrefillEnded(attempt=1, reason=wire.EndReason.FAILED, message="")), "came from a decoder"),
    "hello again": (
        lambda s: s.send(wire.Hello("rogue", "decode", 1, "fake", geometry(), b"x", "1")), "after the handshake"),
    "garbage": (lambda s: s._writer.write(frame(b"\xc1")), "no message"),
    "a huge length": (lambda s: s._writer.write(b"\xff\xff\xff\xff"), "announced"),
    "a key of 25 bits": (lambda s: s.send(a_request(key=1 << 24)), "no message"),
}


@pytest.mark.parametrize("kind", ROGUES)
async def test_admitted_rogue_loses_its_link_only(kind: str) -> None:
    act, word = ROGUES[kind]
    async with running() as rig:
        p = await rig.prefiller()
        d = await rig.decoder([p.port])
        stream = await _admitted(rig, p.port)
        await until(lambda: len(p.prefiller.listener.links) == 2)
        p.engine.paused.clear()
        act(stream)
        goodbye = await _answer(stream)
        while isinstance(goodbye, wire.PrefillEnded):
            goodbye = await _answer(stream)
        assert isinstance(goodbye, wire.Goodbye)
        assert word in goodbye.reason
        p.engine.paused.set()
        await until(lambda: p.prefiller.num_jobs == 0 and len(p.engine.free) == 64)
        assert await finish(d.engine.generate("r", prompt(1, 9))) == ["whole"]


async def test_second_link_of_one_decoder_life_replaces_the_first() -> None:
    """The decoder lost the first connection, and nothing told the prefiller."""
    async with running() as rig:
        p = await rig.prefiller()
        first = await _admitted(rig, p.port, 77)
        await _admitted(rig, p.port, 78)
        p.engine.paused.clear()
        first.send(a_request())
        await until(lambda: p.prefiller.num_jobs == 1)
        await _admitted(rig, p.port, 77)
        goodbye = await _answer(first)
        assert isinstance(goodbye, wire.Goodbye)
        assert "newer link" in goodbye.reason
        await until(lambda: sorted(link.peer.epoch for link in p.prefiller.listener.links) == [77, 78])
        p.engine.paused.set()
        await until(lambda: p.prefiller.num_jobs == 0)


async def test_late_cancel_is_answered_with_what_was_written() -> None:
    async with running() as rig:
        p = await rig.prefiller()
        stream = await _admitted(rig, p.port)
        stream.send(a_request())
        await until(lambda: p.prefiller.counters.whole == 1)
        for _ in range(2):
            stream.send(wire.Cancel(attempt=1))
            ended = await _answer(stream)
            assert isinstance(ended, wire.PrefillEnded)
            assert (ended.reason.value, ended.ok_units, ended.unknown_units) == ("cancelled", 9, 0)
        assert p.prefiller.counters.tombstones == 0


async def test_cancel_of_an_attempt_that_was_forgotten_is_answered_with_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "MOST_ANSWERED", 3)
    async with running() as rig:
        p = await rig.prefiller()
        stream = await _admitted(rig, p.port)
        for attempt in range(1, 6):
            stream.send(a_request(attempt=attempt))
            await until(lambda attempt=attempt: p.prefiller.counters.whole == attempt)  # type: ignore[misc]
        for attempt, unknown in ((1, 1), (2, 1), (3, 0), (6, 0)):
            stream.send(wire.Cancel(attempt=attempt))
            ended = await _answer(stream)
            assert isinstance(ended, wire.PrefillEnded)
            assert (ended.attempt, ended.unknown_units) == (attempt, unknown)
        assert p.prefiller.counters.tombstones == 1  # of the one that never came


async def test_key_in_use_is_an_error_of_the_new_request() -> None:
    async with running() as rig:
        p = await rig.prefiller()
        stream = await _admitted(rig, p.port)
        p.engine.paused.clear()
        stream.send(a_request())
        stream.send(a_request(attempt=2))
        ended = await _answer(stream)
        assert isinstance(ended, wire.PrefillEnded)
        assert (ended.attempt, ended.ok_units) == (2, 0)
        assert "in use" in ended.message
        stream.send(wire.Cancel(attempt=1))
        p.engine.paused.set()
        ended = await _answer(stream)
        assert isinstance(ended, wire.PrefillEnded)
        assert ended.attempt == 1


async def test_peer_that_does_not_read_is_dropped() -> None:
    async with running() as rig:
        p = await rig.prefiller()
        await _admitted(rig, p.port)
        await until(lambda: len(p.prefiller.listener.links) == 1)
        (link,) = p.prefiller.listener.links
        link._stream._max_unsent_bytes = 1 << 20
        ended = wire.PrefillEnded(attempt=1, reason=wire.EndReason.FAILED, message="x" * 4000)
        await until(lambda: not all(link.send(ended) for _ in range(200)))
        assert "does not read" in str(link.error)
