"""PagePool: shortage is a value, misuse raises, neighbours are preferred."""

from __future__ import annotations

import pytest

from pdd.kv.pool import IntegrityError, PagePool, PageState


def test_shortage_is_none_and_changes_nothing() -> None:
    pool = PagePool(4)
    assert pool.reserve(1, 5, PageState.RUNNING) is None
    assert 1 not in pool
    assert pool.reserve(1, 3, PageState.RUNNING) == (0, 1, 2)
    assert pool.grow(1, 2) is None
    assert pool.pages(1) == (0, 1, 2)
    assert pool.counts().free == 1
    pool.check_integrity()


def test_a_hold_of_no_pages_is_a_hold() -> None:
    pool = PagePool(1)
    assert pool.reserve(1, 0, PageState.RUNNING) == ()
    assert pool.grow(1, 1) == (0,)
    assert pool.release(1) == 1


def test_double_free_and_unknown_holds_raise() -> None:
    pool = PagePool(4)
    pool.reserve(1, 2, PageState.RESERVED)
    with pytest.raises(KeyError):
        pool.reserve(1, 1, PageState.RESERVED)
    pool.release(1)
    for misuse in (pool.release, pool.pages, pool.state):
        with pytest.raises(KeyError):
            misuse(1)
    with pytest.raises(KeyError):
        pool.grow(1, 1)
    with pytest.raises(KeyError):
        pool.move(1, PageState.SENDING)


@pytest.mark.parametrize("state", [PageState.FREE, PageState.CACHED])
def test_a_hold_is_never_free_or_cached(state: PageState) -> None:
    pool = PagePool(4)
    with pytest.raises(ValueError):
        pool.reserve(1, 1, state)
    pool.reserve(1, 1, PageState.RUNNING)
    with pytest.raises(ValueError):
        pool.move(1, state)


def test_what_is_quarantined_has_one_way_out() -> None:
    pool = PagePool(4)
    pool.reserve(1, 2, PageState.RESERVED)
    pool.move(1, PageState.QUARANTINED)
    for state in (PageState.RUNNING, PageState.RESERVED, PageState.SENDING):
        with pytest.raises(AssertionError, match=f"quarantined -> {state.value}"):
            pool.move(1, state)
    assert pool.release(1) == 2


def test_books_that_do_not_agree_are_seen() -> None:
    def damaged(how: str) -> PagePool:
        pool = PagePool(8)
        pool.reserve(1, 3, PageState.RUNNING)
        pool.reserve(2, 2, PageState.RUNNING)
        pool.check_integrity()
        match how:
            case "held by 2 and by .1":
                pool._holds[2].pages[0] = 1
            case "the free list":
                pool._holds[2].pages[0] = 6
            case "not of this pool":
                pool._holds[2].pages[0] = 8
            case "are lost":
                pool._lengths[0] -= 1
                pool._counts[PageState.FREE] -= 1
            case "is no run":
                pool._lengths[0] += 1
            case "booked":
                pool._counts[PageState.RUNNING] -= 1
        return pool

    for how in ("held by 2 and by .1", "the free list", "not of this pool", "are lost", "is no run", "booked"):
        with pytest.raises(IntegrityError, match=how):
            damaged(how).check_integrity()


def test_counts_follow_the_state_of_the_hold() -> None:
    pool = PagePool(10)
    pool.reserve(1, 3, PageState.RESERVED)
    pool.reserve(2, 2, PageState.SENDING)
    pool.move(1, PageState.QUARANTINED)
    counts = pool.counts()
    assert (counts.free, counts.reserved, counts.quarantined, counts.sending, counts.total) == (5, 0, 3, 2, 10)


def test_a_prompt_gets_neighbours_and_a_single_page_fills_a_gap() -> None:
    pool = PagePool(16)
    for owner, size in enumerate((2, 4, 1, 3)):  # pages 0-1, 2-5, 6, 7-9; 10-15 free
        pool.reserve(owner, size, PageState.RUNNING)
    pool.release(1)
    pool.release(3)  # free: 2-5, 7-15
    assert pool.reserve(10, 1, PageState.RUNNING) == (2,)  # from the smaller run
    assert pool.reserve(11, 8, PageState.RUNNING) == tuple(range(7, 15))
    assert pool.reserve(12, 4, PageState.RUNNING) == (3, 4, 5, 15)  # scattered only when nothing else is left
    pool.check_integrity()


def test_runs_join_on_both_sides() -> None:
    pool = PagePool(9)
    for owner in range(3):
        pool.reserve(owner, 3, PageState.RUNNING)
    pool.release(0)
    pool.release(2)
    pool.release(1)
    assert pool.reserve(9, 9, PageState.RUNNING) == tuple(range(9))


def test_check_integrity_sees_a_page_with_two_owners() -> None:
    pool = PagePool(4)
    pool.reserve(1, 2, PageState.RUNNING)
    pool._holds[1].pages.append(3)  # what a bug would look like
    with pytest.raises(IntegrityError, match="page 3"):
        pool.check_integrity()
