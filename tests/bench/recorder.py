"""What the flight recorder costs: the engine's CPU with it and without, a write's, and the memory of one that is full."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import tracemalloc
from typing import Any

from pdd.config import Debug, all_fields
from pdd.daemon.node import MOST_CHANGES
from pdd.engine.batch import SampledRow, StepPlan, StepResult
from pdd.engine.limits import SchedulerLimits
from pdd.engine.loop import EngineLoop
from pdd.engine.request import EngineEvent, Finished, GenerateSpec, SamplingParams
from pdd.engine.scheduler import Scheduler
from pdd.history import History
from pdd.kv.pool import PagePool
from pdd.states import Change, Facts, Recorder, record_nothing
from tests.bench.common import median

TURNS, REQUESTS, TOKENS, BATCH = 15, 256, 16, 8
_PROMPT = tuple(range(64))
# Writes of one step, the most that SmolLM2 makes: 512 tokens, pages of 16, 30 layers.
_WRITES = 32 * 30


class _Instant:
    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, tuple(SampledRow(row.row_id, (7,)) for row in plan.rows if row.sample), 0.0)


def step_seconds(recorder: Recorder) -> float:
    """CPU of a step of an engine that computes nothing, over the whole life of all requests."""
    left, over = REQUESTS, threading.Event()

    def emit(events: list[EngineEvent]) -> None:
        nonlocal left
        left -= sum(isinstance(event, Finished) for event in events)
        if not left:
            over.set()

    failures: list[Exception] = []
    limits = SchedulerLimits(page_size=16, max_context=2048, max_batch_size=BATCH)
    loop = EngineLoop(Scheduler(PagePool(4096), limits, recorder=recorder), _Instant(), emit=emit, on_failure=failures.append,
                      recorder=recorder)
    for number in range(REQUESTS):
        loop.submit(GenerateSpec(f"{number:024x}", _PROMPT, SamplingParams(max_tokens=TOKENS)))
    begin = time.process_time()
    loop.start()
    assert over.wait(60), failures
    spent = time.process_time() - begin
    steps = loop.snapshot.totals.steps
    loop.stop()
    loop.join(10)
    return spent / steps


def full_history(memory: int) -> float:
    """Bytes of a history that was told more than it keeps, of requests that all had a long life and long reasons."""
    tracemalloc.start()
    begin = tracemalloc.get_traced_memory()[0]
    history = History(MOST_CHANGES, most_bytes=memory // 4)
    for number in range(4096):
        ident = f"{number:024x}"
        for turn in range(64):
            why = f"{ident} {turn} " + "x" * 150
            history(Change(float(turn), "attempt", f"{ident}/{turn}", "armed", "requested", why, Facts(f"p{turn}", turn, turn, turn)))
            history(Change(float(turn), "link", f"10.0.0.{turn}:1", "up", "suspect", f"{why} link", Facts(f"p{turn}")))
    held = tracemalloc.get_traced_memory()[0] - begin
    tracemalloc.stop()
    return float(held)


def measure(cost: str, real_step: float, rows: list[dict[str, Any]], bounds: list[tuple[str, float, str, float]]) -> None:
    """`real_step`: seconds of a step of eight streams of a model."""
    with_it, without = [], []
    for turn in range(TURNS + 1):  # each goes first as often as the other
        pair = [(with_it, History(MOST_CHANGES)), (without, record_nothing)]
        for times, recorder in pair[:: 1 if turn % 2 else -1]:
            times.append(step_seconds(recorder))  # type: ignore[arg-type]
    states = median([a - b for a, b in zip(with_it[1:], without[1:], strict=True)])  # the first turn warms both
    rows.append({"what": f"engine's CPU of a step, {BATCH} rows", "with_us": median(with_it) * 1e6, "without_us": median(without) * 1e6,
                 "recorder_us": states * 1e6, "p50_ms": real_step * 1e3})
    writes = 0.0
    if cost:
        cells = json.loads(subprocess.run([cost, "3"], check=True, capture_output=True, text=True).stdout)
        each = median([cell["post_ns"] - cell["post_off_ns"] for cell in cells])
        writes = max(0.0, each) * _WRITES * 1e-9
        rows.append({"what": f"worker, {_WRITES} writes", "recorder_us": writes * 1e6, "with_us": median([c["post_ns"] for c in cells]) * _WRITES / 1e3,
                     "without_us": median([c["post_off_ns"] for c in cells]) * _WRITES / 1e3})
    else:
        print("writes not measured: no sender_cost")
    bounds.append(("flight recorder, share of a step", (states + writes) / real_step, "<=", 0.01))
    largest = next(each.le for each in all_fields()["debug.flight_memory"].metadata if hasattr(each, "le") and each.le)
    for what, memory in (("default", Debug().flight_memory), ("largest setting", int(largest))):
        held = full_history(memory)
        rows.append({"what": f"full recorder, {what}: states measured, cells of writes as set", "resident_mb": (held + memory // 2) / 1e6})
        bounds.append((f"flight recorder's memory, {what}, MiB", (held + memory // 2) / (1 << 20), "<=", 64))
