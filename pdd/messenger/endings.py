"""What a prefiller remembers of attempts that are over, or were cancelled before they came. Tables are bounded."""

from __future__ import annotations

from pdd.errors import PeerProtocol
from pdd.messenger import wire
from pdd.messenger.job import Ending
from pdd.messenger.wire import EndReason

TOMBSTONE_SECONDS = 600.0
MOST_TOMBSTONES = 4096
MOST_ANSWERED = 1024


class Tombstones:
    """Attempts of one link that were cancelled before they came."""

    def __init__(self) -> None:
        self._until: dict[int, float] = {}  # in the order of expiry

    def __contains__(self, attempt: int) -> bool:
        return attempt in self._until

    def __len__(self) -> int:
        return len(self._until)

    def add(self, attempt: int, now: float) -> None:
        """Raises PeerProtocol when there are too many: forgetting one would let a cancelled write land."""
        while self._until and self._until[oldest := next(iter(self._until))] <= now:
            del self._until[oldest]
        if len(self._until) >= MOST_TOMBSTONES:
            raise PeerProtocol(f"{MOST_TOMBSTONES} attempts that never came were cancelled")
        self._until.setdefault(attempt, now + TOMBSTONE_SECONDS)


class Answered:
    """What the last attempts of one link ended with: the answer to a Cancel that comes late.

    A decoder numbers its attempts upwards, so one at or below the highest number that was forgotten here may be one
    of those: its answer is that nobody knows, which makes the decoder fence the link.
    """

    def __init__(self) -> None:
        self._ended: dict[int, wire.PrefillEnded] = {}
        self._forgotten = -1  # the highest attempt that is no longer kept

    def __contains__(self, attempt: int) -> bool:
        return attempt in self._ended

    def get(self, attempt: int) -> wire.PrefillEnded | None:
        """None: no such attempt has ended on this link."""
        ended = self._ended.get(attempt)
        if ended is None and attempt <= self._forgotten:
            return Ending(EndReason.FAILED, "how it ended is no longer known").message_for(attempt, unknown=1)
        return ended

    def add(self, ended: wire.PrefillEnded) -> None:
        self._ended[ended.attempt] = ended
        if len(self._ended) > MOST_ANSWERED:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            self._forgotten = max(self._forgotten, oldest)
