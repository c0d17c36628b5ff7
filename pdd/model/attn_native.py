"""Paged attention with native kernels: for rows of one token, and, where the CPU multiplies bf16, for prefill chunks.

The first reads K and V in place, tile by tile through the block table: no gather, no padding to the longest row. The second
packs them once per chunk and layer. Both sum in float32. Everything else, appending included, is TorchAttention's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdd.kv.layout import KvLayout
from pdd.model._attention import ChunkAttention, DecodeAttention
from pdd.model.attention import Rows, Segment
from pdd.model.attn_torch import RowsAttention, SegmentsAttention, TorchAttention

_LANES = 16  # the kernel for single tokens takes a head_dim that is a multiple of this, that for chunks one of twice it


def supports(layout: KvLayout) -> bool:
    return layout.head_dim % _LANES == 0 and layout.tiles == 2


def supports_latents(layout: KvLayout, value_dim: int) -> bool:
    return layout.head_dim % _LANES == 0 and value_dim % _LANES == 0 and layout.tiles == 1


def supports_chunks(layout: KvLayout) -> bool:
    return layout.dtype == "bfloat16" and layout.head_dim % (2 * _LANES) == 0 and ChunkAttention.supported()


class NativeAttention(TorchAttention):
    """See the module's docstring. Not safe for use by several threads."""

    def _rows_attention(self, kv: torch.Tensor) -> RowsAttention:
        return NativeRowsAttention(self._layout, kv, self._num_heads, self._windows)

    def _segments_attention(self, kv: torch.Tensor) -> SegmentsAttention:
        if not supports_chunks(self._layout):
            return super()._segments_attention(kv)
        return NativeSegmentsAttention(self._layout, kv, self._num_heads, self._windows)


class NativeRowsAttention:
    """RowsAttention by the native kernel. value_dim, scale: as of TorchRowsAttention."""

    def __init__(self, layout: KvLayout, kv: torch.Tensor, num_heads: int, windows: Sequence[int], value_dim: int = 0,
                 scale: float = 0.0) -> None:
        self._kernel = DecodeAttention(
            num_heads=num_heads, num_kv_heads=layout.num_kv_heads, head_dim=layout.head_dim, page_size=layout.page_size,
            num_pages=layout.num_pages, bf16=kv.dtype == torch.bfloat16, threads=torch.get_num_threads(), tiles=layout.tiles,
            value_dim=value_dim, scale=scale)
        self._layers, self._windows = [layer.data_ptr() for layer in kv], windows
        self._kv = kv  # keeps the memory behind the addresses

    def plan(self, rows: Rows) -> None:
        num_rows, width = rows.tables.shape
        self._kernel.plan(rows.tables.ctypes.data, rows.kv_lens.ctypes.data, num_rows, width)

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        self._kernel.run(self._layers[layer], q.data_ptr(), q.stride(0), out.data_ptr(), self._windows[layer])


class NativeSegmentsAttention:
    """SegmentsAttention by the native kernel, bf16. Measured on one core (Zen 4, 9 query and 3 KV heads of 64, 2026-11-30):
    1,024 tokens at once 13 ms, torch's SDPA 24 to 38 ms; the second 512 of them 10 and 33 ms."""

    def __init__(self, layout: KvLayout, kv: torch.Tensor, num_heads: int, windows: Sequence[int]) -> None:
        self._kernel = ChunkAttention(
            num_heads=num_heads, num_kv_heads=layout.num_kv_heads, head_dim=layout.head_dim, page_size=layout.page_size,
            num_pages=layout.num_pages, threads=torch.get_num_threads())
        self._layers, self._windows = [layer.data_ptr() for layer in kv], windows
        self._kv = kv  # keeps the memory behind the addresses

    def plan(self, segments: tuple[Segment, ...]) -> None:
        self._segments = segments

    def run(self, layer: int, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        for each in self._segments:
            queries, target = q[each.begin : each.end], out[each.begin : each.end]
            self._kernel.run(self._layers[layer], each.table.ctypes.data, len(each.table), each.start,
                             each.end - each.begin, queries.data_ptr(), queries.stride(0), target.data_ptr(),
                             self._windows[layer])
