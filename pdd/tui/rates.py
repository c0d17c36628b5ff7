"""What the screen shows over time, made from the event stream. Pure: lines and a clock value in, numbers out.

`History.apply` merges a line of /v1/events into the current status and keeps the last two minutes of batch size and
transfer rate. A daemon that restarted (another boot_id) starts over and leaves a gap; a total that fell never gives a
negative rate.
"""

from __future__ import annotations

from collections import deque
from typing import Any

KEPT_SAMPLES = 240


class History:
    """Owner: whoever feeds it (the app's main thread)."""

    def __init__(self) -> None:
        self.status: dict[str, Any] | None = None
        self.batch: deque[float | None] = deque(maxlen=KEPT_SAMPLES)  # None is a gap
        self.moved: deque[float | None] = deque(maxlen=KEPT_SAMPLES)  # bytes per second, in and out together
        self.updated: float | None = None  # the caller's clock at the last line
        self._stamp: float | None = None  # the daemon's monotonic clock at the last line

    def apply(self, line: dict[str, Any], now: float) -> None:
        """Takes one line. Lines of other types than snapshot and delta only prove that the daemon lives."""
        self.updated = now
        if line["type"] not in ("snapshot", "delta"):
            return
        before = self.status
        changes = line["docs"].get("status", {})
        if line["type"] == "snapshot":
            if before is not None:
                self._gap()
            self.status = dict(changes)
        else:
            self.status = {**(before or {}), **changes}
        self.batch.append(self.status["batch_size"])
        if before is not None and self._stamp is not None and line["type"] == "delta":
            rate = bytes_per_second(before, self.status, line["ts_mono"] - self._stamp)
            self.moved.append(rate["in"] + rate["out"])
        self._stamp = line["ts_mono"]

    def _gap(self) -> None:
        self.batch.append(None)
        self.moved.append(None)


def bytes_per_second(before: dict[str, Any], after: dict[str, Any], seconds: float) -> dict[str, float]:
    """Rates between two status documents of one boot: {"in": …, "out": …}."""
    if seconds <= 0:
        return {"in": 0.0, "out": 0.0}
    old, new = before["transfers"], after["transfers"]
    return {
        "in": max(new["bytes_received"] - old["bytes_received"], 0) / seconds,
        "out": max(new["bytes"] - old["bytes"], 0) / seconds,
    }


def known(samples: deque[float | None]) -> list[float]:
    return [sample for sample in samples if sample is not None]
