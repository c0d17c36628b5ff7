"""Mooncake's transfer engine for bench_kv, over its own TCP protocol. A request is one batch of writes; done is when the other end said so.

`depth` batches are under way at once.
"""

from __future__ import annotations

import importlib.metadata
import time

from kv_serve import Peer, serve
from mooncake.engine import TransferEngine


class Mooncake(Peer):
    def __init__(self, pool_bytes: int) -> None:
        super().__init__(pool_bytes)
        self.name = f"Mooncake {importlib.metadata.version('mooncake-transfer-engine-non-cuda')} TCP"
        self.engine = TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("Mooncake does not start")
        if self.engine.register_memory(self.base, pool_bytes) != 0:
            raise RuntimeError("Mooncake takes no memory")

    def describe(self) -> str:
        return f"127.0.0.1:{self.engine.get_rpc_port()} {self.base}"

    def connect(self, description: str) -> None:
        self.there, base = description.split()
        self.remote_base = int(base)

    def prepare(self, page_bytes: int, pages: int, sources: list[int], targets: list[int], depth: int) -> None:
        self.depth = depth
        self.batches = [
            ([self.base + page * page_bytes for page in sources[at : at + pages]],
             [self.remote_base + page * page_bytes for page in targets[at : at + pages]], [page_bytes] * pages)
            for at in range(0, len(sources), pages)
        ]

    def send(self, seconds: float) -> tuple[float, float, int]:
        engine, number = self.engine, 0
        waiting: list[int] = []
        began = time.perf_counter()
        while waiting or number == 0 or time.perf_counter() - began < seconds:
            while len(waiting) < self.depth and (number == 0 or time.perf_counter() - began < seconds):
                waiting.append(engine.batch_transfer_async_write(self.there, *self.batches[number % len(self.batches)]))
                number += 1
            if engine.get_batch_transfer_status([waiting.pop(0)]) != 0:
                raise RuntimeError("a Mooncake transfer failed")
        return began, time.perf_counter(), number


if __name__ == "__main__":
    serve(Mooncake)
