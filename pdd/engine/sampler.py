"""Chooses the next token of each row from its logits.

Order, as vLLM has it: logit bias and bans, then repetition, frequency and presence penalties, then temperature, then
min-p, top-k and top-p. Logprobs are of the model's own distribution: log-softmax of the raw logits, before any of
these.

Randomness is counter based: one uniform number from (seed, position), turned into a token by the inverse of the
cumulative distribution in vocabulary order. So the token at a position is a function of seed, position and logits
alone, whatever else is in the batch, after a preemption, and on another node. Cut-offs keep every token that ties
with the last one kept, for the same reason: equal logits are common in bfloat16, and which of them a sort puts first
is not defined.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from pdd.engine.batch import SampledRow, Sampling

_MASK64 = (1 << 64) - 1
_QUICK_CANDIDATES = 1024  # top-p looks at this many before it sorts the whole vocabulary


@dataclasses.dataclass(slots=True)
class SampleState:
    """What sampling remembers of one row. Owner: the rank's runner."""

    row_id: int
    sampling: Sampling
    prompt: tuple[int, ...]
    counts: dict[int, int]  # of generated tokens
    num_generated: int = 0  # tokens after the prompt

    def __post_init__(self) -> None:
        s = self.sampling
        self.penalised = s.presence_penalty != 0 or s.frequency_penalty != 0 or s.repetition_penalty != 1
        self.shaped = self.penalised or bool(s.logit_bias) or bool(s.banned)
        self.plain_greedy = s.temperature == 0 and not self.shaped and s.logprobs is None
        self.prompt_set = frozenset(self.prompt) if s.repetition_penalty != 1 else frozenset()

    penalised: bool = dataclasses.field(init=False)
    shaped: bool = dataclasses.field(init=False)
    plain_greedy: bool = dataclasses.field(init=False)
    prompt_set: frozenset[int] = dataclasses.field(init=False)

    def add(self, token: int) -> None:
        self.num_generated += 1
        if self.penalised:
            self.counts[token] = self.counts.get(token, 0) + 1


def sample(logits: torch.Tensor, rows: Sequence[SampleState], positions: Sequence[int]) -> tuple[SampledRow, ...]:
    """One token per row; the states are advanced by it.

    Args:
        logits: `[len(rows), vocab_size]`, of the model's dtype.
        positions: of the tokens to sample, counted from the start of the prompt.
    """
    if all(row.plain_greedy for row in rows):
        tokens = logits.argmax(dim=-1).tolist()
        for row, token in zip(rows, tokens, strict=True):
            row.add(token)
        return tuple(SampledRow(row.row_id, (token,)) for row, token in zip(rows, tokens, strict=True))
    raw = logits.float()
    shaped = raw
    if any(row.shaped for row in rows):
        shaped = raw.clone()
        for index, row in enumerate(rows):
            if row.shaped:
                _shape(shaped[index], row)
    tokens = shaped.argmax(dim=-1).tolist()
    drawn = [index for index, row in enumerate(rows) if row.sampling.temperature > 0]
    if drawn:
        uniforms = [uniform(rows[index].sampling.seed, positions[index]) for index in drawn]
        chosen = _draw(shaped[drawn], [rows[index].sampling for index in drawn], uniforms)
        for index, token in zip(drawn, chosen, strict=True):
            tokens[index] = token
    results = []
    for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        row.add(token)
        if row.sampling.logprobs is None:
            results.append(SampledRow(row.row_id, (token,)))
        else:
            logprob, top = _logprobs(raw[index], token, row.sampling.logprobs)
            results.append(SampledRow(row.row_id, (token,), (logprob,), (top,)))
    return tuple(results)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) alone: two rounds of splitmix64's finaliser, 53 bits."""
    state = _mix((seed & _MASK64) ^ _mix((position + 1) * 0x9E3779B97F4A7C15 & _MASK64))
    return (state >> 11) / (1 << 53)


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)


def _shape(logits: torch.Tensor, row: SampleState) -> None:
    """Bias, bans and penalties of one row, in place."""
    sampling = row.sampling
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    if sampling.banned and row.num_generated < sampling.min_tokens:
        logits[list(sampling.banned)] = float("-inf")
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted(row.prompt_set | row.counts.keys()))
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / sampling.repetition_penalty,
                                   values * sampling.repetition_penalty)
    if row.counts and (sampling.frequency_penalty or sampling.presence_penalty):
        generated = torch.tensor(list(row.counts))
        times = torch.tensor(list(row.counts.values()), dtype=torch.float32)
        logits[generated] -= sampling.frequency_penalty * times + sampling.presence_penalty


def _draw(logits: torch.Tensor, rows: list[Sampling], uniforms: list[float]) -> list[int]:
    """One token per row of `[n, vocab_size]`, by temperature and the rows' cut-offs."""
    temperatures = torch.tensor([row.temperature for row in rows])[:, None]
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    scaled = (logits - logits.max(dim=-1, keepdim=True).values) / temperatures
    for index, row in enumerate(rows):
        if row.min_p > 0 or row.top_k > 0 or row.top_p < 1:
            _cut(scaled[index], row)
    weights = torch.softmax(scaled, dim=-1).double()
    cumulative = weights.cumsum(dim=-1)
    targets = torch.tensor(uniforms, dtype=torch.float64)[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    # A target that rounds up to the total would fall off the end: the last token of weight > 0 is meant.
    last = logits.shape[-1] - 1 - (weights.flip(-1) > 0).to(torch.uint8).argmax(dim=-1)
    return torch.minimum(chosen, last).tolist()


def _cut(scaled: torch.Tensor, row: Sampling) -> None:
    """Sets what min-p, top-k and top-p exclude to -inf. `scaled`: one row, its maximum 0."""
    vocab = scaled.shape[0]
    if row.min_p > 0:  # p >= min_p * p_max; the maximum is 0, so the ratio is exp(scaled)
        scaled.masked_fill_(scaled.exp() < row.min_p, float("-inf"))
    if 0 < row.top_k < vocab:
        threshold = torch.topk(scaled, row.top_k).values[-1]
        scaled.masked_fill_(scaled < threshold, float("-inf"))
    if row.top_p < 1:
        total = torch.logsumexp(scaled, dim=-1)
        for candidates in (min(_QUICK_CANDIDATES, vocab), vocab):
            ordered = torch.topk(scaled, candidates).values
            covered = (ordered - total).exp().double().cumsum(dim=-1)
            if covered[-1] >= row.top_p or candidates == vocab:
                break
        kept = int((covered < row.top_p).sum())  # tokens before the one that reaches top_p
        scaled.masked_fill_(scaled < ordered[min(kept, candidates - 1)], float("-inf"))


def _logprobs(raw: torch.Tensor, token: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """(log-probability of `token`, the `count` most likely tokens with theirs, best first)."""
    logprobs = torch.log_softmax(raw, dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if count > 0:
        values, tokens = torch.topk(logprobs, min(count, logprobs.shape[0]))
        top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return float(logprobs[token]), top
