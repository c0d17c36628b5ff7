"""What KV a model has, and where a page of it lies in a rank's memory.

    region = [layer][page][head][tile][token][dim]          one region per rank, one memfd (CPU) or cuMem handle (GPU)

A head has two tiles, K and V, or one: the compressed cache of MLA is a single head of a single tile, kv_lora_rank +
rope_dim wide, and every rank has a copy of it by the rule for more ranks than heads. Head-major, with the tiles of a
head side by side: any range of heads of a whole page is one contiguous run of bytes, so a write between unequal shards
is still one write. Attention gets strided views of the same bytes.
"""

from __future__ import annotations

import dataclasses

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


def pages_of(num_tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // page_size)


def heads_divide(num_heads: int, tp: int) -> bool:
    """Whether `tp` ranks can hold so many KV heads alike: as shares, or, of fewer heads than ranks, as copies."""
    return num_heads % tp == 0 or tp % num_heads == 0


def heads_of_rank(num_heads: int, rank: int, tp: int) -> range:
    """Heads that `rank` holds: its share, or the one that it has a copy of. Only where `heads_divide`."""
    first = rank * num_heads // tp
    return range(first, first + max(1, num_heads // tp))


@dataclasses.dataclass(frozen=True, slots=True)
class KvShape:
    """The KV of one token of a model, before sharding: what two nodes that exchange KV must have in common."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES
    tiles: int = dataclasses.field(default=2, kw_only=True)  # of a head: K and V, or one latent tile

    def copies_over(self, tp: int) -> int:
        """Ranks of `tp` that hold the same head."""
        return max(1, tp // self.num_kv_heads)

    def heads_over(self, tp: int) -> int:
        """Heads that each of `tp` ranks holds."""
        return max(1, self.num_kv_heads // tp)

    def layout_over(self, tp: int, page_size: int, num_pages: int) -> KvLayout:
        """The region of each of `tp` ranks."""
        return KvLayout(
            num_layers=self.num_layers, num_pages=num_pages, num_kv_heads=self.heads_over(tp), page_size=page_size,
            head_dim=self.head_dim, dtype=self.dtype, tiles=self.tiles,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class KvLayout:
    """Geometry of one rank's KV region. All sizes are of this rank alone (`num_kv_heads` is after sharding)."""

    num_layers: int
    num_pages: int
    num_kv_heads: int
    page_size: int  # tokens
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES
    tiles: int = 2  # of a head: K and V, or one latent tile

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one tile."""
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile of one head of one page."""
        return self.page_size * self.token_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one page: its tiles, one after the other."""
        return self.tiles * self.tile_bytes

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
        """`[layers, pages, heads, tiles, page_size, head_dim]`."""
        return (self.num_layers, self.num_pages, self.num_kv_heads, self.tiles, self.page_size, self.head_dim)

    def num_pages_for(self, num_tokens: int) -> int:
        return pages_of(num_tokens, self.page_size)
