"""Two nodes' regions as arrays of names, for tests that look at every slot that a plan writes.

An element stands for one token of one tile and names what belongs there: (layer, head, tile, token).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdd.kv.sharding import ShardSpec, ShardWrites

Names = npt.NDArray[np.int64]
BASE = ShardSpec(num_layers=2, num_kv_heads=4, head_dim=2, dtype="bfloat16", page_size=16, num_pages=12, tp=1)
SLOT_BYTES = BASE.layout.token_bytes


def page_tables(src: ShardSpec, dst: ShardSpec, num_tokens: int, rng: random.Random) -> tuple[list[int], list[int]]:
    return (rng.sample(range(src.num_pages), src.layout.num_pages_for(num_tokens)),
            rng.sample(range(dst.num_pages), dst.layout.num_pages_for(num_tokens)))


def names(spec: ShardSpec, rank: int, pages: Sequence[int], num_tokens: int) -> Names:
    """A rank's region, `[layer, page, head, tile, slot]`, as the prompt leaves it; 0 where it says nothing."""
    layers, num_pages, heads, tiles, page_size, _ = spec.layout.shape
    region = np.zeros((layers, num_pages, heads, tiles, page_size), np.int64)
    held = spec.heads(rank)
    layer, head, tile, token = np.ogrid[1 : layers + 1, held.start : held.stop, :tiles, : len(pages) * page_size]
    named = np.where(token < num_tokens, ((layer * 100 + head) * 10 + tile) * 100_000 + token, 0)
    by_page = named.reshape(layers, heads, tiles, len(pages), page_size)
    region[:, list(pages)] = by_page.transpose(0, 3, 1, 2, 4)
    return region


@dataclasses.dataclass
class Written:
    """What the ranks of a destination hold after some plans, and how often each slot was written."""

    dst: ShardSpec
    sources: Sequence[Names]  # by rank

    def __post_init__(self) -> None:
        shape = self.dst.layout.shape[:-1]
        self.got = [np.zeros(shape, np.int64) for _ in range(self.dst.tp)]
        self.hits = [np.zeros(shape, np.int64) for _ in range(self.dst.tp)]
        self.units = 0

    def apply(self, plan: ShardWrites, begin: int = 0, end: int | None = None) -> None:
        """Entries [begin, end) of all layers."""
        assert len(set(plan.nbytes.tolist())) <= 1
        chosen = slice(begin, end)
        run = np.arange(int(plan.nbytes[0]) // SLOT_BYTES if len(plan) else 0)
        source, got, hits = (array.reshape(-1) for array in
                             (self.sources[plan.src_rank], self.got[plan.dst_rank], self.hits[plan.dst_rank]))
        for layer in range(plan.num_layers):
            ends = []
            for offset, stride in ((plan.src_offset, plan.src_layer_stride), (plan.dst_offset, plan.dst_layer_stride)):
                at = offset[chosen] + layer * stride
                assert not (at % SLOT_BYTES).any()
                ends.append((at[:, None] // SLOT_BYTES + run).reshape(-1))
            got[ends[1]] = source[ends[0]]
            np.add.at(hits, ends[1], 1)
            self.units += int(plan.units[chosen].sum())

    def check(self, pages: Sequence[int], num_tokens: int, skip_tokens: int) -> None:
        """Every slot of tokens [skip, num) was written once, with what belongs there; nothing else of the pool was touched."""
        for rank, (got, hits) in enumerate(zip(self.got, self.hits, strict=True)):
            whole = names(self.dst, rank, pages, num_tokens)
            before = names(self.dst, rank, pages, skip_tokens)
            wanted = (whole != 0) & (before == 0)
            assert (hits[wanted] == 1).all(), f"rank {rank}: a slot was written {hits[wanted].min()} to {hits[wanted].max()} times"
            assert (got[wanted] == whole[wanted]).all(), f"rank {rank}: a slot holds what belongs elsewhere"
            assert not hits[before != 0].any(), f"rank {rank}: a skipped token was written"
            others = np.ones(self.dst.num_pages, bool)
            others[list(pages)] = False
            assert not hits[:, others].any(), f"rank {rank}: a page that is not the prompt's was written"
            assert hits.max(initial=0) <= 1
