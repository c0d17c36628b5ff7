"""Drives a RankRunner as an engine would: scattered pages, chunks of any size, many requests in one step."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from pdd.engine.batch import NewRow, Row, SampledRow, Sampling, StepPlan, StepResult
from pdd.engine.rank_runner import RankRunner
from pdd.model.backends import make_attention
from pdd.model.config import load_config
from pdd.model.shard import Shard
from pdd.model.transformer import load_model

GREEDY = Sampling(temperature=0.0)
Result = TypeVar("Result")


class FakeCounter:
    """What the native Counter is to a rank."""

    def __init__(self) -> None:
        self.value = 0

    def bump(self) -> int:
        self.value += 1
        return self.value


@dataclasses.dataclass
class Tracked:
    """One request as the engine sees it."""

    row_id: int
    tokens: list[int]  # prompt, then generated
    num_prompt: int
    chunk: int  # most tokens of it in a step
    sampling: Sampling | None
    done: int = 0  # tokens whose KV is in the pages
    num_pages: int = 0
    known: bool = False
    samples: list[SampledRow] = dataclasses.field(default_factory=list)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class ThreadRanks:
    """Collectives (pdd/model/collectives.py) of one of several threads. Sums in rank order: the same bits everywhere."""

    def __init__(self, rank: int, barrier: threading.Barrier, shared: list[torch.Tensor | None]) -> None:
        self.rank, self.world = rank, len(shared)
        self._barrier, self._shared = barrier, shared

    def all_reduce(self, x: torch.Tensor) -> None:
        assert x.is_contiguous()
        x.copy_(sum(self._exchange(x)[1:], start=self._shared[0]))
        self.ordered()

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._exchange(x)
        assert len({part.shape for part in parts}) == 1
        return torch.cat(parts, dim=-1)

    def ordered(self) -> None:
        self._barrier.wait(30)

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.ordered()  # what was shared before is used up
        self._shared[self.rank] = x.clone()
        self.ordered()
        return list(self._shared)


def in_ranks(world: int, run: Callable[[int, ThreadRanks | None], Result]) -> list[Result]:
    """What each of `world` threads returns for (its rank, its way to the others). One that fails fails them all."""
    if world == 1:
        return [run(0, None)]
    barrier, shared = threading.Barrier(world), [None] * world

    def guarded(rank: int) -> Result:
        try:
            return run(rank, ThreadRanks(rank, barrier, shared))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(world)]
    failed = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(failed, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


class Harness:
    """Runners of the ranks, their pages in random order, and the requests in flight."""

    def __init__(self, model_dir: Path, *, num_pages: int = 128, page_size: int = 16, dtype: str = "float32",
                 max_context: int = 2048, seed: int = 0, attention: str = "", world: int = 1) -> None:
        """attention: "torch", "native", or "" for what a rank would choose."""
        config = load_config(model_dir)
        self.layout = config.kv_shape(dtype).layout_over(world, page_size, num_pages)
        self.kvs, self.counters, self.runners = [], [], []
        barrier, shared = threading.Barrier(world), [None] * world
        for rank in range(world):
            model = load_model(model_dir, config, dtype=dtype, max_context=max_context, shard=Shard(rank, world))
            # Stale bytes of earlier owners must not matter: start from large finite values, not zeros.
            kv = torch.full(self.layout.shape, 1e3, dtype=model.dtype)
            backend, name = make_attention(model, self.layout, kv, plain=attention == "torch")
            assert attention in ("", name), f"attention backend {name} instead of {attention}"
            counter = FakeCounter()
            ranks = ThreadRanks(rank, barrier, shared) if world > 1 else None
            self.runners.append(RankRunner(model, backend, self.layout, counter, max_context=max_context, ranks=ranks))
            self.kvs.append(kv)
            self.counters.append(counter)
        self.kv, self.counter, self.runner = self.kvs[0], self.counters[0], self.runners[0]
        self.free = list(range(num_pages))
        random.Random(seed).shuffle(self.free)
        self.step_number = 0
        self._next_row = 0

    def request(self, prompt: list[int], *, chunk: int = 10**6, sampling: Sampling | None = GREEDY) -> Tracked:
        self._next_row += 1
        return Tracked(self._next_row, list(prompt), len(prompt), chunk, sampling)

    def step(self, requests: list[Tracked], gone: tuple[int, ...] = ()) -> StepResult:
        new, rows = [], []
        for request in requests:
            if not request.known:
                new.append(NewRow(request.row_id, tuple(request.tokens[: request.num_prompt]),
                                  tuple(request.generated), request.sampling))
                request.known = True
            end = min(len(request.tokens), request.done + request.chunk)
            needed = self.layout.num_pages_for(end) - request.num_pages
            pages = tuple(self.free.pop() for _ in range(needed))
            request.num_pages += needed
            rows.append(Row(request.row_id, tuple(request.tokens[request.done : end]), request.done, pages,
                            sample=request.sampling is not None and end == len(request.tokens)))
            request.done = end
        plan = StepPlan(self.step_number, gone, tuple(new), tuple(rows))
        results = in_ranks(len(self.runners), lambda rank, _: self.runners[rank].run(plan))
        result = results[0]
        assert all(other.sampled == result.sampled for other in results)
        self.step_number += 1
        by_id = {request.row_id: request for request in requests}
        for sampled in result.sampled:
            by_id[sampled.row_id].samples.append(sampled)
            by_id[sampled.row_id].tokens.extend(sampled.tokens)
        return result

    def run(self, requests: list[Tracked], count: int) -> list[list[int]]:
        """Steps all requests together until each has generated `count` tokens."""
        while running := [request for request in requests if len(request.generated) < count]:
            self.step(running)
        return [request.generated for request in requests]
