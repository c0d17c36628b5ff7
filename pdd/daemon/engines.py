"""The engines of a node as the rest of it sees them: one inbox, behind which each request goes to one of them.

A request is given to the engine that has most room for it (`engine/room.py`) and stays there to its end, whatever comes of its
attempts. What is said of a request or an attempt later goes to the engine that has it: told by the events, which come
here first. A request that no engine knows is nobody's: an abort of it does nothing.

It holds no queue and no page; pools and fences are each engine's own. Prefills for decoders go to the first engine:
whoever takes them has one only (the config allows no more).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from pdd.engine.limits import SchedulerLimits
from pdd.engine.request import (
    EngineEvent,
    EngineInbox,
    Finished,
    GenerateSpec,
    KvOutcome,
    KvReserved,
    KvSource,
    PrefillSpec,
)
from pdd.engine.room import Room, choose, room_of
from pdd.engine.snapshot import EngineSnapshot
from pdd.kv.layout import pages_of


class Engine(EngineInbox, Protocol):
    """One of them; `EngineLoop`."""

    @property
    def snapshot(self) -> EngineSnapshot: ...


class Engines:
    """EngineInbox of a node. Owner: the main loop."""

    def __init__(
        self, engines: Sequence[Engine], limits: SchedulerLimits, placed: Callable[[str, int], object] = lambda *_: None
    ) -> None:
        """`placed(request_id, group)` is told of every request to generate, before its engine is."""
        self._engines = tuple(engines)
        self._limits = limits
        self._placed = placed
        self._outlooks = tuple(_Outlook(engine, limits.page_size) for engine in self._engines)
        self._turn = 0
        self._of_request: dict[str, int] = {}
        self._of_attempt: dict[int, int] = {}

    # -- EngineInbox --------------------------------------------------------------------------------------------------
    def submit(self, spec: GenerateSpec) -> None:
        group, first = self._choose(len(spec.prompt), spec.sampling.max_tokens)
        self._of_request[spec.request_id] = group
        self._outlooks[group].hand(spec.request_id, first)
        self._placed(spec.request_id, group)
        self._engines[group].submit(spec)

    def submit_prefill(self, spec: PrefillSpec) -> None:
        self._of_request[spec.request_id] = 0
        self._engines[0].submit_prefill(spec)

    def abort(self, request_id: str) -> None:
        group = self._of_request.get(request_id)
        if group is not None:
            self._engines[group].abort(request_id)

    def kv_settled(
        self, attempt: int, outcome: KvOutcome, *, retry: KvSource | None = None, error: Exception | None = None
    ) -> None:
        group = self._of_attempt[attempt]
        if outcome is not KvOutcome.QUARANTINED:  # the last word about it
            del self._of_attempt[attempt]
        self._engines[group].kv_settled(attempt, outcome, retry=retry, error=error)

    def prefill_settled(self, request_id: str) -> None:
        self._engines[0].prefill_settled(request_id)

    # -- from the engines ---------------------------------------------------------------------------------------------
    def engine_event(self, event: EngineEvent) -> None:
        """Must hear of every event before whoever may answer it."""
        match event:
            case KvReserved():
                self._of_attempt[event.attempt] = event.group
            case Finished():
                group = self._of_request.pop(event.request_id, None)
                if group is not None:
                    self._outlooks[group].forget(event.request_id)
            case _:
                pass

    def _choose(self, prompt_len: int, max_tokens: int) -> tuple[int, int]:
        """(group, pages that the request takes first)."""
        limits, num_groups = self._limits, len(self._engines)
        first = pages_of(prompt_len, limits.page_size)
        most = pages_of(prompt_len + max_tokens - 1, limits.page_size)  # the last token's KV is never needed
        places = min(limits.max_batch_size, limits.max_batch_tokens)
        rooms = [outlook.room() for outlook in self._outlooks]
        group = choose(rooms, first=first, most=most, places=places, turn=self._turn)
        if group is None:  # any of them says so to the client
            group = self._turn
        self._turn = (group + 1) % num_groups
        return group, first


class _Outlook:
    """The room of one engine, with what was handed to it and is not in its snapshot yet. Owner: Engines."""

    def __init__(self, engine: Engine, page_size: int) -> None:
        self._engine = engine
        self._page_size = page_size
        self._snapshot: EngineSnapshot | None = None  # of which `_room` tells
        self._room = Room(0, 0)
        self._handed: dict[str, int] = {}  # request → pages, of those that it does not have

    def room(self) -> Room:
        snapshot = self._engine.snapshot
        if snapshot is not self._snapshot:
            self._snapshot, self._room = snapshot, room_of(snapshot, self._page_size)
            for row in snapshot.requests:
                self._handed.pop(row.request_id, None)
        return self._room.with_handed(self._handed.values())

    def hand(self, request_id: str, pages: int) -> None:
        self._handed[request_id] = pages

    def forget(self, request_id: str) -> None:
        self._handed.pop(request_id, None)
