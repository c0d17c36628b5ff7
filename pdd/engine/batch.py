"""The step plan: what one forward step runs, as plain data from the engine thread to every rank.

A rank keeps, per slot, what never changes (block table so far, sampling parameters, token counts for penalties); a
plan carries full data for new requests and differences for known ones, so a step's message does not grow with context.
msgspec Structs: they cross a process border as msgpack.
"""

from __future__ import annotations

import msgspec


class Sampling(msgspec.Struct, frozen=True):
    """Wire form of SamplingParams, less what the engine thread decides itself (max_tokens, stop ids)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned: tuple[int, ...] = ()  # token ids with probability 0 until min_tokens is reached
    min_tokens: int = 0
    seed: int = 0
    logprobs: int | None = None


class NewRow(msgspec.Struct, frozen=True):
    """A request that the ranks have not seen, or that was preempted and starts over."""

    row_id: int  # unique in this engine's life
    prompt: tuple[int, ...]  # for penalties; tokens generated before a preemption are in `output`
    output: tuple[int, ...]
    sampling: Sampling | None  # None: prefill only, never sampled


class Row(msgspec.Struct, frozen=True):
    """One request's share of a step: `tokens` at positions [start, start + len(tokens))."""

    row_id: int
    tokens: tuple[int, ...]  # qo_len of them
    start: int  # tokens whose KV is already in the pages
    new_pages: tuple[int, ...]  # appended to the row's block table before the step
    sample: bool  # sample after the last token (false for all but the last chunk, and on prefillers)


class StepPlan(msgspec.Struct, frozen=True):
    """One forward step. The layer counter reads step * num_layers + l + 1 once layer l of it is attended."""

    step: int  # 0, 1, 2, ... without gaps
    gone: tuple[int, ...]  # row ids to forget
    new: tuple[NewRow, ...]
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


class SampledRow(msgspec.Struct, frozen=True):
    row_id: int
    tokens: tuple[int, ...]  # one, or more with speculation
    logprobs: tuple[float, ...] = ()  # of `tokens`, when asked for
    top: tuple[tuple[tuple[int, float], ...], ...] = ()  # per token: (id, logprob), best first


class StepResult(msgspec.Struct, frozen=True):
    step: int
    sampled: tuple[SampledRow, ...]
    seconds: float  # wall time of the forward on rank 0
