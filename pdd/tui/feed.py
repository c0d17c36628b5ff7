"""Follows sources in threads of their own, for ever: a daemon that is lost is asked again until it is back.

What comes is put into one inbox as News, in the order of its arrival; the owner of the states takes it from there.
`on_news` is called on the thread that brings it, once until the inbox is emptied, and must only wake the owner.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pdd.errors import ControlError, DaemonNotRunning
from pdd.tui.sources import Source

_RETRY_SECONDS = 0.5
_MOST_RETRY_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class News:
    """One line of a node, or why there is none."""

    label: str
    line: dict[str, Any] | None = None
    error: ControlError | None = None


class Inbox:
    """Any thread puts, one takes."""

    def __init__(self) -> None:
        self.on_news: Callable[[], None] | None = None
        self._waiting: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._woken = threading.Event()

    def put(self, news: News) -> None:
        self._waiting.put(news)
        if not self._woken.is_set():
            self._woken.set()
            if self.on_news is not None:
                self.on_news()

    def take(self) -> list[News]:
        """Everything that waits."""
        self._woken.clear()
        found = []
        while True:
            try:
                found.append(self._waiting.get_nowait())
            except queue.Empty:
                return found

    def wait(self, seconds: float) -> list[News]:
        """At least one piece of news, or none after `seconds`."""
        try:
            first = self._waiting.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            return []
        return [first, *self.take()]


class Feed(threading.Thread):
    """One source. Ends with the process (a blocked read is not waited for), or at the next line after `stop`."""

    def __init__(self, source: Source, interval: float, inbox: Inbox) -> None:
        super().__init__(name=f"pdd-top-{source.label}", daemon=True)
        self.interval = interval  # may be set: the next line is the last at the old one
        self._source = source
        self._inbox = inbox
        self._halt = threading.Event()

    def stop(self) -> None:
        self._halt.set()

    def run(self) -> None:
        pause = _RETRY_SECONDS
        while not self._halt.is_set():
            try:
                if self._follow():
                    pause = _RETRY_SECONDS
                continue
            except ControlError as error:
                self._lose(error)
            self._halt.wait(pause)
            pause = min(pause * 1.5, _MOST_RETRY_SECONDS)

    def _lose(self, error: ControlError) -> None:
        self._inbox.put(News(self._source.label, error=error))

    def _follow(self) -> bool:
        """Delivers lines until the interval changes or the daemon stops. Whether there were any."""
        interval, any_line = self.interval, False
        lines = self._source.lines(interval)
        for line in lines:
            if self._halt.is_set() or line["type"] == "stopping":
                break
            any_line = True
            self._inbox.put(News(self._source.label, line))
            if self.interval != interval:
                break
        else:
            line = {"type": "stopping"}
        close = getattr(lines, "close", None)
        if close is not None:
            close()
        if not self._halt.is_set() and line["type"] == "stopping":
            raise DaemonNotRunning("the daemon stopped")
        return any_line


def start(sources: Sequence[Source], interval: float, inbox: Inbox) -> list[Feed]:
    feeds = [Feed(source, interval, inbox) for source in sources]
    for feed in feeds:
        feed.start()
    return feeds
