"""Writes the flight recorder to a file when something went wrong: a deadline, a step that did not end, a failed engine.

One gzipped pdd.flight/1 document a failure, in the node's log directory under systemd, else in the instance's run
directory (control/dump_files.py); a few files are kept, and failures that come in a row are told by the first of them.
The log names the file. What has prompts or tokens in it is never written.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from pdd.control import dump_files, stories

MOST_FILES = 8
LEAST_PAUSE = 60.0  # seconds between two dumps for deadlines
_LAST_SECONDS = 3.0  # that the end of a node waits for files that are being written
_MOST_BYTES = 32 << 20  # of a document, before it is packed
_LEVEL = 1  # of gzip: a failing node should not compute for long

_log = logging.getLogger("pdd")


class Dumps:
    """Owner: the main loop."""

    def __init__(self, folder: Path, picture: Callable[[str], Awaitable[stories.Flight]]) -> None:
        """`picture`: what the flight recorder holds, and why it is asked."""
        self.folder = folder
        self._picture = picture
        self._writing: set[asyncio.Task[None]] = set()
        self._last = float("-inf")
        self._about: dict[str, str] = {}

    def about(self, request_id: str) -> str | None:
        """The file that was written for a request."""
        return self._about.get(request_id)

    def write_soon(self, why: str, request_id: str = "") -> None:
        """Begins to write one, about one request or the whole node."""
        async def write() -> None:
            await self.write(await self._picture(why), request_id)

        task = asyncio.get_running_loop().create_task(write(), name="flight dump")
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    def late(self, why: str, request_id: str) -> None:
        """As `write_soon`, for a deadline that was missed: at most one in each pause."""
        if self.may_write(time.monotonic()):
            self.write_soon(why, request_id)

    async def wait(self) -> None:
        """For what is being written, a moment at most."""
        if self._writing:
            await asyncio.wait(self._writing, timeout=_LAST_SECONDS)

    def may_write(self, now: float) -> bool:
        """Whether a deadline is worth a file of its own. True begins the pause until the next."""
        if now - self._last < LEAST_PAUSE:
            return False
        self._last = now
        return True

    async def write(self, picture: stories.Flight, request_id: str = "") -> Path | None:
        """On a thread. None, and a line in the log, when it cannot be written."""
        try:
            path = await asyncio.to_thread(write, self.folder, picture)
        except OSError as error:
            _log.error("the flight recorder could not be written to %s: %s", self.folder, error.strerror or error)
            return None
        _log.error("flight recorder written to %s: %s", path, picture.why)
        if request_id:
            self._about[request_id] = str(path)
            while len(self._about) > MOST_FILES:
                self._about.pop(next(iter(self._about)))
        return path


def write(folder: Path, picture: stories.Flight) -> Path:
    """Raises OSError. The oldest files of this instance beyond `MOST_FILES` are removed."""
    body = msgspec.json.encode(picture)
    if len(body) > _MOST_BYTES:
        body = msgspec.json.encode(msgspec.structs.replace(picture, plans=(), plans_unknown="too much to write"))
    name = re.sub(r"[^\w.-]", "_", picture.name)
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(picture.ts)) + f"{int(picture.ts % 1 * 1000):03d}Z"
    path = folder / dump_files.file_name(name, stamp)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o640)
    with os.fdopen(descriptor, "wb") as file:
        file.write(gzip.compress(body, _LEVEL))
    for old in dump_files.kept(folder, name)[:-MOST_FILES]:
        old.unlink(missing_ok=True)
    return path
