"""One job of a prefiller: one prompt of one decoder, from its request until every write of it is terminal."""

from __future__ import annotations

import dataclasses
import enum

from pdd.fabric.types import TransferEnd
from pdd.messenger import wire
from pdd.messenger.link import PeerLink
from pdd.messenger.sink import PushSink
from pdd.messenger.status import JobStatus
from pdd.states import Facts, State


class JobState(enum.Enum):
    QUEUED = "queued"
    PUSHING = "pushing"
    SENDING = "sending"
    CANCELLING = "cancelling"
    DONE = "done"


TABLE = {
    JobState.QUEUED: frozenset({JobState.PUSHING, JobState.CANCELLING, JobState.DONE}),
    JobState.PUSHING: frozenset({JobState.SENDING, JobState.CANCELLING, JobState.DONE}),
    JobState.SENDING: frozenset({JobState.CANCELLING, JobState.DONE}),
    JobState.CANCELLING: frozenset({JobState.DONE}),
    JobState.DONE: frozenset(),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """Why a job is not whole, in the decoder's words."""

    reason: wire.EndReason | None  # None: the peer is lost, and nobody is told
    message: str
    retryable: bool = True

    @property
    def label(self) -> str:
        """For counters and records."""
        return self.reason.value if self.reason is not None else "peer_lost"

    def message_for(self, attempt: int, ok: int = 0, failed: int = 0, unknown: int = 0) -> wire.PrefillEnded:
        assert self.reason is not None
        return wire.PrefillEnded(
            attempt=attempt, reason=self.reason, message=self.message[:4000], ok_units=ok, failed_units=failed,
            unknown_units=unknown, retryable=self.retryable,
        )


@dataclasses.dataclass(slots=True, eq=False)
class Job:
    """Owner: Prefiller."""

    request_id: str  # in this node's engine
    client_id: str  # the request's, on the decoder
    attempt: int
    key: int
    link: PeerLink
    sink: PushSink
    num_tokens: int
    num_units: int  # of all layers, when whole
    state: State[JobState]
    transfer: int | None = None
    end: TransferEnd | None = None  # once every write is terminal
    received: float = 0.0
    started: float | None = None  # pages reserved
    computed: float | None = None  # the last chunk's step ended
    sink_is_closed: bool = False
    is_computed: bool = False  # the sink was closed with every token armed
    engine_is_done: bool = False  # it said Finished, and so why
    ending: Ending | None = None

    def __post_init__(self) -> None:
        self.state.facts = self._facts

    def _facts(self) -> Facts:
        units = self.end.ok if self.end is not None else None
        return Facts(peer=self.link.name, attempt=self.attempt, key=self.key, units=units)

    def status(self, now: float) -> JobStatus:
        return JobStatus(
            request_id=self.request_id, client_id=self.client_id, peer=self.link.name, attempt=self.attempt,
            state=self.state.value.value, age_seconds=now - self.state.since, num_tokens=self.num_tokens,
            computed_tokens=self.sink.computed_tokens, why=self.state.why, received=self.received, started=self.started,
            computed=self.computed, transfer=self.transfer, units=self.num_units,
            peer_tp=self.link.peer.geometry.tp,
        )

    @property
    def is_over(self) -> bool:
        """The engine has let go of it, and every write is terminal or there was none."""
        if not (self.is_computed or self.engine_is_done):
            return False
        return not self.sink.was_opened or (self.sink_is_closed and self.end is not None)
