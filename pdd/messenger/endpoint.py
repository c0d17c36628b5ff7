"""The fabric endpoint of one link: opened, described and connected off the main loop, closed exactly once.

Opening can take a provider many seconds, so each of these calls runs on a thread while the loop serves everybody else.
Whoever waits may be cancelled; the call is not. An endpoint that appears after its link has ended is closed at once,
and the link hears `endpoint_closed` only then: none is ever leaked. The link decides when it ends; this knows no peer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

from pdd.messenger.events import EndpointHandler, FabricEvents
from pdd.messenger.ports import FabricPort

_log = logging.getLogger(__name__)
T = TypeVar("T")


class LinkEndpoint:
    """Owner: the main loop. `open` at most once; `close` at any time."""

    def __init__(
        self, fabric: FabricPort, events: FabricEvents, handler: EndpointHandler, regions: Sequence[int],
        threads: Executor, open_it: Callable[[], int],
    ) -> None:
        """`open_it`: the call of `fabric` that opens an endpoint of the right kind."""
        self.ident: int | None = None
        self.handler = handler  # who hears of it now
        self._open_it = open_it
        self._fabric = fabric
        self._events = events
        self._regions = list(regions)
        self._threads = threads
        self._opening: asyncio.Task[None] | None = None
        self._is_closing = False

    async def open(self) -> bytes:
        """Its descriptor, for the peer. Raises FabricError (a RuntimeError)."""
        self._opening = asyncio.create_task(self._open(), name="open endpoint")
        self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())  # somebody has looked
        await asyncio.shield(self._opening)
        assert self.ident is not None
        return await self._call(lambda ident: self._fabric.describe(ident, self._regions))

    async def connect(self, descriptor: bytes) -> None:
        """Learns the peer's descriptor. Raises FabricError (a RuntimeError)."""
        await self._call(lambda ident: self._fabric.connect(ident, descriptor))

    def close(self) -> None:
        """The handler hears `endpoint_closed` once the fence is up: at once if there is no endpoint, or
        `endpoint_failed` if it cannot be closed."""
        if self._is_closing:
            return
        self._is_closing = True
        if self.ident is not None:
            self._close(self.ident)
        elif self._opening is None or self._opening.done():
            self.handler.endpoint_closed()

    def gone(self) -> None:
        """It has closed by itself."""
        self._is_closing = True

    # -- fabric events (EndpointHandler) ----------------------------------------------------------------------------
    def endpoint_failed(self, message: str) -> None:
        self.handler.endpoint_failed(message)

    def endpoint_closed(self) -> None:
        self.handler.endpoint_closed()

    # -- inside ---------------------------------------------------------------------------------------------------
    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            ident = await loop.run_in_executor(self._threads, self._open_it)
        except RuntimeError as error:
            if not self._is_closing:
                raise
            _log.debug("an endpoint that nobody waits for any more did not open: %s", error)
            self.handler.endpoint_closed()
            return
        self.ident = ident
        self._events.on_endpoint(ident, self)
        if self._is_closing:
            self._close(ident)

    async def _call(self, call: Callable[[int], T]) -> T:
        assert self.ident is not None
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, self.ident)

    def _close(self, ident: int) -> None:
        try:
            self._fabric.close_endpoint(ident)
        except RuntimeError as error:
            self.handler.endpoint_failed(f"it cannot be closed: {error}")
