"""One engine of a node and all that is its alone: rank processes, executor, page pool, scheduler, loop.

    EngineGroup(index, executor) -> load() -> start(...) -> stop() -> close()

A node has a tuple of groups, `engine.dp` of them. Groups share nothing but what `start` is given: ids that are never the
same twice in the node's life, and the dispatch of events. Which group a request goes to is not decided here (engines.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import time
from collections.abc import Callable

from pdd.daemon.steps import ObservedExecutor
from pdd.engine.executor import RankExecutor, RankInfo
from pdd.engine.limits import SchedulerLimits
from pdd.engine.loop import EngineLoop
from pdd.engine.request import EngineEvent
from pdd.engine.scheduler import Scheduler
from pdd.engine.snapshot import EngineSnapshot
from pdd.errors import PddError
from pdd.kv.pool import PagePool
from pdd.metrics import Metrics
from pdd.states import Recorder

_log = logging.getLogger("pdd")


def group_name(index: int, of: int) -> str:
    """Of one of `of` groups, for people; "" where there is no other."""
    return f"group {index}" if of > 1 else ""


@dataclasses.dataclass(slots=True, eq=False)
class EngineGroup:
    """Owner: the main loop; `load`, `stop` and `close` take long and belong on a thread. Pool and scheduler are the
    engine thread's once it runs: others read `snapshot`."""

    index: int  # of the node's groups
    executor: RankExecutor
    ranks: tuple[RankInfo, ...] = ()  # once they are loaded
    pool: PagePool | None = None
    scheduler: Scheduler | None = None
    loop: EngineLoop | None = None  # once it runs
    of: int = 1  # groups that the node has

    def load(self) -> None:
        """Starts the ranks and waits until they are ready. Raises what `RankExecutor.start` does."""
        try:
            self.ranks = self.executor.start()
        except PddError as error:
            raise self.named(error) from error

    def start(
        self, limits: SchedulerLimits, *, ids: Callable[[], int], metrics: Metrics,
        first_step: Callable[[str, float], object], emit: Callable[[list[EngineEvent]], object],
        on_failure: Callable[[Exception], object], recorder: Recorder,
    ) -> None:
        """Starts the engine over the loaded ranks. All callables are called on its thread."""
        self.pool = PagePool(self.ranks[0].ready.num_pages)
        self.scheduler = Scheduler(self.pool, limits, ids=ids, recorder=recorder, group=self.index)
        observed = ObservedExecutor(self.executor, self.scheduler, metrics, first_step)
        self.loop = EngineLoop(
            self.scheduler, observed, emit=emit, on_failure=lambda error: on_failure(self.named(error)), recorder=recorder,
            name=self.name,
        )
        self.loop.start()

    # -- asking ---------------------------------------------------------------------------------------------------
    @property
    def name(self) -> str:
        """For threads, logs and errors; "" where there is no other."""
        return group_name(self.index, self.of)

    def named(self, error: Exception) -> Exception:
        """`error`, with the group that it is of where there is another."""
        if self.of == 1 or not isinstance(error, PddError):
            return error
        return type(error)(f"{self.name}: {error.message}", hint=error.hint)

    @property
    def snapshot(self) -> EngineSnapshot | None:
        return None if self.loop is None else self.loop.snapshot

    @property
    def turn_age(self) -> float:
        """How long the engine's turn in hand has been running; 0 while it has nothing to do."""
        busy = None if self.loop is None else self.loop.busy_since
        return 0.0 if busy is None else time.monotonic() - busy

    # -- the end ----------------------------------------------------------------------------------------------------
    def rank_died(self, error: PddError) -> None:
        if self.loop is not None:
            self.loop.fail(error)

    def stop(self, seconds: float) -> bool:
        """Whether the engine thread is over, after `seconds` or twice that. A step that does not end is ended by
        killing its ranks."""
        if self.loop is None:
            return True
        self.loop.stop()
        if self.loop.join(seconds):
            return True
        _log.error("a step has not ended in %g s: its ranks are killed", seconds)
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.ready.pid, signal.SIGKILL)
        if self.loop.join(seconds):
            return True
        _log.error("the engine thread does not end; it is left to the end of the process")
        return False

    def close(self) -> None:
        """Ends the ranks; only after `stop` has said that no step uses their descriptors."""
        self.executor.close()
