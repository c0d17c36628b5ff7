"""What went over each link, by peer and direction, since this life of the node began. Totals never fall.

Peers name themselves, so names are bounded: the first MOST_NAMES keep their own, later ones share OTHER.
"""

from __future__ import annotations

import collections
import dataclasses

from pdd.metrics import DIRECTIONS

OUT, IN = DIRECTIONS
MOST_NAMES = 256
OTHER = "other"
_KEPT_TIMES = 256  # of the latest transfers of a flow


class Names:
    """The names that this node tells apart. Owner: the main loop."""

    def __init__(self, most: int = MOST_NAMES) -> None:
        self._most = most
        self._known: dict[str, None] = {}

    def label(self, name: str) -> str:
        """`name` itself, or OTHER when too many came before it."""
        if name not in self._known:
            if len(self._known) >= self._most:
                return OTHER
            self._known[name] = None
        return name

    def all(self) -> list[str]:
        return list(self._known)


@dataclasses.dataclass(slots=True)
class Flow:
    """One direction of one peer. Owner: Flows."""

    peer: str
    direction: str  # OUT: written by this node; IN: counted here
    via: str = ""  # what carried the latest: a provider, or "local"
    writes: int = 0
    bytes: int = 0
    units: int = 0
    failed: int = 0  # attempts or jobs that did not complete, those left out that were only cancelled
    times: collections.deque[float] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=_KEPT_TIMES))

    def seconds(self, share: float) -> float | None:
        """The time within which `share` of the latest transfers were whole; None before the first."""
        if not self.times:
            return None
        ordered = sorted(self.times)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


class Flows:
    """Owner: the main loop."""

    def __init__(self) -> None:
        self.names = Names()
        self._by_link: dict[tuple[str, str], Flow] = {}

    def of(self, peer: str, direction: str, via: str = "") -> Flow:
        """The flow of a peer that named itself `peer`, now carried by `via` if that is given; a new one is all zero."""
        name = self.names.label(peer)
        flow = self._by_link.setdefault((name, direction), Flow(name, direction))
        flow.via = via or flow.via
        return flow

    def all(self) -> list[Flow]:
        return list(self._by_link.values())
