"""Who sends the HTTP port what is no HTTP: one line a minute and address, and an answer in the form of all others."""

from __future__ import annotations

import logging
import math
import time

import h11
import msgspec

from pdd.api.error_response import error_object
from pdd.errors import InvalidRequest

_log = logging.getLogger(__name__)
_TOLD_SECONDS = 60.0
_MOST_HOSTS = 256


class Strangers:
    """Owner: main loop. One of a server."""

    def __init__(self) -> None:
        self._told_at: dict[str, float] = {}  # by host, the oldest first

    def tell(self, host: str) -> None:
        now = time.monotonic()
        if now - self._told_at.get(host, -math.inf) < _TOLD_SECONDS:
            return
        self._told_at.pop(host, None)
        self._told_at[host] = now
        if len(self._told_at) > _MOST_HOSTS:
            del self._told_at[next(iter(self._told_at))]
        _log.warning(
            "api.listen: %s sent what is no HTTP request [%s]; is this a peer that dials the API port? Its peers.static must "
            "name the address of peers.listen",
            host, InvalidRequest.id,
        )


def refusal(connection: h11.Connection) -> bytes:
    """The last bytes of a connection whose client speaks no HTTP; none when an answer has begun already."""
    if connection.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return b""
    error = InvalidRequest("this is no HTTP request", hint="this port speaks HTTP/1.1; peers are at peers.listen")
    body = msgspec.json.encode(error_object(error))
    headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
    head = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
    parts = (connection.send(event) for event in (head, h11.Data(data=body), h11.EndOfMessage()))
    return b"".join(part for part in parts if part)
