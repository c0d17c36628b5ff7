"""The queue of requests that wait for pages or for a slot: order, bounded bypass, deadline.

Requests that start over (preempted, or their remote KV failed) come first, then those that never started; within each, the
order is arrival. A client that has seen tokens thus waits for older streams, never for a newcomer. A request that finds
too few free pages may be passed by later ones that fit, for BYPASS_SECONDS: small requests are not held up by one that waits
for many pages, and after that time nobody new passes, so pages add up until it fits. Those that started still go first,
which cannot starve it: they are no more than there were when the passing ended.

A request that was never admitted is dropped at its deadline; one that has started is not, however long it waits: the
stream's own bound is the time between two tokens (scheduler.request_timeout). A prefill-only request has no deadline
here: its decoder has one, which knows that a queue that moves is progress, and takes the request back (an abort) when
nothing does.
"""

from __future__ import annotations

import bisect
import collections
import enum
from collections.abc import Callable, Iterator

from pdd.engine.record import Record
from pdd.engine.request import RequestState

BYPASS_SECONDS = 2.0  # how long a request may be passed for want of pages
MAX_LOOKED_AT = 64  # waiting requests looked at in one step: bounds the cost of a long queue


class Admission(enum.Enum):
    """What became of one request's try."""

    ADMITTED = "admitted"
    NO_SLOT = "no slot"  # the batch (or the row of those fetched ahead) is full
    NO_PAGES = "no pages"


class WaitingQueue:
    """Waiting requests in the order in which they are tried. Owner: the scheduler."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout  # seconds
        self._records: list[Record] = []  # by _place
        self._deadlines: collections.deque[Record] = collections.deque()  # by arrival; holds requests long gone, too

    def set_timeout(self, timeout: float) -> None:
        """Seconds, for those that wait now, too."""
        self._timeout = timeout

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def add(self, record: Record) -> None:
        """Puts a request at its place, which is the end unless it starts over."""
        bisect.insort(self._records, record, key=_place)
        if not record.admissions and record.sink is None:
            self._deadlines.append(record)

    def discard(self, record: Record) -> None:
        """Takes a request out, if it is in."""
        index = bisect.bisect_left(self._records, _place(record), key=_place)
        if index < len(self._records) and self._records[index] is record:
            del self._records[index]

    def admit(self, offer: Callable[[Record], Admission], now: float) -> None:
        """Offers the requests to `offer`, first come first, until the policy says to stop."""
        index = 0
        for _ in range(min(len(self._records), MAX_LOOKED_AT)):
            record = self._records[index]
            answer = offer(record)
            if answer is Admission.ADMITTED:
                del self._records[index]
                continue
            index += 1
            if answer is Admission.NO_PAGES:
                if record.blocked_since is None:
                    record.blocked_since = now
                if now - record.blocked_since >= BYPASS_SECONDS:
                    return

    def expire(self, now: float) -> list[Record]:
        """Removes and returns the requests whose deadline has passed."""
        expired = []
        while (record := self._next_deadline()) is not None and now >= record.arrived + self._timeout:
            self._deadlines.popleft()
            self.discard(record)
            expired.append(record)
        return expired

    def next_deadline(self) -> float | None:
        record = self._next_deadline()
        return None if record is None else record.arrived + self._timeout

    def _next_deadline(self) -> Record | None:
        while self._deadlines:
            record = self._deadlines[0]
            if record.state is RequestState.WAITING and not record.admissions:
                return record
            self._deadlines.popleft()
        return None


def _place(record: Record) -> tuple[bool, int]:
    """Does not change while the request is in the queue."""
    return not record.admissions, record.seq
