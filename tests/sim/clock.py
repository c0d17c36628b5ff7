"""An event loop that owns time: when nothing is ready, the next timer's moment is now.

Nothing here waits, so hours pass in milliseconds, and nothing comes from outside: no socket, no thread, no real clock.
What runs on it, and in which order, depends on nothing but the program.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class Stuck(Exception):
    """Nothing is ready, and nothing will ever be."""


class _Timeless(selectors.SelectSelector):
    """Looks at no file: every wait is a jump of the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("every task waits, and no timer is set")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._timeless = _Timeless()
        self._readers: dict[int, Callable[[], None]] = {}
        super().__init__(self._timeless)

    def time(self) -> float:
        return self._timeless.now

    def _write_to_self(self) -> None:
        """There is no other thread to be woken by."""

    # -- descriptors that stand for simulated things; `readable` says that one has something
    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        self._readers[fd] = lambda: callback(*args)

    def remove_reader(self, fd: Any) -> bool:
        return self._readers.pop(fd, None) is not None

    def readable(self, fd: int) -> None:
        reader = self._readers.get(fd)
        if reader is not None:
            reader()


class Inline(Executor):
    """Runs what it is given at once: a thread would bring its own order."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
