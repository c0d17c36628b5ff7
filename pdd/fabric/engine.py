"""The native fabric with typed answers: `_native.Fabric`, whose caps, stats and events are those of `types.py`.

Commands (open_transfer, arm, ...) are the native ones as they are; this adds nothing to their cost. Importing it loads
the native core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pdd.fabric import _native
from pdd.fabric.types import (
    Arrivals,
    Caps,
    EndpointClosed,
    EndpointFailed,
    Event,
    FlightLayer,
    FlightPlan,
    ImmOverrun,
    ImmReached,
    Stats,
    TransferDone,
    TransferEnd,
)


def _transfer_done(transfer: int, *end: Any) -> TransferDone:
    return TransferDone(transfer, TransferEnd(*end))


_EVENTS: dict[int, Callable[..., Event]] = {
    _native.IMM_REACHED: ImmReached,
    _native.IMM_OVERRUN: ImmOverrun,
    _native.TRANSFER_DONE: _transfer_done,
    _native.ENDPOINT_FAILED: EndpointFailed,
    _native.ENDPOINT_CLOSED: EndpointClosed,
}


class Fabric(_native.Fabric):
    """All fi_* objects of a node's rail groups. `_native.pyi` documents arguments and commands."""

    def read_caps(self) -> Caps:
        """What its NICs offer; the same for as long as it lives."""
        return msgspec.convert(self.caps, Caps)

    def read_stats(self) -> Stats:
        """Its counters now."""
        return msgspec.convert(self.stats(), Stats)

    def read_events(self, max_events: int = 1024) -> list[Event]:
        """Takes at most so many events out of the ring, the oldest first."""
        return [_EVENTS[kind](*details) for kind, *details in self.drain(max_events)]

    def read_flight(self, transfer: int = 0, most: int = 4096) -> list[FlightPlan]:
        """What its workers remember of one transfer, or, for 0, of all: the latest `most` plans of each rail group, the
        oldest first. Waits for the workers: not for the main loop."""
        return [_flight_plan(*plan) for plan in self.flight(transfer, most)]

    def read_arrivals(self, key: int) -> Arrivals | None:
        """None: nothing is kept of this key."""
        try:
            expected, per_mark, first, last, marks = self.imm_arrivals(key)
        except _native.FabricError:
            return None
        return Arrivals(expected, per_mark, first, last, tuple(marks))


def _flight_plan(
    transfer: int, key: int, src_region: int, dst_region: int, first_value: int, num_layers: int, units: int,
    armed: float, layers: list[Any],
) -> FlightPlan:
    return FlightPlan(
        transfer, key, src_region, dst_region, first_value, num_layers, units, armed,
        tuple(FlightLayer(*layer[:-3], *map(tuple, layer[-3:])) for layer in layers),  # the last three are lists
    )
