"""What a config.json says of a model's KV and of the work of its prefill, weights unseen. Pure; no torch.

Knows what the keys mean, not which families run here: a plan for a cluster is made before there is one. Attention is
full (a sliding window is counted as if it were), multi-head, grouped or MLA; the MLP is dense or routed experts.
Source: the published configurations and modelling code of the families named in the tests.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pdd.errors import ModelError
from pdd.kv.layout import KvShape
from pdd.model.fields import MOST_LAYERS, Fields

_DTYPES = {"bfloat16": "bfloat16", "float16": "bfloat16", "float32": "float32"}  # fp16 runs as bf16
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_LINEAR = {"linear_attention", "mamba", "recurrent"}


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWork:
    """What one layer of a prefill costs, over all ranks."""

    active_params: int  # weights that each token is multiplied with
    attention_width: int  # heads * (dim of a key + dim of a value)

    def flops(self, begin_token: int, end_token: int) -> float:
        """Of computing tokens [begin, end) of a prompt: 2 for each active weight, 2 for each key and value looked at."""
        looked_at = (end_token**2 - begin_token**2) / 2  # causal: token t sees t others
        return 2.0 * self.active_params * (end_token - begin_token) + 2.0 * self.attention_width * looked_at


@dataclasses.dataclass(frozen=True, slots=True)
class Sketch:
    family: str
    kv: KvShape
    layers: tuple[LayerWork, ...]


def sketch(config: dict[str, Any]) -> Sketch:
    """Of the contents of a config.json.

    Raises:
        ModelError: a key is missing, is no positive number, or says of layers that have no KV pages.
    """
    fields = Fields(config)
    linear = _LINEAR & {*fields.texts("layer_types")}
    if linear:
        named = ", ".join(sorted(linear))
        raise ModelError(f"config.json: layers of type {named} keep no pages of KV; this model cannot be planned")
    kv = kv_shape(config)
    width, attention = _attention(fields)
    layers = tuple(
        LayerWork(active_params=attention + params, attention_width=width) for params in _mlps(fields, kv.num_layers)
    )
    return Sketch(fields.word("model_type", "unknown"), kv, layers)


def kv_shape(config: dict[str, Any]) -> KvShape:
    """The KV of one token. MLA: a single head of a single tile, the latent and the rotated part side by side."""
    fields = Fields(config)
    dtype = fields.word("dtype", fields.word("torch_dtype", "bfloat16"))
    if dtype not in _DTYPES:
        raise ModelError(f"config.json: dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    num_layers = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    if latent := fields.integer("kv_lora_rank", 0, least=0):
        return KvShape(num_layers, 1, latent + fields.integer("qk_rope_head_dim"), _DTYPES[dtype], tiles=1)
    heads = fields.integer("num_attention_heads")
    return KvShape(num_layers, fields.integer("num_key_value_heads", heads), _head_dim(fields), _DTYPES[dtype])


def _attention(fields: Fields) -> tuple[int, int]:
    """(heads * (key dim + value dim), weights) of a layer's attention."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    latent = fields.integer("kv_lora_rank", 0, least=0)
    if not latent:
        dim, kv_heads = _head_dim(fields), fields.integer("num_key_value_heads", heads)
        return 2 * heads * dim, hidden * dim * (2 * heads + 2 * kv_heads)
    rope = fields.integer("qk_rope_head_dim")
    key, value = fields.integer("qk_nope_head_dim") + rope, fields.integer("v_head_dim")
    query_rank = fields.integer("q_lora_rank", 0, least=0)
    query = query_rank * (hidden + heads * key) if query_rank else hidden * heads * key
    unfolded = hidden * (latent + rope) + latent * heads * (key - rope + value)
    return heads * (key + value), query + unfolded + heads * value * hidden


def _mlps(fields: Fields, num_layers: int) -> list[int]:
    """Weights of each layer's MLP that one token meets: three matrices, of a dense one or of the experts that it is sent
    to."""
    experts = next((found for name in _EXPERTS if (found := fields.integer(name, 0, least=0))), 0)
    first_dense, only_dense = fields.integer("first_k_dense_replace", 0, least=0), {*fields.integers("mlp_only_layers")}
    frequency = fields.integer("moe_layer_freq", 0, least=0)
    every = frequency or fields.integer("decoder_sparse_step", 0, least=0) or 1

    def is_dense(layer: int) -> bool:
        at_turn = (layer if frequency else layer + 1) % every == 0
        return not experts or layer < first_dense or not at_turn or layer in only_dense

    kinds = [is_dense(layer) for layer in range(num_layers)]
    hidden = fields.integer("hidden_size")
    dense = 3 * hidden * fields.integer("intermediate_size") if any(kinds) else 0
    routed = 0
    if not all(kinds):
        width = fields.integer("moe_intermediate_size", fields.integer("intermediate_size", 1))
        met = fields.integer("num_experts_per_tok") + fields.integer("n_shared_experts", 0, least=0)
        routed = hidden * experts + 3 * hidden * width * met
    return [dense if kind else routed for kind in kinds]


def _head_dim(fields: Fields) -> int:
    heads = fields.integer("num_attention_heads")
    return fields.integer("head_dim", max(1, fields.integer("hidden_size") // heads))
