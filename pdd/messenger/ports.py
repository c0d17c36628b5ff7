"""What the messenger needs from the layers below, as protocols: the fabric and the write planner.

The real ones are `pdd.fabric.engine.Fabric` and an adapter of `pdd.kv.sharding`; tests and the simulation bring
their own. Events are those of `pdd.fabric.types`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

from pdd.fabric.types import Event, FlightPlan
from pdd.messenger import wire


class FabricPort(Protocol):
    """The part of `Fabric` that a messenger uses. Safe from any thread; raises FabricError (a RuntimeError)."""

    def fileno(self) -> int: ...
    def read_events(self, max_events: int = 1024) -> list[Event]: ...
    def open_endpoint(self, local: bool = False) -> int: ...
    def describe(self, endpoint: int, regions: list[int]) -> bytes: ...
    def connect(self, endpoint: int, descriptor: bytes) -> None: ...
    def close_endpoint(self, endpoint: int) -> None: ...
    def imm_allocate(self, endpoint: int) -> int: ...
    def imm_arm(self, key: int, expected: int) -> None: ...
    def imm_arrived(self, key: int) -> int: ...
    def imm_retire(self, key: int) -> int: ...
    def open_transfer(self, endpoint: int, key: int) -> int: ...
    def arm(self, transfer: int, watch: int, first_value: int, plan: Any, begin: int, end: int) -> None: ...
    def finish(self, transfer: int) -> None: ...
    def cancel(self, transfer: int) -> None: ...


class FlightPort(Protocol):
    """What the fabric remembers of writes. For `explain`: nothing depends on it."""

    @property
    def nic_names(self) -> Sequence[str]:
        """By number, as FlightLayer has them."""

    async def plans(self, transfer: int) -> Sequence[FlightPlan]:
        """Of one transfer, the oldest first; [] when nothing is remembered. May raise FabricError or TimeoutError."""


class PushPlan(Protocol):
    """The writes of one layer from one source rank to one of the destination, in token order; made once per request."""

    @property
    def native(self) -> Any:
        """The fabric's WritePlan."""

    def entries(self, begin_token: int, end_token: int) -> tuple[int, int]:
        """The half-open range of entries that computing these tokens makes sendable. Ranges of successive chunks tile
        the plan, whatever the chunks are."""


class Planner(Protocol):
    """The arithmetic that both sides of a transfer must agree on."""

    def expected_units(
        self, source: wire.Geometry, destination: wire.Geometry, num_tokens: int, skip_tokens: int
    ) -> int:
        """Units that make the KV of `num_tokens` tokens whole, over all ranks of the destination."""

    def expected_bytes(
        self, source: wire.Geometry, destination: wire.Geometry, num_tokens: int, skip_tokens: int
    ) -> int:
        """Bytes that those units stand for."""

    def choose_source_sets(
        self, source: wire.Geometry, destination: wire.Geometry, rng: random.Random
    ) -> tuple[int, ...]:
        """Which copy of the source's KV is to feed each replica set of the destination; empty when there is one."""

    def plan(
        self,
        source: wire.Geometry,
        destination: wire.Geometry,
        source_pages: Sequence[int],
        destination_pages: Sequence[int],
        num_tokens: int,
        skip_tokens: int,
        source_sets: Sequence[int] = (),
        group: int = 0,
    ) -> Sequence[PushPlan]:
        """`group`: of the destination's engines, whose pages `destination_pages` are."""
