"""Follows a daemon's event stream in a thread of its own, for ever: a daemon that is lost is asked again until it is
back.

What comes is handed to `deliver(line)`, a loss to `lost(reason)`; both are called on the feed's thread and must only
pass the news on. Setting `interval` takes effect with the next line.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from pdd.control.client import Client
from pdd.errors import ControlError
from pdd.units import format_duration

_RETRY_SECONDS = 0.5
_SILENCE_SECONDS = 2.0  # beyond the interval, then the connection counts as lost


class Feed(threading.Thread):
    """Ends with the process (a blocked read is not waited for), or at the next line after `stop`."""

    def __init__(
        self, client: Client, interval: float, deliver: Callable[[dict[str, Any]], None], lost: Callable[[str], None]
    ) -> None:
        super().__init__(name="pdd-top-feed", daemon=True)
        self.interval = interval
        self._client = client
        self._deliver = deliver
        self._lost = lost
        self._stop = threading.Event()

    def stop(self) -> None:
        self._stop.set()

    def run(self) -> None:
        while not self._stop.is_set():
            try:
                self._follow()
            except ControlError as error:
                self._lost(error.message)
                self._stop.wait(_RETRY_SECONDS)

    def _follow(self) -> None:
        """Delivers lines until the interval changes or the daemon stops."""
        interval = self.interval
        url = f"/v1/events?topics=status&interval={format_duration(interval)}"
        lines = self._client.stream(url, idle_timeout=interval + _SILENCE_SECONDS)
        for line in lines:
            if self._stop.is_set():
                return
            if line["type"] == "stopping":
                break
            self._deliver(line)
            if self.interval != interval:
                return
        self._lost("the daemon stopped")
        self._stop.wait(_RETRY_SECONDS)
