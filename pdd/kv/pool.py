"""Who owns each page of KV: one number space of pages, each free or in exactly one hold.

A *hold* is a list of pages in token order under an owner's id (an attempt, a running row), and the whole hold is in
one state, which says who may still touch its pages:

    state         written by          read by    it goes on to
    FREE          nobody              nobody     RESERVED, RUNNING: reserve
    RESERVED      a prefiller         nobody     RUNNING: whole; QUARANTINED: its link has ended; FREE: no write can land
    RUNNING       ranks               ranks      SENDING: computed, or given up; FREE: over, or preempted
    SENDING       nobody              the NIC    FREE: every write is terminal
    QUARANTINED   perhaps a prefiller nobody     FREE: its link is fenced, and nothing else

Pages enter a hold by `reserve` and `grow`, leave it only by `release`, and change state by `move`. Because a
page has no other way back, "a page is free only if no write that names it can still land" is a matter of calling
`release` late enough; the pool itself has no timers and no opinion.

Free pages are kept as maximal runs, and the smallest run that is large enough is taken first: prompts get neighbouring
pages, which go as one write, and single pages (a decode that grows) fill the small gaps.

It does not evict, share or cache pages: `CACHED` is counted for the prefix cache to come, and stays 0 until then. With
it, a page of a whole prefix gets a count of the holds that it is in; `reserve` takes such pages to begin with, and
`release` drops the count, at 0 to CACHED and not to FREE. States stay those of holds: a shared page is never written.
Owner: the engine thread.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum


class PageState(enum.Enum):
    FREE = "free"
    CACHED = "cached"
    RESERVED = "reserved"  # a remote write may land in it
    RUNNING = "running"
    SENDING = "sending"  # a write may still read it
    QUARANTINED = "quarantined"  # a write that nobody can account for may still land in it


MOVES = {  # of a hold, without being released in between
    PageState.RESERVED: frozenset({PageState.RUNNING, PageState.QUARANTINED}),
    PageState.RUNNING: frozenset({PageState.SENDING}),
    PageState.SENDING: frozenset[PageState](),
    PageState.QUARANTINED: frozenset[PageState](),
}


@dataclasses.dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by state. The six always sum to the pool."""

    free: int
    cached: int
    reserved: int
    running: int
    sending: int
    quarantined: int

    @property
    def total(self) -> int:
        return self.free + self.cached + self.reserved + self.running + self.sending + self.quarantined


class IntegrityError(AssertionError):
    """The pool's own books do not agree: a bug of pdd, never of a user."""


@dataclasses.dataclass(slots=True)
class _Hold:
    state: PageState
    pages: list[int]


class PagePool:
    """All pages of a node. Shortage is `None`; a hold that is unknown or already there raises KeyError."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool needs at least one page, not {num_pages}")
        self.num_pages = num_pages
        self._starts: list[int] = [0]  # of free runs, ascending; no two runs touch
        self._lengths: list[int] = [num_pages]
        self._holds: dict[int, _Hold] = {}
        self._counts = dict.fromkeys(PageState, 0)
        self._counts[PageState.FREE] = num_pages

    # -- asking ---------------------------------------------------------------------------------------------------
    @property
    def num_free(self) -> int:
        return self._counts[PageState.FREE]

    def counts(self) -> PageCounts:
        count = self._counts
        return PageCounts(
            free=count[PageState.FREE], cached=count[PageState.CACHED], reserved=count[PageState.RESERVED],
            running=count[PageState.RUNNING], sending=count[PageState.SENDING],
            quarantined=count[PageState.QUARANTINED],
        )

    def pages(self, owner: int) -> tuple[int, ...]:
        """The owner's pages in token order."""
        return tuple(self._holds[owner].pages)

    def pages_from(self, owner: int, index: int) -> tuple[int, ...]:
        """The owner's pages from its `index`-th on: what was appended since a reader last looked."""
        return tuple(self._holds[owner].pages[index:])

    def num_held(self, owner: int) -> int:
        return len(self._holds[owner].pages)

    def state(self, owner: int) -> PageState:
        return self._holds[owner].state

    def __contains__(self, owner: int) -> bool:
        return owner in self._holds

    # -- changing -------------------------------------------------------------------------------------------------
    def reserve(self, owner: int, num_pages: int, state: PageState) -> tuple[int, ...] | None:
        """Opens a hold of `num_pages` pages (0 is allowed), or changes nothing and returns None on shortage."""
        if owner in self._holds:
            raise KeyError(f"hold {owner} exists already")
        self._require_held(state)
        pages = self._take(num_pages)
        if pages is None:
            return None
        self._holds[owner] = _Hold(state, pages)
        self._shift(PageState.FREE, state, len(pages))
        return tuple(pages)

    def grow(self, owner: int, num_pages: int) -> tuple[int, ...] | None:
        """Appends pages to a hold and returns the new ones, or changes nothing and returns None."""
        hold = self._holds[owner]
        pages = self._take(num_pages)
        if pages is None:
            return None
        hold.pages.extend(pages)
        self._shift(PageState.FREE, hold.state, len(pages))
        return tuple(pages)

    def move(self, owner: int, state: PageState) -> None:
        """Puts the whole hold in another state. FREE is not one: that is what `release` is for.

        Raises:
            AssertionError: MOVES has no such move. That is a bug of this program.
        """
        self._require_held(state)
        hold = self._holds[owner]
        if state not in MOVES[hold.state]:
            raise AssertionError(f"hold {owner}: {hold.state.value} -> {state.value} is not in the table")
        self._shift(hold.state, state, len(hold.pages))
        hold.state = state

    def release(self, owner: int) -> int:
        """Frees the hold and returns how many pages that were. A second release raises KeyError."""
        hold = self._holds.pop(owner)
        for start, length in _runs(sorted(hold.pages)):
            self._give_back(start, length)
        self._shift(hold.state, PageState.FREE, len(hold.pages))
        return len(hold.pages)

    # -- proof ----------------------------------------------------------------------------------------------------
    def check_integrity(self) -> None:
        """Raises IntegrityError unless every page is free or in exactly one hold, and the counts say so.

        O(free runs + held pages), and a byte per page: about 60 ns for each held page.
        """
        taken, end_of_previous = bytearray(self.num_pages), -1
        for start, length in zip(self._starts, self._lengths, strict=True):
            if start <= end_of_previous or length < 1 or start + length > self.num_pages:
                raise IntegrityError(f"free run [{start}, {start + length}) overlaps, touches the one before it or is no run")
            end_of_previous = start + length
            taken[start:end_of_previous] = b"\1" * length
        found = dict.fromkeys(PageState, 0)
        found[PageState.FREE] = num_known = sum(self._lengths)
        for owner, hold in self._holds.items():
            for page in hold.pages:
                if not 0 <= page < self.num_pages:
                    raise IntegrityError(f"page {page} of {owner} is not of this pool")
                if taken[page]:
                    others = [other for other, each in self._holds.items() if other != owner and page in each.pages]
                    raise IntegrityError(f"page {page} is held by {owner} and by {others or 'the free list'}")
                taken[page] = 1
            found[hold.state] += len(hold.pages)
            num_known += len(hold.pages)
        if num_known != self.num_pages:
            raise IntegrityError(f"{self.num_pages - num_known} of {self.num_pages} pages are lost")
        if found != self._counts:
            raise IntegrityError(f"counted {found}, booked {self._counts}")

    # -- free runs ------------------------------------------------------------------------------------------------
    def _take(self, num_pages: int) -> list[int] | None:
        """Removes pages from the free runs: from the smallest run that holds them all, else from the largest down."""
        if num_pages < 0:
            raise ValueError(f"cannot take {num_pages} pages")
        if num_pages > self.num_free:
            return None
        taken: list[int] = []
        while len(taken) < num_pages:
            missing = num_pages - len(taken)
            lengths = self._lengths
            fitting = min((length for length in lengths if length >= missing), default=0)
            index = lengths.index(fitting or max(lengths))
            start, length = self._starts[index], min(lengths[index], missing)
            taken.extend(range(start, start + length))
            if length == lengths[index]:
                del self._starts[index], lengths[index]
            else:
                self._starts[index] += length
                lengths[index] -= length
        return taken

    def _give_back(self, start: int, length: int) -> None:
        """Adds a run and joins it with the runs it touches."""
        starts, lengths = self._starts, self._lengths
        index = bisect.bisect_left(starts, start)
        if index < len(starts) and start + length == starts[index]:
            length += lengths[index]
            del starts[index], lengths[index]
        if index > 0 and starts[index - 1] + lengths[index - 1] == start:
            lengths[index - 1] += length
        else:
            starts.insert(index, start)
            lengths.insert(index, length)

    def _shift(self, old: PageState, new: PageState, num_pages: int) -> None:
        self._counts[old] -= num_pages
        self._counts[new] += num_pages

    @staticmethod
    def _require_held(state: PageState) -> None:
        if state in (PageState.FREE, PageState.CACHED):
            raise ValueError(f"a hold cannot be {state.value}")


def _runs(pages: list[int]) -> list[tuple[int, int]]:
    """Ascending pages as (start, length) of maximal runs."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and runs[-1][0] + runs[-1][1] == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs
