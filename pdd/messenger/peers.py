"""The prefillers that a decoder was told of: dials each for ever, keeps one link to each, says which can take work.

Membership is a list of addresses, which may be replaced at any time. Every address has one task, which nothing but the
end of its membership ends: dial, run the link, wait, dial again. A peer that is replaced or restarted is met again by
the next dial, as a new epoch, with a new endpoint; the old link's fence may still be on its way then, and does not
delay the new one. The table does not choose a peer for an attempt and knows nothing of attempts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import random
import socket
from collections.abc import Awaitable, Callable, Sequence

from pdd.address import Address
from pdd.errors import FabricFailure, PddError, PeerError, PeerIncompatible, PeerLost, PeerUnauthenticated
from pdd.messenger.frames import FrameStream
from pdd.messenger.goodbye import PeerFabricFailure
from pdd.messenger.handshake import FieldDiff, Refusal
from pdd.messenger.link import LinkContext, LinkHandler, LinkState, PeerLink
from pdd.messenger.quiet import QuietLog, level_of_end
from pdd.messenger.status import PeerStatus

_log = logging.getLogger(__name__)

_MOST_CAUSE = 160  # characters of a cause where all peers are told of in one line

Connect = Callable[[Address], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@dataclasses.dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds between dials: doubles from `first` to `most`, each time with up to a quarter of it off or on."""

    first: float = 0.1
    most: float = 2.0
    jitter: float = 0.25

    def seconds(self, num_failures: int, rng: random.Random) -> float:
        plain = min(self.most, self.first * 2.0 ** min(num_failures, 32))
        return plain * (1.0 + rng.uniform(-self.jitter, self.jitter))


async def open_tcp(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    set_socket_options(writer)
    return reader, writer


def set_socket_options(writer: asyncio.StreamWriter) -> None:
    """Small frames leave at once."""
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Peer:
    """One address and what became of it."""

    def __init__(self, address: Address, clock_now: float, quiet: QuietLog) -> None:
        self.address = address
        self.link: PeerLink | None = None  # the newest; may be over
        self.epoch: int | None = None  # of the last life that was met
        self.last_error = ""
        self.diff: tuple[FieldDiff, ...] = ()
        self.incompatible = False  # no retry can help
        self.lacks_token = False  # for that it does not hold this node's token, or this one not its
        self.started_at = clock_now
        self.last_up: PeerLink | None = None  # the newest link that came up
        self.num_failures = 0  # dials in a row that did not come up
        self.is_absent = False  # the last dial found nobody: its port is closed, or there is no way to its host
        self.num_connects = 0
        self.allow_local = True  # until a link over memory could not be made, in this life of the peer
        self.quiet = quiet

    @property
    def down_since(self) -> float:
        """Since when this peer is not up, if it is not."""
        ended_at = self.last_up.ended_at if self.last_up is not None else None
        return ended_at if ended_at is not None else self.started_at

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of one prompt that it can hold, as its last life said; None: it was never met."""
        if self.last_up is None:
            return None
        hello = self.last_up.peer
        pool = hello.geometry.num_pages * hello.geometry.page_size
        return min(pool, hello.max_tokens) if hello.max_tokens else pool

    @property
    def is_usable(self) -> bool:
        """It can take new work: its link is up, not suspect, and it is not draining."""
        return self.link is not None and self.link.state is LinkState.UP and not self.link.peer_draining

    @property
    def cause(self) -> str:
        """Why it is not up, in short: of what does not fit the names alone, which `pdd peers` shows in full."""
        if self.diff:
            return f"{', '.join(each.field for each in self.diff)}; `pdd peers` says what differs"
        error = self.last_error
        if not error and self.link is not None and self.link.error is not None:  # just ended, not noted yet
            error = str(self.link.error)
        return error if len(error) <= _MOST_CAUSE else f"{error[:_MOST_CAUSE]}...; `pdd peers` says all"

    @property
    def state(self) -> str:
        if self.link is not None and self.link.is_up:
            return "suspect" if self.link.state is LinkState.SUSPECT else "up"
        if self.incompatible:
            return "auth" if self.lacks_token else "incompatible"
        return "down" if self.num_failures or self.num_connects else "connecting"


class PeerTable:
    """Owner: the main loop. `start` once, `close` once."""

    def __init__(
        self, addresses: Sequence[Address], context: LinkContext, handler: LinkHandler, *,
        connect: Connect = open_tcp, backoff: Backoff = Backoff(), rng: random.Random | None = None,
    ) -> None:
        self._context = context
        self._handler = handler
        self._connect = connect
        self._backoff = backoff
        self._rng = rng or random.Random()
        self._tasks: dict[Peer, asyncio.Task[None]] = {}  # those of former members too, until they have ended
        self._is_running = False
        self.peers: tuple[Peer, ...] = ()
        self.set_members(addresses)

    def start(self) -> None:
        self._is_running = True
        for peer in self.peers:
            self._start_keeping(peer)

    async def close(self, fence_seconds: float = 5.0) -> None:
        """Says goodbye to every peer and waits for the fences, at most `fence_seconds`."""
        self._is_running = False
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._context.fencing.wait(fence_seconds)

    def set_members(self, addresses: Sequence[Address]) -> None:
        """Makes `addresses` the members: links to those that stay are kept, the new ones are dialled, and the links to
        all others end now, as if they had been lost."""
        known = {peer.address: peer for peer in self.peers}
        now = self._context.clock()
        members = {
            address: known.get(address) or Peer(address, now, QuietLog(_log, self._context.clock))
            for address in addresses
        }
        self.peers = tuple(members.values())
        for peer in known.values():
            if peer.address not in members:
                self._dismiss(peer)
        if self._is_running:
            for peer in self.peers:
                self._start_keeping(peer)

    # -- asking ---------------------------------------------------------------------------------------------------
    def usable_links(self) -> list[PeerLink]:
        """Links that can take new work."""
        return [peer.link for peer in self.peers if peer.link is not None and peer.is_usable]

    def hope_until(self, peers: Sequence[Peer]) -> float | None:
        """Until when it makes sense to wait for one of `peers` that is not usable now; None: nobody to wait for.

        A peer is waited for during `connect_timeout` from when it went away, not from when somebody asks; and no longer
        than until a dial finds that nobody is there: a prefiller that starts again has its weights to load, and
        what dials it meanwhile finds it by itself.
        """
        grace = self._context.settings.connect_timeout
        ends = []
        for peer in peers:
            if peer.state == "suspect" and peer.link is not None:
                ends.append(peer.link.since + max(grace, self._context.settings.dead_after))
            elif peer.state in ("down", "connecting") and not peer.is_absent:
                ends.append(peer.down_since + grace)
        return max(ends, default=None)

    def explain(self) -> str:
        """Why no peer can take work: every peer and its cause."""
        if not self.peers:
            return "no prefiller is configured (peers.static)"
        causes = []
        for peer in self.peers:
            state = peer.state
            if peer.link is not None and peer.link.is_up and peer.link.peer_draining:
                state = "draining"
            causes.append(f"{peer.address} is {state}" + (f" ({peer.cause})" if peer.cause else ""))
        return "; ".join(causes)

    def status(self, outstanding: Callable[[PeerLink], tuple[int, int]]) -> tuple[PeerStatus, ...]:
        """`outstanding` gives (attempts, tokens) in hand of a link."""
        return tuple(self._status(peer, outstanding) for peer in self.peers)

    # -- inside ---------------------------------------------------------------------------------------------------
    def _start_keeping(self, peer: Peer) -> None:
        if peer not in self._tasks:
            task = self._tasks[peer] = asyncio.create_task(self._keep(peer), name=f"peer {peer.address}")
            task.add_done_callback(lambda _: self._tasks.pop(peer))

    def _dismiss(self, peer: Peer) -> None:
        if peer.link is not None:
            peer.link.fence(PeerLost(f"{peer.address} is no longer listed as a prefiller"))
        if peer in self._tasks:
            self._tasks[peer].cancel()

    async def _keep(self, peer: Peer) -> None:
        while True:
            if self._twin(peer) is None:
                began = self._context.clock()
                came_up = await self._dial_safely(peer)
                # A link that falls right after it came up is a failure too: it must not be dialled ten times a second.
                lasted = came_up and self._context.clock() - began > self._backoff.most
                peer.num_failures = 0 if lasted else peer.num_failures + 1
            await asyncio.sleep(self._backoff.seconds(peer.num_failures, self._rng))

    async def _dial_safely(self, peer: Peer) -> bool:
        """A dial that fails in a way nobody has thought of is a failed dial, not the last one."""
        try:
            return await self._dial(peer)
        except Exception as error:
            failure = PeerLost(f"it cannot be dialled: {error!r}")
            if peer.last_error != str(failure):
                _log.exception("the dial of %s failed", peer.address)
            self._note(peer, failure)
            return False

    def _twin(self, peer: Peer) -> Peer | None:
        """Another address with a live link to the node that `peer` was last seen to be."""
        for other in self.peers:
            if other is not peer and other.link is not None and other.link.is_up and other.epoch == peer.epoch:
                return other
        return None

    async def _dial(self, peer: Peer) -> bool:
        """One connection, from dial to end. True when its link came up."""
        settings = self._context.settings
        num_connects = peer.num_connects
        try:
            async with asyncio.timeout(settings.connect_timeout):
                reader, writer = await self._connect(peer.address)
        except TimeoutError:
            self._note(peer, PeerLost(f"no connection within {settings.connect_timeout:g} s"))
            return False
        except OSError as error:
            peer.is_absent = True
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror  # asyncio words it for Python
            self._note(peer, PeerLost(f"cannot connect: {why or error}"))
            return False
        peer.is_absent = False

        def admit(link: PeerLink) -> None:
            self._admit(peer, link)

        peer.link = PeerLink(
            self._context, FrameStream(reader, writer), self._handler, initiator=True, label=str(peer.address),
            admit=admit, allow_local=peer.allow_local,
        )
        try:
            await peer.link.run()
            peer.allow_local = peer.allow_local and not _doubts_memory(peer.link)
            if peer.link.error is not None:
                self._note(peer, peer.link.error)
        finally:
            await peer.link.wait_hung_up()
        return peer.num_connects > num_connects

    def _admit(self, peer: Peer, link: PeerLink) -> None:
        """Called when the handshake is done and before the link is used."""
        epoch = link.peer.epoch
        restarted = peer.epoch is not None and peer.epoch != epoch
        peer.allow_local = peer.allow_local or restarted  # from its next link on
        peer.epoch = epoch
        twin = self._twin(peer)
        if twin is not None:
            raise PeerIncompatible(f"it is the same node as {twin.address}", hint="list each prefiller once")
        peer.num_connects += 1
        peer.last_up = link
        peer.incompatible, peer.lacks_token, peer.diff, peer.last_error = False, False, (), ""
        what = "restarted and is used again" if restarted else "is up"
        peer.quiet.log(logging.INFO, f"prefiller {link.name} at {peer.address} {what} (epoch {epoch:016x}), {way_text(link)}")

    def _note(self, peer: Peer, error: PddError) -> None:
        peer.last_error = str(error)
        peer.incompatible = isinstance(error, PeerError) and not error.retryable
        peer.lacks_token = isinstance(error, PeerUnauthenticated)
        peer.diff = error.diff if isinstance(error, Refusal) else ()
        peer.quiet.log(level_of_end(error), f"prefiller {peer.address} is {peer.state}: {error}")

    def _status(self, peer: Peer, outstanding: Callable[[PeerLink], tuple[int, int]]) -> PeerStatus:
        now = self._context.clock()
        link = peer.link if peer.link is not None and peer.link.is_up else None
        via = self._context.node.provider if link is None else link.via
        base = PeerStatus(
            name=peer.link.name if peer.link is not None else str(peer.address), address=str(peer.address),
            state=peer.state, age_seconds=now - (link.since if link is not None else peer.down_since),
            last_error=peer.last_error, epoch=peer.epoch, via=via, diff=peer.diff,
            num_connects=peer.num_connects, fence_error=self._fence_error(peer),
        )
        return base if link is None else with_link(base, link, *outstanding(link))

    def _fence_error(self, peer: Peer) -> str:
        """Of any link that this peer has had."""
        links = [link for link in self._context.fencing.pending() if link.label == str(peer.address)]
        return next((link.fence_error for link in links if link.fence_error), "")


def _doubts_memory(link: PeerLink) -> bool:
    """Whether the next link must not go over memory: this one could not be made, or broke before it had proved good."""
    if link.local_refusal and not link.was_up:
        return True
    return isinstance(link.error, (FabricFailure, PeerFabricFailure)) and not link.has_carried


def way_text(link: PeerLink) -> str:
    """Over what the KV of a link travels, and why not through memory where it might."""
    why = link.local_refusal
    return f"KV over {link.via}" + (f": it is on this host, but {why}" if why else "")


def with_link(base: PeerStatus, link: PeerLink, num_outstanding: int, outstanding_tokens: int) -> PeerStatus:
    """`base` and what a live link knows."""
    return dataclasses.replace(
        base, version=link.peer.version, rtt_seconds=link.rtt_seconds, draining=link.peer_draining,
        queued_tokens=link.load.queued_tokens, running=link.load.running, free_pages=link.load.free_pages,
        outstanding=num_outstanding, outstanding_tokens=outstanding_tokens,
    )
