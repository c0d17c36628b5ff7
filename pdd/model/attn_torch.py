"""Paged attention with plain torch operations: the specification that other backends are tested against.

The pages of a layer are seen as rows `[page, head, tile, slot] x [head_dim]` for appending and as tiles `[page,
head, tile] x [page_size * head_dim]` for gathering, so that one index operation moves whole tiles. Index tensors
depend on the step only and are made once for all layers. Gathering copies every row's KV in every layer: that is this
backend's price.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def __init__(self, layout: KvLayout, kv: torch.Tensor, num_heads: int, windows: Sequence[int] = (),
                 value_dim: int = 0) -> None:
        """
        Args:
            kv: `[layers, pages, heads, tiles, page_size, head_dim]` (model.attention.kv_tensor).
            windows: tokens that a token sees, itself included, in each layer; 0, or nothing: all.
            value_dim: of each head's output; 0: head_dim.
        """
        self._layout = layout
        self._num_heads = num_heads
        self._windows = tuple(windows) or (0,) * layout.num_layers
        self._value_dim = value_dim or layout.head_dim
        self._rows = [layer.view(-1, layout.head_dim) for layer in kv]
        tiles = torch.arange(layout.num_kv_heads * layout.tiles)
        self._append_tiles = tiles.view(layout.num_kv_heads, layout.tiles).T.reshape(-1)  # the order of run()'s kv
        self._tiles = Tiles(layout, kv)
        self._single, self._several = self._rows_attention(kv), self._segments_attention(kv)

    def _rows_attention(self, kv: torch.Tensor) -> RowsAttention:
        return TorchRowsAttention(self._layout, self._tiles, self._num_heads, self._windows)

    def _segments_attention(self, kv: torch.Tensor) -> SegmentsAttention:
        return TorchSegmentsAttention(self._layout, self._tiles, self._windows)

    def plan(self, batch: Batch) -> None:
        layout = self._layout
        tiles = batch.pages[:, None] * len(self._append_tiles) + self._append_tiles  # [T, tiles * heads]
        self._append_index = tiles * layout.page_size + batch.slots[:, None]
        self._num_decode, self._logits = len(batch.decode), batch.logits
        if self._num_decode:
            self._single.plan(batch.decode)
        self._several.plan(batch.segments)

    def run(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        self.append(layer, kv)
        out = self._output_for(q)
        if self._num_decode:
            self._single.run(layer, q[: self._num_decode], out[: self._num_decode])
        self._several.run(layer, q, kv, out)
        return out.view(len(q), -1)

    def append(self, layer: int, kv: torch.Tensor) -> None:
        self._rows[layer][self._append_index] = kv

    def run_logit_rows(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        out = self._output_for(q)
        self._single.plan(self._logits)  # it is the last layer: the plan of the decode rows is used up
        self._single.run(layer, q, out)
        return out.view(len(q), -1)

    def _output_for(self, q: torch.Tensor) -> torch.Tensor:
        return torch.empty(len(q), self._num_heads, self._value_dim, dtype=q.dtype)


class TorchRowsAttention:
    """RowsAttention that gathers every row's KV, padded to the longest row, and masks what is too much."""

    def __init__(self, layout: KvLayout, tiles: Tiles, num_heads: int, windows: Sequence[int], value_dim: int = 0,
                 scale: float = 0.0) -> None:
        """value_dim: with one tile per head, the part of a key that is its value. scale: 0 is head_dim ** -0.5."""
        self._layout, self._tiles, self._windows = layout, tiles, windows
        self._group = num_heads // layout.num_kv_heads
        self._value_dim, self._scale = value_dim, scale or layout.head_dim**-0.5

    def plan(self, rows: Rows) -> None:
        tables = torch.from_numpy(rows.tables)
        self._index = self._tiles.index(tables)
        positions, lens = torch.arange(tables.shape[1] * self._layout.page_size), torch.from_numpy(rows.kv_lens)[:, None]
        self._masks = {window: self._mask((positions < lens) & in_window(positions, lens - 1, window))
                       for window in set(self._windows)}

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        rows = len(q)
        tiles = self._tiles.gather(layer, self._index, rows)
        k, v = tiles.unbind(2) if self._layout.tiles == 2 else (tiles[:, :, 0], tiles[:, :, 0, :, : self._value_dim])
        # query heads of a KV head together
        grouped = q.reshape(rows, self._layout.num_kv_heads, -1, self._layout.head_dim)
        mask = self._masks[self._windows[layer]]
        attended = functional.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=self._scale)
        out.copy_(attended.reshape(out.shape))

    def _mask(self, visible: torch.Tensor) -> torch.Tensor:
        """`[rows, tokens]` as what is added to scores `[rows, kv_heads, group, tokens]`."""
        mask = torch.zeros(visible.shape, dtype=self._tiles.dtype).masked_fill_(~visible, float("-inf"))
        return mask[:, None, None, :].expand(-1, 1, self._group, -1)


class TorchSegmentsAttention:
    """SegmentsAttention that gathers what came before a chunk."""

    def __init__(self, layout: KvLayout, tiles: Tiles, windows: Sequence[int]) -> None:
        self._layout, self._tiles, self._windows = layout, tiles, windows

    def plan(self, segments: tuple[Segment, ...]) -> None:
        # by window, what each query sees; nothing where that is the plain causal triangle, which torch does faster
        self._segments: list[tuple[Segment, torch.Tensor | None, dict[int, torch.Tensor]]] = []
        for segment in segments:
            # nothing earlier: the chunk's own K and V are all there is
            index = self._tiles.index(torch.from_numpy(segment.table)[None, :]) if segment.start else None
            query, keys = torch.arange(segment.start, segment.kv_len)[:, None], torch.arange(segment.kv_len)[None, :]
            visible = {window: (keys <= query) & in_window(keys, query, window)  # causal, shifted by `start`
                       for window in set(self._windows) if window or segment.start}
            self._segments.append((segment, index, visible))

    def run(self, layer: int, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        kv_heads, window = self._layout.num_kv_heads, self._windows[layer]
        for segment, index, visible in self._segments:
            query = q[segment.begin : segment.end].transpose(0, 1)[None]  # [1, heads, qo_len, head_dim]
            if index is None:
                own = kv[segment.begin : segment.end].transpose(0, 1)[None]
                k, v = own[:, :kv_heads], own[:, kv_heads:]
            else:
                k, v = self._tiles.gather(layer, index, 1)[:, :, :, : segment.kv_len].unbind(2)
            mask = visible.get(window)
            part = functional.scaled_dot_product_attention(query, k, v, attn_mask=mask, is_causal=mask is None,
                                                           enable_gqa=True)
            out[segment.begin : segment.end] = part[0].transpose(0, 1)


class Tiles:
    """Gathers whole tiles, `[page_size * head_dim]` of K or V of one head and page."""

    def __init__(self, layout: KvLayout, kv: torch.Tensor) -> None:
        self.dtype = kv.dtype
        self._layout = layout
        self._tiles = [layer.view(-1, layout.page_size * layout.head_dim) for layer in kv]
        self._of_page = torch.arange(layout.num_kv_heads * layout.tiles)

    def index(self, tables: torch.Tensor) -> torch.Tensor:
        """Tile numbers `[rows * heads * tiles * pages]` that lay out each row's tiles, head by head, in token order."""
        first_tiles = tables * len(self._of_page)  # [rows, pages]
        return (first_tiles[:, None, :] + self._of_page[None, :, None]).reshape(-1)

    def gather(self, layer: int, index: torch.Tensor, rows: int) -> torch.Tensor:
        """`[rows, kv_heads, tiles, pages * page_size, head_dim]`."""
        layout = self._layout
        return self._tiles[layer].index_select(0, index).view(rows, layout.num_kv_heads, layout.tiles, -1, layout.head_dim)


def in_window(keys: torch.Tensor, query: torch.Tensor, window: int) -> torch.Tensor:
    """Whether a query at position `query` sees the keys as far as its window goes; 0: all."""
    return keys > query - window if window else torch.ones((), dtype=torch.bool)
