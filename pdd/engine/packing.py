"""How the tokens of a step are shared among the requests that still have a prompt to compute. Pure.

Shortest remaining first, so that a short prompt passes between two chunks of a long one. Whoever a step finishes waits for
all of it; therefore a longer prompt that would be finished too joins only if it at most doubles the step or takes an eighth
of the budget, and those that would not be finished add at most half of that.
A stream of short prompts would so starve a long one; therefore the oldest comes before the other unfinished ones in each
AGED_STEPS-th step, with at most half of it, and has that half before anyone else in each TURN_STEPS-th.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdd.engine.record import Record

SMALL_PART = 8  # of the budget: a GPU's step of a hundred tokens costs as much as one of ten
# Counted in steps, not seconds: a step takes milliseconds on a GPU and a second on a small CPU.
AGED_STEPS = 4
TURN_STEPS = 16  # a multiple of AGED_STEPS; of the short prompts, one in 16 meets such a step, so their p90 does not feel it


def share_budget(records: Sequence[Record], budget: int, step: int) -> list[tuple[Record, int]]:
    """(request, tokens) for step number `step`, tokens >= 1, at most `budget` in all and each at most what remains."""
    if budget < 1 or not records:
        return []
    order = sorted(records, key=lambda record: (record.remaining, record.seq))
    oldest, half = min(records, key=lambda record: record.seq), -(-budget // 2)
    shares = dict.fromkeys((record.seq for record in order), 0)
    left = budget

    def give(record: Record, most: int) -> int:
        nonlocal left
        share = min(record.remaining - shares[record.seq], most, left)
        shares[record.seq] += share
        left -= share
        return share

    if step % TURN_STEPS == 0:
        give(oldest, half)
    finished, small = 0, budget // SMALL_PART
    for record in order:
        rest = record.remaining - shares[record.seq]
        if rest > left or (finished and rest > max(finished, small)):
            break
        give(record, left)
        finished += record.remaining
    begun = sum(shares[record.seq] for record in order if shares[record.seq] < record.remaining)
    limit = max(max(finished, small) // 2 - begun, 0) if finished else left  # for prompts that this step does not finish
    if step % AGED_STEPS == 0 and not begun:
        limit -= give(oldest, min(half, limit))
    for record in order:
        limit -= give(record, limit)
    return [(record, shares[record.seq]) for record in order if shares[record.seq]]
