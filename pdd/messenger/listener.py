"""The decoders that call a prefiller: accepts their connections on a socket that was bound before.

A decoder that calls a second time in the same life (it lost the first connection without this side noticing) replaces
its old link. Strangers cost a bounded number of half-open handshakes, of which the oldest gives way to a newcomer, and a
rate-limited log line.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from pdd.errors import PddError, PeerLost
from pdd.messenger.frames import FrameStream
from pdd.messenger.goodbye import InOrder
from pdd.messenger.handshake import Visited
from pdd.messenger.link import LinkContext, LinkHandler, LinkState, PeerLink
from pdd.messenger.peers import set_socket_options, way_text, with_link
from pdd.messenger.quiet import QuietLog, level_of_end
from pdd.messenger.status import PeerStatus

_log = logging.getLogger(__name__)
_MAX_HANDSHAKES = 64  # at once; each holds at most a connection, 256 KiB and, late, an endpoint
_MAX_LINGERING = 64  # links that have ended while the other end has not hung up yet


class PeerListener:
    """Owner: the main loop. `start` once, `close` once."""

    def __init__(self, sock: socket.socket, context: LinkContext, handler: LinkHandler) -> None:
        self._sock = sock
        self._context = context
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._links: dict[PeerLink, asyncio.Task[None]] = {}
        self._quiet = QuietLog(_log, context.clock)
        self._closing = False

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, sock=self._sock)

    async def close(self, fence_seconds: float = 5.0) -> None:
        """Accepts no more, says goodbye to every decoder and waits for the fences, at most `fence_seconds`."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        tasks = list(self._links.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in list(self._links):  # whose tasks were cancelled before they had begun
            await self._end_unheard(link)
        await self._context.fencing.wait(fence_seconds)

    @property
    def links(self) -> list[PeerLink]:
        """Links that are up."""
        return [link for link in self._links if link.is_up]

    def status(self, outstanding: dict[PeerLink, tuple[int, int]]) -> tuple[PeerStatus, ...]:
        """Links that are up, and those that cannot be fenced. `outstanding` maps links to (jobs, tokens) in hand."""
        now = self._context.clock()
        stuck = [link for link in self._context.fencing.pending() if link.was_up and link.fence_error]
        return tuple(
            with_link(
                PeerStatus(
                    name=link.name, address=link.label, state=link.state.value, age_seconds=now - link.since,
                    epoch=link.peer.epoch, via=link.via, fence_error=link.fence_error,
                    last_error=str(link.error or ""),
                ),
                link, *outstanding.get(link, (0, 0)),
            )
            for link in (*self.links, *stuck)
        )

    # -- inside ---------------------------------------------------------------------------------------------------
    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = FrameStream(reader, writer)
        if self._closing:  # it was accepted just before
            stream.abort()
            return
        self._make_room()
        set_socket_options(writer)
        link = PeerLink(
            self._context, stream, self._handler, initiator=False, label=stream.peer_name, admit=self._admit
        )
        # A task of our own: asyncio reports the cancellation of one that it made itself as an error.
        self._links[link] = asyncio.create_task(self._keep(link), name=f"decoder {link.label}")

    def _make_room(self) -> None:
        """Ends the oldest handshake when too many are open: a decoder's takes milliseconds, a stranger's may take for
        ever, and whoever refused the newcomer instead would let silent strangers shut out every decoder. Those that
        are told an end and do not hang up do not pile up either."""
        waiting = [link for link in self._links if link.state is LinkState.HANDSHAKE]  # the oldest first
        if len(waiting) >= _MAX_HANDSHAKES:
            waiting[0].drop(PeerLost(f"it makes room: {_MAX_HANDSHAKES} newer handshakes are open"))
        lingering = [link for link in self._links if link.lingers]
        if len(lingering) >= _MAX_LINGERING:
            lingering[0].drop(PeerLost(f"it makes room: {_MAX_LINGERING} newer links have ended"))

    async def _keep(self, link: PeerLink) -> None:
        try:
            await link.run()
        finally:
            if link.error is not None:
                self._tell_end(link, link.error)
            try:
                await link.wait_hung_up()
            finally:
                del self._links[link]

    async def _end_unheard(self, link: PeerLink) -> None:
        del self._links[link]
        link.drop(InOrder())
        await link.wait_hung_up()

    def _tell_end(self, link: PeerLink, error: PddError) -> None:
        if link.was_up:
            self._quiet.log(level_of_end(error), f"the link of decoder {link.name} ({link.label}) ended: {error}")
            return
        who = link.label if link.hello is None else f"{link.name} ({link.label})"
        host = link.label.rpartition(":")[0]  # whoever is refused calls again, from another port
        level = logging.INFO if isinstance(error, Visited) else logging.WARNING
        self._quiet.log(level, f"the call from {who} ended: {error}", key=f"{host} {error}")

    def _admit(self, link: PeerLink) -> None:
        for other in list(self._links):
            if other is link or not other.is_up:
                continue
            if (other.peer.epoch, other.peer.dialled) == (link.peer.epoch, link.peer.dialled):
                other.fence(PeerLost(f"{link.name} has opened a newer link"))
        where = f"decoder {link.name} at {link.label}"
        self._quiet.log(logging.INFO, f"{where} is up (epoch {link.peer.epoch:016x}), {way_text(link)}")
