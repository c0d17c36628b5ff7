"""Paged attention on CPU ranks: decode rows by native code over the pages in place, all else as `attn_torch` does it.

A decode row reads each of its K and V bytes once; the gather of the plain backend reads them, writes a copy and reads
that. Prefill chunks are bound by arithmetic, where the copy does not show.
"""

from __future__ import annotations

import torch

from pdd.kv.layout import KvLayout
from pdd.model._attention import PagedDecode
from pdd.model.attention import Batch
from pdd.model.attn_torch import TorchAttention


class NativeAttention(TorchAttention):
    """The plain backend with its decode part replaced."""

    def __init__(self, layout: KvLayout, kv: torch.Tensor, num_heads: int, threads: int) -> None:
        super().__init__(layout, kv, num_heads)
        self._pages = [layer.data_ptr() for layer in kv]
        self._decode = PagedDecode(
            layout.dtype, num_heads=num_heads, num_kv_heads=layout.num_kv_heads, page_size=layout.page_size,
            dim=layout.head_dim, scale=layout.head_dim**-0.5, threads=threads)

    def _plan_decode(self, batch: Batch) -> None:
        self._tables = batch.decode_tables  # kept alive: native code gets their addresses
        self._kv_lens = batch.decode_kv_lens

    def _run_decode(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        rows, width = len(self._kv_lens), self._num_heads * self._layout.head_dim
        out = torch.empty(rows, width, dtype=q.dtype)
        self._decode.run(q.data_ptr(), q.stride(0), out.data_ptr(), self._pages[layer], self._tables.ctypes.data,
                         self._tables.shape[1], self._kv_lens.ctypes.data, rows)
        return out
