"""Loop, scheduler, planner and executor over real rank processes with a small model; only the fabric is a memory copy.

A prefiller and a decoder stand side by side. The copy follows `plan_node_writes` byte for byte, so the same greedy
tokens on both ways prove scheduler, page tables, planner and ranks together, however many each node has.
"""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pdd.engine.executor import RankExecutor, RankInfo
from pdd.engine.limits import SchedulerLimits
from pdd.engine.loop import EngineLoop
from pdd.engine.rank_protocol import RankInit
from pdd.engine.request import (
    EngineEvent,
    Finished,
    FinishReason,
    GenerateSpec,
    KvOutcome,
    KvReserved,
    KvSource,
    PrefillSpec,
    SamplingParams,
    Tokens,
)
from pdd.engine.scheduler import Scheduler
from pdd.kv.pool import PagePool
from pdd.kv.sharding import ShardSpec, ShardWrites, node_units, plan_node_writes

pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("pdd.fabric._native", reason="the native core, whose counter a rank needs, is not built")
demo = pytest.importorskip("pdd.model.demo")

PATIENCE_SECONDS = 60.0
LENGTHS = (1, 2, 15, 16, 17, 33, 48, 70)
_IDS = itertools.count()


class Node:
    """One engine with real ranks."""

    def __init__(self, model: Path, *, num_pages: int, page_size: int, tp: int = 1, **limits: int) -> None:
        init = RankInit(str(model), world=tp, dtype="float32", page_size=page_size, num_pages=num_pages, max_context=256,
                        threads=1, warm_up=tp > 1)
        self.executor = RankExecutor(init, step_timeout=PATIENCE_SECONDS)
        infos: tuple[RankInfo, ...] = self.executor.start()
        ready = infos[0].ready
        self.spec = ShardSpec(
            num_layers=ready.num_layers, num_kv_heads=ready.total_kv_heads, head_dim=ready.head_dim, dtype=ready.dtype,
            page_size=ready.page_size, num_pages=ready.num_pages, tp=tp,
        )
        assert {info.ready.layout for info in infos} == {self.spec.layout}
        self.memory = [np.frombuffer(mmap.mmap(info.kv_fd, ready.kv_bytes), np.uint8) for info in infos]
        self.scheduler = Scheduler(
            PagePool(num_pages), SchedulerLimits(page_size=page_size, max_context=ready.max_context, **limits)
        )
        self.events: list[EngineEvent] = []
        self.changed = threading.Condition()
        self.peer: Node | None = None  # who computes remote KV
        self.failures: list[Exception] = []
        self.loop = EngineLoop(self.scheduler, self.executor, emit=self._emit, on_failure=self.failures.append)
        self.executor.watch(self.loop.fail)
        self.loop.start()

    def close(self) -> None:
        self.loop.stop()
        assert self.loop.join(PATIENCE_SECONDS)
        self.executor.close()
        assert self.failures == []

    def _emit(self, events: list[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, KvReserved):
                assert self.peer
                self.peer.loop.submit_prefill(
                    PrefillSpec(f"push{event.attempt}", event.tokens, CopySink(self.peer, self, event))
                )
        with self.changed:
            self.events += events
            self.changed.notify_all()

    def generate(self, prompts: list[tuple[int, ...]], source: KvSource, max_tokens: int) -> list[list[int]]:
        """The greedy continuations of all prompts, run together."""
        self.events.clear()
        ids = [f"{source.value}-{next(_IDS)}" for _ in prompts]
        for request_id, prompt in zip(ids, prompts, strict=True):
            sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
            self.loop.submit(GenerateSpec(request_id, prompt, sampling, source))

        def ended() -> list[Finished]:
            return [e for e in self.events if isinstance(e, Finished) and e.request_id in ids]

        with self.changed:
            assert self.changed.wait_for(lambda: len(ended()) == len(ids), PATIENCE_SECONDS), self.loop.snapshot
            assert {e.reason for e in ended()} == {FinishReason.LENGTH}, ended()
            return [[o.token for e in self.events if isinstance(e, Tokens) and e.request_id == request_id
                     for o in e.outputs] for request_id in ids]


@dataclasses.dataclass
class CopySink:
    """A fabric that copies when the prompt is computed."""

    source: Node
    target: Node
    event: KvReserved
    pages: tuple[int, ...] = ()
    chunks: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def open(self, pages: tuple[int, ...]) -> None:
        self.pages = pages

    def arm(self, step: int, begin_token: int, end_token: int) -> None:
        self.chunks.append((begin_token, end_token))

    def close(self, *, completed: bool) -> None:
        assert completed
        src, dst, event = self.source.spec, self.target.spec, self.event
        plans = plan_node_writes(src, dst, num_tokens=len(event.tokens), src_pages=self.pages, dst_pages=event.pages)
        assert sum(self._copy(plan) for plan in plans) == node_units(src, dst, len(event.tokens))
        self.source.loop.prefill_settled(f"push{event.attempt}")
        self.target.loop.kv_settled(event.attempt, KvOutcome.WHOLE)

    def _copy(self, plan: ShardWrites) -> int:
        """What one rank gives to another; in units."""
        source, target, units = self.source.memory[plan.src_rank], self.target.memory[plan.dst_rank], 0
        for begin, end in (plan.entries(*chunk) for chunk in self.chunks):
            for layer in range(plan.num_layers):
                for i in range(begin, end):
                    a = int(plan.src_offset[i]) + layer * plan.src_layer_stride
                    b = int(plan.dst_offset[i]) + layer * plan.dst_layer_stride
                    n = int(plan.nbytes[i])
                    target[b : b + n] = source[a : a + n]
                    units += int(plan.units[i])
        return units


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = demo.write_demo_model(tmp_path_factory.mktemp("demo"))
    return path


@pytest.fixture(scope="module")
def solo(model: Path) -> Iterator[Node]:
    node = Node(model, num_pages=64, page_size=16)
    yield node
    node.close()


def some_prompts() -> list[tuple[int, ...]]:
    rng = random.Random(5)
    return [tuple(rng.randrange(3, 200) for _ in range(n)) for n in LENGTHS]


@pytest.mark.parametrize("page_sizes", [pytest.param((8, 8), marks=pytest.mark.slow), (16, 4), (4, 16)])
def test_tokens_are_those_of_a_request_alone(model: Path, solo: Node, page_sizes: tuple[int, int]) -> None:
    prompts = some_prompts()
    right = [solo.generate([prompt], KvSource.LOCAL, 12)[0] for prompt in prompts]
    assert len({tuple(tokens) for tokens in right}) > 4, "the model says something"
    prefiller, decoder = (
        Node(model, num_pages=96 // page_size, page_size=page_size, max_batch_size=5, max_batch_tokens=24)
        for page_size in page_sizes
    )
    decoder.peer = prefiller
    try:
        assert decoder.generate(prompts, KvSource.LOCAL, 12) == right
        assert decoder.generate(prompts, KvSource.REMOTE, 12) == right
        assert decoder.loop.snapshot.totals.preemptions, "the pool is small enough"
    finally:
        decoder.close()
        prefiller.close()
    for node in (decoder, prefiller):
        assert node.loop.snapshot.pages.free == node.spec.num_pages


def test_any_number_of_ranks_says_what_one_says_and_feeds_any_other(model: Path, solo: Node) -> None:
    """Two KV heads over 1, 2 and 4 ranks (one head each, twice), with pages of 16, 32 and 8: every pair of the three."""
    every_pair_agrees(model, solo, {1: 16, 2: 32, 4: 8})


@pytest.mark.slow
@pytest.mark.parametrize("page_sizes", [{1: 16, 2: 16, 4: 16}, {1: 32, 2: 16, 4: 32}, {1: 16, 2: 32, 4: 16}])
@pytest.mark.parametrize("num_kv_heads", [8, 4, 2, 1])
def test_the_grid_of_ranks_heads_and_pages(tmp_path: Path, num_kv_heads: int, page_sizes: dict[int, int]) -> None:
    model = demo.write_demo_model(tmp_path, num_heads=8, num_kv_heads=num_kv_heads, head_dim=16)
    solo = Node(model, num_pages=64, page_size=16)
    try:
        every_pair_agrees(model, solo, page_sizes)
    finally:
        solo.close()


def every_pair_agrees(model: Path, solo: Node, page_sizes: dict[int, int]) -> None:
    """page_sizes: by number of ranks."""
    prompts = some_prompts()
    right = solo.generate(prompts, KvSource.LOCAL, 12)
    nodes = {tp: Node(model, num_pages=1024 // size, page_size=size, tp=tp, max_batch_tokens=24) for tp, size in page_sizes.items()}
    try:
        for tp, node in nodes.items():
            assert node.generate(prompts, KvSource.LOCAL, 12) == right, f"{tp} ranks"
        for (p, prefiller), (d, decoder) in itertools.product(nodes.items(), repeat=2):
            decoder.peer = prefiller
            assert decoder.generate(prompts, KvSource.REMOTE, 12) == right, f"{p} ranks to {d}"
    finally:
        for node in nodes.values():
            node.close()
    for node in nodes.values():
        assert node.loop.snapshot.pages.free == node.spec.num_pages
