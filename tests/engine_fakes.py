"""A rank made of a list: its KV remembers what was written to which slot, and its tokens depend on all of it.

The KV entry of a token is a hash of the whole prefix up to it, as in a real model, and the next token is a hash of all
entries that the row's pages hold. A page that was handed to somebody else too early, a late write, a lost chunk or a
wrong position therefore changes tokens, and `oracle` knows the right ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdd.engine.batch import NewRow, SampledRow, StepPlan, StepResult
from pdd.engine.request import GenerateSpec, KvSource, PrefillSpec, SamplingParams

VOCAB = 997
_PRIME = (1 << 61) - 1


def entries(tokens: Sequence[int]) -> list[int]:
    """KV entry of each token."""
    chain, found = 1, []
    for token in tokens:
        chain = (chain * 1000003 + token + 1) % _PRIME
        found.append(chain)
    return found


def next_token(kv: Sequence[int]) -> int:
    return hash(tuple(kv)) % VOCAB


def oracle(prompt: Sequence[int], max_tokens: int, stop: Sequence[int] = (), min_tokens: int = 0) -> list[int]:
    """What the request generates when it is alone."""
    tokens = list(prompt)
    for index in range(max_tokens):
        tokens.append(next_token(entries(tokens)))
        if tokens[-1] in stop and index >= min_tokens:
            break
    return tokens[len(prompt):]


class FakeExecutor:
    """Runs plans on a memory of `num_pages * page_size` slots, and checks each plan as a rank would."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.memory: list[int] = [0] * (num_pages * page_size)
        self.plans: list[StepPlan] = []
        self.rows: dict[int, NewRow] = {}
        self.tables: dict[int, list[int]] = {}
        self.error: Exception | None = None  # raised by the next step

    def slot(self, pages: Sequence[int], position: int) -> int:
        return pages[position // self.page_size] * self.page_size + position % self.page_size

    def execute(self, plan: StepPlan) -> StepResult:
        if self.error is not None:
            raise self.error
        assert plan.step == len(self.plans), "steps have no gaps"
        self.plans.append(plan)
        for row_id in plan.gone:
            del self.rows[row_id], self.tables[row_id]
        for new in plan.new:
            assert new.row_id not in self.rows
            self.rows[new.row_id], self.tables[new.row_id] = new, []
        assert plan.rows
        assert len({row.row_id for row in plan.rows}) == len(plan.rows)
        sampled = []
        for row in plan.rows:
            table = self.tables[row.row_id]
            table.extend(row.new_pages)
            assert row.tokens
            end = row.start + len(row.tokens)
            assert end <= len(table) * self.page_size, "no page for a token"
            chain = self.memory[self.slot(table, row.start - 1)] if row.start else 1
            for position, token in enumerate(row.tokens, row.start):
                chain = (chain * 1000003 + token + 1) % _PRIME
                self.memory[self.slot(table, position)] = chain
            if row.sample:
                kv = [self.memory[self.slot(table, position)] for position in range(end)]
                sampled.append(SampledRow(row.row_id, (next_token(kv),)))
        return StepResult(plan.step, tuple(sampled), 0.001)


class RecordingSink:
    """A KvSink that only remembers."""

    def __init__(self) -> None:
        self.pages: tuple[int, ...] | None = None
        self.arms: list[tuple[int, int, int]] = []
        self.completed: bool | None = None

    def open(self, pages: tuple[int, ...]) -> None:
        assert self.pages is None
        assert self.completed is None
        self.pages = pages

    def arm(self, step: int, begin_token: int, end_token: int) -> None:
        assert self.pages is not None
        assert self.completed is None
        self.arms.append((step, begin_token, end_token))

    def close(self, *, completed: bool) -> None:
        assert self.completed is None, "closed twice"
        self.completed = completed


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((salt * 7919 + i * 31) % VOCAB for i in range(length))


def generate(
    request_id: str, length: int, max_tokens: int = 4, *, remote: bool = False, salt: int = 0, **sampling: object
) -> GenerateSpec:
    return GenerateSpec(
        request_id, prompt(length, salt), SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
        KvSource.REMOTE if remote else KvSource.LOCAL,
    )


def prefill(request_id: str, length: int, sink: RecordingSink | None = None, *, salt: int = 0) -> PrefillSpec:
    return PrefillSpec(request_id, prompt(length, salt), sink or RecordingSink())
