"""The way that KV takes on one link: the fabric, or, between two nodes of one host, memory that both can see.

    initiator   opens an endpoint of each kind and offers both, and the boot id of its host
    acceptor    of the same boot id: tries the local one, and answers with one of that kind if it can be reached;
                else with one of the fabric
    both        close what was not chosen

The boot id only spares strangers the trying: what proves one host is that the local endpoint's socket is reached, by
the same user and with the secret that came over this authenticated link. From then on the link has one endpoint, and
nobody above needs to know which kind it is. Its fence is the close of every endpoint that was opened for it, chosen or
not: a peer may know of both.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from pdd.errors import PeerProtocol
from pdd.messenger import wire
from pdd.messenger.endpoint import LinkEndpoint
from pdd.messenger.events import EndpointHandler, FabricEvents
from pdd.messenger.handshake import LocalNode, Offer
from pdd.messenger.ports import FabricPort

_log = logging.getLogger(__name__)
LOCAL = "local"  # as statuses and metrics call this way; the others are named by their provider


class Unreachable(Exception):
    """A local peer that could be reached a moment ago cannot be used: the next link must take the fabric."""


@dataclasses.dataclass(slots=True)
class _Unused:
    """Hears of an endpoint while nothing can be written through it: it is not chosen yet, or was not."""

    closed: Callable[[], None]
    dropped: bool = False
    failure: str = ""

    def endpoint_failed(self, message: str) -> None:
        if self.dropped:
            _log.warning("an endpoint that was not chosen does not close: %s", message)
        self.failure = message

    def endpoint_closed(self) -> None:
        self.closed()


@dataclasses.dataclass(frozen=True, slots=True)
class WayContext:
    """What the ways of all links of a node share."""

    node: LocalNode
    fabric: FabricPort
    events: FabricEvents
    threads: Executor


class LinkWay:
    """Owner: the main loop. The initiator calls `offer`, the acceptor `answer`, then both `connect`; `close` at any
    time."""

    def __init__(self, context: WayContext, handler: EndpointHandler, *, allow_local: bool) -> None:
        """`allow_local`: whether this link may go over memory, if the node may at all."""
        self.via = context.node.provider
        self.refusal = ""  # why a peer of this host is not reached over memory
        self._context = context
        self._handler = handler
        self._may_be_local = allow_local and bool(context.node.host)
        self._endpoint = self._new(self, context.fabric.open_endpoint, context.node.regions)
        self._is_closed = False  # the endpoint that is chosen, or will be unless the other one is
        self._local: LinkEndpoint | None = None  # until one of the two is chosen
        self._unused = _Unused(self._unused_closed)
        self._num_unused = 0  # other endpoints that are not closed
        self._is_closing = False

    @property
    def ident(self) -> int | None:
        """The fabric's number of the endpoint, once it is open."""
        return self._endpoint.ident

    async def offer(self) -> Offer:
        """Descriptors of both kinds. Raises FabricError (a RuntimeError)."""
        descriptor = await self._endpoint.open()
        if not self._may_be_local:
            return Offer(descriptor)
        self._local = self._new_local(self._context.node.regions)
        try:
            return Offer(descriptor, await self._local.open())
        except RuntimeError as error:  # FabricError
            self._drop_local(f"no local endpoint: {error}")
            return Offer(descriptor)

    async def answer(self, hello: wire.Hello) -> Offer:
        """A descriptor of the kind that is chosen. Raises FabricError (a RuntimeError)."""
        if self._may_be_local and hello.local and hello.host == self._context.node.host:
            self._local = self._new_local(())  # nobody writes to who accepts
            try:
                descriptor = await self._local.open()
                await self._local.connect(hello.local)
            except RuntimeError as error:  # FabricError
                self._drop_local(str(error))
            else:
                self._choose_local()
                return Offer(descriptor, descriptor)
        return Offer(await self._endpoint.open())

    async def connect(self, hello: wire.Hello, *, initiator: bool) -> None:
        """Learns the peer's endpoint, once both have said hello.

        Raises:
            Unreachable: it cannot be, over memory.
            PeerProtocol: it has chosen what was not offered.
            FabricError: a RuntimeError; the peer's descriptor is malformed or incompatible.
        """
        if self.via == LOCAL:
            return
        if not (initiator and hello.local):
            if self._local is not None:
                self._drop_local("")
            await self._endpoint.connect(hello.descriptor)
            return
        if self._local is None:
            raise PeerProtocol(f"{hello.name} chose a local endpoint that was not offered")
        self._choose_local()
        try:
            if self._unused.failure:
                raise Unreachable(self._unused.failure)
            await self._endpoint.connect(hello.local)
        except (Unreachable, RuntimeError) as error:  # FabricError
            self.refusal = str(error)
            raise Unreachable(self.refusal) from error

    def close(self) -> None:
        """The handler hears `endpoint_closed` once all endpoints are closed, as LinkEndpoint.close tells it."""
        self._is_closing = True
        if self._local is not None:
            self._local.close()
        self._endpoint.close()

    # -- of the chosen endpoint (EndpointHandler) -------------------------------------------------------------------
    def endpoint_failed(self, message: str) -> None:
        self._handler.endpoint_failed(message)

    def endpoint_closed(self) -> None:
        self._is_closed = True
        if not self._is_closing:  # the native side closed it by itself
            self._endpoint.gone()
            self._handler.endpoint_failed("it was closed")  # which closes what else there is
        self._tell_closed()

    # -- inside ---------------------------------------------------------------------------------------------------
    def _unused_closed(self) -> None:
        self._num_unused -= 1
        self._tell_closed()

    def _tell_closed(self) -> None:
        if self._is_closed and self._is_closing and not self._num_unused:
            self._handler.endpoint_closed()

    def _new(self, handler: EndpointHandler, open_it: Callable[[], int], regions: Sequence[int]) -> LinkEndpoint:
        context = self._context
        return LinkEndpoint(context.fabric, context.events, handler, regions, context.threads, open_it)

    def _new_local(self, regions: Sequence[int]) -> LinkEndpoint:
        self._num_unused += 1
        return self._new(self._unused, functools.partial(self._context.fabric.open_endpoint, local=True), regions)

    def _choose_local(self) -> None:
        if self._is_closing or self._local is None:
            return
        fabric, self._endpoint, self._local = self._endpoint, self._local, None
        self._endpoint.handler, fabric.handler = self, _Unused(self._unused_closed, dropped=True)
        fabric.close()
        self.via = LOCAL

    def _drop_local(self, why: str) -> None:
        assert self._local is not None
        self.refusal = why
        self._unused.dropped = True
        self._local.close()
        self._local = None
