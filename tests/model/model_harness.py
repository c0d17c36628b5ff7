"""Drives a RankRunner as an engine would: scattered pages, chunks of any size, many requests in one step."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import torch

from pdd.engine.batch import NewRow, Row, SampledRow, Sampling, StepPlan, StepResult
from pdd.engine.rank_runner import RankRunner
from pdd.engine.rank_start import make_attention
from pdd.kv.layout import KvLayout
from pdd.model.attention import Attention
from pdd.model.attn_torch import TorchAttention
from pdd.model.config import load_config
from pdd.model.llama import load_model

GREEDY = Sampling(temperature=0.0)


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


class Harness:
    """A runner, its pages in random order, and the requests in flight."""

    def __init__(self, model_dir: Path, *, num_pages: int = 128, page_size: int = 16, dtype: str = "float32",
                 max_context: int = 2048, seed: int = 0, attention: str = "") -> None:
        """attention: "torch", "native", or "" for what a rank would choose."""
        config = load_config(model_dir)
        self.model = load_model(model_dir, config, dtype=dtype, max_context=max_context)
        self.layout = KvLayout(config.num_layers, num_pages, self.model.num_kv_heads, page_size, config.head_dim, dtype)
        # Stale bytes of earlier owners must not matter: start from large finite values, not zeros.
        self.kv = torch.full(self.layout.shape, 1e3, dtype=self.model.dtype)
        self.counter = FakeCounter()
        if attention == "torch":
            backend: Attention = TorchAttention(self.layout, self.kv, self.model.num_heads)
        else:
            backend, name = make_attention(self.layout, self.kv, self.model.num_heads)
            assert attention in ("", name), f"attention backend {name} instead of {attention}"
        self.runner = RankRunner(self.model, backend, self.layout, self.counter, max_context=max_context)
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
        result = self.runner.run(StepPlan(self.step_number, gone, tuple(new), tuple(rows)))
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
