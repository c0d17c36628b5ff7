"""Turns step plans into forward passes: what one rank remembers of each row, and one call per step.

A plan names rows by id and carries only what is new; the runner keeps each row's block table and sampling state. A
plan that does not fit what the runner knows is refused before it touches a page: running it would corrupt another
request's KV.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import torch

from pdd.engine.batch import NewRow, Row, SampledRow, StepPlan, StepResult
from pdd.engine.sampler import SampleState, sample
from pdd.errors import EngineError
from pdd.kv.layout import KvLayout
from pdd.model.attention import Attention, Batch, LayerCounter, Rows, Segment
from pdd.model.collectives import Collectives
from pdd.model.transformer import Transformer


class BadPlan(EngineError):
    """A step plan contradicts what this rank knows. Names the step and the row."""


@dataclasses.dataclass(slots=True)
class _RowState:
    table: np.ndarray  # int64 [capacity]: page numbers in token order; the first num_pages are set
    num_pages: int
    sample: SampleState | None  # None: never sampled


class RankRunner:
    """Owns the rows of a rank. `run` once per step, on one thread."""

    def __init__(self, model: Transformer, attention: Attention, layout: KvLayout, counter: LayerCounter, *,
                 max_context: int, ranks: Collectives | None = None) -> None:
        """ranks: the way to the others of the group; None: there are none."""
        self._model = model
        self._ranks = ranks
        self._attention = attention
        self._layout = layout
        self._counter = counter
        self._max_context = max_context
        self._rows: dict[int, _RowState] = {}
        self._next_step = 0

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def run(self, plan: StepPlan) -> StepResult:
        """Runs one step. The counter is bumped once per layer even when the plan has no rows.

        Raises:
            BadPlan: the plan was refused; nothing ran.
        """
        started = time.perf_counter()
        if plan.step != self._next_step:
            raise BadPlan(f"step {plan.step} came where step {self._next_step} was expected")
        self._learn(plan)
        self._next_step += 1
        if not plan.rows:
            for _ in range(self._layout.num_layers):
                self._counter.bump()
            return StepResult(plan.step, (), time.perf_counter() - started)
        ordered = sorted(plan.rows, key=lambda row: len(row.tokens) > 1)  # rows of one token first; stable
        sampled: tuple[SampledRow, ...] = ()
        with torch.inference_mode():
            logits = self._model.forward(self._batch(ordered), self._attention, self._counter, self._ranks)
            if logits is not None:
                chosen = [row for row in ordered if row.sample]
                states = [self._rows[row.row_id].sample for row in chosen]
                sampled = sample(logits, [state for state in states if state is not None],
                                 [row.start + len(row.tokens) for row in chosen])
        return StepResult(plan.step, sampled, time.perf_counter() - started)

    def _learn(self, plan: StepPlan) -> None:
        """Applies the plan's differences to the rows, after checking all of them."""
        def refuse(row_id: int, why: str) -> BadPlan:
            return BadPlan(f"step {plan.step}, row {row_id}: {why}")

        gone, new = set(plan.gone), {row.row_id: row for row in plan.new}  # a new row replaces a known one
        for row_id in plan.gone:
            if row_id not in self._rows:
                raise refuse(row_id, "is to be forgotten but is not known")
        for row_id, fresh in new.items():
            if fresh.sampling is not None:
                self._check_tokens((*fresh.sampling.banned, *(token for token, _ in fresh.sampling.logit_bias)),
                                   plan.step, row_id)
        if len({row.row_id for row in plan.rows}) != len(plan.rows):
            raise BadPlan(f"step {plan.step} has a row twice")
        for row in plan.rows:
            known = None if row.row_id in new or row.row_id in gone else self._rows.get(row.row_id)
            if known is None and row.row_id not in new:
                raise refuse(row.row_id, "is not known")
            self._check_row(plan.step, row, known, new.get(row.row_id))
        for row_id in plan.gone:
            del self._rows[row_id]
        for row_id, fresh in new.items():
            self._rows[row_id] = self._remember(fresh)
        for row in plan.rows:
            state = self._rows[row.row_id]
            state.table[state.num_pages : state.num_pages + len(row.new_pages)] = row.new_pages
            state.num_pages += len(row.new_pages)

    def _check_row(self, step: int, row: Row, known: _RowState | None, fresh: NewRow | None) -> None:
        where = f"step {step}, row {row.row_id}: "
        if not row.tokens:
            raise BadPlan(where + "has no tokens")
        if row.start < 0 or row.start + len(row.tokens) > self._max_context:
            raise BadPlan(where + f"tokens [{row.start}, {row.start + len(row.tokens)}) leave the context of "
                                  f"{self._max_context}")
        num_pages = (known.num_pages if known is not None else 0) + len(row.new_pages)
        if num_pages * self._layout.page_size < row.start + len(row.tokens):
            raise BadPlan(where + f"{num_pages} pages of {self._layout.page_size} tokens do not hold "
                                  f"{row.start + len(row.tokens)}")
        if num_pages > self._table_capacity:
            raise BadPlan(where + f"{num_pages} pages are more than a context of {self._max_context} tokens needs")
        if row.new_pages and not 0 <= min(row.new_pages) <= max(row.new_pages) < self._layout.num_pages:
            raise BadPlan(where + f"pages {min(row.new_pages)} to {max(row.new_pages)} are not all within "
                                  f"[0, {self._layout.num_pages})")
        self._check_tokens(row.tokens, step, row.row_id)
        sampling = fresh.sampling if fresh is not None else known.sample if known is not None else None
        if row.sample and sampling is None:
            raise BadPlan(where + "is to be sampled but came without sampling parameters")

    def _check_tokens(self, tokens: tuple[int, ...], step: int, row_id: int) -> None:
        vocab = self._model.config.vocab_size
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab:
            raise BadPlan(f"step {step}, row {row_id}: a token id is outside [0, {vocab})")

    @property
    def _table_capacity(self) -> int:
        return self._layout.num_pages_for(self._max_context)

    def _remember(self, fresh: NewRow) -> _RowState:
        state = None
        if fresh.sampling is not None:
            state = SampleState(fresh.row_id, fresh.sampling, fresh.prompt, {})
            for token in fresh.output:
                state.add(token)
        return _RowState(np.zeros(self._table_capacity, dtype=np.int64), 0, state)

    def _batch(self, rows: list[Row]) -> Batch:
        """rows: those of one token first."""
        page_size = self._layout.page_size
        num_decode = sum(len(row.tokens) == 1 for row in rows)
        lengths = np.array([len(row.tokens) for row in rows], dtype=np.int64)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        ends = lengths.cumsum()
        positions = np.arange(int(ends[-1]), dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)
        tables = [self._rows[row.row_id].table for row in rows]
        pages = np.empty_like(positions)
        segments = []
        decode = self._rows_of(tables[:num_decode], starts[:num_decode] + 1)
        if num_decode:
            pages[:num_decode] = decode.tables[np.arange(num_decode), positions[:num_decode] // page_size]
        for index in range(num_decode, len(rows)):
            begin, end = int(ends[index] - lengths[index]), int(ends[index])
            table = tables[index][: self._layout.num_pages_for(rows[index].start + end - begin)]
            pages[begin:end] = table[positions[begin:end] // page_size]
            segments.append(Segment(begin, end, rows[index].start, table))
        sampled = [index for index, row in enumerate(rows) if row.sample]
        wanted = ends[sampled] - 1
        tokens = np.fromiter((token for row in rows for token in row.tokens), dtype=np.int64, count=len(positions))
        return Batch(tokens=torch.from_numpy(tokens), positions=torch.from_numpy(positions),
                     pages=torch.from_numpy(pages), slots=torch.from_numpy(positions % page_size),
                     decode=decode, segments=tuple(segments),
                     logit_rows=torch.from_numpy(wanted) if sampled else None,
                     logits=self._rows_of([tables[index] for index in sampled], (starts + lengths)[sampled]))

    def _rows_of(self, tables: list[np.ndarray], kv_lens: np.ndarray) -> Rows:
        if not tables:
            return Rows(np.zeros((0, 0), dtype=np.int64), np.zeros(0, dtype=np.int64))
        used = -(-kv_lens // self._layout.page_size)
        width = int(used.max())
        stacked = np.stack([table[:width] for table in tables])
        # A short row's padding is gathered and masked: let it be of its own pages, never of another request's.
        return Rows(np.where(np.arange(width) < used[:, None], stacked, stacked[:, :1]), kv_lens)
