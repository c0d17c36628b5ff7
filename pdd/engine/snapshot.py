"""What the engine thread lets others see: one immutable picture, swapped by reference.

Everything in a picture is of the same moment, so pages and requests add up. Totals never fall. Times are those of the
engine's clock (monotonic seconds); readers subtract.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from pdd.engine.record import Record
from pdd.engine.request import RequestState
from pdd.engine.scheduler import Scheduler
from pdd.kv.pool import PageCounts, PageState


@dataclasses.dataclass(frozen=True, slots=True)
class RequestRow:
    """A line of `pdd requests`. States are those of RequestState, and of attempts whose request is gone:
    `abandoned` and `quarantined`."""

    request_id: str
    kind: str  # "generate", "prefill", "attempt"
    state: str
    arrived: float
    state_since: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    pages: int = 0
    group: int = 0  # index of the engine that has it


@dataclasses.dataclass(frozen=True, slots=True)
class Totals:
    """Monotonic counts since the engine started."""

    steps: int = 0
    step_seconds: float = 0.0  # of forward passes
    overhead_seconds: float = 0.0  # of the engine thread between two passes, idle time left out
    prompt_tokens: int = 0  # computed here, those of preempted requests again
    generated_tokens: int = 0
    preemptions: int = 0
    expired: int = 0
    misuses: int = 0  # inbox calls that broke the contract
    integrity_failures: int = 0  # checks of the page pool's books that failed


N = TypeVar("N", PageCounts, Totals)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSnapshot:
    at: float
    states: dict[str, int]  # requests by state, every state present; not to be changed
    pages: PageCounts
    batch_size: int  # rows of the latest step; 0 when idle
    batch_tokens: int
    last_step_seconds: float
    queued_prefill_tokens: int  # prompt tokens that this node still has to compute
    totals: Totals
    requests: tuple[RequestRow, ...]
    quarantined_since: float | None = None  # of the pages that have been quarantined for longest

    @property
    def idle(self) -> bool:
        """No request, and no page that anything still waits for."""
        return not self.requests


def joined(snapshots: Sequence[EngineSnapshot]) -> EngineSnapshot:
    """Those of several engines of one node (one at least) as one: sums, of the oldest of their moments."""
    if len(snapshots) == 1:
        return snapshots[0]
    return EngineSnapshot(
        at=min(each.at for each in snapshots),
        states={state: sum(each.states[state] for each in snapshots) for state in snapshots[0].states},
        pages=_summed([each.pages for each in snapshots]),
        batch_size=sum(each.batch_size for each in snapshots),
        batch_tokens=sum(each.batch_tokens for each in snapshots),
        last_step_seconds=max(each.last_step_seconds for each in snapshots),
        queued_prefill_tokens=sum(each.queued_prefill_tokens for each in snapshots),
        totals=_summed([each.totals for each in snapshots]),
        requests=tuple(row for each in snapshots for row in each.requests),
        quarantined_since=min(
            (each.quarantined_since for each in snapshots if each.quarantined_since is not None), default=None
        ),
    )


def _summed(parts: Sequence[N]) -> N:
    """Every field of a dataclass of numbers, added up."""
    kind = type(parts[0])
    return kind(**{field.name: sum(getattr(part, field.name) for part in parts) for field in dataclasses.fields(kind)})


def take_snapshot(
    scheduler: Scheduler, now: float, *, batch_size: int, batch_tokens: int, last_step_seconds: float, totals: Totals
) -> EngineSnapshot:
    """A picture of this moment. O(requests)."""
    states = {state.value: 0 for state in RequestState if state is not RequestState.FINISHED}
    rows = []
    queued = 0
    pool = scheduler.pool
    for record in scheduler.records.values():
        states[record.state.value] += 1
        queued += _prefill_left(record)
        rows.append(RequestRow(
            record.request_id, "generate" if record.sink is None else "prefill", record.state.value, record.arrived,
            record.life.since, record.prompt_len, record.output_len, record.computed,
            pool.num_held(record.hold) if record.hold in pool else 0, scheduler.group,
        ))
    quarantined = []
    for attempt, orphan in scheduler.orphans.items():
        state = "quarantined" if pool.state(attempt) is PageState.QUARANTINED else "abandoned"
        if state == "quarantined":
            quarantined.append(orphan.since)
        rows.append(RequestRow(
            orphan.request_id, "attempt", state, orphan.since, orphan.since, pages=pool.num_held(attempt),
            group=scheduler.group,
        ))
    return EngineSnapshot(
        now, states, pool.counts(), batch_size, batch_tokens, last_step_seconds, queued, totals, tuple(rows),
        min(quarantined, default=None),
    )


def _prefill_left(record: Record) -> int:
    """Tokens of a prompt to be computed here; a decode row's next token is none."""
    if record.state is RequestState.RUNNING:
        return record.remaining if record.sink is not None or record.remaining > 1 else 0
    if record.state is RequestState.WAITING and not record.wants_remote:
        return record.remaining
    return 0
