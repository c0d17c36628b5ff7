"""Every link of a node that has ended and whose fence is not up yet: the one place that waits for fences and alarms.

A link ends in one way, `PeerLink.fence`, and every end is a fence, whoever calls for it:

    the link itself   end of stream, goodbye, protocol error, silence, an endpoint that failed, a handler that raised
    Decoder           the fate of a write is unknown, more units than expected, an attempt that cannot be handled
    PeerTable         its address is no longer a member
    PeerListener      the same decoder has called again, or room is needed for strangers
    close             the node goes down

Each of them only says why. From CLOSING to CLOSED a link is here; what pages it holds back is told by the table of
pdd/kv/pool.py: RESERVED pages of its attempts become QUARANTINED when it ends and FREE when its fence is up, and by
nothing else. A fence takes a millisecond. One that does not come within ALARM_SECONDS is an error in the log, again
every REPEAT_SECONDS, and counts: no timer may free its pages, so an operator must know.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Generic, Protocol, TypeVar

from pdd.units import counted

ALARM_SECONDS = 1.0  # an error of an endpoint that closes all the same is no news
REPEAT_SECONDS = 60.0

_log = logging.getLogger(__name__)


class Fenced(Protocol):
    """A link, as far as its fence goes."""

    label: str
    fence_error: str  # why the fence is not up, as far as the fabric said; "" otherwise

    @property
    def name(self) -> str: ...

    @property
    def since(self) -> float:
        """When it ended."""

    @property
    def was_up(self) -> bool: ...

    async def wait_closed(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class FenceStatus:
    """Of all links of a node."""

    pending: int = 0  # ended, and not fenced yet
    oldest_seconds: float | None = None  # of those
    overdue: int = 0  # of those: an alarm was raised
    alarms: int = 0  # in this life; of links, however often each was told


L = TypeVar("L", bound=Fenced)


class Fencing(Generic[L]):
    """Owner: the main loop. One per node."""

    def __init__(self) -> None:
        self._pending: dict[L, asyncio.TimerHandle] = {}  # the oldest first
        self._overdue: set[L] = set()
        self._num_alarms = 0

    # -- links ----------------------------------------------------------------------------------------------------
    def begin(self, link: L) -> None:
        """It has ended."""
        self._pending[link] = asyncio.get_running_loop().call_later(ALARM_SECONDS, self._alarm, link)

    def done(self, link: L) -> None:
        """Its fence is up."""
        self._pending.pop(link).cancel()
        self._overdue.discard(link)

    # -- asking ---------------------------------------------------------------------------------------------------
    def pending(self) -> tuple[L, ...]:
        return tuple(self._pending)

    def status(self, now: float) -> FenceStatus:
        oldest = next(iter(self._pending), None)
        return FenceStatus(
            len(self._pending), None if oldest is None else now - oldest.since, len(self._overdue), self._num_alarms
        )

    async def wait(self, seconds: float) -> bool:
        """Waits until no fence is pending. False, and a line in the log, when some are after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                for link in self.pending():
                    await link.wait_closed()
        except TimeoutError:
            _log.error("not fenced yet: %s", counted(len(self._pending), "link"))
            return False
        return True

    # -- inside ---------------------------------------------------------------------------------------------------
    def _alarm(self, link: L) -> None:
        # Without the event there is no fence: the pages stay quarantined, visibly, rather than be handed out.
        why = link.fence_error or "the fabric has not said that its endpoint is closed"
        _log.error("%s (%s) is not fenced; its pages stay quarantined: %s", link.name, link.label, why)
        self._num_alarms += link not in self._overdue
        self._overdue.add(link)
        self._pending[link] = asyncio.get_running_loop().call_later(REPEAT_SECONDS, self._alarm, link)
