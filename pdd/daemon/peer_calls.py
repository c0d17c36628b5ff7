"""What an operator asks about one peer: how long a message takes, and in what it differs from this node."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from pdd.address import parse_address
from pdd.control import schema_check
from pdd.errors import NoSuchPeer, RefusedInState, TimedOut
from pdd.messenger import wire
from pdd.messenger.link import LinkContext, PeerLink
from pdd.messenger.peers import Peer
from pdd.messenger.visit import differences, visit


@dataclasses.dataclass(frozen=True, slots=True)
class Met:
    """Whom this node knows, at one moment."""

    context: LinkContext | None  # of its links; None: it works alone
    dialled: Sequence[Peer]  # prefillers, linked or not
    callers: Sequence[PeerLink]  # decoders


async def ping(met: Met, wanted: str, count: int) -> schema_check.Ping:
    """Round trips of heartbeats over the link, one after the other.

    Raises:
        NoSuchPeer, RefusedInState: there is no link. TimedOut: it is silent for peers.dead_after.
    """
    context, address, link, why = _find(met, wanted)
    if link is None:
        raise RefusedInState(f"{wanted} has no link: {why}", hint="`pdd check --peer HOST:PORT` tries a new one.")
    trips = []
    for _ in range(count):
        try:
            async with asyncio.timeout(context.settings.dead_after):
                trips.append(await link.ping())
        except TimeoutError:
            raise TimedOut(f"{link.name} sent no heartbeat for {context.settings.dead_after:g} s",
                           hint="Is its process stopped? `pdd peers` shows its state.") from None
    return schema_check.Ping(peer=link.name, address=address, via=link.via, round_trips_seconds=tuple(trips))


async def compare(met: Met, wanted: str) -> schema_check.Comparison:
    """By what the peer said on its link; without one it is called at anew.

    Raises:
        NoSuchPeer: nobody of that name. PeerError: it does not answer, or is no peer.
    """
    context, address, link, _ = _find(met, wanted)
    theirs: wire.Hello
    if link is not None:
        theirs = link.peer
    else:
        theirs = (await visit(parse_address(address), context.node, context.settings.connect_timeout)).hello
    forbidding = {each.field for each in context.compare(context.node.geometry, theirs.geometry)}
    fields = tuple(
        schema_check.ComparedField(field=each.field, ours=each.ours, theirs=each.theirs, matters=each.field in forbidding)
        for each in differences(context.node, theirs)
    )
    return schema_check.Comparison(peer=theirs.name, address=address, compatible=not forbidding, fields=fields)


def _find(met: Met, wanted: str) -> tuple[LinkContext, str, PeerLink | None, str]:
    """(context, address, the link if it is up, why it is not). A name, or an address as `pdd peers` shows it."""
    context = met.context
    for peer in met.dialled:
        names = {str(peer.address), peer.link.name if peer.link is not None else "",
                 peer.last_up.name if peer.last_up is not None else ""}
        if wanted in names and context is not None:
            up = peer.link if peer.link is not None and peer.link.is_up else None
            return context, str(peer.address), up, f"it is {peer.state}, {peer.last_error or 'not met yet'}"
    for link in met.callers:
        if wanted in (link.name, link.label) and context is not None:
            return context, link.label, link, ""
    known = [*(str(peer.address) for peer in met.dialled), *(link.name for link in met.callers)]
    raise NoSuchPeer(f"this node has no peer {wanted}", hint=f"It has: {', '.join(known) or 'none'}.")
