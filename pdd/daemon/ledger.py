"""What this node remembers of each request: when it was in which state, with whom, and how it ended.

Fed from two places, both on the main loop: the engine's events, and what the messenger reports at the end of each attempt
(decoder) and job (prefiller). Live requests and the latest finished ones are kept; older ones are forgotten. It decides
nothing.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from pdd.engine.request import EngineEvent, Finished, FinishReason, KvReserved, Tokens
from pdd.messenger.status import AttemptDone, JobDone

_MOST_FINISHED = 512


@dataclasses.dataclass(slots=True)
class Entry:
    """One request. Times are of the node's monotonic clock; None: did not happen (yet)."""

    request_id: str  # of the node that serves the client, also on the prefiller
    kind: str  # generate, prefill
    received: float
    prompt_tokens: int
    state: str = "waiting"
    state_since: float = 0.0
    peer: str = ""
    attempt: int | None = None
    attempts: int = 0
    why: str = ""
    started: float | None = None  # pages pinned: for remote KV, or for the first chunk
    asked: float | None = None  # a prefiller was asked
    whole: float | None = None  # the KV was counted whole
    computed: float | None = None  # prefill: the last chunk's step ended
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    reason: str = ""
    error: str = ""
    output_tokens: int = 0
    units: int = 0  # counted (decoder) or written (prefiller)
    writes: int = 0
    bytes: int = 0
    busy_seconds: float = 0.0  # prefill: time with writes queued or in flight
    exposed_seconds: float | None = None  # prefill: of it, after the last layer's attention

    @property
    def hidden_ratio(self) -> float | None:
        """Share of the transfer's time that lay under compute."""
        if self.exposed_seconds is None or self.busy_seconds <= 0:
            return None
        return max(0.0, 1.0 - self.exposed_seconds / self.busy_seconds)


class Ledger:
    """Owner: the main loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._unit_bytes = 0
        self._live: dict[str, Entry] = {}
        self._finished: collections.OrderedDict[str, Entry] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def unit_is(self, num_bytes: int) -> None:
        """Bytes that one unit stands for: a page of one layer."""
        self._unit_bytes = num_bytes

    def live(self) -> list[Entry]:
        return list(self._live.values())

    def find(self, request_id: str) -> Entry | None:
        """A live or recently finished request."""
        return self._live.get(request_id) or self._finished.get(request_id)

    # -- generate requests ------------------------------------------------------------------------------------------
    def open(self, request_id: str, prompt_tokens: int) -> None:
        now = self._clock()
        self._live[request_id] = Entry(request_id, "generate", now, prompt_tokens, state_since=now)

    def engine_event(self, event: EngineEvent) -> Entry | None:
        """Returns the entry that the event ended, if it ended one."""
        entry = self._live.get(event.request_id)
        if entry is None or entry.kind != "generate":
            return None
        now = self._clock()
        match event:
            case KvReserved():
                entry.attempt, entry.attempts = event.attempt, entry.attempts + 1
                entry.started = entry.started or now
                self._move(entry, "wait_kv", now)
            case Tokens():
                if entry.first_token is None:
                    entry.first_token = now
                    entry.started = entry.started or now
                entry.last_token = now
                entry.output_tokens += len(event.outputs)
                if entry.state != "running":
                    self._move(entry, "running", now)
            case Finished():
                return self.close(entry.request_id, event.reason, event.error)
            case _:
                pass
        return None

    def close(self, request_id: str, reason: FinishReason, error: Exception | None) -> Entry | None:
        entry = self._live.pop(request_id, None)
        if entry is None:
            return None
        entry.finished = self._clock()
        entry.reason, entry.error = reason.value, str(error or "")
        self._move(entry, "finished", entry.finished)
        self._keep(entry)
        return entry

    # -- from the messenger -----------------------------------------------------------------------------------------
    def attempt_done(self, done: AttemptDone) -> None:
        """One try at the KV of a request is over."""
        entry = self._live.get(done.request_id)
        if entry is None:
            return
        entry.peer, entry.asked, entry.why = done.peer, done.asked, done.why
        if done.whole:
            entry.whole, entry.units, entry.bytes = done.finished, done.units, done.units * self._unit_bytes
            self._move(entry, "ready", done.finished)

    def job_done(self, job: JobDone) -> None:
        """A prefill for a decoder is over."""
        entry = Entry(
            job.request_id, "prefill", job.received, job.num_tokens, "finished", job.finished, job.peer, job.attempt, 1,
            started=job.started, computed=job.computed, finished=job.finished, reason="stop" if job.whole else "error",
            error=job.error, units=job.units, writes=job.writes, bytes=job.bytes, busy_seconds=job.busy_seconds,
            exposed_seconds=job.exposed_seconds,
        )
        self._keep(entry)

    def _move(self, entry: Entry, state: str, now: float) -> None:
        entry.state, entry.state_since = state, now

    def _keep(self, entry: Entry) -> None:
        self._finished.pop(entry.request_id, None)
        self._finished[entry.request_id] = entry
        while len(self._finished) > _MOST_FINISHED:
            self._finished.popitem(last=False)
