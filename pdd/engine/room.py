"""Which of a node's engines a request goes to: the one that has most room for it. Pure.

    can it ever hold the prompt and its answer?    else it is not chosen
    would it take the prompt now?                  pages for it, a place in the batch, nobody who waits
    the most pages that nobody has or waits for
    the fewest requests
    whoever's turn it is                           round robin

Pages come before requests: what a step of decoding costs, and what a request may have to wait for, goes by tokens held. The
room of an engine is its latest snapshot less what was handed to it since: a burst does not go to one engine because a
snapshot is 20 ms old.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from pdd.engine.request import RequestState
from pdd.engine.snapshot import EngineSnapshot
from pdd.kv.layout import pages_of

_PLACED = (RequestState.RUNNING.value, RequestState.READY.value, RequestState.WAITING_FOR_REMOTE_KV.value)


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """What one engine has to offer."""

    pages: int  # of its pool
    free: int  # of them, less those that requests which wait will take; negative when they wait for more
    placed: int = 0  # requests in the batch, or with pages for the KV that they need first
    waiting: int = 0  # requests that have neither

    def with_handed(self, pages: Iterable[int]) -> Room:
        """As it will be once requests that take so many pages each have come in."""
        taken = list(pages)
        return dataclasses.replace(self, free=self.free - sum(taken), placed=self.placed + len(taken))


def room_of(snapshot: EngineSnapshot, page_size: int) -> Room:
    """O(requests)."""
    waiting = [row for row in snapshot.requests if row.state == RequestState.WAITING.value]
    counts = snapshot.pages
    return Room(
        pages=counts.total,
        free=counts.free + counts.cached - sum(pages_of(row.prompt_tokens + row.output_tokens, page_size) for row in waiting),
        placed=sum(snapshot.states.get(state, 0) for state in _PLACED), waiting=len(waiting),
    )


def choose(rooms: Sequence[Room], *, first: int, most: int, places: int, turn: int) -> int | None:
    """The index of the engine to take a request of `first` pages at its admission and `most` at its end; None: none can
    ever hold that. `places`: rows of a step. `turn`: the index that is first among equals."""

    def rank(index: int) -> tuple[bool, int, int]:
        room = rooms[index]
        starts = room.waiting == 0 and first <= room.free and room.placed < places
        return starts, room.free, -(room.placed + room.waiting)

    turns = ((turn + step) % len(rooms) for step in range(len(rooms)))
    return max((index for index in turns if rooms[index].pages >= most), key=rank, default=None)
