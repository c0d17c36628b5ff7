"""What a model is made of, in numbers: what config.json says once its family is understood. No torch.

Everything else in this package that depends on the model, shapes of tensors, blocks, KV, reads it from here and never asks
which family it is (model/families.py fills it in).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from pdd.kv.layout import KvShape


@dataclasses.dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. "linear" uses `factor` alone, "llama3" the fields up to
    `original_max_position`, "yarn" `factor` and those from there on."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192  # tokens
    beta_fast: float = 32.0  # rotations over the original context above which a frequency is kept
    beta_slow: float = 1.0  # and below which it is divided by `factor`
    truncate: bool = True  # the borders between the two to whole dimensions
    amplitude: float = 1.0  # of the rotated vectors


@dataclasses.dataclass(frozen=True, slots=True)
class Mla:
    """Attention over a compressed cache: of each token one latent and one rotated key that all heads share."""

    q_lora_rank: int  # 0: queries are projected in one step
    kv_lora_rank: int
    rope_dim: int  # of each head's query and of the shared key
    nope_dim: int  # of each head's query and key, not rotated
    v_dim: int
    interleaved: bool  # the checkpoint's pairs to rotate lie side by side, not half a head apart
    scale: float  # of the scores


@dataclasses.dataclass(frozen=True, slots=True)
class Moe:
    """A layer that sends each token through `top_k` of `num_experts` small MLPs."""

    num_experts: int
    top_k: int
    intermediate_size: int  # of each expert
    scoring: Literal["softmax", "sigmoid"]
    normalised: bool  # a token's weights add up to `scale`
    scale: float = 1.0  # of the experts' sum
    shared_size: int = 0  # intermediate size of the MLP that every token goes through; 0: none
    num_groups: int = 1  # of experts; a token chooses among the experts of its best `top_groups` groups
    top_groups: int = 1
    correction_bias: bool = False  # a learnt bias that takes part in the choice, not in the weights


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a decoder-only model needs to run."""

    family: str  # a key of families.FAMILIES
    hidden_size: int
    intermediate_size: int  # of dense layers
    num_layers: int
    num_heads: int
    num_kv_heads: int  # of the KV cache: 1 with `mla`
    head_dim: int  # of the KV cache: with `mla` kv_lora_rank + rope_dim
    vocab_size: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]  # of each layer: a token sees that many tokens, itself included; 0: all
    mla: Mla | None
    moe: Moe | None
    moe_layers: tuple[int, ...]
    # Below: nothing that changes a value of the KV cache; not part of the fingerprint.
    max_position: int  # tokens
    dtype: str  # "bfloat16" or "float32": what `auto` means
    weight_block: tuple[int, int] | None  # rows and columns of fp8 weights that share a scale
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def kv_shape(self, dtype: str) -> KvShape:
        """The KV of one token. dtype: a key of kv.layout.DTYPE_BYTES."""
        return KvShape(self.num_layers, self.num_kv_heads, self.head_dim, dtype, tiles=1 if self.mla else 2)
