"""Paged attention with plain torch operations: the specification that other backends are tested against.

The pages of a layer are seen as rows `[page, head, K or V, slot] x [head_dim]` for appending and as tiles `[page,
head, K or V] x [page_size * head_dim]` for gathering, so that one index operation moves whole tiles. Index tensors
depend on the step only and are made once for all layers. Gathering copies every row's KV in every layer: that is this
backend's price.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as functional

from pdd.kv.layout import KvLayout
from pdd.model.attention import Batch, Rows, Segment


class RowsAttention(Protocol):
    """Attention of single tokens. `plan` once per step, then `run` per layer."""

    def plan(self, rows: Rows) -> None: ...

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the attention of `[len(rows), num_heads, head_dim]` queries into `out` of the same shape."""


class SegmentsAttention(Protocol):
    """Attention of rows with more than one token, which see their own earlier tokens. `plan` once per step, then `run`."""

    def plan(self, segments: tuple[Segment, ...]) -> None: ...

    def run(self, layer: int, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the attention of the segments' queries into their places in `out`; arguments as of Attention.run."""


class TorchAttention:
    """See the module's docstring. Not safe for use by several threads."""

    def __init__(self, layout: KvLayout, kv: torch.Tensor, num_heads: int) -> None:
        """kv: `[layers, pages, heads, 2, page_size, head_dim]` (model.attention.kv_tensor)."""
        self._layout = layout
        self._num_heads = num_heads
        self._rows = [layer.view(-1, layout.head_dim) for layer in kv]
        heads = torch.arange(layout.num_kv_heads)
        # Tile numbers within a page: head h has K at 2h and V at 2h + 1.
        self._append_tiles = torch.cat([2 * heads, 2 * heads + 1])  # [2 * heads]: the order of run()'s kv
        self._tiles = Tiles(layout, kv)
        self._single, self._several = self._rows_attention(kv), self._segments_attention(kv)

    def _rows_attention(self, kv: torch.Tensor) -> RowsAttention:
        return TorchRowsAttention(self._layout, self._tiles, self._num_heads)

    def _segments_attention(self, kv: torch.Tensor) -> SegmentsAttention:
        return TorchSegmentsAttention(self._layout, self._tiles)

    def plan(self, batch: Batch) -> None:
        layout = self._layout
        tiles = batch.pages[:, None] * (2 * layout.num_kv_heads) + self._append_tiles  # [T, 2 * heads]
        self._append_index = tiles * layout.page_size + batch.slots[:, None]
        self._num_decode, self._logits = len(batch.decode), batch.logits
        if self._num_decode:
            self._single.plan(batch.decode)
        self._several.plan(batch.segments)

    def run(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        self.append(layer, kv)
        out = torch.empty(q.shape, dtype=q.dtype)
        if self._num_decode:
            self._single.run(layer, q[: self._num_decode], out[: self._num_decode])
        self._several.run(layer, q, kv, out)
        return out.view(-1, self._num_heads * self._layout.head_dim)

    def append(self, layer: int, kv: torch.Tensor) -> None:
        self._rows[layer][self._append_index] = kv

    def run_logit_rows(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        self._single.plan(self._logits)  # it is the last layer: the plan of the decode rows is used up
        self._single.run(layer, q, out)
        return out.view(-1, self._num_heads * self._layout.head_dim)


class TorchRowsAttention:
    """RowsAttention that gathers every row's KV, padded to the longest row, and masks what is too much."""

    def __init__(self, layout: KvLayout, tiles: Tiles, num_heads: int) -> None:
        self._layout, self._tiles = layout, tiles
        self._group = num_heads // layout.num_kv_heads

    def plan(self, rows: Rows) -> None:
        tables = torch.from_numpy(rows.tables)
        self._index = self._tiles.index(tables)
        positions = torch.arange(tables.shape[1] * self._layout.page_size)
        hidden = positions >= torch.from_numpy(rows.kv_lens)[:, None]
        mask = torch.zeros(hidden.shape, dtype=self._tiles.dtype).masked_fill_(hidden, float("-inf"))
        self._mask = mask[:, None, None, :].expand(-1, 1, self._group, -1)

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        rows = len(q)
        k, v = self._tiles.gather(layer, self._index, rows)
        # query heads of a KV head together
        grouped = q.reshape(rows, self._layout.num_kv_heads, -1, self._layout.head_dim)
        out.copy_(functional.scaled_dot_product_attention(grouped, k, v, attn_mask=self._mask).view(out.shape))


class TorchSegmentsAttention:
    """SegmentsAttention that gathers what came before a chunk."""

    def __init__(self, layout: KvLayout, tiles: Tiles) -> None:
        self._layout, self._tiles = layout, tiles

    def plan(self, segments: tuple[Segment, ...]) -> None:
        self._segments: list[tuple[Segment, torch.Tensor | None, torch.Tensor | None]] = []
        for segment in segments:
            if segment.start == 0:  # nothing earlier: the chunk's own K and V are all there is
                self._segments.append((segment, None, None))
                continue
            index = self._tiles.index(torch.from_numpy(segment.table)[None, :])
            query = torch.arange(segment.start, segment.kv_len)
            visible = torch.arange(segment.kv_len)[None, :] <= query[:, None]  # causal, shifted by `start`
            self._segments.append((segment, index, visible))

    def run(self, layer: int, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        kv_heads = self._layout.num_kv_heads
        for segment, index, visible in self._segments:
            query = q[segment.begin : segment.end].transpose(0, 1)[None]  # [1, heads, qo_len, head_dim]
            if index is None:
                own = kv[segment.begin : segment.end].transpose(0, 1)[None]
                k, v = own[:, :kv_heads], own[:, kv_heads:]
                part = functional.scaled_dot_product_attention(query, k, v, is_causal=True, enable_gqa=True)
            else:
                k, v = self._tiles.gather(layer, index, 1)
                k, v = k[:, :, : segment.kv_len], v[:, :, : segment.kv_len]
                part = functional.scaled_dot_product_attention(query, k, v, attn_mask=visible, enable_gqa=True)
            out[segment.begin : segment.end] = part[0].transpose(0, 1)


class Tiles:
    """Gathers whole tiles, `[page_size * head_dim]` of K or V of one head and page."""

    def __init__(self, layout: KvLayout, kv: torch.Tensor) -> None:
        self.dtype = kv.dtype
        self._layout = layout
        self._tiles = [layer.view(-1, layout.page_size * layout.head_dim) for layer in kv]
        heads = torch.arange(layout.num_kv_heads)
        self._head_tiles = torch.stack([2 * heads, 2 * heads + 1], dim=1)  # [heads, 2]

    def index(self, tables: torch.Tensor) -> torch.Tensor:
        """Tile numbers `[rows * heads * 2 * pages]` that lay out each row's K, then V, per head in token order."""
        first_tiles = tables * (2 * self._layout.num_kv_heads)  # [rows, pages]
        return (first_tiles[:, None, None, :] + self._head_tiles[None, :, :, None]).reshape(-1)

    def gather(self, layer: int, index: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, each `[rows, kv_heads, pages * page_size, head_dim]`."""
        layout = self._layout
        both = self._tiles[layer].index_select(0, index).view(rows, layout.num_kv_heads, 2, -1, layout.head_dim)
        return both[:, :, 0], both[:, :, 1]
