"""What went over each link, by peer and direction, since this life of the node began. Totals never fall."""

from __future__ import annotations

import dataclasses

OUT, IN = "out", "in"


@dataclasses.dataclass(slots=True)
class Flow:
    """One direction of one peer. Owner: Flows."""

    peer: str
    direction: str  # OUT: written by this node; IN: counted here
    writes: int = 0
    bytes: int = 0
    units: int = 0
    failed: int = 0  # attempts or jobs that did not complete


class Flows:
    """Owner: the main loop."""

    def __init__(self) -> None:
        self._by_link: dict[tuple[str, str], Flow] = {}

    def add(self, peer: str, direction: str, *, writes: int = 0, bytes: int = 0, units: int = 0, failed: int = 0) -> None:
        flow = self._by_link.setdefault((peer, direction), Flow(peer, direction))
        flow.writes += writes
        flow.bytes += bytes
        flow.units += units
        flow.failed += failed

    def all(self) -> list[Flow]:
        return list(self._by_link.values())
