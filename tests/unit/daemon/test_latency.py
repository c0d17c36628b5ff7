"""Percentiles are of the last minute alone, and unknown when it was empty."""

from __future__ import annotations

import random

import pytest

from pdd.daemon.latency import NUM_SLOTS, SLOT_SECONDS, WINDOW_SECONDS, Window


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_nothing_observed_is_unknown_not_zero(clock: Clock) -> None:
    assert Window(clock).percentiles(0.5, 0.99) == [None, None]


@pytest.mark.parametrize("scale", [3e-6, 0.012, 4.0, 900.0])
def test_percentiles_are_near_the_exact_ones(clock: Clock, scale: float) -> None:
    window, rng = Window(clock), random.Random(1)
    values = sorted(scale * rng.lognormvariate(0, 1) for _ in range(1000))
    for value in values:
        window.observe(value)
    for share, found in zip((0.1, 0.5, 0.99), window.percentiles(0.1, 0.5, 0.99), strict=True):
        assert found == pytest.approx(max(values[int(share * 1000) - 1], 1e-6), rel=0.05)


def test_the_extremes(clock: Clock) -> None:
    window = Window(clock)
    for value in (0.0, 1.0, 100.0):
        window.observe(value)
    least, most = window.percentiles(0.0, 1.0)
    assert least == pytest.approx(1e-6, rel=0.05)
    assert most == pytest.approx(100.0, rel=0.05)


def test_what_is_older_than_the_window_is_forgotten(clock: Clock) -> None:
    window = Window(clock)
    window.observe(9.0)
    clock.now += WINDOW_SECONDS / 2
    for _ in range(10):
        window.observe(0.1)
    assert window.percentiles(1.0) == [pytest.approx(9.0, rel=0.05)]
    clock.now += WINDOW_SECONDS / 2
    assert window.percentiles(1.0) == [pytest.approx(0.1, rel=0.05)]
    clock.now += WINDOW_SECONDS
    assert window.percentiles(1.0) == [None]


def test_memory_is_bounded_by_the_window(clock: Clock) -> None:
    window = Window(clock)
    for _ in range(10 * NUM_SLOTS):
        window.observe(0.1)
        clock.now += SLOT_SECONDS
    assert len(window._slots) <= NUM_SLOTS
