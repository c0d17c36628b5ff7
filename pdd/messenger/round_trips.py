"""How long a heartbeat takes to a peer and back, but for the time that the peer kept it. Pure, apart from the pings.

A heartbeat carries a number, the number of the peer's latest one (the echo), and for how long that one has been here.
"""

from __future__ import annotations

import asyncio
import dataclasses

from pdd.messenger import wire

_MAX_ECHOES = 64  # heartbeats whose answer may still come


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """What a heartbeat carries for this."""

    seq: int  # 1, 2, ...
    echo: int  # 0: the peer has sent none yet
    echo_age_us: int


class RoundTrips:
    """Owner: PeerLink."""

    def __init__(self) -> None:
        self.latest: float | None = None  # seconds
        self._seq = 0
        self._sent_at: dict[int, float] = {}
        self._pings: list[tuple[int, asyncio.Future[float]]] = []  # (seq of the heartbeat, its round trip)
        self._last_seq_received = 0
        self._last_seq_at = 0.0

    def leave(self, now: float) -> Mark:
        """A heartbeat goes out."""
        self._seq += 1
        self._sent_at[self._seq] = now
        while len(self._sent_at) > _MAX_ECHOES:
            del self._sent_at[next(iter(self._sent_at))]
        age = now - self._last_seq_at if self._last_seq_received else 0.0
        return Mark(self._seq, self._last_seq_received, max(0, int(age * 1e6)))

    def arrive(self, beat: wire.Heartbeat, now: float) -> None:
        """A heartbeat of the peer has come."""
        self._last_seq_received, self._last_seq_at = beat.seq, now
        sent_at = self._sent_at.get(beat.echo)
        if sent_at is None:
            return
        self.latest = max(0.0, now - sent_at - beat.echo_age_us / 1e6)
        for seq, waiting in self._pings:
            if seq <= beat.echo and not waiting.done():
                waiting.set_result(self.latest)

    def await_latest(self) -> asyncio.Future[float]:
        """Seconds of the round trip of the heartbeat that went out last."""
        self._pings = [(seq, each) for seq, each in self._pings if not each.done()]
        waiting = asyncio.get_running_loop().create_future()
        self._pings.append((self._seq, waiting))
        return waiting
