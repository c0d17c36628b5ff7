"""Drain: no new work, what runs goes on until a deadline, then it is failed. The node stays; `end` undoes it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from pdd.daemon.service import NodeService
from pdd.daemon.view import left
from pdd.engine.request import EngineInbox
from pdd.errors import RefusedInState, RequestCancelled
from pdd.messenger.prefiller import Prefiller

_log = logging.getLogger("pdd")


class Drain:
    """Owner: the main loop."""

    def __init__(self, service: NodeService, timeout: float, changed: Callable[[], None]) -> None:
        """`timeout`: seconds, when `begin` names none. `changed`: called at each change of state."""
        self.active = False
        self._for_good = False
        self._service = service
        self._timeout = timeout
        self._changed = changed
        self._prefiller: Prefiller | None = None
        self._inbox: EngineInbox | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def set_timeout(self, timeout: float) -> None:
        """Seconds, of drains that begin from now on without one of their own."""
        self._timeout = timeout

    def covers(self, prefiller: Prefiller, inbox: EngineInbox) -> None:
        """Prefills for decoders are work of this node too."""
        self._prefiller, self._inbox = prefiller, inbox
        if self.active:
            prefiller.drain()

    def begin(self, timeout: float | None = None, *, for_good: bool = False) -> None:
        """No new work from now on; what runs goes on for at most `timeout` seconds.

        Again while draining only moves the deadline. `for_good`: the node stops afterwards, whatever anybody says.
        """
        seconds = self._timeout if timeout is None else timeout
        self.active = True
        self._for_good |= for_good
        _log.info(
            "%s, for at most %g s; left: %s", "stopping" if for_good else "draining", seconds, left(*self.open_work())
        )
        self._stop_timer()
        self._deadline = time.monotonic() + seconds
        why = f"its {seconds:g} s to drain are over"
        self._timer = asyncio.get_running_loop().call_later(seconds, self.give_up, why)
        self._service.drain(True)
        if self._prefiller is not None:
            self._prefiller.drain()
        self._changed()

    def end(self) -> None:
        """Takes new work again; nothing to do where it does already.

        Raises:
            RefusedInState: the node is stopping.
        """
        if self._for_good:
            raise RefusedInState("this node is stopping and cannot be resumed", hint="Start it again when it has ended.")
        if not self.active:
            return
        self.active = False
        _log.info("resumed: takes new work again")
        self._stop_timer()
        self._service.drain(False)
        if self._prefiller is not None:
            self._prefiller.resume()
        self._changed()

    @property
    def seconds_left(self) -> float | None:
        """Until what runs is failed; None when nothing drains, or nothing runs any more."""
        return max(0.0, self._deadline - time.monotonic()) if self.active and any(self.open_work()) else None

    def open_work(self) -> tuple[int, int]:
        """Requests of clients, and prefills for decoders, that are not over."""
        return self._service.num_open, 0 if self._prefiller is None else self._prefiller.num_jobs

    async def quiet(self) -> None:
        """Returns once there is no open work."""
        while any(self.open_work()):
            await self._service.quiet()
            if self._prefiller is not None:
                await self._prefiller.wait_idle()

    def give_up(self, why: str) -> None:
        """Ends what is still open; clients and decoders are told."""
        if any(self.open_work()):
            _log.warning("%s: %s given up", why, left(*self.open_work()))
        self._service.cancel_all(RequestCancelled(f"this node ends its work: {why}", hint="try again; another will answer"))
        if self._prefiller is not None and self._inbox is not None:
            for job in self._prefiller.jobs():
                self._inbox.abort(job.request_id)

    def close(self) -> None:
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
