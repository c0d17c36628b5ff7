"""What this node remembers of each request: when what happened to it, with whom, and how it ended.

Fed on the main loop: by the engine's events, by what the messenger reports at the end of each attempt (decoder) and job
(prefiller), and by the stream, which knows how a request ended for its client. Live requests and the latest finished ones
are kept; older ones are forgotten. The state of a live request is not kept here: the engine's snapshot has it. It decides
nothing.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from pdd.engine.request import EngineEvent, Finished, FinishReason, KvReserved, Tokens
from pdd.fabric.types import Arrivals
from pdd.messenger.status import AttemptDone, JobDone

MOST_FINISHED = 512
_MOST_TRIES = 8  # of one request that are remembered, the latest
_FINISH = {"": FinishReason.STOP, "cancelled": FinishReason.ABORT}  # of a prefill, by how its job ended


@dataclasses.dataclass(slots=True)
class Entry:
    """One request. Times are of the node's monotonic clock; None: did not happen (yet)."""

    request_id: str  # of the node that serves the client, also on the prefiller
    kind: str  # generate, prefill
    received: float
    prompt_tokens: int
    prompt: tuple[int, ...] | None = None  # kept only when debug.show_prompts is set
    given_id: str | None = None  # what the client called it
    group: int = 0  # index of the engine that has it
    peer: str = ""
    attempt: int | None = None
    attempts: int = 0
    why: str = ""
    started: float | None = None  # the end of its first wait: pages pinned for remote KV, or its first step
    asked: float | None = None  # a prefiller was asked
    whole: float | None = None  # the KV was counted whole
    computed: float | None = None  # prefill: the last chunk's step ended
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    reason: str = ""
    error: str = ""
    output_tokens: int = 0
    pages: int = 0  # counted (decoder) or written (prefiller), of this node's size
    units: int = 0
    writes: int = 0
    bytes: int = 0
    via: str = ""  # what carried them
    busy_seconds: float = 0.0  # prefill: time with writes queued or in flight
    exposed_seconds: float | None = None  # prefill: of it, after the last layer's attention
    tries: tuple[tuple[AttemptDone, Arrivals | None], ...] = ()  # at the KV, over, as far as the request goes
    job: JobDone | None = None  # prefill

    @property
    def hidden_ratio(self) -> float | None:
        """Share of the transfer's time that lay under compute."""
        if self.exposed_seconds is None or self.busy_seconds <= 0:
            return None
        return max(0.0, 1.0 - self.exposed_seconds / self.busy_seconds)


class Ledger:
    """Owner: the main loop."""

    def __init__(self, clock: Callable[[], float], *, keep_prompts: bool = False) -> None:
        self._clock = clock
        self._keep_prompts = keep_prompts
        self.prompt_tokens = 0  # of all requests that clients had taken
        self._live: dict[str, Entry] = {}
        self._finished: collections.OrderedDict[str, Entry] = collections.OrderedDict()
        self.num_forgotten = 0  # that ended and are not kept any more

    def keep_prompts(self, keep: bool) -> None:
        """Of the requests that come from now on; those that are kept are forgotten when it is off."""
        self._keep_prompts = keep
        if not keep:
            for entry in (*self._live.values(), *self._finished.values()):
                entry.prompt = None

    def __len__(self) -> int:
        return len(self._live)

    def live(self) -> dict[str, Entry]:
        return dict(self._live)

    def finished(self) -> dict[str, Entry]:
        """The latest, the oldest first."""
        return dict(self._finished)

    def find(self, request_id: str) -> Entry | None:
        """A live or recently finished request."""
        return self._live.get(request_id) or self._finished.get(request_id)

    # -- generate requests ------------------------------------------------------------------------------------------
    def open(self, request_id: str, prompt: tuple[int, ...], given_id: str | None = None) -> None:
        kept = prompt if self._keep_prompts else None
        self.prompt_tokens += len(prompt)
        self._live[request_id] = Entry(request_id, "generate", self._clock(), len(prompt), kept, given_id)

    def placed(self, request_id: str, group: int) -> None:
        """Which engine a request was given to."""
        self._live[request_id].group = group

    def first_step(self, request_id: str, at: float) -> None:
        """A request that needs no prefiller was taken into its first step."""
        entry = self._live.get(request_id)
        if entry is not None and entry.started is None:
            entry.started = at

    def engine_event(self, event: EngineEvent) -> None:
        entry = self._live.get(event.request_id)
        if entry is None:
            return
        now = self._clock()
        match event:
            case KvReserved():
                entry.attempt, entry.attempts = event.attempt, entry.attempts + 1
                entry.started = entry.started or now
            case Tokens():
                entry.first_token = entry.first_token or now
                entry.last_token = now
                entry.output_tokens += len(event.outputs)
            case Finished():
                entry.finished = now
                if not entry.reason:  # else the stream has said how it ended, and this answers its abort
                    entry.reason, entry.error = event.reason.value, str(event.error or "")
                self._keep(self._live.pop(event.request_id))
            case _:
                pass

    def ended(self, request_id: str, reason: FinishReason, error: Exception | None) -> None:
        """How a request ended for its client; the engine may still hold it, and may have another word for its end."""
        entry = self.find(request_id)
        if entry is not None:
            entry.reason, entry.error = reason.value, str(error or "")

    # -- from the messenger -----------------------------------------------------------------------------------------
    def attempt_done(self, done: AttemptDone, arrivals: Arrivals | None = None) -> None:
        """One try at the KV of a request is over; `arrivals`: of its units. The request may be over already."""
        entry = self.find(done.request_id)
        if entry is None:
            return
        entry.tries = (*entry.tries, (done, arrivals))[-_MOST_TRIES:]
        if entry.finished is not None:
            return
        entry.peer, entry.asked, entry.why, entry.via = done.peer, done.asked, done.why, done.via
        if done.whole:
            entry.why = f"all KV came from {done.peer}"
            entry.whole, entry.pages, entry.units, entry.bytes = done.finished, done.pages, done.units, done.bytes

    def job_done(self, job: JobDone) -> None:
        """A prefill for a decoder is over."""
        entry = Entry(
            job.request_id, "prefill", job.received, job.num_tokens, peer=job.peer, attempt=job.attempt, attempts=1,
            started=job.started, computed=job.computed, finished=job.finished,
            reason=_FINISH.get(job.reason, FinishReason.ERROR).value,
            error=job.error, pages=job.pages, units=job.units, writes=job.writes, bytes=job.bytes, via=job.via,
            busy_seconds=job.busy_seconds, exposed_seconds=job.exposed_seconds, job=job,
        )
        self._keep(entry)

    def _keep(self, entry: Entry) -> None:
        self._finished.pop(entry.request_id, None)
        self._finished[entry.request_id] = entry
        while len(self._finished) > MOST_FINISHED:
            self._finished.popitem(last=False)
            self.num_forgotten += 1
