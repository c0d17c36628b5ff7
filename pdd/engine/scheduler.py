"""Which requests have pages and a place in the batch, and what the next step runs. Pure: time is an argument.

One scheduler for every node and every kind of request: to generate with local or with remote KV, or to prefill only.

    WAITING -> RUNNING                     local prompt, or prefill-only: pages for all its tokens and a slot
    WAITING -> WAITING_FOR_REMOTE_KV       pages for all tokens but the last; a prefiller is asked
            -> READY -> RUNNING            counted whole; got a slot
    RUNNING -> READY                       no page to grow into: gives its slot back, keeps its pages
    READY, RUNNING -> WAITING              preempted: gives its pages back, starts over with prompt + output; here, if
                                           no prefiller can
    RUNNING -> SENDING -> FINISHED         prefill-only, computed or cut short; pages stay until every write is terminal

A step takes first the decode rows, oldest request first; then admits from the queue (`waiting`); then fills the rest
of its token budget with prefill chunks (`packing`). When a decode row cannot grow, the latest arrival that may be
preempted is, if it came after that row. Requests that wait for remote KV, are prefill-only or SENDING are never
preempted: a write may land in their pages or read them.

Why everything ends. `check_fits` refuses what the pool cannot hold alone. The oldest READY or RUNNING request can take
the pages of all others, but for those that go away by themselves, as they hold all they need to. A row that lacks a
page is served before the queue is, and holds no slot, so an older READY request gets that. Each preemption pays for a
growth, which is page_size tokens of an older request.

Pages that wait for remote KV come back when its prefiller is done, or when the messenger gives the attempt up for want
of progress. That prefiller waits for no other node: a node that takes prompts of decoders asks nobody for KV, whatever
its role (the config allows no other). Two nodes that did both for each other could wait in a circle, each with all its
pages reserved and the other's prompt in its queue, and nothing here would see that.

It does not run, send, sleep or log anything. Owner: the engine thread.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable

from pdd.engine.batch import NewRow, Row, StepPlan, StepResult
from pdd.engine.effects import Decision, Effect, SinkArm, SinkClose, SinkOpen
from pdd.engine.limits import SchedulerLimits, check_fits
from pdd.engine.packing import share_budget
from pdd.engine.record import NO_HOLD, Misuse, Orphan, Record
from pdd.engine.request import (
    FinishReason,
    GenerateSpec,
    KvAbandoned,
    KvOutcome,
    KvReserved,
    KvSource,
    PrefillSpec,
    RequestState,
    Tokens,
)
from pdd.engine.waiting import Admission, WaitingQueue
from pdd.errors import Draining, EngineError, Overloaded, PddError, RequestTimeout
from pdd.kv.layout import pages_of
from pdd.kv.pool import PagePool, PageState
from pdd.states import Recorder, record_nothing

HEADROOM_DIVISOR = 16  # of the pool: at most this part stays free at admission for running rows to grow into


class Scheduler:
    def __init__(
        self, pool: PagePool, limits: SchedulerLimits, *, recorder: Recorder = record_nothing,
        ids: Callable[[], int] | None = None, group: int = 0,
    ) -> None:
        """`ids` makes the ids of holds, rows and attempts: never the same twice in this node's life, none negative.
        Several schedulers of one node share one, as an attempt is known by its id alone. None: a count of its own.
        `group` is the index of this one among them.
        `recorder` hears of every state change of a request."""
        self.pool = pool
        self.limits = limits
        self.group = group
        self._recorder = recorder
        self._new_id = ids or itertools.count().__next__
        # A row is at least a token: a smaller token budget than row budget would leave rows out of every step.
        self._max_rows = min(limits.max_batch_size, limits.max_batch_tokens)
        self._records: dict[str, Record] = {}
        self._waiting = WaitingQueue(limits.queue_timeout)
        self._fetching: dict[int, Record] = {}  # WAITING_FOR_REMOTE_KV, by attempt
        self._active: list[Record] = []  # READY and RUNNING, by arrival
        self._orphans: dict[int, Orphan] = {}  # by attempt
        self._gone: list[int] = []  # row ids that the ranks may forget
        self._num_running = 0
        self._next_seq = 0
        self._next_step = 0

    # -- what others look at --------------------------------------------------------------------------------------
    @property
    def records(self) -> dict[str, Record]:
        """Every request that is not FINISHED. To be read only."""
        return self._records

    @property
    def orphans(self) -> dict[int, Orphan]:
        """To be read only."""
        return self._orphans

    @property
    def waiting(self) -> WaitingQueue:
        return self._waiting

    # -- inbox ----------------------------------------------------------------------------------------------------
    def set_queue(self, max_queue: int, queue_timeout: float, now: float) -> list[Effect]:
        """New bounds of the queue. What waits already stays, if it has not waited for too long by now."""
        self.limits = dataclasses.replace(self.limits, max_queue=max_queue, queue_timeout=queue_timeout)
        self._waiting.set_timeout(queue_timeout)
        return []

    def submit(self, spec: GenerateSpec | PrefillSpec, now: float) -> list[Effect]:
        """Queues a request, or ends it at once when it can never fit or the queue is full.

        Raises:
            Misuse: its id is in use, or its prompt is empty.
        """
        if spec.request_id in self._records:
            raise Misuse(f"request id {spec.request_id} is in use")
        if not spec.prompt:
            raise Misuse(f"request {spec.request_id} has no token")
        record = Record.of(spec, self._next_seq, now, self._recorder)
        self._next_seq += 1
        self._records[record.request_id] = record
        try:
            check_fits(
                record.prompt_len, record.sampling.max_tokens if record.sampling else 0,
                max_context=self.limits.max_context, pool_tokens=self.pool.num_pages * self.limits.page_size,
            )
            if len(self._waiting) >= self.limits.max_queue:
                raise Overloaded(f"{len(self._waiting)} requests are waiting", hint="try again later")
        except PddError as error:
            return self._end(record, FinishReason.ERROR, error, now)
        self._waiting.add(record)
        return []

    def abort(self, request_id: str, now: float, error: Exception | None = None) -> list[Effect]:
        """Ends a request in whatever state it is. Nothing for one that is unknown or only has pages to send."""
        record = self._records.get(request_id)
        if record is None or record.state is RequestState.SENDING:
            return []
        return self._end(record, FinishReason.ERROR if error else FinishReason.ABORT, error, now)

    def kv_settled(
        self, attempt: int, outcome: KvOutcome, retry: KvSource | None, error: Exception | None, now: float
    ) -> list[Effect]:
        """Takes back, or hands over, the pages of a remote attempt.

        Raises:
            Misuse: the attempt is not open.
        """
        if attempt in self._orphans:
            if outcome is KvOutcome.QUARANTINED:
                if self.pool.state(attempt) is PageState.QUARANTINED:
                    raise Misuse(f"attempt {attempt} is quarantined already")
                self.pool.move(attempt, PageState.QUARANTINED)
                self._orphans[attempt] = Orphan(self._orphans[attempt].request_id, now)
            else:
                del self._orphans[attempt]
                self.pool.release(attempt)
            return []
        record = self._fetching.pop(attempt, None)
        if record is None:
            raise Misuse(f"attempt {attempt} is not open")
        if outcome is KvOutcome.WHOLE:
            self.pool.move(attempt, PageState.RUNNING)
            record.computed = len(record.tokens) - 1
            record.move(RequestState.READY, now, "whole")
            self._activate(record)
            return []
        record.hold = NO_HOLD
        if outcome is KvOutcome.QUARANTINED:
            self.pool.move(attempt, PageState.QUARANTINED)
            self._orphans[attempt] = Orphan(record.request_id, now)
        else:
            self.pool.release(attempt)
        if retry is None and record.output_len and not isinstance(error, Draining):
            retry = KvSource.LOCAL  # it was preempted for others' sake: a stream that has begun is not given up for that
        if retry is None:
            error = error or EngineError("the remote KV failed without a reason")
            return self._end(record, FinishReason.ERROR, error, now)
        record.kv_source = retry
        record.move(RequestState.WAITING, now, f"attempt {attempt} failed, next: {retry.value}")
        self._waiting.add(record)
        return []

    def prefill_settled(self, request_id: str, now: float) -> list[Effect]:
        """Frees the source pages of a prefill-only request. One that still computes is ended: nobody wants its KV."""
        record = self._records.get(request_id)
        if record is None or record.sink is None:
            return []
        effects: list[Effect] = []
        if record.state is not RequestState.SENDING:
            effects = self._end(record, FinishReason.ABORT, None, now)
        if record.state is RequestState.SENDING:
            self._release(record)
            record.move(RequestState.FINISHED, now, "its writes are settled")
            del self._records[request_id]
        return effects

    def fail_all(self, error: Exception, now: float) -> list[Effect]:
        """Ends every request; the node goes down."""
        effects: list[Effect] = []
        for request_id in list(self._records):
            effects += self.abort(request_id, now, error)
        return effects

    # -- one step -------------------------------------------------------------------------------------------------
    def schedule(self, now: float) -> Decision:
        """Decides the next step. Its plan, when there is one, must be answered by `complete` before the next call."""
        effects: list[Effect] = []
        expired = self._waiting.expire(now)
        for record in expired:
            waited = RequestTimeout(
                f"waited {self.limits.queue_timeout:g} s for KV pages or a place in the batch", hint="try again later"
            )
            effects += self._end(record, FinishReason.ERROR, waited, now)
        rows: dict[int, tuple[Record, int]] = {}  # by row id, tokens of the step
        preempted: list[str] = []
        self._place_decodes(rows, preempted, now)
        if not preempted:  # else a victim could come back at once, into the pages that it has just given up
            self._waiting.admit(lambda record: self._try_admit(record, effects, now), now)
        prompts = [r for r in self._active if r.state is RequestState.RUNNING and r.hold not in rows]
        for record, share in share_budget(prompts, self.limits.max_batch_tokens - len(rows), self._next_step):
            rows[record.hold] = (record, share)
        plan = self._plan(rows.values(), now) if rows else None
        if plan is not None:
            effects += _arms(rows.values())
        return Decision(
            plan, tuple(effects), tuple(preempted), tuple(r.request_id for r in expired), self._waiting.next_deadline()
        )

    def complete(self, plan: StepPlan, result: StepResult, now: float) -> list[Effect]:
        """Takes in what the ranks did.

        The KV of every token of a row counts as there. With speculation that will not hold: the last tokens of a row
        are drafts then, and only those that the ranks accepted (one less than they sampled) have KV that stays. A row
        will have to say how many are drafts, and `computed` to stop at the last one that was accepted.

        Raises:
            EngineError: the ranks sampled nothing for a row that was to be sampled.
        """
        by_row = {row.row_id: row for row in result.sampled}
        holders = {record.hold: record for record in self._active}
        effects: list[Effect] = []
        for row in plan.rows:
            record = holders.get(row.row_id)
            if record is None:  # ended since the plan was made
                continue
            record.computed = row.start + len(row.tokens)
            if record.sink is not None:
                if not record.remaining:
                    effects += self._end(record, FinishReason.STOP, None, now)
                continue
            if not row.sample:
                continue
            sampled = by_row.get(row.row_id)
            if sampled is None or not sampled.tokens:
                raise EngineError(f"step {plan.step} sampled nothing for row {row.row_id}")
            outputs, reason = record.take(sampled)
            effects.append(Tokens(record.request_id, outputs))
            if reason is not None:
                effects += self._end(record, reason, None, now)
        return effects

    # -- decode rows ----------------------------------------------------------------------------------------------
    def _place_decodes(self, rows: dict[int, tuple[Record, int]], preempted: list[str], now: float) -> None:
        """Gives each request that only lacks its next token a slot, a page and a row, as far as there are any."""
        slotless = []
        candidates = [r for r in self._active if r.sampling is not None and r.remaining == 1]
        for record in candidates:
            if record.state is RequestState.READY and self._num_running >= self._max_rows:
                slotless.append(record)
            elif record.preemptable:  # not preempted since
                self._place(record, rows, preempted, now)
        # A row above may have given its slot back. Without this, it could stay empty while an older request wants it.
        for record in slotless:
            if record.preemptable and self._num_running < self._max_rows:
                self._place(record, rows, preempted, now)

    def _place(
        self, record: Record, rows: dict[int, tuple[Record, int]], preempted: list[str], now: float
    ) -> None:
        """Finds the page that the next token needs, from later requests if it must, and makes the row."""
        missing = self._num_pages(record.computed + 1) - self.pool.num_held(record.hold)
        while missing > 0 and self.pool.grow(record.hold, missing) is None:
            victim = self._latest_after(record)
            if victim is None:
                if record.state is RequestState.RUNNING:
                    record.move(RequestState.READY, now, "no page to grow into")
                    self._num_running -= 1
                return
            rows.pop(victim.hold, None)
            self._preempt(victim, now)
            preempted.append(victim.request_id)
        if record.state is RequestState.READY:
            record.move(RequestState.RUNNING, now)
            self._num_running += 1
        rows[record.hold] = (record, 1)

    def _latest_after(self, record: Record) -> Record | None:
        for other in reversed(self._active):
            if other.seq <= record.seq:
                return None
            if other.preemptable:
                return other
        return None

    def _preempt(self, record: Record, now: float) -> None:
        self._deactivate(record)
        self._release(record)
        record.computed = 0
        record.move(RequestState.WAITING, now, "preempted")
        self._waiting.add(record)

    # -- admission ------------------------------------------------------------------------------------------------
    def _try_admit(self, record: Record, effects: list[Effect], now: float) -> Admission:
        remote = record.wants_remote
        if remote:
            ahead = len(self._fetching) + len(self._active) - self._num_running
            if ahead >= self._max_rows:
                return Admission.NO_SLOT
        elif self._num_running >= self._max_rows:
            return Admission.NO_SLOT
        num_tokens = len(record.tokens) - 1 if remote else len(record.tokens)
        num_pages = self._num_pages(num_tokens)
        if num_pages + self._headroom() > self.pool.num_free:
            return Admission.NO_PAGES
        hold = self._new_id()
        pages = self.pool.reserve(hold, num_pages, PageState.RESERVED if remote else PageState.RUNNING)
        assert pages is not None
        record.admit(hold)
        if remote:
            record.move(RequestState.WAITING_FOR_REMOTE_KV, now, f"attempt {hold}")
            self._fetching[hold] = record
            tokens = tuple(record.tokens[:-1])
            effects.append(KvReserved(record.request_id, hold, tokens, pages, group=self.group))
        else:
            record.move(RequestState.RUNNING, now)
            self._activate(record)
            self._num_running += 1
            if record.sink is not None:
                effects.append(SinkOpen(record.request_id, record.sink, pages))
        return Admission.ADMITTED

    def _headroom(self) -> int:
        """Pages to leave free, so that a newcomer is not preempted at once by rows that grow. 0 on an idle node."""
        growing = sum(record.sampling is not None for record in self._active)
        return min(growing, self.pool.num_pages // HEADROOM_DIVISOR)

    def _num_pages(self, num_tokens: int) -> int:
        return pages_of(num_tokens, self.limits.page_size)

    # -- the plan -------------------------------------------------------------------------------------------------
    def _plan(self, shares: Iterable[tuple[Record, int]], now: float) -> StepPlan:
        new: list[NewRow] = []
        rows: list[Row] = []
        for record, count in shares:
            if not record.row_known:
                new.append(record.new_row())
                record.row_known = True
            new_pages = self.pool.pages_from(record.hold, record.pages_told)
            record.pages_told += len(new_pages)
            record.last_step = self._next_step
            end = record.computed + count
            rows.append(Row(
                row_id=record.hold, tokens=tuple(record.tokens[record.computed : end]), start=record.computed,
                new_pages=new_pages, sample=record.sampling is not None and end == len(record.tokens),
            ))
        step, self._next_step = self._next_step, self._next_step + 1
        gone, self._gone = tuple(self._gone), []
        return StepPlan(step=step, gone=gone, new=tuple(new), rows=tuple(rows))

    # -- endings --------------------------------------------------------------------------------------------------
    def _end(self, record: Record, reason: FinishReason, error: Exception | None, now: float) -> list[Effect]:
        """Says that the request is over, and frees its pages or leaves them to whoever must settle them."""
        effects: list[Effect] = [record.finished(reason, error)]
        why = str(error) if error else reason.value
        if record.state is RequestState.WAITING_FOR_REMOTE_KV:
            if self._fetching.pop(record.hold, None) is not None:
                self._orphans[record.hold] = Orphan(record.request_id, now)
                effects.append(KvAbandoned(record.request_id, record.hold))
        elif record.state is RequestState.WAITING:
            self._waiting.discard(record)
        else:
            self._deactivate(record)
        if record.sink is not None:
            effects.append(SinkClose(record.request_id, record.sink, completed=reason is FinishReason.STOP))
            if record.hold != NO_HOLD:
                self.pool.move(record.hold, PageState.SENDING)
                record.move(RequestState.SENDING, now, why)
                self._forget_row(record)
                return effects
        elif record.hold != NO_HOLD and record.hold not in self._orphans:
            self._release(record)
        record.move(RequestState.FINISHED, now, why)
        del self._records[record.request_id]
        return effects

    def _activate(self, record: Record) -> None:
        index = len(self._active)
        while index and self._active[index - 1].seq > record.seq:
            index -= 1
        self._active.insert(index, record)

    def _deactivate(self, record: Record) -> None:
        """Takes it out of the batch: READY or RUNNING no longer."""
        self._active.remove(record)
        if record.state is RequestState.RUNNING:
            self._num_running -= 1

    def _release(self, record: Record) -> None:
        self.pool.release(record.hold)
        self._forget_row(record)
        record.hold = NO_HOLD

    def _forget_row(self, record: Record) -> None:
        if record.row_known:
            self._gone.append(record.hold)
            record.row_known = False


def _arms(shares: Iterable[tuple[Record, int]]) -> list[Effect]:
    return [
        SinkArm(record.request_id, record.sink, record.computed, record.computed + count)
        for record, count in shares if record.sink is not None
    ]
