"""A document that takes long to make, read on a thread and kept for a while, so that event streams may carry it.

Who asks is given the latest there is; one that is older than `max_age` is replaced in the background, once for all who
ask. A reading that fails is logged and leaves the old one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)


class SlowDocument:
    """Owner: the main loop; only `read` runs on a thread."""

    def __init__(self, read: Callable[[], dict[str, Any]], max_age: float) -> None:
        self._read = read
        self._max_age = max_age  # seconds
        self._latest: dict[str, Any] = {}
        self._made_at = -1e9
        self._making: asyncio.Task[None] | None = None

    def latest(self) -> dict[str, Any]:
        """The document as it was at most about `max_age` ago, if `ready` was waited for once."""
        if time.monotonic() - self._made_at > self._max_age and (self._making is None or self._making.done()):
            self._making = asyncio.create_task(self._make())
        return self._latest

    async def ready(self) -> None:
        """Returns once there is a first one, or it could not be made."""
        self.latest()
        if not self._latest and self._making is not None:
            await asyncio.shield(self._making)

    async def _make(self) -> None:
        try:
            self._latest = await asyncio.to_thread(self._read)
        except Exception:
            _log.exception("a document for event streams cannot be made")
        self._made_at = time.monotonic()
