"""NIXL for bench_kv, over UCX; UCX_TLS in the environment says by what. Every request has its notification.

Descriptors and requests are prepared before they are timed, and neighbours may be merged, which NIXL does by itself. Without its progress
threads, which spin also while others have their turn (4 KiB pages: 0.06 instead of 0.5 GB/s on two cores): either end drives it by polling.
"""

from __future__ import annotations

import base64
import collections
import importlib.metadata
import os
import time

import numpy as np
from kv_serve import Peer, serve
from nixl_cu12._api import nixl_agent, nixl_agent_config

LAST, SEEN = b"last", b"seen"  # how many requests there were; all of them are here


class Nixl(Peer):
    def __init__(self, pool_bytes: int) -> None:
        super().__init__(pool_bytes)
        self.name = f"NIXL {importlib.metadata.version('nixl-cu12')} UCX {os.environ['UCX_TLS']}"
        self.agent = nixl_agent(f"pdd-{os.getpid()}", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self.agent.register_memory([(self.base, pool_bytes, 0, "")], "DRAM")
        self.requests = []

    def describe(self) -> str:
        return base64.b64encode(self.agent.get_agent_metadata()).decode() + f" {self.base}"

    def connect(self, description: str) -> None:
        metadata, base = description.split()
        self.there = self.agent.add_remote_agent(base64.b64decode(metadata))
        self.there = self.there.decode() if isinstance(self.there, bytes) else self.there
        self.remote_base = int(base)

    def prepare(self, page_bytes: int, pages: int, sources: list[int], targets: list[int], depth: int) -> None:
        for request in self.requests:
            request.release()
        self.depth = depth

        def prepared(name: str, base: int, order: list[int]):
            rows = np.zeros((len(order), 3), dtype=np.uint64)
            rows[:, 0], rows[:, 1] = np.asarray(order, dtype=np.uint64) * page_bytes + base, page_bytes
            return self.agent.prep_xfer_dlist(name, rows, "DRAM")

        self.lists = prepared("NIXL_INIT_AGENT", self.base, sources), prepared(self.there, self.remote_base, targets)
        every = np.arange(len(sources), dtype=np.int32)
        self.requests = [
            self.agent.make_prepped_xfer("WRITE", self.lists[0], run, self.lists[1], run, b"page")
            for run in np.split(every, len(every) // pages)
        ]

    def send(self, seconds: float) -> tuple[float, float, int]:
        agent, requests, number = self.agent, self.requests, 0
        waiting: list[int] = []
        free = collections.deque(range(len(requests)))  # a request that is under way cannot be posted again
        began = time.perf_counter()
        while waiting or number == 0 or time.perf_counter() - began < seconds:
            while len(waiting) < self.depth and (number == 0 or time.perf_counter() - began < seconds):
                waiting.append(free.popleft())
                if agent.transfer(requests[waiting[-1]]) == "ERR":
                    raise RuntimeError("a NIXL transfer failed")
                number += 1
            states = [agent.check_xfer_state(requests[at]) for at in waiting]
            if "ERR" in states:
                raise RuntimeError("a NIXL transfer failed")
            free.extend(at for at, state in zip(waiting, states, strict=True) if state == "DONE")
            waiting = [at for at, state in zip(waiting, states, strict=True) if state != "DONE"]
        ended = time.perf_counter()
        agent.send_notif(self.there, LAST + str(number).encode())
        while not any(SEEN in notes for notes in agent.get_new_notifs().values()):
            continue  # nobody else drives what is still to be sent
        return began, ended, number

    def receive(self) -> float:
        arrived, expected = 0, None
        while arrived != expected:
            for notes in self.agent.get_new_notifs().values():
                for note in notes:
                    if note.startswith(LAST):
                        expected = int(note[len(LAST) :])
                    else:
                        arrived += 1
                        last = time.perf_counter()
        self.agent.send_notif(self.there, SEEN)
        for _ in range(100):
            self.agent.get_new_notifs()
        return last


if __name__ == "__main__":
    serve(Nixl)
