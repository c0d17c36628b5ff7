"""The waterfall that a prefiller publishes: its times, what is whole, its size, and that it is made when it is looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from pdd.daemon.waterfall import Waterfalls, document
from pdd.fabric.types import FlightLayer, FlightPlan
from pdd.messenger.status import JobDone
from pdd.tui import draw, waterfall

JOB = JobDone(
    request_id="r", attempt=1, peer="d0", whole=True, reason="", error="", received=9.0, started=9.5, computed=10.9,
    finished=11.0, num_tokens=64, units=16, writes=4, bytes=4096, busy_seconds=0.4, exposed_seconds=0.1, pages=4, transfer=5,
)


def layer(number: int, ready: float, landed: float, ok: int = 2) -> FlightLayer:
    return FlightLayer(number, ready, ready + 0.01, ready + 0.02, landed, 2, ok, 0, 0, (0,), (), ())


def plan(first_value: int, armed: float, *layers: FlightLayer, src: int = 0) -> FlightPlan:
    return FlightPlan(5, 1, src, 0, first_value, len(layers), 2, armed, layers)


PLANS = [
    plan(1, 10.0, layer(0, 10.1, 10.15), layer(1, 10.2, 10.25)),
    plan(3, 10.25, layer(0, 10.4, 10.45), layer(1, 10.5, 10.55, ok=1)),
]


def test_times_count_from_the_first_arming_and_compute_from_the_layer_before() -> None:
    made = document(JOB, PLANS)
    assert (made.id, made.peer, made.direction, made.tokens, made.bytes) == ("r", "d0", "out", 64, 4096)
    assert made.seconds == pytest.approx(1.0)
    assert made.hidden_ratio == pytest.approx(0.75)
    cells = {(cell.chunk, cell.layer): cell for cell in made.cells}
    assert list(cells) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    first, second, third, last = cells.values()
    assert (first.armed_seconds, first.compute_begin_seconds, first.compute_end_seconds) == pytest.approx((0.0, 0.0, 0.1))
    assert (second.compute_begin_seconds, second.compute_end_seconds) == pytest.approx((0.1, 0.2))
    assert (second.posted_seconds, second.landed_seconds) == pytest.approx((0.21, 0.25))
    assert third.compute_begin_seconds == pytest.approx(0.25)
    assert last.landed_seconds is None, "one of its units has not been completed"


def test_ranks_are_one_cell_and_many_layers_are_told_together() -> None:
    both = [plan(1, 10.0, layer(0, 10.1, 10.2), src=0), plan(1, 10.01, layer(0, 10.15, 10.3), src=1)]
    [cell] = document(JOB, both).cells
    assert (cell.compute_end_seconds, cell.posted_seconds, cell.landed_seconds) == pytest.approx((0.15, 0.11, 0.3))
    many = [plan(1 + chunk * 100, 10.0 + chunk, *(layer(n, 10.0 + chunk + n / 200, 12.0 + chunk) for n in range(100)))
            for chunk in range(50)]
    made = document(JOB, many)
    assert len(made.cells) <= 1024
    assert max(cell.layer for cell in made.cells) >= 95


def test_the_screen_draws_it() -> None:
    import msgspec

    drawn = waterfall.lines(msgspec.to_builtins(document(JOB, PLANS)), "r", 100, 20, draw.ASCII)
    text = "\n".join("".join(part for part, _ in line) for line in drawn)
    assert "r  out d0  64 tokens" in text
    assert "hidden 75% of the transfer" in text


class Flight:
    nic_names = ()

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.fails = False

    async def plans(self, transfer: int) -> Sequence[FlightPlan]:
        self.asked.append(transfer)
        if self.fails:
            raise TimeoutError
        return PLANS


async def test_it_is_made_when_somebody_looks_and_only_once() -> None:
    falls, flight = Waterfalls(), Flight()
    assert falls.latest(flight).id == ""
    falls.job_done(JOB)
    assert flight.asked == []
    flight.fails = True
    assert falls.latest(flight).id == ""
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    flight.fails = False
    for _ in range(5):
        falls.latest(flight)
        await asyncio.sleep(0)
    assert falls.latest(flight).id == "r"
    assert flight.asked == [5, 5]
    assert Waterfalls().latest(None).id == ""
