"""`pdd explain`: the whole story of one request, put together from what each part remembers of it.

The engine's and the messenger's state changes (pdd.history), the ledger's times, the attempts and the arrivals of their
units, the pages that are held, and, on a decoder, what the prefillers say when they are asked over their links. Nothing
here changes anything, and nothing is trusted: a prefiller that does not answer is told as such.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from pdd.control import stories
from pdd.daemon import verdicts
from pdd.daemon.ledger import Entry
from pdd.fabric.types import Arrivals
from pdd.messenger import wire
from pdd.messenger.explain import Push, explained, push_of, push_that_ended
from pdd.messenger.status import AttemptDone, AttemptStatus
from pdd.states import Change

if TYPE_CHECKING:
    from pdd.daemon.node import Node

_LINK_SECONDS = 10.0  # changes of a link that long after the end of a request still belong to its story
_MOST_ASKED = 4  # attempts of one request that prefillers are asked about, the latest


async def explain(node: Node, request_id: str) -> stories.Explain:
    """Of a request that `Documents.request` knows by that id."""
    entry = node.ledger.find(request_id)
    row = node.documents.request(request_id)
    jobs = [job for job in node.view.jobs() if job.client_id == request_id]
    now = time.monotonic()
    if jobs:
        entry = None  # of an earlier try of the same prompt here
    received = entry.received if entry is not None else now - row.age_seconds
    story = _Story(node, received, now)
    if row.kind == "prefill":
        pushes = [push_of(job, now) for job in jobs]
        if not pushes and entry is not None and entry.job is not None:
            pushes = [push_that_ended(entry.job)]
        ids = [job.request_id for job in jobs] or ([entry.job.job_id] if entry is not None and entry.job else [])
        push = await _own_push(node, pushes[-1]) if pushes else None
        attempts: tuple[stories.ExplainAttempt, ...] = ()
    else:
        ids, push = [request_id], None
        attempts = await _attempts(node, request_id, entry, story)
    changes = story.changes(ids, {row.peer, *(each.peer for each in attempts)}, entry)
    over = row.state == "finished"
    made = stories.Explain(
        id=request_id, node=node.config.node.name, role=node.config.node.role, kind=row.kind, state=row.state, over=over,
        verdict="", age_seconds=row.age_seconds, client_request_id=row.client_request_id,
        group=row.group if len(node.groups) > 1 else None, reason=row.reason,
        error=(entry.error or None) if entry is not None else None, prompt_tokens=row.prompt_tokens,
        output_tokens=row.output_tokens, tries=row.attempts, ttft=_ttft(entry, attempts), attempts=attempts, push=push,
        pages=_pages(node, ids, now), steps=changes, dump=node.dumps.about(request_id),
    )
    return verdicts.judged(made, row)


class _Story:
    """Times as seconds since the request came."""

    def __init__(self, node: Node, received: float, now: float) -> None:
        self.received = received
        self.now = now
        self._history = node.history

    def at(self, time: float | None) -> float | None:
        return None if time is None else time - self.received

    def changes(
        self, ids: Sequence[str], peers: set[str | None], entry: Entry | None
    ) -> tuple[stories.ExplainStep, ...]:
        """Of the request and what belongs to it, and of the links that it went over meanwhile, in the order of time."""
        until = self.now if entry is None or entry.finished is None else entry.finished + _LINK_SECONDS
        found = [change for request_id in ids for change in self._history.story(request_id)]
        found += [
            change for change in self._history.links()
            if change.facts.peer and change.facts.peer in peers and self.received <= change.at <= until
        ]
        return tuple(self._step(change) for change in sorted(found, key=lambda change: change.at))

    def _step(self, change: Change) -> stories.ExplainStep:
        facts, attempt = change.facts, change.facts.attempt
        if attempt is None and change.kind == "attempt":  # it begins, and knows nothing but its number
            attempt = int(change.ident.rpartition("/")[2])
        return stories.ExplainStep(
            at_seconds=change.at - self.received, kind=change.kind, of=change.ident, before=change.before,
            state=change.after, why=change.why or None, peer=facts.peer or None, attempt=attempt, key=facts.key,
            units=facts.units, step=facts.step,
        )


# -- a prefiller ---------------------------------------------------------------------------------------------------------
async def _own_push(node: Node, push: Push) -> stories.ExplainPush:
    fabric = node.fabric
    assert fabric is not None  # it has jobs
    nobody = wire.ExplainRequest(ask=0, attempt=0)
    return _push(await explained(nobody, push, fabric.flight, fabric.regions, time.monotonic))


def _push(answer: wire.ExplainAnswer) -> stories.ExplainPush:
    """Words of a peer, made fit for a terminal."""
    return stories.ExplainPush(
        state=answer.state, state_seconds=answer.state_seconds, why=wire.one_line(answer.why) or None,
        queue_seconds=answer.queue_seconds, compute_seconds=answer.compute_seconds, send_seconds=answer.send_seconds,
        exposed_seconds=answer.exposed_seconds, tokens=answer.tokens, computed_tokens=answer.computed_tokens,
        units=answer.units, ok_units=answer.ok_units, failed_units=answer.failed_units,
        unknown_units=answer.unknown_units, chunks=answer.steps,
        lacks=tuple(
            stories.ExplainLack(
                what=lack.what, chunk=lack.chunk, first_layer=lack.first_layer, last_layer=lack.last_layer,
                from_rank=lack.from_rank, to_rank=lack.to_rank, nic=lack.nic or None, units=lack.units,
                seconds=lack.seconds,
            )
            for lack in answer.lacks
        ),
        more_lacks=answer.more_lacks,
    )


# -- a decoder -----------------------------------------------------------------------------------------------------------
async def _attempts(
    node: Node, request_id: str, entry: Entry | None, story: _Story
) -> tuple[stories.ExplainAttempt, ...]:
    """The oldest first. Their prefillers are asked at once, about the latest ones."""
    live = [each for each in node.view.attempts() if each.request_id == request_id]
    in_hand = {each.attempt for each in live}
    tries = () if entry is None else entry.tries
    found = [_ended(done, arrivals, story) for done, arrivals in tries if done.attempt not in in_hand]
    found += [_in_hand(each, _arrivals(node, each.key), story) for each in live]
    asked = [each for each in found if each.peer][-_MOST_ASKED:]
    answers = await asyncio.gather(*(_ask(node, each) for each in asked))
    said = dict(zip((each.attempt for each in asked), answers, strict=True))
    return tuple(said.get(each.attempt, each) for each in found)


async def _ask(node: Node, attempt: stories.ExplainAttempt) -> stories.ExplainAttempt:
    assert node.decoder is not None
    answer = await node.decoder.ask_about(attempt.attempt, attempt.peer or "")
    if isinstance(answer, str):
        return replace(attempt, push_unknown=answer)
    if not answer.known:
        return replace(attempt, push_unknown=f"{attempt.peer} remembers nothing of it: its link began later, or it is too "
                       "long ago")
    return replace(attempt, push=_push(answer))


def _arrivals(node: Node, key: int | None) -> Arrivals | None:
    return None if key is None or node.fabric is None else node.fabric.fabric.read_arrivals(key)


def _in_hand(attempt: AttemptStatus, arrivals: Arrivals | None, story: _Story) -> stories.ExplainAttempt:
    return stories.ExplainAttempt(
        attempt=attempt.attempt, peer=attempt.peer or None, key=attempt.key, state=attempt.state,
        state_seconds=attempt.age_seconds, why=attempt.why or None, expected_units=attempt.expected_units,
        arrived_units=attempt.arrived_units, fence_error=attempt.fence_error or None, **_when(arrivals, story),
    )


def _ended(done: AttemptDone, arrivals: Arrivals | None, story: _Story) -> stories.ExplainAttempt:
    return stories.ExplainAttempt(
        attempt=done.attempt, peer=done.peer or None, key=done.key, state="whole" if done.whole else done.reason,
        state_seconds=story.now - done.finished, why=done.why or None, expected_units=done.expected_units,
        arrived_units=done.units, via=done.via or None, **_when(arrivals, story),
    )


def _when(arrivals: Arrivals | None, story: _Story) -> dict[str, Any]:
    """When units came, as members of ExplainAttempt."""
    if arrivals is None:
        return {}
    marks = [
        stories.ExplainMark(units=min((place + 1) * arrivals.units_per_mark, arrivals.expected),
                           at_seconds=at - story.received)
        for place, at in enumerate(arrivals.marks) if at is not None
    ]
    last = arrivals.last
    return {
        "first_unit_at_seconds": story.at(arrivals.first), "last_unit_at_seconds": story.at(last),
        "last_unit_seconds": None if last is None else story.now - last, "arrivals": tuple(marks),
    }


def _pages(node: Node, ids: Sequence[str], now: float) -> tuple[stories.ExplainPages, ...]:
    """What is held for it now."""
    snapshot = node.view.snapshot
    return tuple(
        stories.ExplainPages(
            holder="request" if row.kind != "attempt" else "an attempt that is not settled", state=row.state,
            pages=row.pages, seconds=now - row.state_since,
        )
        for row in (() if snapshot is None else snapshot.requests)
        if row.request_id in ids and row.pages
    )


def _ttft(entry: Entry | None, attempts: Sequence[stories.ExplainAttempt]) -> stories.ExplainTtft | None:
    """Only of what clients wait for."""
    if entry is None or entry.kind != "generate":
        return None
    whole = next((each for each in attempts if each.state == "whole"), None)
    push = whole.push if whole is not None else None
    asks = [done.asked for done, _ in entry.tries if done.asked is not None]
    first_asked = min(asks, default=None)
    remote = entry.whole is not None
    return stories.ExplainTtft(
        total_seconds=_between(entry.received, entry.first_token), queue_seconds=_between(entry.received, entry.started),
        reserve_seconds=_between(entry.started, first_asked),
        failed_attempts_seconds=_between(first_asked, entry.asked) if len(asks) > 1 else None,
        prefill_queue_seconds=push.queue_seconds if push else None,
        prefill_compute_seconds=push.compute_seconds if push else None,
        exposed_seconds=push.exposed_seconds if push else None,
        prefill_seconds=_between(entry.asked, entry.whole) if remote else _between(entry.started, entry.first_token),
        first_decode_seconds=_between(entry.whole, entry.first_token) if remote else None,
    )


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin
