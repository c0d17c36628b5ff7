"""Rates over the last one and ten seconds, from totals sampled once a second. Pure: the caller brings the clock.

All clients get the same numbers because the daemon computes them. A total that fell (it cannot within one life) gives
no negative rate.
"""

from __future__ import annotations

from collections import deque

from pdd.control.schema import Rates, RateWindows, Status

_LONG_SECONDS = 10.0


def _totals(status: Status) -> dict[str, int]:
    return {
        "bytes_per_second": status.transfers.bytes,
        "bytes_received_per_second": status.transfers.bytes_received,
        "writes_per_second": status.transfers.writes,
        "generated_tokens_per_second": status.engine.generated_tokens,
        "prompt_tokens_per_second": status.engine.prompt_tokens,
        "steps_per_second": status.engine.steps,
    }


class RateWindow:
    """The samples of the last ten seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[str, int]]] = deque()

    def add(self, now: float, status: Status) -> None:
        self._samples.append((now, _totals(status)))
        while len(self._samples) > 2 and self._samples[1][0] <= now - _LONG_SECONDS:
            self._samples.popleft()

    def rates(self) -> RateWindows:
        """Over the newest two samples, and over all that are kept."""
        if len(self._samples) < 2:
            return RateWindows()
        return RateWindows(one_second=self._between(-2), ten_seconds=self._between(0))

    def _between(self, first: int) -> Rates:
        (start, before), (end, after) = self._samples[first], self._samples[-1]
        seconds = max(end - start, 1e-9)
        return Rates(**{name: max(after[name] - before[name], 0) / seconds for name in after})
