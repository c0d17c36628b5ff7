"""Brings the fabric's events to whoever waits for them, on the main loop.

One eventfd wakes the loop; `pump` drains the ring and calls, by kind: the owner of the endpoint (its link), the owner
of immediates (Decoder), the owner of transfers (Prefiller). A handler that raises is logged and costs its own event
only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from typing import Any, Protocol

from pdd.messenger.ports import EventKinds, FabricPort

_log = logging.getLogger(__name__)
_BATCH = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class TransferEnd:
    """What became of a transfer's units, and what it cost."""

    ok: int
    failed: int
    unknown: int
    error: str = ""
    writes: int = 0
    bytes: int = 0
    busy_seconds: float = 0.0
    exposed_seconds: float = 0.0


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

    def __init__(self, fabric: FabricPort, kinds: EventKinds) -> None:
        self._fabric = fabric
        self._endpoints: dict[int, EndpointHandler] = {}
        self._early_failures: dict[int, str] = {}  # of endpoints that a thread has opened and nobody owns yet
        self._imm: ImmHandler | None = None
        self._transfers: TransferHandler | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._by_kind: dict[int, Callable[..., None]] = {
            kinds.imm_reached: self._imm_reached,
            kinds.imm_overrun: self._imm_overrun,
            kinds.transfer_done: self._transfer_done,
            kinds.endpoint_failed: self._endpoint_failed,
            kinds.endpoint_closed: self._endpoint_closed,
        }

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
        while batch := self._fabric.drain(_BATCH):
            for kind, *details in batch:
                try:
                    self._by_kind[kind](*details)
                except Exception:
                    _log.exception("a fabric event could not be handled: kind %d %r", kind, details)
            if len(batch) < _BATCH:
                return

    def _imm_reached(self, key: int, arrived: int) -> None:
        if self._imm is not None:
            self._imm.imm_reached(key, arrived)

    def _imm_overrun(self, key: int, arrived: int) -> None:
        if self._imm is not None:
            self._imm.imm_overrun(key, arrived)

    def _transfer_done(self, transfer: int, *end: Any) -> None:
        if self._transfers is not None:
            self._transfers.transfer_done(transfer, TransferEnd(*end))

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
