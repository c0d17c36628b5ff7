"""How a connection ends: the goodbye arrives though the peer still talks, and nobody who does not listen is waited for."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdd.errors import PeerLost
from pdd.messenger import linger, wire
from pdd.messenger.frames import FrameStream
from pdd.messenger.goodbye import InOrder
from pdd.messenger.link import LinkState
from tests.messenger.rig import finish, hang_up, prompt, running, until, up

TALK = struct.pack(">I", 4096) + bytes(4096)
GOODBYE = wire.Goodbye("you talk too much")


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[FrameStream, asyncio.StreamReader, asyncio.StreamWriter]]:
    """This side as a stream, the other side bare."""
    accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    server = await asyncio.start_server(lambda *ends: accepted.put_nowait(ends), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    ours = await accepted.get()
    try:
        yield FrameStream(*ours), reader, writer
    finally:
        server.close()
        await hang_up([writer, ours[1]])


async def talk_for_ever(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(TALK)
        await writer.drain()


async def told(reader: asyncio.StreamReader) -> str:
    """What the last frame before the end says."""
    async with asyncio.timeout(5):
        data = await reader.read(-1)
    goodbye = wire.decode(data[4:])
    assert isinstance(goodbye, wire.Goodbye)
    return goodbye.reason


# -- one connection ---------------------------------------------------------------------------------------------------
async def test_goodbye_arrives_though_nobody_reads_what_the_peer_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linger, "SECONDS", 60.0)
    async with connected() as (stream, reader, writer):
        writer.write(TALK * 100)
        await asyncio.sleep(0.05)  # more than a reader takes in waits in the socket
        stream.send(GOODBYE)
        stream.close()
        writer.write(TALK * 50)
        await asyncio.sleep(0.05)
        assert await told(reader) == GOODBYE.reason
        writer.close()
        async with asyncio.timeout(5):
            await stream.wait_closed()  # all that was said is read away: this is the peer's own end


async def test_end_of_a_connection_is_heard_at_once_by_whoever_waits_for_a_message() -> None:
    async with connected() as (stream, _, _):
        waiting = asyncio.create_task(stream.receive())
        await asyncio.sleep(0)
        stream.close()
        with pytest.raises(PeerLost):
            await waiting
        with pytest.raises(PeerLost, match="is closed"):
            await stream.receive()
        with pytest.raises(PeerLost, match="is closed"):
            stream.send(GOODBYE)
        assert stream.lingers


async def test_peer_that_talks_on_for_ever_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linger, "SECONDS", 60.0)
    async with connected() as (stream, _, writer):
        stream.close()
        talking = asyncio.create_task(talk_for_ever(writer))
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(talking, 10)
        await stream.wait_closed()


async def test_peer_that_never_hangs_up_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linger, "SECONDS", 0.05)
    async with connected() as (stream, _, _):
        stream.close()
        async with asyncio.timeout(5):
            await stream.wait_closed()
        assert not stream.lingers


async def test_whoever_waits_for_the_end_can_stop_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linger, "SECONDS", 60.0)
    async with connected() as (stream, _, _):
        stream.close()
        waiting = asyncio.create_task(stream.wait_closed())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not stream.lingers


async def test_peer_that_has_hung_up_before_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linger, "SECONDS", 60.0)
    async with connected() as (stream, reader, writer):
        writer.write_eof()
        with pytest.raises(PeerLost):
            await stream.receive()
        stream.send(GOODBYE)
        stream.close()
        async with asyncio.timeout(5):
            await stream.wait_closed()
        assert await told(reader) == GOODBYE.reason


# -- links ------------------------------------------------------------------------------------------------------------
async def test_fence_does_not_wait_for_the_peer_to_hang_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linger, "SECONDS", 60.0)
    async with running() as rig:
        p = await rig.prefiller()
        proxy = await rig.proxy(p.port)
        d = await rig.decoder([proxy.port])
        await until(up(d))
        (link,) = d.decoder.peers.usable_links()
        proxy.silence(True)
        link.fence(PeerLost("for the test"))
        await until(lambda: link.state is LinkState.CLOSED)
        assert link.lingers
        proxy.silence(False)


async def test_refused_stranger_that_talks_on_learns_why() -> None:
    async with running() as rig:
        p = await rig.prefiller()
        reader, writer = await rig.connect(p.port)
        greeting = wire.encode(wire.Greeting(protocol=99, nonce=os.urandom(32), authenticated=False))
        writer.write(struct.pack(">I", len(greeting)) + greeting + TALK * 100)
        stream = FrameStream(reader, writer)
        assert isinstance(await stream.receive(), wire.Greeting)
        await asyncio.sleep(0.05)
        goodbye = await stream.receive()
        assert isinstance(goodbye, wire.Goodbye)
        assert "version 99" in goodbye.reason


async def test_strangers_that_do_not_hang_up_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linger, "SECONDS", 60.0)
    async with running() as rig:
        p = await rig.prefiller()
        for _ in range(100):
            _, writer = await rig.connect(p.port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await until(lambda: len(p.prefiller.listener._links) <= 64)
        d = await rig.decoder([p.port])
        await until(up(d))
        assert await finish(d.engine.generate("r", prompt(1, 9))) == ["whole"]


async def test_listener_that_closes_in_the_turn_of_a_call_leaves_nothing_open() -> None:
    """The call's own task is cancelled before it has begun."""
    async with running() as rig:
        p = await rig.prefiller()
        listener, closing = p.prefiller.listener, []
        accept = listener._accept

        def accept_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accept(reader, writer)
            closing.append(asyncio.create_task(listener.close()))
            for task in listener._links.values():
                task.cancel()

        server = await asyncio.start_server(accept_and_close, "127.0.0.1", 0)
        async with server:
            reader, _ = await rig.connect(server.sockets[0].getsockname()[1])
            assert await told(reader) == str(InOrder())
            await closing[0]
        assert listener._links == {}
