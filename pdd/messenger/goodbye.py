"""The last word on a link: what an error of this node becomes on the wire, and a peer's goodbye here.

The text is for people; what a program must know of it is its cause.
"""

from __future__ import annotations

from pdd.errors import FabricFailure, PddError, PeerError, PeerIncompatible, PeerLost, PeerProtocol, PeerUnauthenticated
from pdd.messenger import wire


class InOrder(PeerLost):
    """The link ends because its node closes its links: nothing is wrong."""

    def __init__(self, message: str = "the node closes its links") -> None:
        super().__init__(message)


class PeerFabricFailure(PeerLost):
    """The link ends because the peer's endpoint failed."""


_CAUSES: tuple[tuple[type[PddError], wire.Cause], ...] = (
    (InOrder, wire.Cause.ORDERLY),
    (PeerIncompatible, wire.Cause.INCOMPATIBLE),
    (PeerUnauthenticated, wire.Cause.UNAUTHENTICATED),
    (PeerProtocol, wire.Cause.PROTOCOL),
    (PeerLost, wire.Cause.LOST),
    (FabricFailure, wire.Cause.FABRIC),
)


def goodbye(error: PddError) -> wire.Goodbye:
    """What the peer is told of the end of a link for `error`."""
    cause = next((cause for kind, cause in _CAUSES if isinstance(error, kind)), wire.Cause.UNKNOWN)
    return wire.Goodbye(reason=str(error)[:4000], cause=cause)


def said(message: wire.Goodbye, name: str = "the peer") -> PeerError:
    """The error that ends a link whose peer, `name`, said goodbye."""
    kinds: dict[wire.Cause, type[PeerError]] = {
        wire.Cause.ORDERLY: InOrder, wire.Cause.FABRIC: PeerFabricFailure, wire.Cause.UNAUTHENTICATED: PeerUnauthenticated,
    }
    return kinds.get(message.cause, PeerLost)(f"{name} said goodbye: {wire.one_line(message.reason)}")
