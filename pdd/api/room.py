"""How many connections the API port holds open, and which one goes when one more comes.

A connection that has no request in hand (it says nothing yet, or waits for its next request) gives way, the longest idle
first: silent clients, however many, do not shut out those that ask. When all are busy, the newcomer is told so.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time

import msgspec

from pdd.api.error_response import RETRY_AFTER_SECONDS, error_object
from pdd.errors import TooManyConnections

_log = logging.getLogger(__name__)
_TOLD_SECONDS = 60.0


class Room:
    """Owner: main loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._busy: set[asyncio.Transport] = set()
        self._idle: dict[asyncio.Transport, None] = {}  # the longest idle first
        self._told_at = -math.inf

    def set_most(self, most: int) -> None:
        """Those that are open stay; newcomers meet the new bound."""
        self._most = most

    def enter(self, transport: asyncio.Transport) -> bool:
        """Counts a new connection, idle at first. False: there is no room; it was answered and is being closed."""
        if len(self._busy) + len(self._idle) >= self._most:
            self._tell()
            if not self._idle:
                transport.write(_refusal(self._most))
                transport.close()
                return False
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.abort()
        self._idle[transport] = None
        return True

    def is_busy(self, transport: asyncio.Transport) -> None:
        """It has a request in hand."""
        if transport in self._idle:
            del self._idle[transport]
            self._busy.add(transport)

    def is_idle(self, transport: asyncio.Transport) -> None:
        """Its request was answered."""
        if transport in self._busy:
            self._busy.remove(transport)
            self._idle[transport] = None

    def leave(self, transport: asyncio.Transport) -> None:
        """It is closed."""
        self._busy.discard(transport)
        self._idle.pop(transport, None)

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told_at >= _TOLD_SECONDS:
            self._told_at = now
            _log.warning(
                "api.listen: all %d connections are open, %d of them idle; the longest idle gives way, and where none is idle, "
                "a newcomer is answered 503 [%s]; raise api.max_connections if these are clients of yours",
                self._most, len(self._idle), TooManyConnections.id,
            )


def _refusal(most: int) -> bytes:
    error = TooManyConnections(f"all {most} connections of this node are at work", hint="try again, or another node")
    body = msgspec.json.encode(error_object(error))
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
        f"retry-after: {RETRY_AFTER_SECONDS}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
