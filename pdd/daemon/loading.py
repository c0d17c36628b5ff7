"""Loads the engines of a node: what each one's ranks are told, in which order they start, and how far all are.

All groups have pools of one size, because a prefiller is told one size for all (wire.Geometry). Where the config leaves it to
the ranks, the first group loads alone and finds it, and the others are told; else all load together. What is free of
memory is looked at once, before, and each group has an equal share: which of them looks first decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdd.config import Config
from pdd.daemon.group import EngineGroup
from pdd.engine.rank_protocol import RankInit, RankProgress
from pdd.topology.placement import Placement

_PHASES = ("weights", "kv", "warm-up")


def rank_init(
    config: Config, placement: Placement, group: int, model_dir: str, num_pages: int, free_bytes: int
) -> RankInit:
    """For the ranks of one group. `free_bytes`: of memory, before any group began to load."""
    place = placement.place(group * config.engine.tp)  # its ranks are on one NUMA node
    others = [placement.place(other * config.engine.tp) for other in range(config.engine.dp) if other != group]
    beside = sum(not place.cpus or not other.cpus or place.cpus == other.cpus for other in others)
    return RankInit(
        model_dir, world=config.engine.tp, dtype=config.model.dtype, page_size=config.kv.page_size, num_pages=num_pages,
        memory_fraction=config.kv.memory_fraction, max_context=config.model.max_context,
        max_batch_size=config.engine.max_batch_size, max_batch_tokens=config.engine.max_batch_tokens,
        memory_bytes=free_bytes // config.engine.dp if others else 0, beside=beside * config.engine.tp,
        threads=place.threads, cpus=place.cpus, numa=place.numa,
    )


async def load(make: Callable[[int, int], EngineGroup], num_groups: int, num_pages: int) -> None:
    """Loads groups that `make(index, pages of the pool)` makes. `num_pages`: of each; 0: as many as the first one finds.

    Raises:
        PddError: what the first that failed says. The others may still be starting: close them.
    """
    first = 0
    if num_pages == 0:
        finder = make(0, 0)
        await asyncio.to_thread(finder.load)
        first, num_pages = 1, finder.ranks[0].ready.num_pages
    groups = [make(index, num_pages) for index in range(first, num_groups)]
    await asyncio.gather(*(asyncio.to_thread(group.load) for group in groups))


class Progress:
    """How far all ranks are: as the one that is furthest behind. Owner: the main loop."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], RankProgress] = {}  # by group and rank

    def add(self, group: int, rank: int, made: RankProgress) -> tuple[str, float | None]:
        """(phase, share of it that is done by all who are in it; None: not known) after one more word of a rank."""
        self._made[group, rank] = made
        phase = min((each.phase for each in self._made.values()), key=_PHASES.index)
        there = [each for each in self._made.values() if each.phase == phase]
        total = sum(each.total_bytes for each in there)
        return phase, sum(each.done_bytes for each in there) / total if total else None
