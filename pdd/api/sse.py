"""Server-sent events: a `data:` line of JSON per object, then `[DONE]`; after an error event there is no `[DONE]`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a reverse proxy passes events on as they come
]
DONE = b"data: [DONE]\n\n"


def events(objects: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(b"data: " + msgspec.json.encode(item) + b"\n\n" for item in objects)
