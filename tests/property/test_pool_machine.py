"""Whatever happens to a pool, its pages sum to the pool and no page has two owners."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdd.kv.pool import MOVES, PagePool, PageState

NUM_PAGES = 24
HELD = [PageState.RESERVED, PageState.RUNNING, PageState.SENDING, PageState.QUARANTINED]


class PoolMachine(RuleBasedStateMachine):
    """Drives the pool beside a model that is nothing but dicts and sets."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.model: dict[int, tuple[PageState, list[int]]] = {}
        self.next_owner = 0

    def num_held(self) -> int:
        return sum(len(pages) for _, pages in self.model.values())

    @rule(num_pages=st.integers(0, 12), state=st.sampled_from(HELD))
    def reserve(self, num_pages: int, state: PageState) -> None:
        owner, self.next_owner = self.next_owner, self.next_owner + 1
        pages = self.pool.reserve(owner, num_pages, state)
        assert (pages is None) == (num_pages > NUM_PAGES - self.num_held())
        if pages is not None:
            assert len(pages) == num_pages
            self.model[owner] = (state, list(pages))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), num_pages=st.integers(0, 4))
    def grow(self, data: st.DataObject, num_pages: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.model)))
        pages = self.pool.grow(owner, num_pages)
        assert (pages is None) == (num_pages > NUM_PAGES - self.num_held())
        self.model[owner][1].extend(pages or ())

    @precondition(lambda self: self.model)
    @rule(data=st.data(), state=st.sampled_from(HELD))
    def move(self, data: st.DataObject, state: PageState) -> None:
        owner = data.draw(st.sampled_from(sorted(self.model)))
        if state not in MOVES[self.model[owner][0]]:
            with pytest.raises(AssertionError, match="not in the table"):
                self.pool.move(owner, state)
            return
        self.pool.move(owner, state)
        self.model[owner] = (state, self.model[owner][1])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.model)))
        assert self.pool.release(owner) == len(self.model.pop(owner)[1])

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity()
        counts = self.pool.counts()
        assert counts.total == NUM_PAGES
        for state in HELD:
            expected = sum(len(pages) for held, pages in self.model.values() if held is state)
            assert getattr(counts, state.value) == expected
        for owner, (state, pages) in self.model.items():
            assert self.pool.pages(owner) == tuple(pages)
            assert self.pool.state(owner) is state
        held = [page for _, pages in self.model.values() for page in pages]
        assert len(held) == len(set(held))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
