"""One attempt of a decoder: one try at one prompt's KV from one prefiller, as a state machine.

    CHOOSING    no prefiller yet: one is awaited, for a short while
    ARMED       key allocated, count armed, nothing sent
    REQUESTED   the prefiller is asked; units arrive
    CANCELLING  given up; the prefiller's answer is awaited
    DRAINING    the prefiller has answered with its count of units, and some of those are still on the way
    FENCING     the link is gone; the pages are quarantined until its fence is up
    DONE        settled for good

Only DONE is final, and an attempt is settled with the engine exactly once for good (and once QUARANTINED before, on
the way through FENCING).
"""

from __future__ import annotations

import dataclasses
import enum

from pdd.engine.request import KvReserved
from pdd.messenger import wire
from pdd.messenger.link import PeerLink
from pdd.messenger.status import AttemptStatus
from pdd.states import Facts, State


class AttemptState(enum.Enum):
    CHOOSING = "choosing"
    ARMED = "armed"
    REQUESTED = "requested"
    CANCELLING = "cancelling"
    DRAINING = "draining"
    FENCING = "fencing"
    DONE = "done"


TABLE = {
    AttemptState.CHOOSING: frozenset({AttemptState.ARMED, AttemptState.DONE}),
    AttemptState.ARMED: frozenset({AttemptState.REQUESTED, AttemptState.FENCING, AttemptState.DONE}),
    AttemptState.REQUESTED: frozenset(
        {AttemptState.CANCELLING, AttemptState.DRAINING, AttemptState.FENCING, AttemptState.DONE}
    ),
    AttemptState.CANCELLING: frozenset({AttemptState.DRAINING, AttemptState.FENCING, AttemptState.DONE}),
    AttemptState.DRAINING: frozenset({AttemptState.FENCING, AttemptState.DONE}),
    AttemptState.FENCING: frozenset({AttemptState.DONE}),
    AttemptState.DONE: frozenset(),
}


@dataclasses.dataclass(slots=True, eq=False)
class Attempt:
    """Owner: Decoder."""

    reserved: KvReserved
    state: State[AttemptState]
    link: PeerLink | None = None
    key: int | None = None
    expected_units: int = 0
    expected_bytes: int = 0  # that those stand for
    source_sets: tuple[int, ...] = ()  # copies of the prefiller's KV that feed this node's replica sets
    asked: float | None = None  # when the request was sent
    abandoned: bool = False  # nobody wants the result any more: no retry, no error
    failure: Exception | None = None  # why it is given up; decides what the request is told or how it is retried
    retryable: bool = True
    ended: wire.PrefillEnded | None = None  # the prefiller's answer

    # progress, as seen from here
    arrived_units: int = 0
    peer_tokens: int = -1  # computed, as the last heartbeat said; -1: not listed yet
    num_absent: int = 0  # heartbeats in a row that did not list it
    progress_at: float = 0.0

    def __post_init__(self) -> None:
        self.state.facts = self._facts

    def _facts(self) -> Facts:
        peer = self.link.name if self.link is not None else ""
        return Facts(peer=peer, attempt=self.id, key=self.key, units=self.arrived_units)

    @property
    def is_refused(self) -> bool:
        """The prefiller will never take it."""
        return self.ended is not None and self.ended.reason is wire.EndReason.REFUSED

    @property
    def id(self) -> int:
        return self.reserved.attempt

    @property
    def num_tokens(self) -> int:
        """Tokens that the prefiller computes for it."""
        return len(self.reserved.tokens)

    def bytes_of(self, num_units: int) -> int:
        """What so many of its units stand for; they are of one size, or as good as that."""
        return self.expected_bytes * num_units // self.expected_units if self.expected_units else 0

    @property
    def arrived_pages(self) -> int:
        """What the units counted make of the destination pages."""
        return len(self.reserved.pages) * self.arrived_units // self.expected_units if self.expected_units else 0

    @property
    def fits_a_frame(self) -> bool:
        """Whether one frame holds the request."""
        num_bytes = 4 * (len(self.reserved.tokens) + len(self.reserved.pages))
        return num_bytes < wire.MAX_FRAME_BYTES - 4096

    def request(self, epoch: int) -> wire.PrefillRequest:
        """What the prefiller is asked, once there is a key."""
        assert self.key is not None
        reserved = self.reserved
        return wire.PrefillRequest(
            attempt=self.id, key=self.key, epoch=epoch, tokens=wire.pack_u32(reserved.tokens),
            pages=wire.pack_u32(reserved.pages), skip_tokens=reserved.skip_tokens,
            request_id=reserved.request_id[:256], source_sets=self.source_sets, group=reserved.group,
        )

    def status(self, now: float, arrived_units: int) -> AttemptStatus:
        """`arrived_units`: as counted now; `self.arrived_units` is from when progress was last looked at."""
        return AttemptStatus(
            attempt=self.id, request_id=self.reserved.request_id, state=self.state.value.value,
            age_seconds=now - self.state.since, peer=self.link.name if self.link is not None else "", key=self.key,
            num_tokens=self.num_tokens, num_pages=len(self.reserved.pages), arrived_units=arrived_units,
            expected_units=self.expected_units,
            why=str(self.failure) if self.failure is not None else self.state.why,
            fence_error=self.link.fence_error if self.link is not None else "",
        )
