"""What all ranks of a node must say alike, and which rank does not. Pure.

Ranks share one model, one plan and one seed, so they sample the same tokens; a rank that does not has another view of
some request's KV, and every token after that would be wrong. Log probabilities are not compared: they are floats for
clients, and rank 0's count.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Sequence

from pdd.engine.batch import StepResult
from pdd.engine.rank_protocol import RankReady
from pdd.errors import RanksDisagree

_READY_FIELDS = (
    "num_layers", "num_pages", "page_size", "head_dim", "dtype", "total_kv_heads", "vocab_size", "eos_token_ids",
    "max_context", "family", "fingerprint",
)


def check_results(results: Sequence[StepResult]) -> None:
    """`results[r]` is rank r's of one step. Raises RanksDisagree unless all sampled the same tokens."""
    if all(result.sampled == results[0].sampled for result in results):
        return
    said = [tuple((row.row_id, row.tokens) for row in result.sampled) for result in results]
    if (pair := _odd_one(said)) is None:
        return
    odd, other = pair
    tokens, wanted = dict(said[odd]), dict(said[other])
    what = "its rows come in another order"
    if tokens.keys() != wanted.keys():
        what = f"it sampled rows {sorted(tokens)}, not {sorted(wanted)}"
    elif tokens != wanted:
        row = next(row for row in wanted if tokens[row] != wanted[row])
        what = f"row {row} got tokens {list(tokens[row])}, not {list(wanted[row])}"
    raise _disagree(odd, other, f"in step {results[0].step}", what)


def check_ready(ready: Sequence[RankReady]) -> None:
    """Raises RanksDisagree unless all ranks made the same of model and memory."""
    for field in _READY_FIELDS:
        said = [getattr(each, field) for each in ready]
        if (pair := _odd_one(said)) is not None:
            odd, other = pair
            raise _disagree(odd, other, "after its start", f"its {field} is {said[odd]}, not {said[other]}")


def _odd_one(values: Sequence[Hashable]) -> tuple[int, int] | None:
    """(a rank that differs from most, one of most); of two that differ, rank 1 and rank 0. None: all are equal."""
    if all(value == values[0] for value in values):
        return None
    most = collections.Counter(values).most_common(1)[0][0]  # the first of equals is that of the lowest rank
    return next(rank for rank, value in enumerate(values) if value != most), values.index(most)


def _disagree(odd: int, other: int, when: str, what: str) -> RanksDisagree:
    return RanksDisagree(
        f"rank {odd} disagrees with rank {other} {when}: {what}",
        hint="All ranks must run the same build of torch and pdd on the same kind of device; see the log of this rank.",
    )
