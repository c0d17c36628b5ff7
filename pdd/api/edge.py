"""What holds for every request of the port, around all endpoints: keys, request ids, and a last word on failures.

Every answer has an X-Request-Id (ids.py). While the node drains, every answer closes its connection, so that a client's
pool does not keep one that is about to end.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdd.api import ids
from pdd.api.connection import ClientGone, drop
from pdd.api.error_response import error_response
from pdd.errors import PddError, Unauthorized, no_space

_OPEN = ("/health", "/health/")  # probes carry no key
_log = logging.getLogger("pdd.api")


class ApiKeys:
    """The keys that clients may show; none: no key is asked for. Owner: the main loop."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self.replace(keys)

    def replace(self, keys: Sequence[str]) -> None:
        """From the next request on; those that were let in go on."""
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def knows(self, key: str) -> bool:
        digest = hashlib.sha256(key.encode("latin-1")).digest()
        # Every key is compared, in constant time: the time taken says nothing about any of them.
        return sum(hmac.compare_digest(digest, expected) for expected in self._digests) > 0


class Edge:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, api_keys: ApiKeys, draining: Callable[[], bool]) -> None:
        self._app = app
        self._keys = api_keys
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        names = ids.RequestIds.new(headers)
        ids.keep(scope, names)
        answer = _Answer(send, names.header, self._draining)
        try:
            self._check_key(scope["path"], headers)
            await self._app(scope, receive, answer)
        except asyncio.CancelledError:  # the server waited for it as long as it was told to; nobody waits for this task
            _log.warning("request %s was dropped: the node went down before its client took the answer", names)
            await drop(scope)
        except ClientGone:
            _log.debug("the client of %s left", names)
        except Exception as error:
            if answer.begun:  # nothing true can be added; an incomplete answer is what the client must see
                raise
            full = no_space(error)
            if full is not None:
                _log.error("request %s failed: %s [%s]", names, full, full.id)
            elif not isinstance(error, PddError):
                _log.exception("request %s failed", names)
            await error_response(full or error)(scope, receive, answer)

    def _check_key(self, path: str, headers: Headers) -> None:
        if not self._keys or path == _OPEN[0] or path.startswith(_OPEN[1]):
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if not self._keys.knows(key.strip()) or scheme.lower() != "bearer":
            raise Unauthorized("an API key is needed: Authorization: Bearer KEY, with a key that this node knows")


class _Answer:
    """`send`, with the headers that every answer has."""

    def __init__(self, send: Send, request_id: str, draining: Callable[[], bool]) -> None:
        self._send = send
        self._draining = draining
        self._request_id = request_id
        self.begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            extra = [(b"x-request-id", self._request_id.encode("ascii"))]
            if self._draining():
                extra.append((b"connection", b"close"))
            message = {**message, "headers": [*message.get("headers", []), *extra]}
        await self._send(message)
