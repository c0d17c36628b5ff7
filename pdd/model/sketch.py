"""What a config.json says of a model's KV and of the work of its prefill, weights unseen. Pure; no torch.

Knows what the keys mean, not which families run here: a plan for a cluster is made before there is one. Attention is
full (a sliding window is counted as if it were), multi-head, grouped or MLA; the MLP is dense or routed experts.
Source: the published configurations and modelling code of the families named in the tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pdd.errors import ModelError
from pdd.kv.layout import KvShape

_DTYPES = {"bfloat16": "bfloat16", "float16": "bfloat16", "float32": "float32"}  # fp16 runs as bf16
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


def sketch(config: Mapping[str, Any]) -> Sketch:
    """Of the contents of a config.json.

    Raises:
        ModelError: a key is missing, is no positive number, or says of layers that have no KV pages.
    """
    linear = _LINEAR & set(config.get("layer_types") or ())
    if linear:
        named = ", ".join(sorted(linear))
        raise ModelError(f"config.json: layers of type {named} keep no pages of KV; this model cannot be planned")
    num_layers = _integer(config, "num_hidden_layers")
    width, attention = _attention(config)
    layers = tuple(
        LayerWork(active_params=attention + _mlp(config, layer), attention_width=width) for layer in range(num_layers)
    )
    return Sketch(str(config.get("model_type") or "unknown"), kv_shape(config), layers)


def kv_shape(config: Mapping[str, Any]) -> KvShape:
    """The KV of one token. MLA: a single head of a single tile, the latent and the rotated part side by side."""
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if dtype not in _DTYPES:
        raise ModelError(f"config.json: dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    num_layers = _integer(config, "num_hidden_layers")
    if config.get("kv_lora_rank"):
        width = _integer(config, "kv_lora_rank") + _integer(config, "qk_rope_head_dim")
        return KvShape(num_layers, 1, width, _DTYPES[dtype], tiles=1)
    heads = _integer(config, "num_attention_heads")
    return KvShape(num_layers, _integer(config, "num_key_value_heads", heads), _head_dim(config), _DTYPES[dtype])


def _attention(config: Mapping[str, Any]) -> tuple[int, int]:
    """(heads * (key dim + value dim), weights) of a layer's attention."""
    hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    if not config.get("kv_lora_rank"):
        dim, kv_heads = _head_dim(config), _integer(config, "num_key_value_heads", heads)
        return 2 * heads * dim, hidden * dim * (2 * heads + 2 * kv_heads)
    latent, rope = _integer(config, "kv_lora_rank"), _integer(config, "qk_rope_head_dim")
    key, value = _integer(config, "qk_nope_head_dim") + rope, _integer(config, "v_head_dim")
    query_rank = config.get("q_lora_rank")
    query = query_rank * (hidden + heads * key) if query_rank else hidden * heads * key
    unfolded = hidden * (latent + rope) + latent * heads * (key - rope + value)
    return heads * (key + value), query + unfolded + heads * value * hidden


def _mlp(config: Mapping[str, Any], layer: int) -> int:
    """Weights of a layer's MLP that one token meets: three matrices, of a dense one or of the experts that it is sent to."""
    hidden = _integer(config, "hidden_size")
    experts = config.get("n_routed_experts") or config.get("num_experts") or config.get("num_local_experts")
    first_dense = int(config.get("first_k_dense_replace") or 0)
    every = int(config.get("moe_layer_freq") or config.get("decoder_sparse_step") or 1)
    at_turn = layer % every == 0 if config.get("moe_layer_freq") else (layer + 1) % every == 0
    if not experts or layer < first_dense or not at_turn or layer in (config.get("mlp_only_layers") or ()):
        return 3 * hidden * _integer(config, "intermediate_size")
    width = _integer(config, "moe_intermediate_size", _integer(config, "intermediate_size", 1))
    chosen = _integer(config, "num_experts_per_tok")
    shared = int(config.get("n_shared_experts") or 0)
    return hidden * int(experts) + 3 * hidden * width * (chosen + shared)


def _head_dim(config: Mapping[str, Any]) -> int:
    heads = _integer(config, "num_attention_heads")
    return _integer(config, "head_dim", _integer(config, "hidden_size") // heads)


def _integer(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"config.json: {name} must be a positive integer, is {value!r}")
    return value
