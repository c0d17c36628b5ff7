"""This project's runner for bench_engine, without its rank's process. Also measures the memory bandwidth, with torch's threads."""

from __future__ import annotations

import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

import torch

from pdd.version import VERSION
from tests.bench.peers.serve import Engine, serve
from tests.model.model_harness import Harness, Tracked


class Pdd(Engine):
    def __init__(self, model: str, threads: int, dtype: str) -> None:
        torch.set_num_threads(threads)
        self.name = f"pdd {VERSION} (torch {torch.__version__})"
        self.harness = Harness(pathlib.Path(model), num_pages=1024, dtype=dtype)
        self.stream = torch.ones(64 << 20)

    def prefill(self, prompt: list[int]) -> float:
        request = self.harness.request(prompt)
        started = time.perf_counter()
        self.harness.step([request])
        seconds = time.perf_counter() - started
        self._give_back([request])
        return seconds

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        requests = [self.harness.request(prompt) for prompt in prompts]
        for request in requests:
            self.harness.step([request])
        self.harness.step(requests)
        started = time.perf_counter()
        for _ in range(steps):
            self.harness.step(requests)
        seconds = (time.perf_counter() - started) / steps
        self._give_back(requests)
        return seconds

    def facts(self) -> dict[str, float]:
        """weight_bytes: what every step reads (a tied embedding as the head); kv_bytes: per token of context."""
        model, layout = self.harness.model, self.harness.layout
        weights = model.param_bytes - model.config.vocab_size * model.config.hidden_size * model.dtype.itemsize
        return {"weight_bytes": weights, "kv_bytes": layout.num_layers * layout.num_kv_heads * layout.tiles * layout.token_bytes}

    def bandwidth(self) -> float:
        """Bytes per second of reading memory, best of four."""
        best = float("inf")
        for _ in range(4):
            started = time.perf_counter()
            self.stream.sum()
            best = min(best, time.perf_counter() - started)
        return self.stream.nbytes / best

    def _give_back(self, requests: list[Tracked]) -> None:
        for request in requests:
            state = self.harness.runner._rows[request.row_id]
            self.harness.free.extend(int(page) for page in state.table[: state.num_pages])


if __name__ == "__main__":
    serve(Pdd)
