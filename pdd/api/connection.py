"""One HTTP exchange as a connection sees it: the client may leave, and may read slowly or not at all.

`while_connected` ends the work when the client closes its connection or half of it. `Sender` bounds how long a write
may wait for the client to read. Both end in ClientGone, which nobody answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import TypeVar

from starlette.types import Message, Receive, Scope, Send

ABORT = "pdd.abort"  # key in scope["state"]: drops the connection with what is unsent; set by server.py

_log = logging.getLogger("pdd.api")
T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection, or half of it, or stopped reading. An outcome: nobody is left to tell of it."""


async def while_connected(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """The result of `work`, for a request whose body is read.

    Raises:
        ClientGone: the client left first; `work` is cancelled and has ended.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Sender:
    """`send` with a bound on how long the client may not read. Until then the server buffers 64 KiB, no more."""

    def __init__(self, scope: Scope, send: Send, timeout_s: float) -> None:
        self._abort: Callable[[], None] | None = scope.get("state", {}).get(ABORT)
        self._send = send
        self._timeout_s = timeout_s

    async def __call__(self, message: Message) -> None:
        """
        Raises:
            ClientGone: the client read nothing for the whole time; its connection is dropped.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError:
            _log.warning("a client read nothing for %g s; its request is aborted", self._timeout_s)
            if self._abort is not None:
                self._abort()
                await asyncio.sleep(0)  # lets the server see that the connection is lost
            raise ClientGone from None
