"""Watches the steps on their way to the ranks: how long each took, how many requests ran, which waited for it.

It stands between the engine loop and the executor and changes nothing. Owner: the engine thread, as of both.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pdd.engine.batch import StepPlan, StepResult
from pdd.engine.loop import Executor
from pdd.engine.scheduler import Scheduler
from pdd.metrics import Metrics


class ObservedExecutor:
    """An Executor that tells what the one behind it does."""

    def __init__(
        self, executor: Executor, scheduler: Scheduler, metrics: Metrics, first_step: Callable[[str, float], object]
    ) -> None:
        """`first_step(request_id, at)` is called on the engine thread for each request that was not prefilled elsewhere."""
        self._executor = executor
        self._scheduler = scheduler
        self._metrics = metrics
        self._first_step = first_step

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.new:
            self._observe_waits({row.row_id for row in plan.new})
        result = self._executor.execute(plan)
        self._metrics.step_seconds.observe(result.seconds)
        self._metrics.step_batch_size.observe(len(plan.rows))
        return result

    def _observe_waits(self, rows: set[int]) -> None:
        """Of requests in their first step. The wait of one with remote KV ended when its pages were reserved."""
        now = time.monotonic()
        for record in self._scheduler.records.values():
            if record.hold in rows and record.admissions == 1 and not record.wants_remote:
                self._metrics.queue_time.observe(now - record.arrived)
                self._first_step(record.request_id, now)
