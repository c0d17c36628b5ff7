"""The engine's outlet for one prompt that a decoder asked for: turns steps into armed writes.

Runs on the engine thread and never waits: the transfer is opened with the source pages, each step arms the writes
that its tokens complete, and native code posts them layer by layer while the step runs. What the main loop must know
is posted to it. A fabric error never reaches the engine: it is posted too, and the rest of the prompt is computed
into nothing or aborted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from pdd.messenger.ports import FabricPort, PushPlan

Post = Callable[[Callable[[], None]], object]  # runs a callable on the main loop, soon, in order


class SinkOwner(Protocol):
    """Called on the main loop."""

    def sink_opened(self, request_id: str, transfer: int) -> None: ...
    def sink_failed(self, request_id: str, message: str) -> None: ...
    def sink_closed(self, request_id: str, completed: bool) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Pusher:
    """What all sinks of a node share."""

    fabric: FabricPort
    watch: int  # of the layer counter, which reads step * num_layers + l + 1 once layer l of a step is attended
    num_layers: int
    post: Post
    owner: SinkOwner


class PushSink:
    """KvSink of one prefill. Owner: the engine thread; the main loop reads the public fields."""

    def __init__(
        self, pusher: Pusher, request_id: str, endpoint: int, key: int,
        make_plans: Callable[[tuple[int, ...]], Sequence[PushPlan]],
    ) -> None:
        self.armed_tokens = 0  # the running step included
        self.computed_tokens = 0  # of steps that have ended: one runs at a time, so the next arm or the close tells
        self._running_to = 0  # the last token of the running step
        self.holds_pages = False  # the engine has pinned source pages for it
        self.was_opened = False  # a transfer exists, and will be reported
        self._pusher = pusher
        self._request_id = request_id
        self._endpoint = endpoint
        self._key = key
        self._make_plans = make_plans
        self._plans: Sequence[PushPlan] = ()
        self._transfer: int | None = None
        self._broken = False

    def open(self, pages: tuple[int, ...]) -> None:
        self.holds_pages = True
        try:
            self._plans = self._make_plans(pages)
            transfer = self._pusher.fabric.open_transfer(self._endpoint, self._key)
        except (RuntimeError, ValueError) as error:
            self._break(error)
            return
        self._transfer = transfer
        self.was_opened = True
        owner, request_id = self._pusher.owner, self._request_id
        self._pusher.post(lambda: owner.sink_opened(request_id, transfer))

    def arm(self, step: int, begin_token: int, end_token: int) -> None:
        self.computed_tokens, self._running_to = begin_token, end_token
        if self._transfer is None or self._broken:
            return
        pusher = self._pusher
        try:
            for plan in self._plans:
                begin, end = plan.entries(begin_token, end_token)
                if begin < end:
                    first_value = step * pusher.num_layers + 1
                    pusher.fabric.arm(self._transfer, pusher.watch, first_value, plan.native, begin, end)
        except (RuntimeError, ValueError) as error:
            self._break(error)
        else:
            self.armed_tokens = end_token

    def close(self, *, completed: bool) -> None:
        if completed:
            self.computed_tokens = self._running_to
        if self._transfer is not None:
            fabric = self._pusher.fabric
            try:
                if completed and not self._broken:
                    fabric.finish(self._transfer)
                else:
                    fabric.cancel(self._transfer)
            except RuntimeError as error:  # the transfer is over: its link ended meanwhile
                self._break(error)
        self._plans = ()
        owner, request_id, whole = self._pusher.owner, self._request_id, completed and not self._broken
        self._pusher.post(lambda: owner.sink_closed(request_id, whole))

    def _break(self, error: Exception) -> None:
        self._broken = True
        owner, request_id, message = self._pusher.owner, self._request_id, str(error)
        self._pusher.post(lambda: owner.sink_failed(request_id, message))
