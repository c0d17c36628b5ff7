"""Whether and how a model fits a machine: what each size of a rank group takes, and the pages that are left. Pure; no torch.

By the same arithmetic as a start: ranks of one machine take weights and pages of the same memory, all as many pages.
"""

from __future__ import annotations

import dataclasses

from pdd.model.architecture import ModelConfig
from pdd.model.shard import Shard
from pdd.model.tensor_parallel import MOST_RANKS, param_bytes, refusals, working_sizes

_USUAL_SIZES = (1, 2, 4, 8, 16)


@dataclasses.dataclass(frozen=True, slots=True)
class GroupFit:
    """One size of a rank group. All bytes are of one rank, all layers."""

    tp: int
    refused: tuple[str, ...]  # why the model does not divide so; then nothing else is said
    param_bytes: int = 0  # of the rank that has most
    kv_token_bytes: int = 0
    page_bytes: int = 0
    num_pages: int = 0  # of every rank, that fit this machine
    missing_bytes: int = 0  # that the weights of all ranks and one page need beyond what is free

    @property
    def fits(self) -> bool:
        return not self.refused and self.missing_bytes == 0 and self.num_pages > 0


def sizes_to_look_at(config: ModelConfig) -> tuple[int, ...]:
    """The usual numbers of ranks, with the reasons of those that do not work, and what works up to the largest of them."""
    most = min(MOST_RANKS, max(_USUAL_SIZES))
    return tuple(sorted({*_USUAL_SIZES, *(size for size in working_sizes(config) if size <= most)}))


def group_fit(config: ModelConfig, tp: int, *, dtype: str, page_size: int, free_bytes: int, fraction: float) -> GroupFit:
    """What `tp` ranks on one machine with `free_bytes` take. fraction: of what the weights leave, for KV."""
    refused = refusals(config, tp)
    if refused:
        return GroupFit(tp, refused)
    each = [param_bytes(config, Shard(rank, tp), dtype) for rank in range(tp)]
    page = config.kv_shape(dtype).layout_over(tp, page_size, 1)
    left = free_bytes - sum(each)
    num_pages = max(0, int(left * fraction)) // (tp * page.region_bytes)
    return GroupFit(tp, (), max(each), page.region_bytes // page_size, page.region_bytes, num_pages,
                    max(0, -left) if num_pages == 0 else 0)
