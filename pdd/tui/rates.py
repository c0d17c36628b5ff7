"""What the screen shows over time, made from the event stream. Pure: lines and a clock value in, numbers out.

`History.apply` merges a line of /v1/events into the current status and keeps the last samples of batch size, transfer
rate, tokens and pages in use. Rates are the daemon's own, of the last second; a sample of the transfer chart is at least
the mean since the one before it, so that no burst between two pictures is missed. A daemon that was lost or restarted
leaves a gap.
"""

from __future__ import annotations

from collections import deque
from typing import Any

KEPT_SAMPLES = 240
_WINDOW_SECONDS = 1.0  # of the daemon's shortest rate


class History:
    """Owner: whoever feeds it (the app's main thread)."""

    def __init__(self) -> None:
        self.status: dict[str, Any] | None = None
        self.batch: deque[float | None] = deque(maxlen=KEPT_SAMPLES)  # None is a gap
        self.moved: deque[float | None] = deque(maxlen=KEPT_SAMPLES)  # bytes per second, in and out together
        self.tokens: deque[float | None] = deque(maxlen=KEPT_SAMPLES)  # per second, prompt and output together
        self.used: deque[float | None] = deque(maxlen=KEPT_SAMPLES)  # pages that cannot be handed out
        self.updated: float | None = None  # the caller's clock at the last line
        self._counted: tuple[float, int] | None = None  # clock, and bytes moved until then

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
            self._counted = None
            self.status = dict(changes)
        else:
            self.status = {**(before or {}), **changes}
        self.batch.append(self.status["batch_size"])
        rates, totals = self.status["rates"]["1s"], self.status["transfers"]
        moved = totals["bytes_received"] + totals["bytes"]
        rate = rates["bytes_received_per_second"] + rates["bytes_per_second"]
        if self._counted is None:
            self._counted = now, moved
        elif now - self._counted[0] >= _WINDOW_SECONDS:
            rate = max(rate, (moved - self._counted[1]) / (now - self._counted[0]))
            self._counted = now, moved
        self.moved.append(rate)
        self.tokens.append(rates["prompt_tokens_per_second"] + rates["generated_tokens_per_second"])
        pages = self.status["pages"]
        self.used.append(pages["total"] - pages["free"] - pages["cached"])

    def _gap(self) -> None:
        for samples in (self.batch, self.moved, self.tokens, self.used):
            samples.append(None)


def known(samples: deque[float | None]) -> list[float]:
    return [sample for sample in samples if sample is not None]
