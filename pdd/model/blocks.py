"""The parts of a layer: attention blocks, which make queries and KV of hidden states, and MLPs. One rank's shares.

A layer is an attention block and an MLP block (model/transformer.py). Both end in a projection cut by inputs, so what they
return is this rank's summand. Blocks hold weights and nothing of a step; the pages are the attention backend's.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as functional

from pdd.model.architecture import ModelConfig
from pdd.model.layers import rms_norm
from pdd.model.rope import rotate
from pdd.model.shard import length
from pdd.model.weights import Weights

Turn = tuple[torch.Tensor, torch.Tensor]  # cos and sin of the step's positions, each [T, 1, dim]


class AttentionBlock(Protocol):
    """What comes before and after the attention itself."""

    def project(self, x: torch.Tensor, turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
        """Normed hidden states `[T, hidden]` to queries and KV as Attention.run takes them."""

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """This rank's summand `[T, hidden]` of what Attention.run returned."""


class MlpBlock(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normed hidden states `[T, hidden]` to this rank's summand, of the same shape."""


class GroupedAttention:
    """Query heads in groups that share a KV head. Query, key and value weights are one matrix: fewer, larger products."""

    def __init__(self, weights: Weights, config: ModelConfig, at: str) -> None:
        self._heads = length(weights.shard.part(config.num_heads, "num_attention_heads"))
        self._kv_heads = length(weights.shard.kv_heads(config.num_kv_heads))
        self._dim, self._eps = config.head_dim, config.rms_eps
        self._qkv = weights.linear(at + "q_proj", at + "k_proj", at + "v_proj")
        self._q_norm = weights.tensor(at + "q_norm.weight") if config.qk_norm else None
        self._k_norm = weights.tensor(at + "k_norm.weight") if config.qk_norm else None
        self._output = weights.linear(at + "o_proj")

    def project(self, x: torch.Tensor, turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
        """q `[T, heads, head_dim]` and all heads' K, then V, `[T, 2 * kv_heads, head_dim]`."""
        heads, kv_heads = self._heads, self._kv_heads
        qkv = self._qkv(x).view(len(x), heads + 2 * kv_heads, self._dim)
        q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        if self._q_norm is not None and self._k_norm is not None:
            q.copy_(rms_norm(q, self._q_norm, self._eps))
            k.copy_(rms_norm(k, self._k_norm, self._eps))
        both = qkv[:, : heads + kv_heads]  # q and k turn together
        both.copy_(rotate(both, *turn))
        return q, qkv[:, heads:]

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        return self._output(attended)


class Mlp:
    """silu(gate) * up, and down. Gate and up are one matrix."""

    def __init__(self, weights: Weights, at: str) -> None:
        self._gate_up = weights.linear(at + "gate_proj", at + "up_proj")
        self._down = weights.linear(at + "down_proj")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(functional.silu(gate).mul_(up))
