"""Threads for work in proportion to a request's length, so that the event loop answers probes and other streams
meanwhile.

Short work stays on the loop, where it is done sooner than a thread wakes up. Long and middling work have threads of
their own, so a huge prompt delays other huge prompts only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

INLINE_BYTES = 4 << 10  # about 1 ms of tokenizing
LONG_BYTES = 1 << 20
T = TypeVar("T")


class Workers:
    """Owner: main loop."""

    def __init__(self) -> None:
        self._middling = ThreadPoolExecutor(2, "pdd-tokenize")
        self._long = ThreadPoolExecutor(1, "pdd-tokenize-long")

    async def run(self, size_bytes: int, work: Callable[[], T], *, inline: bool = True) -> T:
        """The result of `work`, whose cost grows with `size_bytes`. A caller that is cancelled does not wait for it."""
        if inline and size_bytes <= INLINE_BYTES:
            return work()
        pool = self._long if size_bytes > LONG_BYTES else self._middling
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def close(self) -> None:
        """Drops what waits; what runs ends by itself."""
        for pool in (self._middling, self._long):
            pool.shutdown(wait=False, cancel_futures=True)
