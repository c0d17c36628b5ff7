"""A short call at a serving node, to hear what it says of itself: `pdd check --peer`, `pdd peers compare`.

The caller shakes hands as a decoder does, token included, and then says the role VISITOR, which nobody works with: the other
end answers with its hello and refuses. No endpoint is opened and no link comes up, at any version of a node.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time

from pdd.address import Address
from pdd.errors import PeerLost
from pdd.messenger import handshake, wire
from pdd.messenger.frames import FrameStream
from pdd.messenger.handshake import VISITOR, FieldDiff, LocalNode
from pdd.messenger.peers import open_tcp


@dataclasses.dataclass(frozen=True, slots=True)
class Visit:
    """What was heard. Seconds."""

    hello: wire.Hello
    version: int  # of the protocol, that both ends speak
    connect_seconds: float
    round_trip_seconds: float  # of a message through the other end's main loop


async def visit(address: Address, node: LocalNode, timeout: float) -> Visit:
    """Calls at `address` as `node`, whose role does not matter; at most `timeout` seconds.

    Raises:
        PeerLost: nobody answers, or not in time. PeerUnauthenticated: the tokens differ.
        PeerIncompatible: no version of the protocol in common. WrongGreeting, PeerProtocol: it is no peer.
    """
    began = time.perf_counter()
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await open_tcp(address)
            connected = time.perf_counter()
            stream = FrameStream(reader, writer)
            try:
                version = await handshake.authenticate(stream, node, initiator=True)
                asked = time.perf_counter()
                stream.send(wire.Hello(
                    name=node.name, role=VISITOR, epoch=node.epoch, provider=node.provider, geometry=node.geometry,
                    descriptor=b"", version=node.version, dialled=VISITOR,
                ))
                hello = await handshake.expect(stream, wire.Hello)
                answered = time.perf_counter()
            finally:
                stream.abort()
    except TimeoutError:
        raise PeerLost(f"{address} did not answer within {timeout:g} s", hint="Is it stopped, or overloaded?") from None
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise PeerLost(f"{address} does not answer: {why or error}",
                       hint="Is a node running there, and is this its peers.listen?") from None
    return Visit(hello, version, connected - began, answered - asked)


def differences(ours: LocalNode, theirs: wire.Hello) -> tuple[FieldDiff, ...]:
    """Every field of the handshake that says something else at the two ends, whether or not that matters."""
    here, there = _described(ours), _described(theirs)
    return tuple(FieldDiff(name, here[name], there[name]) for name in here if here[name] != there[name])


def _described(who: wire.Hello | LocalNode) -> dict[str, str]:
    geometry = {name: str(getattr(who.geometry, name)) for name in who.geometry.__struct_fields__}
    return {"pdd": who.version, "provider": who.provider, **geometry}
