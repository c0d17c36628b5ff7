"""What a scheduling decision asks the rest of the engine thread to do, as data.

The scheduler returns these in the order in which they must happen; the loop carries them out. Events go to the main
loop, sink calls to the messenger's push side, the plan to the ranks.
"""

from __future__ import annotations

import dataclasses

from pdd.engine.batch import StepPlan
from pdd.engine.request import EngineEvent, KvSink


@dataclasses.dataclass(frozen=True, slots=True)
class SinkOpen:
    """The source pages of a prefill-only request are pinned."""

    request_id: str
    sink: KvSink
    pages: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SinkArm:
    """The decision's plan computes tokens [begin, end) of the request."""

    request_id: str
    sink: KvSink
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class SinkClose:
    request_id: str
    sink: KvSink
    completed: bool


Effect = EngineEvent | SinkOpen | SinkArm | SinkClose


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What to do now. `effects` come before the plan is sent to the ranks."""

    plan: StepPlan | None  # None: nothing can run until something happens
    effects: tuple[Effect, ...]
    preempted: tuple[str, ...]  # request ids that lost their pages and start over
    expired: tuple[str, ...]  # request ids that waited too long for pages or a slot
    wake_at: float | None  # when a waiting request expires, if nothing else happens before
