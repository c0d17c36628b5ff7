"""Which engine a request goes to, as a table."""

from __future__ import annotations

from typing import Any

import pytest

from pdd.engine.request import RequestState
from pdd.engine.room import Room, choose, room_of
from pdd.engine.snapshot import EngineSnapshot, RequestRow, Totals
from pdd.kv.pool import PageCounts

IDLE = Room(pages=100, free=100)


@pytest.mark.parametrize(
    ("rooms", "wanted", "chosen"),
    [
        ([IDLE], {}, 0),
        ([IDLE, IDLE], {}, 0),
        ([IDLE, IDLE], {"turn": 1}, 1),  # round robin among equals
        ([IDLE, IDLE, IDLE], {"turn": 2}, 2),
        ([Room(100, 50), Room(100, 51)], {}, 1),  # most pages that nobody has
        ([Room(100, 51), Room(100, 50)], {"turn": 1}, 0),  # whoever's turn it is
        ([Room(100, 50, placed=3), Room(100, 50, placed=2)], {}, 1),  # then the fewest requests
        ([Room(100, 50, placed=7), Room(100, 40, placed=1)], {}, 0),  # pages before requests
        ([Room(100, 60, waiting=1), Room(100, 20, placed=5)], {}, 1),  # nobody there waits: it starts at once
        ([Room(100, 60, placed=8), Room(100, 20)], {}, 1),  # no place in the batch of the first
        ([Room(100, 3), Room(100, 9, placed=7)], {"first": 4}, 1),  # not enough pages in the first now
        ([Room(100, 3), Room(100, 9, waiting=1)], {"first": 4}, 1),  # it would wait in both
        ([Room(100, 4), Room(100, 90, placed=8)], {"first": 4}, 0),  # the last free pages will do
        ([Room(100, 50, placed=1, waiting=9), Room(100, 50, placed=8)], {}, 1),  # those that wait are requests, too
        ([Room(100, -5, waiting=2), Room(100, -4, waiting=3)], {}, 1),  # all are full: less is waited for there
        ([Room(10, 10), Room(100, 2, waiting=4)], {"most": 11}, 1),  # the first can never hold it
        ([Room(10, 10), Room(11, 1)], {"most": 11}, 1),
        ([Room(10, 10), Room(10, 10)], {"most": 11}, None),
    ],
)
def test_a_request_goes_where_most_room_is(rooms: list[Room], wanted: dict[str, int], chosen: int | None) -> None:
    assert choose(rooms, **{"first": 2, "most": 4, "places": 8, "turn": 0, **wanted}) == chosen


def snapshot(*rows: tuple[str, int, int], free: int = 40, cached: int = 0, running: int = 60) -> EngineSnapshot:
    """`rows`: (state, prompt tokens, output tokens)."""
    states = {state.value: sum(row[0] == state.value for row in rows) for state in RequestState if state.value != "finished"}
    requests = tuple(
        RequestRow(f"r{n}", "generate", state, 0.0, 0.0, prompt, output) for n, (state, prompt, output) in enumerate(rows)
    )
    return EngineSnapshot(0.0, states, PageCounts(free, cached, 0, running, 0, 0), 0, 0, 0.0, 0, Totals(), requests)


@pytest.mark.parametrize(
    ("picture", "room"),
    [
        (snapshot(), Room(100, 40)),
        (snapshot(cached=7, running=53), Room(100, 47)),  # cached pages can be handed out
        (snapshot(("running", 50, 3), ("ready", 9, 0), ("wait_kv", 9, 0)), Room(100, 40, placed=3)),
        (snapshot(("waiting", 33, 0), ("waiting", 16, 1)), Room(100, 40 - 3 - 2, waiting=2)),  # a preempted one wants its output's, too
        (snapshot(("waiting", 1600, 0)), Room(100, -60, waiting=1)),
        (snapshot(("abandoned", 0, 0), ("quarantined", 0, 0)), Room(100, 40)),  # attempts whose requests are gone
    ],
)
def test_room_of_a_snapshot(picture: EngineSnapshot, room: Room) -> None:
    assert room_of(picture, 16) == room


def test_what_was_handed_over_counts_as_placed() -> None:
    assert Room(100, 40, 1, 2).with_handed([3, 4]) == Room(100, 33, 3, 2)
    handed: Any = []
    assert IDLE.with_handed(handed) == IDLE
