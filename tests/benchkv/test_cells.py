"""What is measured: pools, orders, and the lists of the command line."""

from __future__ import annotations

import numpy as np
import pytest

from pdd.bench import cells
from pdd.bench.cells import Cell
from pdd.errors import UsageError


@pytest.mark.parametrize("page_bytes", [64, 4096, 65536, 1 << 20, 1 << 28])
@pytest.mark.parametrize("pages", [1, 3, 64])
def test_requests_in_flight_share_no_page(page_bytes: int, pages: int) -> None:
    cell = Cell(page_bytes, pages, "scattered", inflight=16)
    assert cell.num_slots * cell.pages == cell.num_pages
    assert 1 <= cell.depth <= cell.num_slots
    runs = [set(range(slot * pages, (slot + 1) * pages)) for slot in range(cell.depth)]
    assert len(set().union(*runs)) == cell.depth * pages


def test_a_scattered_order_is_a_shuffle_and_two_seeds_differ() -> None:
    one, two = cells.order(1000, "scattered", 1), cells.order(1000, "scattered", 2)
    assert sorted(one) == sorted(two) == list(range(1000))
    assert (np.diff(one) == 1).sum() < 20
    assert (one != two).any()
    assert list(cells.order(5, "adjacent", 1)) == [0, 1, 2, 3, 4]


def test_lists_make_every_combination() -> None:
    found = cells.parse("4KiB, 1MiB", "1,64", "scattered,adjacent", 2)
    assert len(found) == 8
    assert found[0] == Cell(4096, 1, "scattered", 2)
    assert {cell.name for cell in found} >= {"4KiB x 1 scattered", "1MiB x 64 adjacent"}


@pytest.mark.parametrize(
    ("lists", "why"),
    [
        (("4 kilos", "64", "adjacent"), "--sizes"),
        (("1B", "64", "adjacent"), "no size of a page"),
        (("4KiB", "0", "adjacent"), "--pages"),
        (("4KiB", "-1", "adjacent"), "--pages"),
        (("4KiB", "64", "random"), "--layout"),
        (("512MiB", "64", "adjacent"), "at most 1GiB"),
        (("", "64", "adjacent"), "0 combinations"),
        (("4KiB," * 200, "1,2", "adjacent"), "400 combinations"),
    ],
)
def test_a_wrong_list_is_told(lists: tuple[str, str, str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        cells.parse(*lists, 4)
