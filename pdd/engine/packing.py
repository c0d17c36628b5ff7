"""How the tokens of a step are shared among the requests that still have a prompt to compute. Pure.

Shortest remaining first, so that a short prompt passes between two chunks of a long one. A step that finishes prompts
carries at most as many tokens of others as it finishes: filled up with a long prompt's chunk, it would keep the short one
waiting for that chunk too. A request that was in none of OVERDUE_STEPS steps takes half of the next, the one served
longest ago before the others, so that a stream of short prompts never starves a long one, and overdue long ones never
shut out a short one.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdd.engine.record import Record

OVERDUE_STEPS = 4  # counted in steps, not seconds: a step takes milliseconds on a GPU and a second on a small CPU


def share_budget(records: Sequence[Record], budget: int, step: int) -> list[tuple[Record, int]]:
    """(request, tokens) for step number `step`, tokens >= 1, at most `budget` in all and each at most what remains."""
    if budget < 1 or not records:
        return []
    shares: dict[int, int] = {}
    order = sorted(records, key=_shortest_first)
    overdue = [record for record in order[1:] if step - record.served_step > OVERDUE_STEPS]
    left = budget
    if overdue:
        first = min(overdue, key=_longest_ago_first)
        shares[first.seq] = min(first.remaining, -(-budget // 2))
        left -= shares[first.seq]
    finished = 0
    for record in order:
        share = record.remaining - shares.get(record.seq, 0)
        if share <= left:
            finished += record.remaining
        elif finished:
            share = min(left, finished)
            left = share  # and nothing for those behind it
        else:
            share = left
        if share:
            shares[record.seq] = shares.get(record.seq, 0) + share
            left -= share
        if not left:
            break
    return [(record, shares[record.seq]) for record in order if record.seq in shares]


def _shortest_first(record: Record) -> tuple[int, int]:
    return record.remaining, record.seq


def _longest_ago_first(record: Record) -> tuple[int, int]:
    return record.served_step, record.seq
