"""Log lines about one peer, at most one a second, and the same line at most once a minute.

A peer that is down is dialled twice a second for hours; the log must name the cause once and stay readable. Lines that
differ in what does not matter (the port that a decoder calls from) are the same when their `key` is.
"""

from __future__ import annotations

import logging
import math

from pdd.messenger.goodbye import InOrder
from pdd.states import Clock
from pdd.units import counted

_MOST_KEYS = 256
EVERY_SECONDS = 1.0
SAME_LINE_SECONDS = 60.0


class QuietLog:
    """Owner: the main loop. One per peer, or one for all strangers of a listener."""

    def __init__(self, logger: logging.Logger, clock: Clock) -> None:
        self._logger = logger
        self._clock = clock
        self._last_line = ""
        self._last_at = float("-inf")
        self._num_held_back = 0
        self._key_at: dict[str, float] = {}  # when a line of that key was written, the oldest first

    def log(self, level: int, line: str, key: str = "") -> None:
        """Writes `line` unless it comes too soon after the last one, or after any of its `key`; then it is only counted."""
        now = self._clock()
        wait = SAME_LINE_SECONDS if line == self._last_line else EVERY_SECONDS
        if now - self._last_at < wait or (key and now - self._key_at.get(key, -math.inf) < SAME_LINE_SECONDS):
            self._num_held_back += 1
            return
        suffix = f" ({counted(self._num_held_back, 'line')} held back)" if self._num_held_back else ""
        self._logger.log(level, "%s%s", line, suffix)
        self._last_line, self._last_at, self._num_held_back = line, now, 0
        if key:
            self._key_at.pop(key, None)
            self._key_at[key] = now
            if len(self._key_at) > _MOST_KEYS:
                del self._key_at[next(iter(self._key_at))]


def level_of_end(error: Exception) -> int:
    """How loud the end of a link is: a peer that goes in good order is no trouble."""
    return logging.INFO if isinstance(error, InOrder) else logging.WARNING
