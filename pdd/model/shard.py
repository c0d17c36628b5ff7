"""How a tensor-parallel group divides a model: which part each rank keeps. No torch.

Query heads and the inner dimension of MLPs are divided evenly, or not at all; so are KV heads, or each is copied where there
are more ranks than heads. The vocabulary is padded to a multiple of the ranks. Experts go to ranks whole, as evenly as
they do. Whether a model divides is asked before (model/tensor_parallel.py); here it must.
"""

from __future__ import annotations

import dataclasses

from pdd.kv.layout import heads_divide, heads_of_rank

_REFUSED = "tensor_parallel.refusals should have said so"


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """One rank of a tensor-parallel group."""

    rank: int = 0
    world: int = 1

    def part(self, size: int, what: str) -> slice:
        """This rank's contiguous share of `size` equal things (query heads, rows of the MLP); `what` names them."""
        assert size % self.world == 0, f"{what} ({size}) over {self.world} ranks: {_REFUSED}"
        share = size // self.world
        return slice(self.rank * share, (self.rank + 1) * share)

    def kv_heads(self, num_kv_heads: int) -> slice:
        """This rank's KV heads: its share, or the one head it has a copy of when there are more ranks than heads."""
        assert heads_divide(num_kv_heads, self.world), f"{num_kv_heads} KV heads over {self.world} ranks: {_REFUSED}"
        held = heads_of_rank(num_kv_heads, self.rank, self.world)
        return slice(held.start, held.stop)

    def vocab_share(self, vocab_size: int) -> int:
        """Rows of the vocabulary on every rank; the last ranks' may be padding."""
        return -(-vocab_size // self.world)

    def vocab(self, vocab_size: int) -> slice:
        """This rank's tokens, without padding."""
        share = self.vocab_share(vocab_size)
        return slice(min(self.rank * share, vocab_size), min((self.rank + 1) * share, vocab_size))

    def experts(self, num_experts: int) -> range:
        """The experts that this rank keeps."""
        return range(self.rank * num_experts // self.world, (self.rank + 1) * num_experts // self.world)


def length(part: slice) -> int:
    return part.stop - part.start
