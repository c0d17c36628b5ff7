"""The control connection of a benchmark: blocking, framed, bounded in size and in time, proved by a token over TCP.

Every wait has the limit `timeout`; what a stranger may make us hold is small until the token is proved. The other end's
goodbye, its failure, its silence and the end of the stream are all errors here, each with its own words.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import struct
import time
from typing import TypeVar

import msgspec

from pdd.bench import wire
from pdd.errors import BenchPeerLost, FabricFailure, PeerProtocol, PeerUnauthenticated, TimedOut, VersionMismatch
from pdd.messenger.frames import FrameBuffer
from pdd.messenger.proof import NONCE_BYTES, proof
from pdd.messenger.wire import one_line
from pdd.version import VERSION

_HEADER = struct.Struct(">I")
_READ_BYTES = 256 << 10
_LINGER_SECONDS = 0.5
_LABELS = {True: b"pdd bench reader\0", False: b"pdd bench writer\0"}

M = TypeVar("M", bound=msgspec.Struct)


class Channel:
    """One connection. `peer`: what messages call the other end. Owner: one thread."""

    def __init__(self, sock: socket.socket, peer: str, timeout: float, *, proved: bool = False) -> None:
        sock.settimeout(timeout)
        self.peer = peer
        self.timeout = timeout  # seconds
        self._sock = sock
        self._buffer = FrameBuffer(wire.MAX_FRAME_BYTES if proved else wire.MAX_STRANGER_BYTES)

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def local_host(self) -> str:
        """The numeric address of this end, by which the other one reaches this machine."""
        host: str = self._sock.getsockname()[0]
        return host.removeprefix("::ffff:") if "." in host else host

    # -- messages
    def send(self, message: wire.Message) -> None:
        """Raises BenchPeerLost, or TimedOut when the other end does not read."""
        payload = wire.encode(message)
        try:
            self._sock.sendall(_HEADER.pack(len(payload)) + payload)
        except TimeoutError:
            raise TimedOut(f"{self.peer} does not read: nothing went out for {self.timeout:g} s") from None
        except OSError as error:
            self._explain(error)

    def take(self) -> wire.Message | None:
        """The next message that is here, or None; never waits. Call until None, then wait for more.

        Raises:
            BenchPeerLost: the end of the stream, a goodbye, or no message of ours. FabricFailure: its writes failed.
        """
        while (payload := self._next()) is None:
            if not select.select([self._sock], [], [], 0)[0]:  # recv itself would wait for the socket's timeout
                return None
            try:
                data = self._sock.recv(_READ_BYTES)
            except OSError as error:
                raise BenchPeerLost(f"the connection to {self.peer} broke: {error.strerror or error}") from None
            if not data:
                raise BenchPeerLost(f"{self.peer} closed the connection")
            self._buffer.feed(data)
        try:
            message = wire.decode(payload)
        except msgspec.MsgspecError as error:
            raise self._no_message(payload, error) from None
        if isinstance(message, wire.Failed):
            raise FabricFailure(f"{self.peer}: {one_line(message.message)}")
        if isinstance(message, wire.Goodbye) and message.reason != wire.FINISHED:
            raise BenchPeerLost(f"{self.peer} ended the benchmark: {one_line(message.reason)}")
        return message

    def receive(self, *, patience: float | None = None) -> wire.Message:
        """Waits for the next message, at most `patience` or the channel's timeout. Raises TimedOut, and as take()."""
        limit = self.timeout if patience is None else patience
        deadline = time.monotonic() + limit
        while (message := self.take()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimedOut(f"{self.peer} said nothing for {limit:g} s", hint="Allow more with --timeout.")
            select.select([self._sock], [], [], left)
        return message

    def expect(self, kind: type[M]) -> M:
        """The next message, which must be of this kind."""
        message = self.receive()
        if not isinstance(message, kind):
            raise self._out_of_turn(message, kind.__name__)
        return message

    def close(self, reason: str = "") -> None:
        """Says why, if there is something to say, and ends the connection. Idempotent; waits for the other end to end
        it too, at most half a second: a socket closed over unread bytes is reset, and the reset overtakes the reason."""
        if self._sock.fileno() < 0:
            return
        if reason:
            payload = wire.encode(wire.Goodbye(reason[:2048]))
            deadline = time.monotonic() + _LINGER_SECONDS
            with contextlib.suppress(OSError):  # it left first
                self._sock.settimeout(_LINGER_SECONDS)
                self._sock.sendall(_HEADER.pack(len(payload)) + payload)
                self._sock.shutdown(socket.SHUT_WR)
                while time.monotonic() < deadline and self._sock.recv(_READ_BYTES):
                    continue
        self._sock.close()

    # -- trust
    def authenticate(self, token: bytes | None, *, reads: bool) -> None:
        """Hello and Proof. `reads`: whether this is the reading end.

        Raises:
            VersionMismatch: another protocol. PeerUnauthenticated: no token, or another one. BenchPeerLost: no bench.
        """
        nonce = os.urandom(NONCE_BYTES)
        self.send(wire.Hello(wire.PROTOCOL, nonce, token is not None, VERSION))
        theirs = self.receive()
        if not isinstance(theirs, wire.Hello) or len(theirs.nonce) != NONCE_BYTES:
            raise self._out_of_turn(theirs, "Hello")
        if theirs.protocol != wire.PROTOCOL:
            raise self._other_protocol(theirs.protocol)
        if theirs.authenticated != (token is not None):
            holder, other = ("this end", self.peer) if token is not None else (self.peer, "this end")
            raise PeerUnauthenticated(f"{holder} requires a shared token and {other} has none",
                                      hint="give both ends the same peers.token_credential or --token-file")
        if token is not None:
            own = wire.Proof(proof(token, _LABELS[reads], nonce, theirs.nonce))
            if reads:  # the listener answers nothing to a stranger
                self.send(own)
            shown = self.expect(wire.Proof)
            if not hmac.compare_digest(shown.mac, proof(token, _LABELS[not reads], theirs.nonce, nonce)):
                raise PeerUnauthenticated(f"{self.peer} does not hold the same token",
                                          hint="compare peers.token_credential or --token-file of both ends")
            if not reads:
                self.send(own)
        self._buffer.limit = wire.MAX_FRAME_BYTES

    # -- what went wrong
    def _next(self) -> bytes | None:
        try:
            return self._buffer.next()
        except PeerProtocol as error:
            raise BenchPeerLost(f"{self.peer} is no `pdd bench kv --listen`: {error.message}") from None

    def _explain(self, error: OSError) -> None:
        """Sending failed: if it said why before it left, that is the reason."""
        while self.take() is not None:
            continue
        raise BenchPeerLost(f"the connection to {self.peer} broke: {error.strerror or error}")

    def _no_message(self, payload: bytes, error: msgspec.MsgspecError) -> BenchPeerLost | VersionMismatch:
        try:
            outline = msgspec.msgpack.decode(payload, type=wire.Outline)
        except msgspec.MsgspecError:
            return BenchPeerLost(f"{self.peer} sent a frame of {len(payload)} bytes that is no message: {error}")
        if outline.type == "greeting":
            return BenchPeerLost(f"{self.peer} is the peer port of a serving node",
                                 hint="Run `pdd bench kv --listen` beside it, on another port.")
        if outline.type == "bench_hello" and outline.protocol != wire.PROTOCOL:
            return self._other_protocol(outline.protocol)
        return BenchPeerLost(f"{self.peer} sent a {one_line(outline.type)!r} that is no message: {error}")

    def _other_protocol(self, theirs: int) -> VersionMismatch:
        return VersionMismatch(f"{self.peer} speaks bench protocol {theirs}, this end {wire.PROTOCOL}",
                               hint="Run the same pdd version at both ends.")

    def _out_of_turn(self, message: object, wanted: str) -> BenchPeerLost:
        return BenchPeerLost(f"{self.peer} sent a {type(message).__name__} where a {wanted} must come")
