"""The state changes of a node that are remembered: the latest of all its parts, and the story of each request.

A `History` is the recorder of every link, attempt, job, request and engine (`pdd.states`). A story is found by the id
that the engine gave the request, without a search; it holds the changes of the request, of its attempts (decoder) and of
its job (prefiller). Memory is bounded by count and by bytes: when it is full, the oldest stories of requests that have
ended go first. Any thread may record and read.
"""

from __future__ import annotations

import collections
import dataclasses
import threading

from pdd.states import Change

MOST_CHARS = 256  # of a text that is kept: some come from peers
_FIRST, _LAST = 24, 104  # changes of one story: its beginning and its end, when it has more
_CHANGE_BYTES = 440  # of a Change and its Facts, texts left out
_END = {"request": "finished", "job": "done"}
_LEAST_STORIES = 16  # however little memory is given: what is in hand must be told


class _Story:
    __slots__ = ("first", "last", "num_bytes")

    def __init__(self) -> None:
        self.first: list[Change] = []
        self.last: collections.deque[Change] = collections.deque(maxlen=_LAST)
        self.num_bytes = 600  # of itself, its lists and its key

    def add(self, change: Change) -> int:
        """Bytes that it has grown by."""
        before = self.num_bytes
        if len(self.first) < _FIRST:
            self.first.append(change)
        else:
            if len(self.last) == _LAST:
                self.num_bytes -= _size(self.last[0])
            self.last.append(change)
        self.num_bytes += _size(change)
        return self.num_bytes - before


class History:
    """Keeps at most `most` changes of all parts, as many of links alone, and stories of at most `most_stories` requests
    and about `most_bytes`."""

    def __init__(self, most: int, *, most_stories: int = 1024, most_bytes: int = 4 << 20) -> None:
        self._changes: collections.deque[Change] = collections.deque(maxlen=most)
        self._links: collections.deque[Change] = collections.deque(maxlen=most)
        self._most_stories = most_stories
        self._most_bytes = most_bytes
        self._live: collections.OrderedDict[str, _Story] = collections.OrderedDict()
        self._ended: collections.OrderedDict[str, _Story] = collections.OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __call__(self, change: Change) -> None:
        change = _bounded(change)
        with self._lock:
            self._changes.append(change)
            if change.kind == "link":
                self._links.append(change)
            elif change.kind != "engine":
                self._tell(change)

    # -- asking ---------------------------------------------------------------------------------------------------
    def latest(self, most: int) -> list[Change]:
        """At most so many, the oldest first. Across threads the order is that of recording, not of `at`."""
        with self._lock:
            return list(self._changes)[-most:]

    def links(self) -> list[Change]:
        """The latest changes of links, the oldest first."""
        with self._lock:
            return list(self._links)

    def story(self, request_id: str) -> list[Change]:
        """All that is remembered of one request, in the order of recording; [] when nothing is. `request_id`: the
        engine's."""
        with self._lock:
            story = self._live.get(request_id) or self._ended.get(request_id)
            return [] if story is None else [*story.first, *story.last]

    @property
    def num_bytes(self) -> int:
        """About what all stories take."""
        return self._num_bytes

    # -- inside ---------------------------------------------------------------------------------------------------
    def _tell(self, change: Change) -> None:
        key = change.ident.rpartition("/")[0] if change.kind == "attempt" else change.ident
        story = self._live.get(key) or self._ended.get(key)
        if story is None:  # it begins, or was already forgotten: then nobody waits for its end
            story = (self._ended if change.before else self._live)[key] = _Story()
            self._num_bytes += story.num_bytes
        self._num_bytes += story.add(change)
        if change.after == _END.get(change.kind) and key in self._live:
            self._ended[key] = self._live.pop(key)
        while self._is_full():
            _, gone = (self._ended or self._live).popitem(last=False)
            self._num_bytes -= gone.num_bytes

    def _is_full(self) -> bool:
        num = len(self._live) + len(self._ended)
        return num > _LEAST_STORIES and (num > self._most_stories or self._num_bytes > self._most_bytes)


def _bounded(change: Change) -> Change:
    if len(change.why) <= MOST_CHARS and len(change.ident) <= MOST_CHARS and len(change.facts.peer) <= MOST_CHARS:
        return change
    facts = dataclasses.replace(change.facts, peer=change.facts.peer[:MOST_CHARS])
    return dataclasses.replace(change, ident=change.ident[:MOST_CHARS], why=change.why[:MOST_CHARS], facts=facts)


def _size(change: Change) -> int:
    return _CHANGE_BYTES + len(change.why) + len(change.ident) + len(change.facts.peer)
