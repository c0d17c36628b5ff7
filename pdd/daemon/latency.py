"""Percentiles of the last minute, for `status` and `top`: what a node does now, not since it began.

Counts by bucket, in slots of five seconds that are forgotten one by one: observing costs the same at any rate, memory is
bounded, and a minute is a minute however many tokens it had. Buckets are 9 % wide, so a percentile is that exact. The
histograms of /metrics keep their own, coarser buckets since the start, for whoever scrapes.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable

SLOT_SECONDS, NUM_SLOTS = 5.0, 12
WINDOW_SECONDS = SLOT_SECONDS * NUM_SLOTS  # the oldest slot goes whole: 55 to 60 s are seen
_PER_OCTAVE = 8
_LEAST = 1e-6  # seconds; anything shorter counts as this


class Window:
    """Durations lately observed, in seconds. Owner: the main loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slots: collections.deque[tuple[int, collections.Counter[int]]] = collections.deque()  # oldest first

    def observe(self, seconds: float) -> None:
        slot = int(self._clock() // SLOT_SECONDS)
        if not self._slots or self._slots[-1][0] != slot:
            self._forget(slot)
            self._slots.append((slot, collections.Counter()))
        self._slots[-1][1][_bucket(seconds)] += 1

    def percentiles(self, *shares: float) -> list[float | None]:
        """The duration within which each share (0 to 1) of the observations lie; None when there were none."""
        self._forget(int(self._clock() // SLOT_SECONDS))
        buckets: collections.Counter[int] = collections.Counter()
        for _, counts in self._slots:
            buckets += counts
        ordered = sorted(buckets.items())
        total = buckets.total()
        return [_at(ordered, share * total) if total else None for share in shares]

    def _forget(self, now: int) -> None:
        while self._slots and self._slots[0][0] <= now - NUM_SLOTS:
            self._slots.popleft()


@dataclasses.dataclass(frozen=True, slots=True)
class Latencies:
    """Owner: the main loop."""

    first_token: Window  # from a request to its first token
    between_tokens: Window
    kv_wait: Window  # of a decoder, from asking for the KV of a prompt to counting it whole

    @classmethod
    def new(cls, clock: Callable[[], float]) -> Latencies:
        return cls(Window(clock), Window(clock), Window(clock))


def _bucket(seconds: float) -> int:
    return math.floor(math.log2(max(seconds, _LEAST) / _LEAST) * _PER_OCTAVE)


def _at(ordered: list[tuple[int, int]], rank: float) -> float:
    """The middle of the bucket in which the observation of that rank is."""
    running = itertools.accumulate(count for _, count in ordered)
    bucket = next(bucket for (bucket, _), seen in zip(ordered, running, strict=True) if seen >= rank)
    return float(_LEAST * 2 ** ((bucket + 0.5) / _PER_OCTAVE))
