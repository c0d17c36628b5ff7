"""What time says about an attempt, as a table."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pdd.engine.request import KvReserved
from pdd.messenger import wire
from pdd.messenger.attempt import TABLE, Attempt, AttemptState
from pdd.messenger.deadlines import Deadlines, Late
from pdd.states import State

DEADLINES = Deadlines(dead_after=2.0, stall=30.0)
ENDED = wire.PrefillEnded(attempt=1, reason=wire.EndReason.CANCELLED, message="", ok_units=9)


def attempt(state: AttemptState, **known: Any) -> Attempt:
    """One that last moved at second 100, with 4 of its 10 units here."""
    machine = State("attempt", "1", state, TABLE, clock=lambda: 0.0, recorder=lambda change: None)
    fields = {"expected_units": 10, "arrived_units": 4, "progress_at": 100.0, **known}
    return Attempt(KvReserved("r", 1, (1,), (0,)), machine, **fields)


@pytest.mark.parametrize(
    ("state", "known", "late_from", "late", "words"),
    [
        (AttemptState.REQUESTED, {}, 30.0, Late.STALLED, "not advanced for 30 s; 4 of 10 units are here"),
        (AttemptState.REQUESTED, {"num_absent": 2}, 30.0, Late.STALLED, "for 30 s"),
        (AttemptState.REQUESTED, {"num_absent": 3}, 2.0, Late.STALLED, "for 2 s"),  # its prefiller has no work left for it
        (AttemptState.CANCELLING, {}, 2.0, Late.LOST, "cancel was not answered within 2 s"),
        (AttemptState.DRAINING, {"ended": ENDED}, 2.0, Late.LOST, "5 units that were written have not arrived in 2 s"),
    ],
)
def test_an_attempt_is_late_from_its_deadline_on_and_not_before(
    state: AttemptState, known: dict[str, Any], late_from: float, late: Late, words: str
) -> None:
    tried = attempt(state, **known)
    assert DEADLINES.check(tried, 100.0 + late_from - 0.001) is None
    found = DEADLINES.check(tried, 100.0 + late_from)
    assert found is not None
    assert found[0] is late
    assert words in found[1]


@pytest.mark.parametrize("state", [AttemptState.CHOOSING, AttemptState.ARMED, AttemptState.FENCING, AttemptState.DONE])
def test_no_deadline_touches_what_waits_for_nothing_of_a_prefiller(state: AttemptState) -> None:
    """Least of all FENCING: no timer frees a page."""
    assert DEADLINES.check(attempt(state), 1e9) is None


def test_progress_moves_the_deadline() -> None:
    moved = dataclasses.replace(attempt(AttemptState.REQUESTED), progress_at=129.0)
    assert DEADLINES.check(moved, 158.9) is None
    assert DEADLINES.check(moved, 159.0) is not None
