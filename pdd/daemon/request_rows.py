"""Requests as documents show them. Pure.

A live request's state is the engine's and comes from its snapshot; times and causes are the ledger's; what is on its way
is the messenger's. On a prefiller a prefill is shown by the id that its decoder knows it by.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from pdd.control import schema
from pdd.daemon.flows import IN, OUT
from pdd.daemon.ledger import Entry
from pdd.engine.snapshot import RequestRow
from pdd.kv.layout import pages_of
from pdd.messenger.status import AttemptStatus, JobStatus


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """What all rows of a document share."""

    now: float  # the clock of rows and entries
    page_size: int


@dataclasses.dataclass(frozen=True, slots=True)
class InFlight:
    peer: str
    direction: str


def in_flight(attempts: Sequence[AttemptStatus], jobs: Sequence[JobStatus]) -> Iterator[InFlight]:
    """Everything that is not settled, of those that were asked."""
    for attempt in attempts:
        if attempt.peer:
            yield InFlight(attempt.peer, IN)
    for job in jobs:
        yield InFlight(job.peer, OUT)


def live(
    rows: Sequence[RequestRow], entries: Mapping[str, Entry], attempts: Sequence[AttemptStatus],
    jobs: Sequence[JobStatus], context: Context,
) -> list[schema.Request]:
    """Every request of the engine's snapshot, and those that are too new to be in it."""
    job_of = {job.request_id: job for job in jobs}
    newest = {attempt.request_id: attempt for attempt in attempts}  # attempts come the oldest first
    oldest = {attempt.request_id: attempt for attempt in reversed(attempts)}
    found = []
    for row in rows:
        if row.kind == "prefill":
            found.append(_prefill(row, job_of.get(row.request_id), context))
        elif row.kind == "attempt":
            found.append(_fetching(_plain(row, context), oldest.get(row.request_id)))
        else:
            request = _timed(_plain(row, context), entries.get(row.request_id), context)
            found.append(_fetching(request, newest.get(row.request_id)) if row.state == "wait_kv" else request)
    known = {row.request_id for row in rows}
    for entry in entries.values():
        if entry.request_id not in known:
            found.append(_timed(_new(entry, context), entry, context))
    return found


def finished(entry: Entry, context: Context) -> schema.Request:
    """One that the engine has let go of."""
    assert entry.finished is not None
    request = schema.Request(
        id=entry.request_id, kind=entry.kind, state="finished", age_seconds=entry.finished - entry.received,
        state_age_seconds=context.now - entry.finished, prompt_tokens=entry.prompt_tokens,
        output_tokens=entry.output_tokens,
    )
    return _timed(request, entry, context)


def _plain(row: RequestRow, context: Context) -> schema.Request:
    """What the engine knows."""
    need = pages_of(row.prompt_tokens + row.output_tokens, context.page_size)
    return schema.Request(
        id=row.request_id, kind=row.kind, state=row.state, age_seconds=context.now - row.arrived,
        state_age_seconds=context.now - row.state_since, prompt_tokens=row.prompt_tokens,
        output_tokens=row.output_tokens, group=row.group,
        pages=schema.PageNeed(have=pages_of(row.computed_tokens, context.page_size), need=max(row.pages, need)),
    )


def _new(entry: Entry, context: Context) -> schema.Request:
    age = context.now - entry.received
    return schema.Request(
        id=entry.request_id, kind=entry.kind, state="waiting", age_seconds=age, state_age_seconds=age,
        prompt_tokens=entry.prompt_tokens,
    )


def _prefill(row: RequestRow, job: JobStatus | None, context: Context) -> schema.Request:
    request = _plain(row, context)
    return schema.Request(
        id=job.client_id if job else row.request_id, kind=row.kind, state=row.state, age_seconds=request.age_seconds,
        state_age_seconds=request.state_age_seconds, prompt_tokens=row.prompt_tokens, pages=request.pages, group=row.group,
        peer=job.peer if job else None, attempt=job.attempt if job else None, why=(job.why or None) if job else None,
    )


def _fetching(request: schema.Request, attempt: AttemptStatus | None) -> schema.Request:
    """With how far the attempt is: units counted, as pages."""
    if attempt is None:
        return request
    have = attempt.num_pages * attempt.arrived_units // attempt.expected_units if attempt.expected_units else 0
    return msgspec.structs.replace(
        request, peer=attempt.peer or None, attempt=attempt.attempt, why=attempt.why or request.why,
        pages=schema.PageNeed(have=have, need=attempt.num_pages),
    )


def _timed(request: schema.Request, entry: Entry | None, context: Context) -> schema.Request:
    """With what the ledger remembers."""
    if entry is None:
        return request
    generates = entry.kind == "generate"
    if entry.asked is not None:
        prefill = _between(entry.asked, entry.whole)
    else:
        prefill = _between(entry.started, entry.first_token if generates else entry.computed)
    transfer = schema.RequestTransfer(
        pages=entry.pages, units=entry.units, writes=entry.writes or None, bytes=entry.bytes,
        via=entry.via or None,
    ) if entry.units else None
    return msgspec.structs.replace(
        request, peer=entry.peer or None, attempt=entry.attempt, attempts=entry.attempts, prompt=entry.prompt,
        client_request_id=entry.given_id, group=entry.group,
        why=entry.error or entry.why or None, reason=entry.reason or None,
        queue_seconds=_between(entry.received, entry.started), prefill_seconds=prefill,
        exposed_seconds=entry.exposed_seconds, hidden_ratio=entry.hidden_ratio,
        first_token_seconds=_between(entry.received, entry.first_token), transfer=transfer,
    )


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin
