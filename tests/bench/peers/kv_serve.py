"""The peers' side of bench_kv: answers one JSON line per request on stdin, so that transfer engines of any venv can take turns.

Imports the standard library and numpy only; kv_*.py next to it run under the Python of their own venv. What an engine prints goes to stderr.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np


class Peer:
    """One end. `memory`: a pool of pages; times are CLOCK_MONOTONIC in seconds, which the two ends share."""

    name = ""  # with the version, for the report

    def __init__(self, pool_bytes: int) -> None:
        pool = mmap.mmap(-1, pool_bytes)
        self.memory = np.frombuffer(pool, dtype=np.uint8)
        self.base = int(self.memory.ctypes.data)

    def fill(self, seed: int) -> None:
        self.memory[:] = np.frombuffer(np.random.default_rng(seed).bytes(len(self.memory)), dtype=np.uint8) if seed else 0

    def checksums(self, page_bytes: int, pages: list[int]) -> list[int]:
        whole = memoryview(self.memory)
        return [zlib.crc32(whole[page * page_bytes : (page + 1) * page_bytes]) for page in pages]

    def describe(self) -> str:
        """What the other end needs to write here."""
        raise NotImplementedError

    def connect(self, description: str) -> None:
        raise NotImplementedError

    def prepare(self, page_bytes: int, pages: int, sources: list[int], targets: list[int], depth: int) -> None:
        """What can be made ready before it is timed: requests of `pages` entries, in turn, `depth` at once."""
        raise NotImplementedError

    def send(self, seconds: float) -> tuple[float, float, int]:
        """Requests for so long; (when the first was begun, when the last was done as far as this end knows, requests)."""
        raise NotImplementedError

    def receive(self) -> float | None:
        """When the last request was here; None where only the sender knows."""
        return None


def serve(make: Callable[[int], Peer]) -> None:
    """argv: POOL_BYTES. Ends with its stdin."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: an end that polls for ever outlives a killed benchmark else
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    peer = make(int(sys.argv[1]))
    answer({"name": peer.name})
    for line in sys.stdin:
        call, *arguments = json.loads(line)
        answer(getattr(peer, call)(*arguments))
    os._exit(0)  # the engines' own threads may take their time, and some crash
