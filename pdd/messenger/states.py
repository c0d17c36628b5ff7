"""State with an explicit table: the one place through which every link, attempt and job changes its state.

A transition that the table does not have is a bug of this program, never an input: it raises AssertionError.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Generic, TypeVar

from pdd.messenger.ports import Change, Clock, Recorder

S = TypeVar("S", bound=enum.Enum)


class State(Generic[S]):
    """The current state, since when, and why. Tells the recorder of every change."""

    def __init__(
        self, kind: str, ident: str, initial: S, table: Mapping[S, frozenset[S]], *, clock: Clock, recorder: Recorder
    ) -> None:
        self._kind = kind
        self._ident = ident
        self._table = table
        self._clock = clock
        self._recorder = recorder
        self.value = initial
        self.since = clock()
        self.why = ""
        recorder(Change(self.since, kind, ident, "", initial.value, ""))

    def move(self, after: S, why: str = "") -> None:
        before = self.value
        if after not in self._table[before]:
            step = f"{before.value} -> {after.value}"
            raise AssertionError(f"{self._kind} {self._ident}: {step} is not in the table ({why})")
        self.value = after
        self.since = self._clock()
        self.why = why
        self._recorder(Change(self.since, self._kind, self._ident, before.value, after.value, why))
