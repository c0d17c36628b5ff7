"""Attention over a compressed cache (MLA, DeepSeek): the projections, and the backend that attends to latents in pages.

A token's page entry is its latent, normed, and one rotated key that all heads share: one tile of kv_lora_rank + rope_dim,
the same on every rank. Heads' keys and values are products of the latent with `kv_b_proj`. Single tokens (decode) multiply
that weight into the query and into the output instead, so that they attend to latents as they lie in the pages; prefill
chunks make keys and values of the latents, some heads at a time, which is less work where many queries share them. Equal
within rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as functional

from pdd.kv.layout import KvLayout
from pdd.model.architecture import Mla, ModelConfig
from pdd.model.attention import Rows, Segment
from pdd.model.attn_torch import RowsAttention, SegmentsAttention, Tiles, TorchAttention, TorchRowsAttention
from pdd.model.blocks import Turn
from pdd.model.layers import rms_norm
from pdd.model.rope import rotate
from pdd.model.weights import Weights

_NORM_EPS = 1e-6  # of the two inner norms, whatever rms_norm_eps is. Source: transformers, DeepseekV3Attention
_EXPANDED_VALUES = 32 << 20  # of keys and values that a chunk makes at a time


class LatentProjections:
    """AttentionBlock of MLA. `up_k` and `up_v` are what the backend needs of `kv_b_proj`."""

    def __init__(self, weights: Weights, config: ModelConfig, mla: Mla, at: str) -> None:
        self._mla = mla
        self._heads = config.num_heads // weights.shard.world
        self._latent = mla.kv_lora_rank + mla.rope_dim
        head = mla.nope_dim + mla.rope_dim
        each_head = _halves_apart(self._heads, head, mla)
        if mla.q_lora_rank:
            down = _halves_apart(1, self._latent, mla) + mla.q_lora_rank
            self._down = weights.linear(at + "q_a_proj", at + "kv_a_proj_with_mqa",
                                        order=torch.cat([torch.arange(mla.q_lora_rank), down]))
            self._q_norm = weights.tensor(at + "q_a_layernorm.weight")
            self._q = weights.linear(at + "q_b_proj", order=each_head)
        else:
            self._down = weights.linear(at + "kv_a_proj_with_mqa", order=_halves_apart(1, self._latent, mla))
            self._q = weights.linear(at + "q_proj", order=each_head)
        self._kv_norm = weights.tensor(at + "kv_a_layernorm.weight")
        up = weights.tensor(at + "kv_b_proj.weight").view(self._heads, mla.nope_dim + mla.v_dim, mla.kv_lora_rank)
        self.up_k, self.up_v = up[:, : mla.nope_dim], up[:, mla.nope_dim :]  # [heads, nope or v, kv_lora_rank]
        self._output = weights.linear(at + "o_proj")

    def project(self, x: torch.Tensor, turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
        """q `[T, heads, nope_dim + rope_dim]` and the pages' entries `[T, 1, kv_lora_rank + rope_dim]`."""
        mla, down = self._mla, self._down(x)
        q = self._q(rms_norm(down[:, : mla.q_lora_rank], self._q_norm, _NORM_EPS) if mla.q_lora_rank else x)
        q = q.view(len(x), self._heads, mla.nope_dim + mla.rope_dim)
        q[..., mla.nope_dim :].copy_(rotate(q[..., mla.nope_dim :], *turn))
        entry = down[:, mla.q_lora_rank :].unsqueeze(1)
        latent, key = entry[..., : mla.kv_lora_rank], entry[..., mla.kv_lora_rank :]
        latent.copy_(rms_norm(latent, self._kv_norm, _NORM_EPS))
        key.copy_(rotate(key, *turn))
        return q, entry

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        return self._output(attended)


def _halves_apart(heads: int, size: int, mla: Mla) -> torch.Tensor:
    """Order of `heads * size` outputs in which the last rope_dim of each head hold the firsts of all pairs, then the
    seconds, as `rotate` wants them; the checkpoint may have pairs side by side."""
    one = torch.arange(size)
    if mla.interleaved:
        pairs = one[size - mla.rope_dim :].view(-1, 2)
        one = torch.cat([one[: size - mla.rope_dim], pairs.T.reshape(-1)])
    return (torch.arange(heads)[:, None] * size + one).reshape(-1)


class LatentAttention(TorchAttention):
    """Attention (model/attention.py) over pages of latents. q as of LatentProjections; out `[T, heads * v_dim]`."""

    def __init__(self, layout: KvLayout, kv: torch.Tensor, num_heads: int, windows: Sequence[int], mla: Mla,
                 blocks: Sequence[LatentProjections], native_rows: Callable[..., RowsAttention] | None = None) -> None:
        """native_rows: NativeRowsAttention, where it is built."""
        self._mla, self._blocks, self._native_rows = mla, blocks, native_rows
        super().__init__(layout, kv, num_heads, windows, mla.v_dim)

    def _rows_attention(self, kv: torch.Tensor) -> RowsAttention:
        made = (self._num_heads, self._windows, self._mla.kv_lora_rank, self._mla.scale)
        rows: RowsAttention = TorchRowsAttention(self._layout, self._tiles, *made)
        if self._native_rows is not None:
            rows = self._native_rows(self._layout, kv, *made)
        return _LatentRows(rows, self._mla, self._blocks)

    def _segments_attention(self, kv: torch.Tensor) -> SegmentsAttention:
        return _LatentSegments(self._tiles, self._mla, self._blocks)


class _LatentRows:
    """RowsAttention: all heads' queries, taken into the latents' space, share one head of keys, whose values are latents."""

    def __init__(self, rows: RowsAttention, mla: Mla, blocks: Sequence[LatentProjections]) -> None:
        self._rows, self._mla, self._blocks = rows, mla, blocks

    def plan(self, rows: Rows) -> None:
        self._rows.plan(rows)

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        mla, block = self._mla, self._blocks[layer]
        heads_first = q.transpose(0, 1)
        absorbed = torch.bmm(heads_first[..., : mla.nope_dim], block.up_k)  # [heads, rows, kv_lora_rank]
        query = torch.cat([absorbed, heads_first[..., mla.nope_dim :]], dim=-1).transpose(0, 1).contiguous()
        seen = torch.empty(len(q), q.shape[1], mla.kv_lora_rank, dtype=q.dtype)
        self._rows.run(layer, query, seen)
        out.copy_(torch.bmm(seen.transpose(0, 1), block.up_v.transpose(1, 2)).transpose(0, 1))


class _LatentSegments:
    """SegmentsAttention: keys and values are made of the latents, for as many heads at a time as memory is meant for."""

    def __init__(self, tiles: Tiles, mla: Mla, blocks: Sequence[LatentProjections]) -> None:
        self._tiles, self._mla, self._blocks = tiles, mla, blocks

    def plan(self, segments: tuple[Segment, ...]) -> None:
        self._segments: list[tuple[Segment, torch.Tensor, torch.Tensor]] = []
        for segment in segments:
            index = self._tiles.index(torch.from_numpy(segment.table)[None, :])
            visible = torch.arange(segment.kv_len)[None, :] <= torch.arange(segment.start, segment.kv_len)[:, None]
            self._segments.append((segment, index, visible))

    def run(self, layer: int, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        mla, block = self._mla, self._blocks[layer]
        for segment, index, visible in self._segments:
            entries = self._tiles.gather(layer, index, 1)[0, 0, 0, : segment.kv_len]  # [kv_len, latent]
            latents, shared_key = entries[:, : mla.kv_lora_rank], entries[:, mla.kv_lora_rank :]
            at_once = max(1, _EXPANDED_VALUES // (segment.kv_len * (mla.nope_dim + mla.rope_dim + mla.v_dim)))
            for first in range(0, q.shape[1], at_once):
                heads = slice(first, first + at_once)
                keys = torch.matmul(latents, block.up_k[heads].transpose(1, 2))  # [heads, kv_len, nope]
                keys = torch.cat([keys, shared_key.expand(len(keys), -1, -1)], dim=-1)
                values = torch.matmul(latents, block.up_v[heads].transpose(1, 2))
                query = q[segment.begin : segment.end, heads].transpose(0, 1)
                part = functional.scaled_dot_product_attention(query[None], keys[None], values[None], attn_mask=visible,
                                                               scale=mla.scale)
                out[segment.begin : segment.end, heads] = part[0].transpose(0, 1)
