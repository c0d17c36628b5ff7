"""Questions about attempts over a link, and their bounds on both sides. They are for people; nothing waits for them.

A decoder awaits an answer for a second at most, and asks once what several people want to know of one attempt. A
prefiller answers few questions of a link at a time, and few in a second: one more is dropped, and its asker's second
passes. What it remembers of jobs that have ended is bounded.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Coroutine
from typing import Any

from pdd.messenger import wire
from pdd.messenger.explain import Push, push_that_ended
from pdd.messenger.link import LinkState, PeerLink
from pdd.messenger.status import JobDone
from pdd.messenger.versions import EXPLAIN_VERSION

PATIENCE = 1.0  # seconds
MOST_AT_ONCE = 4  # answers of one link in hand: as many attempts of a request as are asked about
BURST, PER_SECOND = 8, 10.0  # answers to one link that may begin at once, and in the long run
_MOST_PAST = 256  # jobs of one link

_log = logging.getLogger(__name__)


class Asks:
    """A decoder's questions. Owner: Decoder."""

    def __init__(self) -> None:
        self._serial = 0
        self._open: dict[int, tuple[PeerLink, asyncio.Future[wire.ExplainAnswer]]] = {}
        self._about: dict[tuple[PeerLink, int], asyncio.Task[wire.ExplainAnswer | str]] = {}

    async def ask(self, link: PeerLink, attempt: int) -> wire.ExplainAnswer | str:
        """The answer, or why there is none."""
        asking = self._about.get((link, attempt))
        if asking is None:
            asking = self._about[link, attempt] = asyncio.create_task(self._ask(link, attempt), name="explain")
            asking.add_done_callback(lambda _: self._about.pop((link, attempt), None))
        return await asyncio.shield(asking)

    def take(self, link: PeerLink, answer: wire.ExplainAnswer) -> None:
        """One that nobody waits for any more is dropped."""
        asked_of, future = self._open.get(answer.ask, (None, None))
        if asked_of is link and future is not None and not future.done():
            future.set_result(answer)

    def link_down(self, link: PeerLink) -> None:
        for asked_of, future in self._open.values():
            if asked_of is link:
                future.cancel()

    async def _ask(self, link: PeerLink, attempt: int) -> wire.ExplainAnswer | str:
        if link.version < EXPLAIN_VERSION:
            return f"{link.name} speaks version {link.version} of the peer protocol, which has no such question: upgrade it"
        if link.state is LinkState.SUSPECT:
            return f"{link.name} has been silent for {link.silence:.1f} s"
        self._serial += 1
        ask = self._serial
        future: asyncio.Future[wire.ExplainAnswer] = asyncio.get_running_loop().create_future()
        self._open[ask] = link, future
        try:
            if not link.send(wire.ExplainRequest(ask=ask, attempt=attempt)):
                return f"the link to {link.name} has ended: {link.error}"
            async with asyncio.timeout(PATIENCE):
                return await future
        except TimeoutError:
            return f"{link.name} gave no answer within {PATIENCE:g} s; its last sign of life was {link.silence:.1f} s ago"
        except asyncio.CancelledError:
            if not future.cancelled():
                raise
            return f"the link to {link.name} has ended: {link.error}"
        finally:
            del self._open[ask]


class Answers:
    """What a prefiller says on one link. Owner: Prefiller."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._left = float(BURST)
        self._as_of = 0.0

    def begin(self, now: float, answering: Coroutine[Any, Any, None]) -> bool:
        """Whether it is answered."""
        self._left = min(BURST, self._left + max(0.0, now - self._as_of) * PER_SECOND)
        self._as_of = now
        if self._left < 1 or len(self._tasks) >= MOST_AT_ONCE:
            answering.close()
            return False
        self._left -= 1
        task = asyncio.create_task(answering, name="explain answer")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_logged)
        return True


def _logged(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        _log.error("an attempt could not be explained: %r", error)


class PastJobs:
    """Jobs of one link that have ended, the latest ones, by attempt."""

    def __init__(self) -> None:
        self._pushes: collections.OrderedDict[int, Push] = collections.OrderedDict()

    def add(self, done: JobDone) -> None:
        self._pushes[done.attempt] = push_that_ended(done)
        while len(self._pushes) > _MOST_PAST:
            self._pushes.popitem(last=False)

    def get(self, attempt: int) -> Push | None:
        return self._pushes.get(attempt)
