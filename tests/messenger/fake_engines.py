"""Engines that compute nothing but keep the books: who owns which page, and what each page must hold.

"KV" of a page in a layer is the tuple of all tokens up to the page's end: right content proves right tokens, right
page, right layer and right order. Both raise or record a violation as soon as the messenger breaks its contract.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pdd.engine.request import (
    EngineEvent,
    Finished,
    FinishReason,
    GenerateSpec,
    KvAbandoned,
    KvOutcome,
    KvReserved,
    KvSource,
    PrefillSpec,
)
from pdd.messenger import wire
from tests.messenger.fake_fabric import FakeCounter, FakeFabric, FakePlan, Write

UNIT_BYTES = 10

Emit = Callable[[EngineEvent], None]


def kv_of(tokens: Sequence[int], page: int, page_size: int, layer: int) -> tuple[Any, ...]:
    return (layer, *tokens[: min(len(tokens), (page + 1) * page_size)])


@dataclasses.dataclass(frozen=True)
class FakePush:
    native: FakePlan
    page_size: int
    num_tokens: int
    skip_tokens: int

    def entries(self, begin_token: int, end_token: int) -> tuple[int, int]:
        first = self.skip_tokens // self.page_size
        end = end_token // self.page_size
        if end_token == self.num_tokens:
            end = -(-end_token // self.page_size)
        return max(begin_token // self.page_size, first) - first, max(end, first) - first


class FakePlanner:
    """One rank in each group, equal page sizes, one unit per page and layer. A decoder's pages are numbered through its
    groups, as if their regions were one."""

    extra_units = 0  # a prefiller and a decoder that do not agree on the count
    wish: tuple[int, ...] = ()  # what a decoder's chooses

    def __init__(self) -> None:
        self.heard: list[tuple[int, ...]] = []  # wishes that a prefiller's planned with

    def expected_units(
        self, source: wire.Geometry, destination: wire.Geometry, num_tokens: int, skip_tokens: int
    ) -> int:
        pages = -(-num_tokens // source.page_size) - skip_tokens // source.page_size
        return pages * source.num_layers + self.extra_units

    def expected_bytes(
        self, source: wire.Geometry, destination: wire.Geometry, num_tokens: int, skip_tokens: int
    ) -> int:
        return UNIT_BYTES * self.expected_units(source, destination, num_tokens, skip_tokens)

    def choose_source_sets(
        self, source: wire.Geometry, destination: wire.Geometry, rng: random.Random
    ) -> tuple[int, ...]:
        return self.wish

    def plan(
        self, source: wire.Geometry, destination: wire.Geometry, source_pages: Sequence[int],
        destination_pages: Sequence[int], num_tokens: int, skip_tokens: int, source_sets: Sequence[int] = (),
        group: int = 0,
    ) -> list[FakePush]:
        self.heard.append(tuple(source_sets))
        first = skip_tokens // source.page_size
        theirs = tuple(group * destination.num_pages + page for page in destination_pages[first:])
        plan = FakePlan(tuple(source_pages[first:]), theirs, source.num_layers)
        return [FakePush(plan, source.page_size, num_tokens, skip_tokens)]


@dataclasses.dataclass
class Request:
    request_id: str
    tokens: tuple[int, ...]
    attempts: list[int] = dataclasses.field(default_factory=list)
    outcome: str = ""  # whole, local, error, aborted
    error: Exception | None = None
    done: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


@dataclasses.dataclass
class Reservation:
    request: Request
    pages: tuple[int, ...]
    skip_tokens: int
    state: str = "reserved"  # reserved, quarantined
    abandoned: bool = False
    landed: set[tuple[int, int]] = dataclasses.field(default_factory=set)  # (layer, page)


class FakeDecodeEngine:
    """EngineInbox of a decoder. Pages are handed out at random, freed ones first to be used again. Here they are numbered
    through all groups of the node, and from 0 for whoever is told."""

    def __init__(
        self, fabric: FakeFabric, emit: Emit, *, num_pages: int, page_size: int, num_layers: int, seed: int = 0,
        group: int = 0, ids: Iterator[int] | None = None,
    ) -> None:
        self.fabric = fabric
        self.emit = emit
        self.page_size = page_size
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.rng = random.Random(seed)
        self.group = group
        self.free = list(range(group * num_pages, (group + 1) * num_pages))
        self.reservations: dict[int, Reservation] = {}
        self.waiting: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.violations = fabric.network.violations
        self.settled: list[tuple[int, KvOutcome]] = []
        self._attempts = ids or itertools.count(1)
        fabric.on_land = self.landed

    # -- what a test does -------------------------------------------------------------------------------------------
    def generate(self, request_id: str, tokens: tuple[int, ...]) -> Request:
        """Wants the KV of all of `tokens`."""
        request = self.requests[request_id] = Request(request_id, tokens)
        self._enqueue(request)
        return request

    @property
    def quarantined(self) -> int:
        return sum(len(r.pages) for r in self.reservations.values() if r.state == "quarantined")

    def check_integrity(self) -> None:
        held = [page for r in self.reservations.values() for page in r.pages]
        first = self.group * self.num_pages
        assert sorted([*held, *self.free]) == list(range(first, first + self.num_pages))

    # -- EngineInbox ------------------------------------------------------------------------------------------------
    def submit(self, spec: GenerateSpec) -> None:
        raise NotImplementedError

    def submit_prefill(self, spec: PrefillSpec) -> None:
        raise NotImplementedError

    def prefill_settled(self, request_id: str) -> None:
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        request = self.requests[request_id]
        if request.outcome:
            return
        self._end(request, "aborted")
        if request in self.waiting:
            self.waiting.remove(request)
        for attempt, reservation in self.reservations.items():
            if reservation.request is request and not reservation.abandoned and reservation.state == "reserved":
                reservation.abandoned = True
                self._say(KvAbandoned(request_id, attempt))
        self._say(Finished(request_id, FinishReason.ABORT))

    def kv_settled(
        self, attempt: int, outcome: KvOutcome, *, retry: KvSource | None = None, error: Exception | None = None
    ) -> None:
        self.settled.append((attempt, outcome))
        reservation = self.reservations.get(attempt)
        if reservation is None:
            self.violations.append(f"attempt {attempt} is settled ({outcome.value}) though it is over")
            return
        request = reservation.request
        first_word = reservation.state == "reserved"
        if outcome is KvOutcome.QUARANTINED:
            if not first_word:
                self.violations.append(f"attempt {attempt} is quarantined twice")
            reservation.state = "quarantined"
        else:
            if outcome is KvOutcome.WHOLE:
                if not first_word:
                    self.violations.append(f"attempt {attempt} is whole after it was quarantined")
                self._verify(reservation)
            danger = self.fabric.network.can_land(self.fabric, reservation.pages)
            if danger:
                self.violations.append(f"attempt {attempt} is {outcome.value} though {danger}")
            del self.reservations[attempt]
            self.free += reservation.pages
        if not first_word:
            if retry is not None or error is not None:
                self.violations.append(f"attempt {attempt}: the second word has a verdict")
        elif outcome is KvOutcome.WHOLE:
            if not request.outcome:
                self._end(request, "whole")
        elif request.outcome:
            pass  # aborted meanwhile
        elif retry is KvSource.REMOTE:
            self._enqueue(request)
        elif retry is KvSource.LOCAL:
            self._end(request, "local")
        else:
            request.error = error
            if error is None:
                self.violations.append(f"attempt {attempt} fails its request without an error")
            self._end(request, "error")
        self._serve()

    # -- inside -----------------------------------------------------------------------------------------------------
    def _end(self, request: Request, outcome: str) -> None:
        if request.outcome:
            self.violations.append(f"{request.request_id} ends twice: {request.outcome}, {outcome}")
        request.outcome = outcome
        request.done.set()
        if outcome in ("whole", "error", "local"):
            self._say(Finished(request.request_id, FinishReason.STOP if outcome != "error" else FinishReason.ERROR))

    def _say(self, event: EngineEvent) -> None:
        asyncio.get_running_loop().call_soon(self.emit, event)

    def _enqueue(self, request: Request) -> None:
        self.waiting.append(request)
        self._serve()

    def _serve(self) -> None:
        while self.waiting:
            request = self.waiting[0]
            num_pages = -(-len(request.tokens) // self.page_size)
            if num_pages > len(self.free):
                return
            del self.waiting[0]
            # The freshest pages first: a page that was freed too early is hit at once.
            pages = tuple(self.free[-num_pages:])
            del self.free[-num_pages:]
            attempt = next(self._attempts)
            request.attempts.append(attempt)
            for page in pages:
                for layer in range(self.num_layers):
                    self.fabric.memory[(layer, page)] = None
            self.reservations[attempt] = Reservation(request, pages, 0)
            told = tuple(page - self.group * self.num_pages for page in pages)
            self._say(KvReserved(request.request_id, attempt, request.tokens, told, group=self.group))

    def _verify(self, reservation: Reservation) -> None:
        request = reservation.request
        for index, page in enumerate(reservation.pages):
            for layer in range(self.num_layers):
                wanted = kv_of(request.tokens, index, self.page_size, layer)
                found = self.fabric.memory.get((layer, page))
                if found != wanted or (layer, page) not in reservation.landed:
                    self.violations.append(f"{request.request_id} is whole, but layer {layer} of page {page} is not")
                    return

    def landed(self, write: Write) -> None:
        if write.dst_page in self.free:
            self.violations.append(f"a write landed in page {write.dst_page}, which is free")
            return
        for attempt, held in self.reservations.items():
            if write.dst_page in held.pages and held.state == "reserved":
                index = held.pages.index(write.dst_page)
                if write.content != kv_of(held.request.tokens, index, self.page_size, write.layer):
                    self.violations.append(f"a foreign write landed in page {write.dst_page} of attempt {attempt}")
                if (write.layer, write.dst_page) in held.landed:
                    self.violations.append(f"layer {write.layer} of page {write.dst_page} of attempt {attempt} was written twice")
                held.landed.add((write.layer, write.dst_page))


class FakePrefillEngine:
    """EngineInbox of a prefiller: first come, first served, `chunk` tokens per step."""

    def __init__(
        self, fabric: FakeFabric, counter: FakeCounter, emit: Emit, *, num_pages: int, page_size: int, num_layers: int,
        chunk: int = 8, layer_seconds: float = 0.0,
    ) -> None:
        self.fabric = fabric
        self.counter = counter
        self.emit = emit
        self.page_size = page_size
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.chunk = chunk
        self.layer_seconds = layer_seconds
        self.free = list(range(num_pages))
        self.held: dict[str, tuple[int, ...]] = {}
        self.queue: list[PrefillSpec] = []
        self.running: PrefillSpec | None = None
        self.aborted: set[str] = set()
        self.refuse: Exception | None = None
        self.paused = asyncio.Event()
        self.paused.set()
        self.step = 0
        self.violations = fabric.network.violations
        self.peak_queue = 0
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def load(self) -> wire.Load:
        return wire.Load(
            queued_tokens=sum(len(spec.prompt) for spec in self.queue), running=int(self.running is not None),
            free_pages=len(self.free), steps=self.step,
        )

    # -- EngineInbox ------------------------------------------------------------------------------------------------
    def submit(self, spec: GenerateSpec) -> None:
        raise NotImplementedError

    def kv_settled(self, attempt: int, outcome: KvOutcome, **_: Any) -> None:
        raise NotImplementedError

    def submit_prefill(self, spec: PrefillSpec) -> None:
        if self.refuse is not None:
            spec.sink.close(completed=False)
            self._say(Finished(spec.request_id, FinishReason.ERROR, self.refuse))
            return
        self.queue.append(spec)
        self.peak_queue = max(self.peak_queue, len(self.queue))
        self._wake.set()

    def abort(self, request_id: str) -> None:
        for spec in self.queue:
            if spec.request_id == request_id:
                self.queue.remove(spec)
                spec.sink.close(completed=False)
                self._say(Finished(request_id, FinishReason.ABORT))
                return
        if self.running is not None and self.running.request_id == request_id:
            self.aborted.add(request_id)

    def prefill_settled(self, request_id: str) -> None:
        pages = self.held.pop(request_id, None)
        if pages is None:
            self.violations.append(f"prefill {request_id} is settled though it holds no pages")
            return
        if self.running is not None and self.running.request_id == request_id:
            self.violations.append(f"prefill {request_id} is settled while it runs")
        reading = [
            w for w in self.fabric.network.in_flight
            if w.source is self.fabric and not w.read and w.src_page in pages
        ]
        if reading:
            self.violations.append(f"prefill {request_id} is settled while a write reads page {reading[0].src_page}")
        for page in pages:
            for layer in range(self.num_layers):
                self.fabric.memory[(layer, page)] = "reused"
        self.free += pages
        self._wake.set()

    # -- inside -----------------------------------------------------------------------------------------------------
    def _say(self, event: EngineEvent) -> None:
        asyncio.get_running_loop().call_soon(self.emit, event)

    async def _run(self) -> None:
        while True:
            if not self.queue or -(-len(self.queue[0].prompt) // self.page_size) > len(self.free):
                self._wake.clear()
                await self._wake.wait()
                continue
            self.running = self.queue.pop(0)
            await self._prefill(self.running)
            self.running = None

    async def _prefill(self, spec: PrefillSpec) -> None:
        num_pages = -(-len(spec.prompt) // self.page_size)
        pages = tuple(self.free[:num_pages])
        del self.free[:num_pages]
        self.held[spec.request_id] = pages
        spec.sink.open(pages)
        for begin in range(0, len(spec.prompt), self.chunk):
            await self.paused.wait()
            if spec.request_id in self.aborted:
                self.aborted.discard(spec.request_id)
                self.running = None
                spec.sink.close(completed=False)
                self._say(Finished(spec.request_id, FinishReason.ABORT))
                return
            end = min(begin + self.chunk, len(spec.prompt))
            spec.sink.arm(self.step, begin, end)
            for layer in range(self.num_layers):
                await asyncio.sleep(self.layer_seconds)
                for index in range(begin // self.page_size, -(-end // self.page_size)):
                    held = kv_of(spec.prompt[:end], index, self.page_size, layer)
                    self.fabric.memory[(layer, pages[index])] = held
                self.counter.bump()
            self.step += 1
        self.running = None
        spec.sink.close(completed=True)
        self._say(Finished(spec.request_id, FinishReason.STOP))
