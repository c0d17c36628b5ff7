"""State with an explicit table: the one place through which every link, attempt, job and request changes its state.

A transition that the table does not have is a bug of this program, never an input: it raises AssertionError. Every
change is told to a recorder, with what else its owner knows at that moment (peer, key, units, step), so that whoever
keeps the last ones sees all parts of a node alike. `pdd.history` is such a recorder; the states themselves keep nothing.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

S = TypeVar("S", bound=enum.Enum)

Clock = Callable[[], float]  # monotonic seconds

@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What is known beside a state when it changes; None and "" where it is not, or means nothing."""

    peer: str = ""  # name of the node at the other end
    attempt: int | None = None
    key: int | None = None
    units: int | None = None  # counted (attempt) or written (job) so far
    step: int | None = None  # of the engine: the last one that it was in


NO_FACTS = Facts()


def no_facts() -> Facts:
    return NO_FACTS


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One state change: what a flight recorder keeps."""

    at: float  # the clock's
    kind: str  # link, attempt, job, request, engine
    ident: str
    before: str  # "": it begins
    after: str
    why: str
    facts: Facts = NO_FACTS


Recorder = Callable[[Change], None]  # called on the thread that owns the state; must not block


def record_nothing(change: Change) -> None:
    """The recorder of a part that has none."""


def told(change: Change) -> str:
    """One line: "attempt r1/7 requested -> fencing: why (peer p0, key 5, units 9)"."""
    facts = [f"{name} {value}" for name, value in dataclasses.asdict(change.facts).items() if value not in (None, "")]
    way = f"{change.before} -> {change.after}" if change.before else change.after
    return (
        f"{change.kind} {change.ident} {way}" + (f": {change.why}" if change.why else "")
        + (f" ({', '.join(facts)})" if facts else "")
    ).replace("  ", " ")


class TimedState(Generic[S]):
    """The current state, since when, and why; whoever moves it says when. Tells the recorder of every change.

    `facts` is asked at each change for what else is known; whoever owns the state sets it.
    """

    __slots__ = ("_ident", "_kind", "_recorder", "_table", "facts", "since", "value", "why")

    def __init__(
        self, kind: str, ident: str, initial: S, table: Mapping[S, frozenset[S]], *, at: float, recorder: Recorder
    ) -> None:
        self._kind = kind
        self._ident = ident
        self._table = table
        self._recorder = recorder
        self.value = initial
        self.since = at
        self.why = ""
        self.facts: Callable[[], Facts] = no_facts
        recorder(Change(at, kind, ident, "", initial.value, ""))

    def move_at(self, at: float, after: S, why: str = "") -> None:
        before = self.value
        if after not in self._table[before]:
            step = f"{before.value} -> {after.value}"
            raise AssertionError(f"{self._kind} {self._ident}: {step} is not in the table ({why})")
        self.value = after
        self.since = at
        self.why = why
        self._recorder(Change(at, self._kind, self._ident, before.value, after.value, why, self.facts()))


class State(TimedState[S]):
    """A state with a clock of its own."""

    __slots__ = ("_clock",)

    def __init__(
        self, kind: str, ident: str, initial: S, table: Mapping[S, frozenset[S]], *, clock: Clock, recorder: Recorder
    ) -> None:
        super().__init__(kind, ident, initial, table, at=clock(), recorder=recorder)
        self._clock = clock

    def move(self, after: S, why: str = "") -> None:
        self.move_at(self._clock(), after, why)
