"""How two nodes come to trust each other on a new connection.

    both       Greeting    newest and oldest protocol version, nonce, whether a token is configured
    initiator  Proof       only with a token; the acceptor answers nothing to a stranger
    acceptor   Proof
    initiator  Hello       with the descriptor of its endpoint for this link
    acceptor   Hello       descriptor empty when the two do not fit

The versions are compared before anything else is decoded (`versions.py`), the token before anything about memory is
said, the geometry before any endpoint learns of the other. Every refusal names what differs, on both sides. The caller
bounds the time of it all. The Proof covers neither versions nor anything later: the token keeps strangers out, not
those who can rewrite the connection.
"""

from __future__ import annotations

import dataclasses
import hmac
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from pdd.errors import PeerIncompatible, PeerProtocol, PeerUnauthenticated
from pdd.messenger import wire
from pdd.messenger.frames import FrameStream
from pdd.messenger.goodbye import said
from pdd.messenger.proof import NONCE_BYTES, proof
from pdd.messenger.versions import OURS, Range, agree

_LABELS = {True: b"pdd peer initiator\0", False: b"pdd peer acceptor\0"}


@dataclasses.dataclass(frozen=True, slots=True)
class LocalNode:
    """What this node says of itself on every link."""

    name: str
    role: str  # prefill, decode, both
    epoch: int  # random u64 of this life
    version: str
    provider: str
    geometry: wire.Geometry
    regions: tuple[int, ...]  # fabric regions of the KV memory, one per rank, those of an engine together
    token: bytes | None = dataclasses.field(default=None, repr=False)
    max_tokens: int = 0  # most tokens of one prompt that this node prefills for a peer; 0: it prefills for nobody
    versions: Range = OURS  # of the peer protocol
    host: str = ""  # boot id of this host, where KV may go through memory to peers on it; "": never


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """How a node can be written to on one link."""

    descriptor: bytes
    local: bytes = b""  # by a peer on the same host


@dataclasses.dataclass(frozen=True, slots=True)
class FieldDiff:
    """One field that forbids two nodes to work together."""

    field: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.field} {self.ours} here, {self.theirs} there"


Compare = Callable[[wire.Geometry, wire.Geometry], tuple[FieldDiff, ...]]

class Refusal(PeerIncompatible):
    """PeerIncompatible with the fields that differ, for `peers compare`."""

    def __init__(self, message: str, diff: tuple[FieldDiff, ...]) -> None:
        hint = "both nodes must have the same model and dtype, and page sizes that divide one another"
        if all(each.field == "tp" for each in diff):
            hint = "choose engine.tp so that it divides the number of KV heads, or is a multiple of it"
        if all(each.field == "num_pages" for each in diff):
            hint = "lower kv.num_pages where it is too large; the two need not be equal"
        super().__init__(message, hint=hint)
        self.diff = diff


VISITOR = "visitor"  # the role of who only asks what a node is (visit.py)


class Visited(PeerIncompatible):
    """The refusal of a visitor, which is no trouble."""


class WrongGreeting(PeerProtocol):
    """The other end speaks first as no peer does. `kind`: its word."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"a {wire.one_line(kind)!r} came where a greeting must")
        self.kind = kind


class _AnyGreeting(msgspec.Struct):
    """As much of a greeting as every version of this protocol has."""

    type: str
    protocol: int = 0  # a goodbye has none
    oldest: int = 0


async def authenticate(stream: FrameStream, node: LocalNode, *, initiator: bool) -> int:
    """Greeting and Proof; returns the protocol version that both ends speak from here on.

    Raises:
        PeerIncompatible: there is no version that both ends speak.
        PeerUnauthenticated: exactly one end has a token, or the tokens differ.
        PeerProtocol, PeerLost: the other end is no peer, or went away.
    """
    nonce, token, ours = os.urandom(NONCE_BYTES), node.token, node.versions
    stream.send(
        wire.Greeting(protocol=ours.newest, nonce=nonce, authenticated=token is not None, oldest=ours.oldest)
    )
    theirs, version = await _receive_greeting(stream, ours)
    if theirs.authenticated != (token is not None):
        holder, other = ("this node", "the peer") if token is not None else ("the peer", "this node")
        raise PeerUnauthenticated(
            f"{holder} requires a shared token and {other} has none", hint="set peers.token_credential on both nodes"
        )
    if token is None:
        return version
    own = wire.Proof(mac=proof(token, _LABELS[initiator], nonce, theirs.nonce))
    if initiator:
        stream.send(own)
    shown = await expect(stream, wire.Proof)
    if not hmac.compare_digest(shown.mac, proof(token, _LABELS[not initiator], theirs.nonce, nonce)):
        raise PeerUnauthenticated("the peer does not hold the same token", hint="compare peers.token_credential")
    if not initiator:
        stream.send(own)
    return version


async def exchange_hello(
    stream: FrameStream, node: LocalNode, *, dialled: str, describe: Callable[[wire.Hello | None], Awaitable[Offer]],
    compare: Compare,
) -> wire.Hello:
    """Hello both ways; returns the peer's. `dialled`: the address, "" for the acceptor. `describe` opens the endpoint,
    the acceptor's in knowledge of the initiator's hello.

    Raises:
        Refusal: the nodes do not fit; names the fields. The other end learns the same.
    """

    def hello(offer: Offer) -> wire.Hello:
        return wire.Hello(
            name=node.name, role=node.role, epoch=node.epoch, provider=node.provider, geometry=node.geometry,
            descriptor=offer.descriptor, version=node.version, dialled=dialled[:256], max_tokens=node.max_tokens,
            host=node.host if offer.local else "", local=offer.local,
        )

    if dialled:
        stream.send(hello(await describe(None)))
        theirs = await expect(stream, wire.Hello)
        _judge(node, theirs, compare, initiator=True)
        if not theirs.descriptor:
            raise PeerIncompatible(f"{theirs.name} refused this node without a reason that this node can see")
        return theirs
    theirs = await expect(stream, wire.Hello)
    try:
        _judge(node, theirs, compare, initiator=False)
    except PeerIncompatible:
        stream.send(hello(Offer(b"")))
        raise
    stream.send(hello(await describe(theirs)))
    return theirs


def _judge(node: LocalNode, theirs: wire.Hello, compare: Compare, *, initiator: bool) -> None:
    if theirs.epoch == node.epoch:
        raise PeerIncompatible("the address leads back to this node itself", hint="take it out of peers.static")
    if theirs.role == VISITOR:
        raise Visited(f"{theirs.name} only asked what this node is (pdd check, pdd peers compare)")
    wanted = ("prefill", "both") if initiator else ("decode", "both")
    if theirs.role not in wanted:
        needed = " or ".join(wanted)
        raise PeerIncompatible(f"{theirs.name} has role {theirs.role!r}; this side of a link needs {needed}",
                               hint="a decoder lists prefillers (peers.static), by what each has in peers.listen")
    diff = compare(node.geometry, theirs.geometry)
    if diff:
        raise Refusal(f"{theirs.name} cannot work with this node: {'; '.join(map(str, diff))}", diff)


async def _receive_greeting(stream: FrameStream, versions: Range) -> tuple[wire.Greeting, int]:
    payload = await stream.receive_payload()
    try:
        outline = msgspec.msgpack.decode(payload, type=_AnyGreeting)
        if outline.type == "goodbye":
            raise said(msgspec.msgpack.decode(payload, type=wire.Goodbye))
        if outline.type != "greeting":
            raise WrongGreeting(outline.type[:64])
        version = agree(versions, Range(outline.oldest or outline.protocol, outline.protocol))
        greeting = msgspec.msgpack.decode(payload, type=wire.Greeting)
    except msgspec.MsgspecError as error:
        raise PeerProtocol(f"the first {len(payload)} bytes are no greeting: {error}") from error
    if len(greeting.nonce) != NONCE_BYTES:
        raise PeerProtocol(f"the greeting has a nonce of {len(greeting.nonce)} bytes, not {NONCE_BYTES}")
    return greeting, version


M = TypeVar("M", wire.Proof, wire.Hello)


async def expect(stream: FrameStream, kind: type[M]) -> M:
    """The next message, which must be of this kind. Raises what a goodbye says, or PeerProtocol."""
    message = await stream.receive()
    if isinstance(message, kind):
        return message
    if isinstance(message, wire.Goodbye):
        raise said(message)
    raise PeerProtocol(f"a {type(message).__name__} came where a {kind.__name__} must")
