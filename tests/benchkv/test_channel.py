"""The control connection: who is let in, what a stranger can do, and which words the other end's end is told in."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from pdd.bench import wire
from pdd.bench.channel import Channel
from pdd.errors import BenchPeerLost, FabricFailure, PddError, PeerUnauthenticated, TimedOut, VersionMismatch
from pdd.messenger import wire as peer_wire

TOKEN = b"correct horse battery staple"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


def frame(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


def meet(pair: tuple[socket.socket, socket.socket], reads: bytes | None, writes: bytes | None) -> list[PddError | None]:
    """What each end's handshake ended with: reader, writer."""
    found: list[PddError | None] = [None, None]

    def one(at: int, token: bytes | None) -> None:
        channel = Channel(pair[at], "the other end", 2.0)
        try:
            channel.authenticate(token, reads=at == 0)
        except PddError as error:
            found[at] = error
            channel.close(error.message)

    threads = [threading.Thread(target=one, args=(at, token)) for at, token in enumerate((reads, writes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("token", [TOKEN, None])
def test_two_ends_of_one_token_meet(pair: Any, token: bytes | None) -> None:
    assert meet(pair, token, token) == [None, None]


@pytest.mark.parametrize(("reads", "writes"), [(TOKEN, None), (None, TOKEN), (TOKEN, b"another")])
def test_another_token_or_none_is_refused(pair: Any, reads: bytes | None, writes: bytes | None) -> None:
    reader, writer = meet(pair, reads, writes)
    assert isinstance(writer, PeerUnauthenticated)
    assert reader is not None
    assert "token" in reader.message  # its own finding, or what the writer said
    assert TOKEN.decode() not in f"{reader} {writer}"


def test_a_proof_cannot_be_played_back(pair: Any) -> None:
    """A stranger who echoes what it hears gets nowhere: the two directions' proofs differ."""
    channel = Channel(pair[0], "the echo", 0.5)

    def echo() -> None:
        while data := pair[1].recv(4096):
            pair[1].sendall(data)

    thread = threading.Thread(target=echo)
    thread.start()
    with pytest.raises(PeerUnauthenticated):
        channel.authenticate(TOKEN, reads=True)
    channel.close()
    thread.join()


@pytest.mark.parametrize(
    ("sent", "kind", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", BenchPeerLost, "no `pdd bench kv"),
        (frame(b"\xc1"), BenchPeerLost, "no message"),
        (struct.pack(">I", 1 << 20), BenchPeerLost, "1048576 bytes"),
        (frame(peer_wire.encode(peer_wire.Greeting(1, bytes(32), False))), BenchPeerLost, "serving node"),
        (frame(wire.encode(wire.Hello(2, bytes(32), False, "9.9"))), VersionMismatch, "protocol 2"),
        (frame(msgspec.msgpack.encode({"type": "bench_hello", "protocol": 3, "new": 1})), VersionMismatch, "protocol 3"),
        (frame(wire.encode(wire.Hello(1, bytes(3), False, "0.1"))), BenchPeerLost, "Hello"),
        (frame(wire.encode(wire.Setup(1 << 40, 1.0))), BenchPeerLost, "Setup"),
    ],
)
def test_what_is_no_bench_is_told(pair: Any, sent: bytes, kind: type[PddError], why: str) -> None:
    pair[1].sendall(sent)
    with pytest.raises(kind, match=why):
        Channel(pair[0], "10.0.0.7:7000", 1.0).authenticate(None, reads=True)


def test_the_other_ends_end_has_its_own_words(pair: Any) -> None:
    here, there = (Channel(sock, "the other end", 0.2, proved=True) for sock in pair)
    with pytest.raises(TimedOut, match=r"said nothing for 0\.2 s"):
        here.receive()
    there.send(wire.Failed("no such NIC\x1b[31m"))
    with pytest.raises(FabricFailure, match="no such NIC") as told:
        here.receive()
    assert "\x1b" not in told.value.message
    there.send(wire.Started())
    assert here.expect(wire.Started) == wire.Started()
    there.send(wire.Started())
    with pytest.raises(BenchPeerLost, match="where a Stopped must come"):
        here.expect(wire.Stopped)
    there.close("it was interrupted")
    with pytest.raises(BenchPeerLost, match="it was interrupted"):
        here.receive()
    with pytest.raises(BenchPeerLost, match="closed the connection"):
        here.receive()


def test_a_reason_is_heard_by_an_end_that_was_sending() -> None:
    """The end that leaves has not read what came; on loopback its reason is never overtaken, so its lingering is not shown."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        here, there = Channel(one, "the writer", 2.0, proved=True), Channel(listener.accept()[0], "the reader", 2.0, proved=True)
        for _ in range(100):
            here.send(wire.Ask((), tuple(range(1000))))
        leaving = threading.Thread(target=there.close, args=("it was interrupted",))
        leaving.start()
        with pytest.raises(BenchPeerLost, match="it was interrupted"):
            here.receive()
        here.close()
        leaving.join()
