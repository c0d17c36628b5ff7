"""Whether the node is alive, for systemd's watchdog: the engine gets its turns done, and so does the main loop.

The bounds are those that a node has anyway. A turn of the engine that takes longer than engine.step_timeout is a hung rank or
a bug, and a main loop that comes late by peers.dead_after has been given up by every peer. No WATCHDOG=1 is sent while either
is so, and when that lasts for WatchdogSec= systemd ends the daemon by SIGABRT, on which faulthandler writes all stacks.
Pure: the caller has the clock.
"""

from __future__ import annotations

import logging

_log = logging.getLogger("pdd")


class Watchdog:
    """Owner: the main loop. `look` at each tick of it."""

    def __init__(self, pause: float) -> None:
        """`pause`: seconds that the caller sleeps between two looks."""
        self._pause = pause
        self._last: float | None = None
        self._told = ""

    def look(self, now: float, turn_age: float, step_timeout: float, dead_after: float) -> str:
        """Why this node is not alive; "" when it is. Times in seconds; a change is logged."""
        late = 0.0 if self._last is None else now - self._last - self._pause
        self._last = now
        why = ""
        if turn_age >= step_timeout:
            why = f"the engine's turn has run for {turn_age:.0f} s (engine.step_timeout {step_timeout:g} s)"
        elif late >= dead_after:
            why = f"the main loop came {late:.1f} s late (peers.dead_after {dead_after:g} s)"
        if bool(why) != bool(self._told):
            _log.error("systemd is not told that this node is alive: %s", why) if why else _log.warning("alive again")
        self._told = why
        return why
