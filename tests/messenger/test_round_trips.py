"""A round trip is the time on the way alone, of the heartbeat that the peer's answer names."""

from __future__ import annotations

import asyncio

import pytest

from pdd.messenger import wire
from pdd.messenger.round_trips import RoundTrips


def beat(seq: int, echo: int, age: float) -> wire.Heartbeat:
    return wire.Heartbeat(seq=seq, load=wire.Load(), echo=echo, echo_age_us=int(age * 1e6))


def test_the_time_that_the_peer_kept_a_heartbeat_is_left_out() -> None:
    trips = RoundTrips()
    assert (trips.leave(10.0).seq, trips.latest) == (1, None)
    trips.arrive(beat(7, echo=1, age=0.4), 10.5)
    assert trips.latest == pytest.approx(0.1)
    mark = trips.leave(10.75)
    assert (mark.seq, mark.echo, mark.echo_age_us) == (2, 7, 250_000)


def test_an_answer_to_nothing_that_was_sent_lately_measures_nothing() -> None:
    trips = RoundTrips()
    for second in range(100):
        trips.leave(float(second))
    trips.arrive(beat(1, echo=0, age=0.0), 100.0)  # the peer had heard none yet
    trips.arrive(beat(2, echo=36, age=0.0), 100.0)  # too long ago: the latest 64 count
    assert trips.latest is None
    trips.arrive(beat(3, echo=37, age=0.0), 100.0)
    assert trips.latest == pytest.approx(64.0)


async def test_a_ping_waits_for_an_answer_to_its_own_heartbeat_or_to_a_later_one() -> None:
    trips = RoundTrips()
    trips.leave(0.0)
    trips.leave(1.0)
    second = trips.await_latest()
    trips.leave(2.0)
    third = trips.await_latest()
    trips.arrive(beat(1, echo=1, age=0.0), 3.0)
    assert not second.done()
    trips.arrive(beat(2, echo=2, age=1.5), 3.0)
    assert (await asyncio.wait_for(second, 1), third.done()) == (pytest.approx(0.5), False)
    trips.arrive(beat(3, echo=3, age=0.0), 3.0)
    assert await third == pytest.approx(1.0)
