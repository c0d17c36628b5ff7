"""The engine thread: takes in what others ask, schedules, arms, runs a step, tells what came of it.

    inbox (any thread) -> scheduler -> sinks armed -> executor.execute(plan) -> scheduler -> events out

One thread owns scheduler and pool. Others speak to it through `EngineInbox`, whose calls only put a command into a
queue; it answers through `emit`, which gets the events of a moment in one list, in order. With nothing to run it proves
the books of the page pool and sleeps on the queue until a command comes or a waiting request's deadline does: it never
polls. A step is not interrupted; an abort takes effect after it. From waking up to falling asleep it is busy, turn after
turn; a turn that does not end, in a step, a sink or anywhere else, is what a watchdog sees.

A failure of the executor, or a bug, ends the thread: every open request is told, `on_failure` is called once, and
whatever is submitted after that is refused. It does not restart anything and does not decide what the daemon does then.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pdd.engine.batch import StepPlan, StepResult
from pdd.engine.effects import Decision, Effect, SinkArm, SinkClose, SinkOpen
from pdd.engine.record import Misuse
from pdd.engine.request import (
    EngineEvent,
    Finished,
    FinishReason,
    GenerateSpec,
    KvOutcome,
    KvSource,
    PrefillSpec,
)
from pdd.engine.scheduler import Scheduler
from pdd.engine.snapshot import EngineSnapshot, Totals, take_snapshot
from pdd.errors import Draining, EngineError
from pdd.kv.pool import IntegrityError
from pdd.states import Recorder, State, record_nothing

INTEGRITY_EVERY_SECONDS = 1.0  # at most so often an engine that goes idle proves the books of its pages
SNAPSHOT_EVERY_SECONDS = 0.02  # under load; before the thread sleeps there is always a fresh one

_log = logging.getLogger(__name__)

_Command = tuple[Callable[..., Sequence[Effect]], tuple[Any, ...]]


class LoopState(enum.Enum):
    """How far the engine thread's life is."""

    NEW = "new"
    RUNNING = "running"
    STOPPING = "stopping"  # told to; ends with the turn in hand
    STOPPED = "stopped"
    FAILED = "failed"


_LIFE: dict[LoopState, frozenset[LoopState]] = {
    LoopState.NEW: frozenset({LoopState.RUNNING}),
    LoopState.RUNNING: frozenset({LoopState.STOPPING, LoopState.FAILED}),
    LoopState.STOPPING: frozenset({LoopState.STOPPED, LoopState.FAILED}),
    LoopState.STOPPED: frozenset(),
    LoopState.FAILED: frozenset(),
}


class Executor(Protocol):
    """What runs plans: rank processes, or a simulation."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step on all ranks.

        Raises:
            EngineError: the step, or a rank, failed. The executor is of no more use.
        """


class EngineLoop:
    """The owner of scheduler and pool, and the `EngineInbox` of the node."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, *, emit: Callable[[list[EngineEvent]], object],
        on_failure: Callable[[Exception], object], clock: Callable[[], float] = time.monotonic,
        recorder: Recorder = record_nothing, name: str = "",
    ) -> None:
        """`emit`, `on_failure` and `recorder` are called on the engine thread and must not block. `name`: of this one among
        the engines of its node."""
        self._scheduler = scheduler
        self._executor = executor
        self._emit = emit
        self._on_failure = on_failure
        self._clock = clock
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._outbox: list[EngineEvent] = []
        self._thread = threading.Thread(target=self._run, name=f"pdd-engine {name}".rstrip(), daemon=True)
        self._life = State("engine", name, LoopState.NEW, _LIFE, clock=clock, recorder=recorder)
        self._ended: Exception | None = None  # why nothing is taken in any more
        self._busy_since: float | None = None
        self._batch_size = self._batch_tokens = 0
        self._last_step_seconds = 0.0
        self._totals = Totals()
        self._books_changed = False  # since they were checked
        self._books_checked_at = float("-inf")
        self._snapshot = self._picture(clock())

    # -- other threads --------------------------------------------------------------------------------------------
    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step in hand; what is still open is told Draining. Returns at once."""
        self._put(self._stop)

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the thread to end; whether it did."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def fail(self, error: Exception) -> None:
        """Ends the thread as a failed step would. For whoever notices that a rank died while no step ran."""
        self._put(_raise, error)

    @property
    def snapshot(self) -> EngineSnapshot:
        return self._snapshot

    @property
    def busy_since(self) -> float | None:
        """When the turn in hand began, None while the thread sleeps. A turn takes in the inbox, schedules, arms, runs a
        step and tells; one that never ends is how a stuck engine looks."""
        return self._busy_since

    def submit(self, spec: GenerateSpec) -> None:
        self._put(self._scheduler.submit, spec)

    def submit_prefill(self, spec: PrefillSpec) -> None:
        self._put(self._scheduler.submit, spec)

    def set_queue(self, max_queue: int, queue_timeout: float) -> None:
        self._put(self._scheduler.set_queue, max_queue, queue_timeout)

    def abort(self, request_id: str) -> None:
        self._put(self._scheduler.abort, request_id)

    def kv_settled(
        self, attempt: int, outcome: KvOutcome, *, retry: KvSource | None = None, error: Exception | None = None
    ) -> None:
        self._put(self._scheduler.kv_settled, attempt, outcome, retry, error)

    def prefill_settled(self, request_id: str) -> None:
        self._put(self._scheduler.prefill_settled, request_id)

    def _put(self, command: Callable[..., Sequence[Effect]], *arguments: Any) -> None:
        self._inbox.put((command, arguments))
        if self._ended is not None:
            self._refuse_rest()

    # -- the engine thread ----------------------------------------------------------------------------------------
    def _run(self) -> None:
        failure: Exception | None = None
        self._life.move(LoopState.RUNNING)
        try:
            while self._life.value is LoopState.RUNNING:
                self._busy_since = self._clock()
                self._take_in()
                if self._life.value is LoopState.RUNNING:
                    self._turn()
        except Exception as error:  # the border of the thread: whatever it is, every open request must hear of it
            failure = error if isinstance(error, EngineError) else EngineError(f"the engine failed: {error!r}")
            _log.error("the engine has failed: %s", failure, exc_info=None if failure is error else error)
        self._end(failure)

    def _turn(self) -> None:
        """One step, or a sleep when there is none to run."""
        started = self._clock()
        decision = self._scheduler.schedule(started)
        step = decision.plan.step if decision.plan else None
        self._carry_out(decision.effects, started, step)
        self._flush()
        self._count(decision)
        if decision.plan is None:
            self._batch_size = self._batch_tokens = 0
            check_at = self._check_books(started)
            self._snapshot = self._picture(started)
            self._sleep(min((at for at in (decision.wake_at, check_at) if at is not None), default=None))
            return
        began = self._clock()
        self._batch_size, self._batch_tokens = len(decision.plan.rows), decision.plan.num_tokens
        # A step may take seconds: what it runs is seen while it does.
        if decision.plan.new or began - self._snapshot.at >= SNAPSHOT_EVERY_SECONDS:
            self._snapshot = self._picture(began)
        result = self._executor.execute(decision.plan)
        self._books_changed = True
        returned = self._clock()
        self._carry_out(self._scheduler.complete(decision.plan, result, returned), returned, None)
        self._flush()
        self._count_step(decision.plan, result, (began - started) + (self._clock() - returned))
        if returned - self._snapshot.at >= SNAPSHOT_EVERY_SECONDS:
            self._snapshot = self._picture(returned)

    def _take_in(self) -> None:
        """Does what is in the inbox now, without waiting: what comes meanwhile is for the next turn."""
        for _ in range(self._inbox.qsize()):
            self._do(self._inbox.get_nowait())
        self._flush()

    def _check_books(self, now: float) -> float | None:
        """Proves the books of the page pool, once since they changed; None, or when it is time for that.

        Books that are wrong are an alarm and not the end: what they say may be as wrong for a request as for a page.
        """
        if not self._books_changed:
            return None
        due = self._books_checked_at + INTEGRITY_EVERY_SECONDS
        if now < due:
            return due
        self._books_changed, self._books_checked_at = False, now
        try:
            self._scheduler.pool.check_integrity()
        except IntegrityError as error:
            self._totals = dataclasses.replace(self._totals, integrity_failures=self._totals.integrity_failures + 1)
            _log.error("the books of the page pool are wrong, which is a bug of pdd; restart this node: %s", error)
        return None

    def _sleep(self, wake_at: float | None) -> None:
        timeout = None if wake_at is None else max(0.0, wake_at - self._clock())
        self._busy_since = None
        try:
            command = self._inbox.get(timeout=timeout)
        except queue.Empty:
            return
        self._busy_since = self._clock()
        self._do(command)

    def _do(self, command: _Command) -> None:
        call, arguments = command
        now = self._clock()
        self._books_changed = True
        try:
            effects = call(*arguments, now)
        except Misuse as error:
            self._totals = dataclasses.replace(self._totals, misuses=self._totals.misuses + 1)
            _log.error("a call to the engine was ignored: %s", error)
            return
        self._carry_out(effects, now, None)

    def _stop(self, now: float) -> Sequence[Effect]:
        if self._life.value is LoopState.RUNNING:
            self._life.move(LoopState.STOPPING)
        return ()

    # -- effects --------------------------------------------------------------------------------------------------
    def _carry_out(self, effects: Sequence[Effect], now: float, step: int | None) -> None:
        failed: set[str] = set()
        for effect in effects:
            if not isinstance(effect, SinkOpen | SinkArm | SinkClose):
                self._outbox.append(effect)
            elif effect.request_id not in failed:
                if isinstance(effect, SinkClose):
                    self._flush()  # why it ended is heard before that it ended
                try:
                    _call_sink(effect, step)
                except Exception as error:  # the border to the messenger: its failure ends this one request
                    _log.exception("the sink of request %s failed", effect.request_id)
                    failed.add(effect.request_id)
                    if not isinstance(effect, SinkClose):
                        self._give_up(effect, error, now)

    def _give_up(self, effect: SinkOpen | SinkArm, error: Exception, now: float) -> None:
        """Ends a prefill whose sink failed. One that could not even open has no write that reads its pages."""
        reason = EngineError(f"the KV of this prompt cannot be sent: {error}")
        self._carry_out(self._scheduler.abort(effect.request_id, now, reason), now, None)
        if isinstance(effect, SinkOpen):
            self._carry_out(self._scheduler.prefill_settled(effect.request_id, now), now, None)

    def _flush(self) -> None:
        if self._outbox:
            events, self._outbox = self._outbox, []
            self._emit(events)

    # -- the end --------------------------------------------------------------------------------------------------
    def _end(self, failure: Exception | None) -> None:
        reason = failure or Draining("this node is going down", hint="ask another node")
        now = self._busy_since = self._clock()
        try:
            self._carry_out(self._scheduler.fail_all(reason, now), now, None)
            self._flush()
        except Exception:  # after a bug the books may be wrong, or nobody listens: the failure must be reported still
            _log.exception("not every request could be told that the engine has ended")
        self._batch_size = self._batch_tokens = 0
        self._snapshot = self._picture(now)
        self._ended = reason  # from here on, whoever puts a command refuses it, and what came before is refused here
        self._refuse_rest()
        self._busy_since = None
        self._life.move(LoopState.STOPPED if failure is None else LoopState.FAILED, str(failure or ""))
        if failure is not None:
            self._on_failure(failure)

    def _refuse_rest(self) -> None:
        """Answers submissions to an engine that has ended; several threads may do this at once."""
        while True:
            try:
                _, arguments = self._inbox.get_nowait()
            except queue.Empty:
                return
            spec = arguments[0] if arguments else None
            if isinstance(spec, PrefillSpec):
                spec.sink.close(completed=False)
            if isinstance(spec, GenerateSpec | PrefillSpec):
                self._emit([Finished(spec.request_id, FinishReason.ERROR, self._ended, len(spec.prompt))])

    # -- what others see ------------------------------------------------------------------------------------------
    def _picture(self, now: float) -> EngineSnapshot:
        return take_snapshot(
            self._scheduler, now, batch_size=self._batch_size, batch_tokens=self._batch_tokens,
            last_step_seconds=self._last_step_seconds, totals=self._totals,
        )

    def _count(self, decision: Decision) -> None:
        if decision.preempted or decision.expired:
            totals = self._totals
            self._totals = dataclasses.replace(
                totals, preemptions=totals.preemptions + len(decision.preempted),
                expired=totals.expired + len(decision.expired),
            )

    def _count_step(self, plan: StepPlan, result: StepResult, overhead: float) -> None:
        totals = self._totals
        sampled = sum(len(row.tokens) for row in result.sampled)
        self._last_step_seconds = result.seconds
        decoded = sum(row.sample and len(row.tokens) == 1 for row in plan.rows)
        self._totals = dataclasses.replace(
            totals, steps=totals.steps + 1, step_seconds=totals.step_seconds + result.seconds,
            overhead_seconds=totals.overhead_seconds + overhead, generated_tokens=totals.generated_tokens + sampled,
            prompt_tokens=totals.prompt_tokens + plan.num_tokens - decoded,
        )


def _call_sink(effect: SinkOpen | SinkArm | SinkClose, step: int | None) -> None:
    if isinstance(effect, SinkOpen):
        effect.sink.open(effect.pages)
    elif isinstance(effect, SinkArm):
        assert step is not None
        effect.sink.arm(step, effect.begin, effect.end)
    else:
        effect.sink.close(completed=effect.completed)


def _raise(error: Exception, now: float) -> Sequence[Effect]:
    raise error
