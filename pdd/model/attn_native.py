"""Paged attention with the native kernel for rows of one token, torch for longer ones.

The kernel reads K and V in place, tile by tile through the block table: no gather, no padding to the longest row,
sums in float32. Everything else, appending included, is TorchAttention's.
"""

from __future__ import annotations

import torch

from pdd.kv.layout import KvLayout
from pdd.model._attention import DecodeAttention
from pdd.model.attention import Rows
from pdd.model.attn_torch import RowsAttention, TorchAttention

_LANES = 16  # the kernel takes a head_dim that is a multiple of this


def supports(layout: KvLayout) -> bool:
    return layout.head_dim % _LANES == 0


class NativeAttention(TorchAttention):
    """See the module's docstring. Not safe for use by several threads."""

    def _rows_attention(self, kv: torch.Tensor) -> RowsAttention:
        return NativeRowsAttention(self._layout, kv, self._num_heads)


class NativeRowsAttention:
    """RowsAttention by the native kernel."""

    def __init__(self, layout: KvLayout, kv: torch.Tensor, num_heads: int) -> None:
        self._kernel = DecodeAttention(
            num_heads=num_heads, num_kv_heads=layout.num_kv_heads, head_dim=layout.head_dim, page_size=layout.page_size,
            num_pages=layout.num_pages, bf16=kv.dtype == torch.bfloat16, threads=torch.get_num_threads())
        self._layers = [layer.data_ptr() for layer in kv]
        self._kv = kv  # keeps the memory behind the addresses

    def plan(self, rows: Rows) -> None:
        num_rows, width = rows.tables.shape
        self._kernel.plan(rows.tables.ctypes.data, rows.kv_lens.ctypes.data, num_rows, width)

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        self._kernel.run(self._layers[layer], q.data_ptr(), q.stride(0), out.data_ptr())
