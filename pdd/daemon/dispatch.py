"""Hands the engine's events to everyone who wants them, so that the failure of one costs nobody else an event.

An exception of a consumer is a bug of that consumer: it is logged with its trace and the event goes on to the others. One
kind may not be lost that way: pages that were reserved for remote KV have no way back but through the messenger, so whoever
reserved them is told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from pdd.engine.request import EngineEvent, KvReserved

_log = logging.getLogger("pdd")

Consumer = Callable[[EngineEvent], object]


class Dispatch:
    """Owner: the main loop. Consumers are called in the order in which they were added, but for the first."""

    def __init__(self) -> None:
        self._consumers: list[Consumer] = []
        self._fetch: Consumer | None = None
        self._not_fetched: Callable[[KvReserved, Exception], object] = lambda event, error: None

    def add_first(self, consumer: Consumer) -> None:
        """One that the others rely on."""
        self._consumers.insert(0, consumer)

    def add(self, consumer: Consumer) -> None:
        self._consumers.append(consumer)

    def add_fetcher(self, consumer: Consumer, not_fetched: Callable[[KvReserved, Exception], object]) -> None:
        """`consumer` is who fetches remote KV; `not_fetched` is called when it fails at a KvReserved."""
        self.add(consumer)
        self._fetch, self._not_fetched = consumer, not_fetched

    def take(self, events: Sequence[EngineEvent]) -> None:
        for event in events:
            for consumer in self._consumers:
                self._hand(event, consumer)

    def _hand(self, event: EngineEvent, consumer: Consumer) -> None:
        try:
            consumer(event)
        except Exception as error:
            _log.exception("%s of %s could not be taken", type(event).__name__, event.request_id)
            if isinstance(event, KvReserved) and consumer == self._fetch:
                self._give_back(event, error)

    def _give_back(self, event: KvReserved, error: Exception) -> None:
        try:
            self._not_fetched(event, error)
        except Exception:
            _log.exception("the pages of attempt %d of %s are lost", event.attempt, event.request_id)
