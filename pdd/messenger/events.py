"""Brings the fabric's events to whoever waits for them, on the main loop.

One eventfd wakes the loop; `pump` drains the ring and calls, by kind: the owner of the endpoint (its link), the owner
of immediates (Decoder), the owner of transfers (Prefiller). A handler that raises is logged and costs its own event
only.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from pdd.fabric.types import EndpointClosed, EndpointFailed, Event, ImmOverrun, ImmReached, TransferDone, TransferEnd
from pdd.messenger.ports import FabricPort

_log = logging.getLogger(__name__)
_BATCH = 1024


class ImmHandler(Protocol):
    def imm_reached(self, key: int, arrived: int) -> None: ...
    def imm_overrun(self, key: int, arrived: int) -> None: ...


class TransferHandler(Protocol):
    def transfer_done(self, transfer: int, end: TransferEnd) -> None: ...


class EndpointHandler(Protocol):
    def endpoint_failed(self, message: str) -> None: ...
    def endpoint_closed(self) -> None: ...


class FabricEvents:
    """Owner: the main loop. The only reader of the fabric's ring."""

    def __init__(self, fabric: FabricPort) -> None:
        self._fabric = fabric
        self._endpoints: dict[int, EndpointHandler] = {}
        self._early_failures: dict[int, str] = {}  # of endpoints that a thread has opened and nobody owns yet
        self._imm: ImmHandler | None = None
        self._transfers: TransferHandler | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        loop.add_reader(self._fabric.fileno(), self.pump)

    def detach(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._fabric.fileno())
            self._loop = None

    def on_immediates(self, handler: ImmHandler) -> None:
        self._imm = handler

    def on_transfers(self, handler: TransferHandler) -> None:
        self._transfers = handler

    def on_endpoint(self, endpoint: int, handler: EndpointHandler) -> None:
        """`handler` hears of this endpoint until it is closed."""
        self._endpoints[endpoint] = handler
        message = self._early_failures.pop(endpoint, None)
        if message is not None:
            handler.endpoint_failed(message)

    def pump(self) -> None:
        """Handles all events that wait."""
        while batch := self._fabric.read_events(_BATCH):
            for event in batch:
                try:
                    self._handle(event)
                except Exception:
                    _log.exception("a fabric event could not be handled: %r", event)
            if len(batch) < _BATCH:
                return

    def _handle(self, event: Event) -> None:
        match event:
            case ImmReached(key, arrived):
                if self._imm is not None:
                    self._imm.imm_reached(key, arrived)
            case ImmOverrun(key, arrived):
                if self._imm is not None:
                    self._imm.imm_overrun(key, arrived)
            case TransferDone(transfer, end):
                if self._transfers is not None:
                    self._transfers.transfer_done(transfer, end)
            case EndpointFailed(endpoint, message):
                self._endpoint_failed(endpoint, message)
            case EndpointClosed(endpoint):
                self._endpoint_closed(endpoint)

    def _endpoint_failed(self, endpoint: int, message: str) -> None:
        handler = self._endpoints.get(endpoint)
        if handler is None:
            self._early_failures[endpoint] = message
        else:
            handler.endpoint_failed(message)

    def _endpoint_closed(self, endpoint: int) -> None:
        handler = self._endpoints.pop(endpoint, None)
        if handler is not None:
            handler.endpoint_closed()
