"""Time in which this process ran: the only time that proves anything about a peer.

A node that was stopped for a minute finds a minute of silence behind it, all its own. Whoever measures silence or lack
of progress ticks regularly, and a tick that comes late counts for two at most.
"""

from __future__ import annotations

from pdd.states import Clock


class AwakeTime:
    """Owner: whoever ticks it, every `tick_seconds`."""

    def __init__(self, clock: Clock, tick_seconds: float) -> None:
        self.seconds = 0.0  # so far
        self._clock = clock
        self._most = 2 * tick_seconds
        self._last_at = clock()

    def tick(self) -> float:
        """Seconds more."""
        now = self._clock()
        ran, self._last_at = min(now - self._last_at, self._most), now
        self.seconds += ran
        return ran
