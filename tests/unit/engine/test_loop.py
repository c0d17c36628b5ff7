"""The engine thread: events in order, sleep without polling, aborts, failures. A real thread, no real ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from pdd.engine import loop as loop_module
from pdd.engine.batch import StepPlan, StepResult
from pdd.engine.limits import SchedulerLimits
from pdd.engine.loop import EngineLoop
from pdd.engine.request import (
    EngineEvent,
    Finished,
    FinishReason,
    KvAbandoned,
    KvOutcome,
    KvReserved,
    Tokens,
)
from pdd.engine.scheduler import Scheduler
from pdd.errors import Draining, EngineError, RankDied, RequestTimeout
from pdd.kv.pool import PagePool
from pdd.states import Change
from tests.engine_fakes import FakeExecutor, RecordingSink, entries, generate, oracle, prefill

PAGE = 4
PATIENCE_SECONDS = 20.0


class SlowExecutor(FakeExecutor):
    """Stops before a step while `gate` is closed."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def execute(self, plan: StepPlan) -> StepResult:
        self.entered.set()
        assert self.gate.wait(PATIENCE_SECONDS)
        return super().execute(plan)


class Rig:
    def __init__(self, num_pages: int = 16, **limits: object) -> None:
        self.executor = SlowExecutor(num_pages, PAGE)
        defaults = {"page_size": PAGE, "max_context": 1000}
        self.scheduler = Scheduler(PagePool(num_pages), SchedulerLimits(**(defaults | limits)))  # type: ignore[arg-type]
        self.events: list[EngineEvent] = []
        self.changed = threading.Condition()
        self.failures: list[Exception] = []
        self.clock_reads = 0
        self.changes: list[Change] = []
        self.loop = EngineLoop(
            self.scheduler, self.executor, emit=self._emit, on_failure=self.failures.append, clock=self._clock,
            recorder=self.changes.append,
        )
        self.loop.start()

    def _clock(self) -> float:
        self.clock_reads += 1
        return time.monotonic()

    def _emit(self, events: list[EngineEvent]) -> None:
        with self.changed:
            self.events += events
            self.changed.notify_all()

    def wait(self, condition: Callable[[], object]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE_SECONDS), self.events

    def wait_snapshot(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.loop.snapshot
            time.sleep(0.001)

    def finished(self, request_id: str) -> Finished | None:
        found = [e for e in self.events if isinstance(e, Finished) and e.request_id == request_id]
        assert len(found) <= 1, "ended twice"
        return found[0] if found else None

    def wait_finished(self, *request_ids: str) -> None:
        self.wait(lambda: all(self.finished(request_id) for request_id in request_ids))

    def tokens(self, request_id: str) -> list[int]:
        return [output.token for e in self.events if isinstance(e, Tokens) and e.request_id == request_id
                for output in e.outputs]

    def reserved(self, request_id: str) -> KvReserved | None:
        found = [e for e in self.events if isinstance(e, KvReserved) and e.request_id == request_id]
        return found[-1] if found else None

    def land(self, event: KvReserved) -> None:
        for position, kv in enumerate(entries(event.tokens)):
            self.executor.memory[self.executor.slot(event.pages, position)] = kv


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(**getattr(request, "param", {}))
    yield rig
    rig.executor.gate.set()
    rig.loop.stop()
    assert rig.loop.join(PATIENCE_SECONDS)
    counts = rig.loop.snapshot.pages
    assert counts.total == counts.free + counts.reserved + counts.sending + counts.quarantined


def test_local_and_remote_requests_say_what_they_say_alone(rig: Rig) -> None:
    local, remote = generate("a", 9, 6), generate("b", 9, 6, remote=True, salt=1)
    rig.loop.submit(local)
    rig.loop.submit(remote)
    rig.wait(lambda: rig.reserved("b"))
    event = rig.reserved("b")
    assert event
    rig.land(event)
    rig.loop.kv_settled(event.attempt, KvOutcome.WHOLE)
    rig.wait_finished("a", "b")
    assert rig.tokens("a") == oracle(local.prompt, 6)
    assert rig.tokens("b") == oracle(remote.prompt, 6)
    rig.wait_snapshot(lambda: rig.loop.snapshot.idle)
    snapshot = rig.loop.snapshot
    assert snapshot.pages.free == 16
    assert snapshot.totals.generated_tokens == 12
    assert snapshot.batch_size == 0


def test_a_step_is_seen_while_it_runs(rig: Rig) -> None:
    """It may take seconds: a node that computes must not look idle."""
    rig.executor.gate.clear()
    rig.loop.submit(generate("r", 9, 2))
    assert rig.executor.entered.wait(PATIENCE_SECONDS)
    snapshot = rig.loop.snapshot
    assert [row.request_id for row in snapshot.requests] == ["r"]
    assert (snapshot.states["running"], snapshot.batch_size, snapshot.batch_tokens) == (1, 1, 9)
    rig.executor.gate.set()
    rig.wait_finished("r")


def test_an_idle_thread_sleeps(rig: Rig) -> None:
    rig.loop.submit(generate("r", 9, remote=True))
    rig.wait(lambda: rig.reserved("r"))
    rig.wait_snapshot(lambda: rig.loop.snapshot.states["wait_kv"] == 1)
    time.sleep(0.05)
    before = rig.clock_reads
    time.sleep(0.3)
    assert rig.clock_reads == before


@pytest.mark.parametrize("rig", [{"num_pages": 4, "queue_timeout": 0.2}], indirect=True)
def test_a_sleeping_thread_wakes_for_a_deadline(rig: Rig) -> None:
    rig.loop.submit(generate("r", 13, remote=True))
    rig.loop.submit(generate("late", 13))
    rig.wait_finished("late")
    ended = rig.finished("late")
    assert ended
    assert isinstance(ended.error, RequestTimeout)
    rig.wait_snapshot(lambda: rig.loop.snapshot.totals.expired == 1)


def test_an_abort_during_a_step_takes_effect_after_it(rig: Rig) -> None:
    rig.executor.gate.clear()
    rig.loop.submit(generate("a", 4, 50))
    assert rig.executor.entered.wait(PATIENCE_SECONDS)
    assert rig.loop.busy_since is not None
    rig.loop.abort("a")
    rig.loop.abort("a")
    rig.executor.gate.set()
    rig.wait_finished("a")
    assert rig.finished("a") == Finished("a", FinishReason.ABORT, None, 4, 0, 1)
    rig.wait_snapshot(lambda: rig.loop.snapshot.idle)
    rig.wait_snapshot(lambda: rig.loop.busy_since is None)


@pytest.mark.parametrize("where", ["open", "arm", "close", "emit", "schedule", "step", "inbox"])
def test_a_turn_that_hangs_anywhere_is_seen(rig: Rig, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is over when it goes on: between turns that sleep there is nothing to see."""
    rig.wait_snapshot(lambda: rig.loop.busy_since is None)
    before = time.monotonic()
    entered, gate = threading.Event(), threading.Event()

    def hanging(call: Callable[..., object]) -> Callable[..., object]:
        def hang(*args: object, **named: object) -> object:
            entered.set()
            assert gate.wait(PATIENCE_SECONDS)
            return call(*args, **named)

        return hang

    sink = RecordingSink()
    owner: object
    owner, name = {
        "emit": (rig.loop, "_emit"), "schedule": (rig.scheduler, "schedule"), "step": (rig.executor, "execute"),
        "inbox": (rig.scheduler, "submit"),
    }.get(where, (sink, where))
    monkeypatch.setattr(owner, name, hanging(getattr(owner, name)))
    rig.loop.submit_prefill(prefill("p", 9, sink))
    assert entered.wait(PATIENCE_SECONDS)
    busy_since = rig.loop.busy_since
    assert busy_since is not None
    assert busy_since >= before
    gate.set()
    rig.wait_finished("p")
    rig.loop.prefill_settled("p")
    rig.wait_snapshot(lambda: rig.loop.snapshot.idle and rig.loop.busy_since is None)


def test_a_busy_engine_is_not_a_stuck_one(rig: Rig) -> None:
    """Each turn has a beginning of its own, however long the thread has not slept."""
    begins = []
    execute = rig.executor.execute
    rig.executor.execute = lambda plan: (begins.append(rig.loop.busy_since), execute(plan))[1]  # type: ignore[method-assign]
    rig.loop.submit(generate("a", 4, 20))
    rig.wait_finished("a")
    assert len(set(begins)) == 20
    assert begins == sorted(begins)


def test_an_end_that_hangs_is_seen(rig: Rig) -> None:
    entered, gate = threading.Event(), threading.Event()
    sink = RecordingSink()

    def close(*, completed: bool) -> None:
        entered.set()
        assert gate.wait(PATIENCE_SECONDS)

    rig.loop.submit(generate("fetch", 16 * PAGE, 1, remote=True))
    sink.close = close  # type: ignore[method-assign]
    rig.loop.submit_prefill(prefill("p", 9, sink))
    rig.wait_snapshot(lambda: rig.loop.snapshot.states["waiting"] == 1)
    rig.loop.stop()
    assert entered.wait(PATIENCE_SECONDS)
    assert rig.loop.busy_since is not None
    gate.set()
    assert rig.loop.join(PATIENCE_SECONDS)
    assert rig.loop.busy_since is None


@pytest.mark.parametrize("error", [None, RankDied("rank 0 was killed by SIGKILL")])
def test_the_recorder_hears_of_the_threads_life(rig: Rig, error: Exception | None) -> None:
    if error is None:
        rig.loop.stop()
        rig.loop.stop()
    else:
        rig.loop.fail(error)
    assert rig.loop.join(PATIENCE_SECONDS)
    heard = [(change.kind, change.after, change.why) for change in rig.changes]
    end = [("engine", "stopping", ""), ("engine", "stopped", "")] if error is None else [("engine", "failed", str(error))]
    assert heard == [("engine", "new", ""), ("engine", "running", ""), *end]


def test_an_abandoned_attempt_is_shown_until_it_is_settled(rig: Rig) -> None:
    rig.loop.submit(generate("r", 9, remote=True))
    rig.wait(lambda: rig.reserved("r"))
    event = rig.reserved("r")
    assert event
    rig.loop.abort("r")
    rig.wait_finished("r")
    assert KvAbandoned("r", event.attempt) in rig.events
    rig.wait_snapshot(lambda: [row.state for row in rig.loop.snapshot.requests] == ["abandoned"])
    rig.loop.kv_settled(event.attempt, KvOutcome.QUARANTINED)
    rig.wait_snapshot(lambda: [row.state for row in rig.loop.snapshot.requests] == ["quarantined"])
    assert rig.loop.snapshot.pages.quarantined == 2
    assert not rig.loop.snapshot.idle
    rig.loop.kv_settled(event.attempt, KvOutcome.RELEASED)
    rig.wait_snapshot(lambda: rig.loop.snapshot.idle)


@pytest.mark.parametrize("rig", [{"max_batch_tokens": 4}], indirect=True)
def test_a_sink_is_armed_before_the_step_that_computes_its_tokens(rig: Rig) -> None:
    order: list[object] = []
    sink = RecordingSink()
    arm, close, execute = sink.arm, sink.close, rig.executor.execute
    sink.close = lambda *, completed: (order.append(len(rig.events)), close(completed=completed))  # type: ignore[assignment,method-assign]
    sink.arm = lambda *a: (order.append(("arm", a[0])), arm(*a))  # type: ignore[assignment,method-assign]
    rig.executor.execute = lambda plan: (order.append(("run", plan.step)), execute(plan))[1]  # type: ignore[method-assign]
    rig.loop.submit_prefill(prefill("p", 10, sink))
    rig.wait_finished("p")
    rig.wait_snapshot(lambda: sink.completed)
    assert sink.arms == [(0, 0, 4), (1, 4, 8), (2, 8, 10)]
    assert order == [*((kind, step) for step in range(3) for kind in ("arm", "run")), 1]  # told, then closed
    assert sink.completed is True
    rig.wait_snapshot(lambda: rig.loop.snapshot.pages.sending == 3)
    assert rig.loop.snapshot.states["sending"] == 1
    rig.loop.prefill_settled("p")
    rig.wait_snapshot(lambda: rig.loop.snapshot.idle)
    assert rig.loop.snapshot.totals.prompt_tokens == 10


@pytest.mark.parametrize("broken", ["open", "arm", "close"])
def test_a_sink_that_fails_ends_its_request_and_no_other(
    rig: Rig, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("endpoint closed")

    sink = RecordingSink()
    setattr(sink, broken, fail)
    rig.loop.submit_prefill(prefill("p", 10, sink))
    other = generate("a", 9, 6)
    rig.loop.submit(other)
    rig.wait_finished("p", "a")
    assert rig.tokens("a") == oracle(other.prompt, 6)
    assert [record.message for record in caplog.records] == ["the sink of request p failed"]
    ended = rig.finished("p")
    assert ended
    if broken == "close":
        assert ended.reason is FinishReason.STOP
    else:
        assert "endpoint closed" in str(ended.error)
        assert sink.completed is False
    if broken != "open":  # writes may be armed: the pages are not free before they are settled
        rig.wait_snapshot(lambda: rig.loop.snapshot.pages.sending == 3)
        rig.loop.prefill_settled("p")
    rig.wait_snapshot(lambda: rig.loop.snapshot.idle)


def test_misuse_is_counted_and_ends_nothing(rig: Rig) -> None:
    rig.loop.kv_settled(77, KvOutcome.WHOLE)
    rig.loop.submit(generate("a", 4, 2))
    rig.loop.submit(generate("a", 4, 2))
    rig.wait_finished("a")
    rig.wait_snapshot(lambda: rig.loop.snapshot.totals.misuses == 2)
    assert rig.failures == []


def test_a_dead_rank_ends_every_request_once_and_what_comes_later(rig: Rig) -> None:
    sink, late_sink = RecordingSink(), RecordingSink()
    rig.executor.gate.clear()
    rig.loop.submit(generate("run", 4, 50))
    assert rig.executor.entered.wait(PATIENCE_SECONDS)
    rig.loop.submit(generate("fetch", 9, remote=True))
    rig.loop.submit_prefill(prefill("push", 9, sink))
    rig.executor.error = RankDied("rank 0 was killed by SIGKILL")
    rig.executor.gate.set()
    rig.wait(lambda: rig.failures)
    assert rig.loop.join(PATIENCE_SECONDS)
    assert all(rig.finished(request_id) for request_id in ("run", "fetch", "push"))
    rig.loop.submit(generate("late", 4))
    rig.loop.submit_prefill(prefill("late push", 4, late_sink))
    rig.loop.abort("run")
    for request_id in ("run", "fetch", "push", "late", "late push"):
        ended = rig.finished(request_id)
        assert ended
        assert ended.error is rig.failures[0]
    assert (sink.completed, late_sink.completed) == (False, False)
    assert len(rig.failures) == 1


def test_a_rank_that_dies_while_idle_ends_the_loop(rig: Rig) -> None:
    rig.loop.submit(generate("r", 9, remote=True))
    rig.wait(lambda: rig.reserved("r"))
    error = RankDied("rank 0 exited with status 1")
    rig.loop.fail(error)
    rig.wait_finished("r")
    assert rig.loop.join(PATIENCE_SECONDS)
    assert rig.failures == [error]


def test_a_bug_is_an_engine_error(rig: Rig) -> None:
    rig.executor.error = ZeroDivisionError("oops")
    rig.loop.submit(generate("a", 4))
    rig.wait_finished("a")
    assert rig.loop.join(PATIENCE_SECONDS)
    assert isinstance(rig.failures[0], EngineError)
    assert "oops" in str(rig.failures[0])


def test_stop_tells_draining_and_reports_no_failure(rig: Rig) -> None:
    rig.loop.submit(generate("r", 9, remote=True))
    rig.wait(lambda: rig.reserved("r"))
    rig.loop.stop()
    assert rig.loop.join(PATIENCE_SECONDS)
    ended = rig.finished("r")
    assert ended
    assert isinstance(ended.error, Draining)
    assert rig.failures == []


@pytest.mark.parametrize("rig", [{"num_pages": 12, "max_batch_size": 3, "max_batch_tokens": 8}], indirect=True)
def test_many_threads_may_submit_and_abort(rig: Rig) -> None:
    specs = {f"t{t}-{i}": generate(f"t{t}-{i}", 1 + i % 13, 1 + i % 7, salt=t * 100 + i)
             for t in range(4) for i in range(25)}

    def client(t: int) -> None:
        for i in range(25):
            rig.loop.submit(specs[f"t{t}-{i}"])
            if i % 5 == 0:
                rig.loop.abort(f"t{t}-{i}")

    threads = [threading.Thread(target=client, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rig.wait_finished(*specs)
    for request_id, spec in specs.items():
        right = oracle(spec.prompt, spec.sampling.max_tokens)
        got = rig.tokens(request_id)
        assert got == right[: len(got)]
        ended = rig.finished(request_id)
        assert ended
        assert (ended.reason is FinishReason.LENGTH) == (got == right)
    rig.wait_snapshot(lambda: rig.loop.snapshot.idle)


# -- the books of the page pool ---------------------------------------------------------------------------------------
def test_an_engine_that_goes_idle_proves_its_books_and_tells_when_they_are_wrong(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_module, "INTEGRITY_EVERY_SECONDS", 0.05)
    checks = []
    check = rig.scheduler.pool.check_integrity
    monkeypatch.setattr(rig.scheduler.pool, "check_integrity", lambda: (checks.append(1), check()))
    rig.loop.submit(generate("a", 3, max_tokens=2))
    rig.wait(lambda: any(isinstance(event, Finished) for event in rig.events))
    rig.wait_snapshot(lambda: checks)
    assert rig.loop.snapshot.totals.integrity_failures == 0
    rig.scheduler.pool._lengths[0] -= 1  # a page is lost
    rig.loop.abort("nobody")
    rig.wait_snapshot(lambda: rig.loop.snapshot.totals.integrity_failures == 1)
    assert "1 of 16 pages are lost" in caplog.text
    before = len(checks)
    time.sleep(0.2)
    assert len(checks) == before  # an engine that sleeps proves nothing again
    rig.scheduler.pool._lengths[0] += 1
    assert rig.failures == []


def test_books_that_change_all_the_time_are_not_proved_each_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "INTEGRITY_EVERY_SECONDS", 1000.0)
    checks = []
    monkeypatch.setattr(rig.scheduler.pool, "check_integrity", lambda: checks.append(1))
    for index in range(10):
        rig.loop.submit(generate(f"r{index}", 3, max_tokens=2))
        rig.wait(lambda index=index: sum(isinstance(event, Finished) for event in rig.events) == index + 1)  # type: ignore[misc]
    assert len(checks) <= 1
