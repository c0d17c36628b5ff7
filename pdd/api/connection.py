"""One HTTP exchange as a connection sees it: the client may leave, and may read slowly or not at all.

`unless` ends work that became pointless: the client closed its connection or half of it, or the node goes down.
`Sender` bounds how long a write may wait for the client to read. A client that left is ClientGone: nobody answers it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import TypeVar

from starlette.types import Message, Receive, Scope, Send

from pdd.errors import Draining

ABORT = "pdd.abort"  # key in scope["state"]: drops the connection with what is unsent; set by server.py

_log = logging.getLogger("pdd.api")
T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection, or half of it, or stopped reading. An outcome: nobody is left to tell of it."""


async def unless(work: Coroutine[None, None, T], *spoilers: Coroutine[None, None, Exception]) -> T:
    """The result of `work`. If a spoiler returns first, `work` is cancelled and what the spoiler returned is raised."""
    task = asyncio.ensure_future(work)
    others = [asyncio.ensure_future(spoiler) for spoiler in spoilers]
    try:
        done, _ = await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        raise next(other for other in others if other in done).result()
    finally:
        for waiting in (task, *others):
            waiting.cancel()
        await asyncio.gather(task, *others, return_exceptions=True)


async def client_left(receive: Receive) -> Exception:
    """Returns when the client closes its connection or half of it. For a request whose body is read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    return ClientGone()


async def stopped(stop: asyncio.Event) -> Exception:
    """Returns when the node goes down."""
    await stop.wait()
    return Draining("the node is shutting down and this request did not finish in time")


class Sender:
    """`send` with a bound on how long the client may not read. Until then the server buffers 64 KiB, no more."""

    def __init__(self, scope: Scope, send: Send, timeout_seconds: float) -> None:
        self._scope = scope
        self._send = send
        self._timeout_seconds = timeout_seconds

    async def __call__(self, message: Message) -> None:
        """
        Raises:
            ClientGone: the client read nothing for the whole time; its connection is dropped.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await self._send(message)
        except TimeoutError:
            _log.warning("a client read nothing for %g s; its request is aborted", self._timeout_seconds)
            await drop(self._scope)
            raise ClientGone from None


async def drop(scope: Scope) -> None:
    """Closes the connection and forgets what it has not sent."""
    abort: Callable[[], None] | None = scope.get("state", {}).get(ABORT)
    if abort is not None:
        abort()
        await asyncio.sleep(0)  # lets the server see that the connection is lost
