"""Reads request bodies under three bounds: the size of one, the time without a byte, and the size of all together.

A body over its bound is refused while it arrives. The memory of bodies in flight is bounded too, so many clients that
each stay within their limit can not fill the node.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager, suppress

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from pdd.api.connection import ClientGone
from pdd.errors import BodyTooLarge, InvalidRequest, Overloaded, RequestTimeout

_DISCARD_FACTOR = 4  # bodies up to this many times the limit are read to their end, so that the client sees the answer


class BodyReader:
    """Owner: main loop."""

    def __init__(self, max_bytes: int, *, budget_bytes: int, idle_seconds: float, total_seconds: float) -> None:
        """`max_bytes`: of one body. `budget_bytes`: of all held ones. `idle_seconds`: longest wait for a byte;
        `total_seconds`: for a body."""
        self.max_bytes = max_bytes
        self._free = max(budget_bytes, max_bytes)
        self._idle_seconds = idle_seconds
        self._total_seconds = total_seconds

    @contextmanager
    def hold(self) -> Iterator[HeldBody]:
        """A place to read one body into; its memory counts until the block ends."""
        held = HeldBody(self)
        try:
            yield held
        finally:
            self._free += held.taken

    def take(self, size: int) -> None:
        """
        Raises:
            Overloaded: the budget of all bodies is used up.
        """
        if size > self._free:
            raise Overloaded("this node is reading as many request bodies as it has memory for")
        self._free -= size

    async def parts(self, receive: Receive) -> AsyncGenerator[bytes, None]:
        """
        Raises:
            RequestTimeout, ClientGone
        """
        deadline = asyncio.get_running_loop().time() + self._total_seconds
        more = True
        while more:
            wait = min(self._idle_seconds, deadline - asyncio.get_running_loop().time())
            try:
                async with asyncio.timeout(wait):
                    message = await receive()
            except TimeoutError:
                raise RequestTimeout("the request body came too slowly, or not at all") from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            more = message.get("more_body", False)
            yield message.get("body", b"")


class HeldBody:
    def __init__(self, reader: BodyReader) -> None:
        self._reader = reader
        self.taken = 0  # bytes of the budget

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body.

        Raises:
            BodyTooLarge, Overloaded, RequestTimeout, ClientGone
        """
        limit = self._reader.max_bytes
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdigit() and int(announced[:20]) > limit:
            await self.discard(scope, receive)
            raise _too_large(limit)
        collected: list[bytes] = []
        async with aclosing(self._reader.parts(receive)) as parts:
            async for part in parts:
                if self.taken + len(part) > limit:
                    collected.clear()
                    await self._skip(parts)
                    raise _too_large(limit)
                self._reader.take(len(part))
                self.taken += len(part)
                collected.append(part)
        return b"".join(collected)

    async def discard(self, scope: Scope, receive: Receive) -> None:
        """Reads a body nobody wants: a client that is still writing would not see the answer before it.

        A client that waits to be told to go on (Expect: 100-continue) is not told so.
        """
        if "expect" not in Headers(scope=scope):
            async with aclosing(self._reader.parts(receive)) as parts:
                await self._skip(parts)

    async def _skip(self, parts: AsyncGenerator[bytes, None]) -> None:
        rest = self._reader.max_bytes * _DISCARD_FACTOR
        with suppress(RequestTimeout):  # the client hears what was wrong first
            async for part in parts:
                rest -= len(part)
                if rest < 0:
                    return


def check_media_type(scope: Scope) -> None:
    """Only JSON: a browser sends other types to any site without asking that site first.

    Raises:
        InvalidRequest
    """
    media_type = Headers(scope=scope).get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidRequest(f'the body must be JSON, with content-type: application/json, not "{media_type[:64]}"')


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is larger than {limit} bytes")
