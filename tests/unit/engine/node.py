"""A scheduler with ranks, driven by hand: what the tests of its policies share."""

from __future__ import annotations

from collections.abc import Callable

from pdd.engine.effects import Decision, Effect
from pdd.engine.limits import SchedulerLimits
from pdd.engine.request import (
    Finished,
    GenerateSpec,
    KvOutcome,
    KvReserved,
    KvSource,
    PrefillSpec,
    RequestState,
    Tokens,
)
from pdd.engine.scheduler import Scheduler
from pdd.kv.pool import PagePool
from pdd.states import Recorder, record_nothing
from tests.engine_fakes import FakeExecutor, entries

PAGE = 4


class Node:
    """A scheduler with ranks, driven by hand."""

    def __init__(
        self, num_pages: int = 16, *, recorder: Recorder = record_nothing, ids: Callable[[], int] | None = None,
        **limits: object,
    ) -> None:
        self.pool = PagePool(num_pages)
        defaults = {"page_size": PAGE, "max_context": 1000}
        self.scheduler = Scheduler(
            self.pool, SchedulerLimits(**(defaults | limits)), recorder=recorder, ids=ids  # type: ignore[arg-type]
        )
        self.executor = FakeExecutor(num_pages, PAGE)
        self.now = 0.0
        self.events: list[Effect] = []
        self.outputs: dict[str, list[int]] = {}

    def submit(self, *specs: GenerateSpec | PrefillSpec) -> None:
        for spec in specs:
            self._note(self.scheduler.submit(spec, self.now))

    def step(self) -> Decision:
        decision = self.scheduler.schedule(self.now)
        self._note(decision.effects)
        if decision.plan is not None:
            result = self.executor.execute(decision.plan)
            self._note(self.scheduler.complete(decision.plan, result, self.now))
        self.pool.check_integrity()
        return decision

    def run(self, steps: int = 1000) -> None:
        for _ in range(steps):
            if self.step().plan is None:
                return

    def fetch(self, request_id: str) -> KvReserved:
        """Lets the remote KV of the request's open attempt arrive whole."""
        event = self.reserved(request_id)
        for position, kv in enumerate(entries(event.tokens)):
            self.executor.memory[self.executor.slot(event.pages, position)] = kv
        self._note(self.scheduler.kv_settled(event.attempt, KvOutcome.WHOLE, None, None, self.now))
        return event

    def settle(self, attempt: int, outcome: KvOutcome, retry: KvSource | None = None,
               error: Exception | None = None) -> None:
        self._note(self.scheduler.kv_settled(attempt, outcome, retry, error, self.now))

    def abort(self, request_id: str) -> None:
        self._note(self.scheduler.abort(request_id, self.now))

    def reserved(self, request_id: str) -> KvReserved:
        return [e for e in self.events if isinstance(e, KvReserved) and e.request_id == request_id][-1]

    def finished(self, request_id: str) -> Finished | None:
        found = [e for e in self.events if isinstance(e, Finished) and e.request_id == request_id]
        assert len(found) <= 1
        return found[0] if found else None

    def state(self, request_id: str) -> RequestState:
        return self.scheduler.records[request_id].state

    def _note(self, effects: tuple[Effect, ...] | list[Effect]) -> None:
        self.events += effects
        for effect in effects:
            if isinstance(effect, Tokens):
                self.outputs.setdefault(effect.request_id, []).extend(output.token for output in effect.outputs)
