"""Log lines about one peer, at most one a second, and the same line at most once a minute.

A peer that is down is dialled twice a second for hours; the log must name the cause once and stay readable.
"""

from __future__ import annotations

import logging

from pdd.states import Clock
from pdd.units import counted

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

    def log(self, level: int, line: str) -> None:
        """Writes `line` unless it comes too soon after the last one; then it is only counted."""
        now = self._clock()
        wait = SAME_LINE_SECONDS if line == self._last_line else EVERY_SECONDS
        if now - self._last_at < wait:
            self._num_held_back += 1
            return
        suffix = f" ({counted(self._num_held_back, 'line')} held back)" if self._num_held_back else ""
        self._logger.log(level, "%s%s", line, suffix)
        self._last_line, self._last_at, self._num_held_back = line, now, 0
