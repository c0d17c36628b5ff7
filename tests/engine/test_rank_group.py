"""Ranks as threads, each with its own mapping of the memory that processes would share: sums and gathers, and who is awaited."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("pdd.fabric._native", reason="the native core is not built")

from pdd.engine import group_memory  # noqa: E402
from pdd.engine.rank_group import SPIN_SECONDS, RankGroup  # noqa: E402
from pdd.fabric import _native  # noqa: E402

PATIENCE_SECONDS = 30.0
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=[2, 3, 4, 8])
def world(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def fd(world: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Slots of 64 bytes: nearly every tensor goes in pieces."""
    monkeypatch.setattr(group_memory, "SLOT_BYTES", 64)
    fd = group_memory.create(world)
    yield fd
    os.close(fd)


def on_all_ranks(fd: int, world: int, run: Callable[[RankGroup], Any]) -> list[Any]:
    """What `run` returns on each rank."""
    results: dict[int, Any] = {}

    def rank(number: int) -> None:
        with torch.inference_mode():
            results[number] = run(RankGroup(fd, number, world))

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    return [results[number] for number in range(world)]


@pytest.mark.parametrize(("cpus", "threads", "beside", "spins"), [
    (2, 1, 0, True), (2, 1, 2, False), (4, 1, 2, True), (4, 2, 0, True), (4, 2, 1, False), (1, 1, 0, False),
])
def test_a_rank_looks_before_it_sleeps_only_where_all_ranks_have_cores(
    monkeypatch: pytest.MonkeyPatch, cpus: int, threads: int, beside: int, spins: bool
) -> None:
    """Those of other groups, too."""
    told: list[float] = []
    monkeypatch.setattr(_native, "Barrier", lambda fd, rank, world, spin: told.append(spin))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    fd = group_memory.create(2)
    RankGroup(fd, 0, 2, threads=threads, beside=beside)
    os.close(fd)
    assert told == [SPIN_SECONDS if spins else 0.0]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + rank)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (16,), (17,), (7, 33), (0, 8)])
def test_a_sum_is_that_of_float32_in_rank_order_on_every_rank(
    fd: int, world: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    def run(group: RankGroup) -> torch.Tensor:
        x = values(group.rank, shape, dtype)
        group.all_reduce(x)
        return x

    want = sum(values(rank, shape, dtype).float() for rank in range(world)).to(dtype)
    for got in on_all_ranks(fd, world, run):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3), (5, 7), (4, 64), (2, 3, 5)])
def test_a_gather_puts_last_dimensions_side_by_side(
    fd: int, world: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    want = torch.cat([values(rank, shape, dtype) for rank in range(world)], dim=-1)
    for got in on_all_ranks(fd, world, lambda group: group.all_gather_last(values(group.rank, shape, dtype))):
        assert torch.equal(got, want)


def test_calls_of_any_kind_and_size_follow_each_other_though_ranks_dawdle(fd: int, world: int) -> None:
    """A rank that is ahead must not write over what another still reads."""
    calls = random.Random(7).choices(["sum", "gather", "ordered"], k=200)

    def run(group: RankGroup) -> list[torch.Tensor]:
        mine = random.Random(group.rank)
        found = []
        for number, call in enumerate(calls):
            if mine.random() < 0.1:
                threading.Event().wait(mine.random() * 2e-3)
            x = values(group.rank, (number % 3 + 1, number % 23 + 1), DTYPES[number % 2], seed=number)
            if call == "sum":
                group.all_reduce(x)
                found.append(x)
            elif call == "gather":
                found.append(group.all_gather_last(x))
            else:
                group.ordered()
        return found

    first, *others = on_all_ranks(fd, world, run)
    number = calls.index("sum")
    want = sum(values(rank, (number % 3 + 1, number % 23 + 1), DTYPES[number % 2], seed=number).float() for rank in range(world))
    assert torch.equal(first[sum(call != "ordered" for call in calls[:number])].float(), want.to(DTYPES[number % 2]).float())
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_nobody_passes_before_the_last_has_come(fd: int, world: int) -> None:
    arrived: list[int] = []

    def run(group: RankGroup) -> list[int]:
        threading.Event().wait(0.01 * group.rank)
        arrived.append(group.rank)
        group.ordered()
        return sorted(arrived)

    assert on_all_ranks(fd, world, run) == [list(range(world))] * world
    assert group_memory.arrivals(fd, world) == (1,) * world


@pytest.mark.parametrize(
    ("arrived", "late", "awaited"),
    [((5, 4), (0, 1), (1,)), ((5, 5), (0, 1), (0, 1)), ((5, 5, 5), (2,), (2,)), ((7, 6, 7, 6), (0, 1, 2, 3), (1, 3)),
     ((9, 4, 9), (1,), (1,)), ((9, 9, 8), (0, 2), (2,))],
)
def test_those_who_are_behind_are_awaited(arrived: tuple[int, ...], late: tuple[int, ...], awaited: tuple[int, ...]) -> None:
    assert group_memory.who_is_awaited(arrived, late) == awaited
