"""Where a page of KV lies in a rank's memory.

    region = [layer][page][head][K, V][token][dim]          one region per rank, one memfd (CPU) or cuMem handle (GPU)

Head-major, with K and V of a head side by side: any range of heads of a whole page is one contiguous run of bytes, so a
write between unequal shards is still one write. Attention gets strided K and V views of the same bytes.
"""

from __future__ import annotations

import dataclasses

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


def pages_of(num_tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // page_size)


@dataclasses.dataclass(frozen=True, slots=True)
class KvLayout:
    """Geometry of one rank's KV region. All sizes are of this rank alone (`num_kv_heads` is after sharding)."""

    num_layers: int
    num_pages: int
    num_kv_heads: int
    page_size: int  # tokens
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one head of K (or of V)."""
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one page: its K tile, then its V tile."""
        return 2 * self.page_size * self.token_bytes

    @property
    def page_bytes(self) -> int:
        return self.num_kv_heads * self.head_bytes

    @property
    def layer_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def region_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """`[layers, pages, heads, 2, page_size, head_dim]`."""
        return (self.num_layers, self.num_pages, self.num_kv_heads, 2, self.page_size, self.head_dim)

    def num_pages_for(self, num_tokens: int) -> int:
        return pages_of(num_tokens, self.page_size)
