"""What a config.json says of a model's KV and of the work of its prefill, weights unseen. Pure; no torch.

Of a family that runs here it says what running it would do (model/config.py); of any other it knows what the usual keys
mean: a plan for a cluster is made before there is one. Attention is full (a sliding window is counted as if it were),
multi-head, grouped or MLA; the MLP is dense or routed experts.
Source: the published configurations and modelling code of the families named in the tests.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pdd.errors import ModelError
from pdd.kv.layout import KvShape
from pdd.model.config import parse_config
from pdd.model.families import FAMILIES
from pdd.model.fields import MOST_LAYERS, Fields

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


@dataclasses.dataclass(frozen=True, slots=True)
class _Latent:
    """MLA."""

    query_rank: int  # 0: queries are projected in one step
    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Experts:
    layers: frozenset[int]  # that have them
    number: int
    chosen: int  # for each token
    size: int  # inner
    shared_size: int  # inner size of the MLP that every token goes through


@dataclasses.dataclass(frozen=True, slots=True)
class _Numbers:
    hidden: int
    heads: int
    kv: KvShape
    latent: _Latent | None
    dense_size: int  # inner size of the MLP of layers without experts
    experts: _Experts | None


def sketch(config: dict[str, Any]) -> Sketch:
    """Of the contents of a config.json.

    Raises:
        ModelError: a key is missing, is no positive number, or says of layers that have no KV pages; or a family that
            runs here does not run with this value.
    """
    fields = Fields(config)
    linear = _LINEAR & {*fields.texts("layer_types")}
    if linear:
        named = ", ".join(sorted(linear))
        raise ModelError(f"config.json: layers of type {named} keep no pages of KV; this model cannot be planned")
    family = fields.word("model_type", "unknown")
    numbers = _that_runs(fields) if family in FAMILIES else _of_keys(fields)
    width, attention = _attention(numbers)
    layers = tuple(
        LayerWork(active_params=attention + _mlp(numbers, layer), attention_width=width)
        for layer in range(numbers.kv.num_layers)
    )
    return Sketch(family, numbers.kv, layers)


# -- reading -------------------------------------------------------------------------------------------------------------
def _that_runs(fields: Fields) -> _Numbers:
    model = parse_config(fields, Fields({}))
    mla, moe = model.mla, model.moe
    return _Numbers(
        hidden=model.hidden_size, heads=model.num_heads, kv=model.kv_shape(model.dtype),
        latent=_Latent(mla.q_lora_rank, mla.kv_lora_rank, mla.rope_dim, mla.nope_dim, mla.v_dim) if mla else None,
        dense_size=model.intermediate_size,
        experts=_Experts(frozenset(model.moe_layers), moe.num_experts, moe.top_k, moe.intermediate_size, moe.shared_size)
        if moe else None,
    )


def _of_keys(fields: Fields) -> _Numbers:
    num_layers, heads = fields.integer("num_hidden_layers", most=MOST_LAYERS), fields.integer("num_attention_heads")
    hidden, dtype, latent = fields.integer("hidden_size"), fields.dtype(), None
    if fields.integer("kv_lora_rank", 0, least=0):
        latent = _Latent(
            fields.integer("q_lora_rank", 0, least=0), fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim"),
            fields.integer("qk_nope_head_dim"), fields.integer("v_head_dim"),
        )
        kv = KvShape(num_layers, 1, latent.rank + latent.rope_dim, dtype, tiles=1)
    else:
        kv_heads = fields.integer("num_key_value_heads", heads)
        kv = KvShape(num_layers, kv_heads, fields.integer("head_dim", max(1, hidden // heads)), dtype)
    experts = _experts(fields, num_layers)
    all_routed = experts is not None and len(experts.layers) == num_layers
    return _Numbers(hidden, heads, kv, latent, 0 if all_routed else fields.integer("intermediate_size"), experts)


def _experts(fields: Fields, num_layers: int) -> _Experts | None:
    number = next((found for name in _EXPERTS if (found := fields.integer(name, 0, least=0))), 0)
    first, only_dense = fields.integer("first_k_dense_replace", 0, least=0), {*fields.integers("mlp_only_layers")}
    every, at = fields.integer("moe_layer_freq", 0, least=0), 0  # layer 0 is one of them
    if not every:
        every, at = fields.integer("decoder_sparse_step", 0, least=0) or 1, 1
    layers = frozenset(layer for layer in range(first, num_layers) if (layer + at) % every == 0) - only_dense
    if not number or not layers:
        return None
    size = fields.integer("moe_intermediate_size", fields.integer("intermediate_size", 1))
    return _Experts(layers, number, chosen=fields.integer("num_experts_per_tok"), size=size,
                    shared_size=size * fields.integer("n_shared_experts", 0, least=0))


# -- arithmetic ----------------------------------------------------------------------------------------------------------
def _attention(numbers: _Numbers) -> tuple[int, int]:
    """(heads * (key dim + value dim), weights) of a layer's attention."""
    hidden, heads, latent = numbers.hidden, numbers.heads, numbers.latent
    if latent is None:
        dim = numbers.kv.head_dim
        return 2 * heads * dim, hidden * dim * (2 * heads + 2 * numbers.kv.num_kv_heads)
    key, value = latent.nope_dim + latent.rope_dim, latent.value_dim
    query = latent.query_rank * (hidden + heads * key) if latent.query_rank else hidden * heads * key
    unfolded = hidden * (latent.rank + latent.rope_dim) + latent.rank * heads * (latent.nope_dim + value)
    return heads * (key + value), query + unfolded + heads * value * hidden


def _mlp(numbers: _Numbers, layer: int) -> int:
    """Weights of a layer's MLP that one token meets: three matrices, of a dense one or of the experts that it is sent to."""
    experts = numbers.experts
    if experts is None or layer not in experts.layers:
        return 3 * numbers.hidden * numbers.dense_size
    return numbers.hidden * experts.number + 3 * numbers.hidden * (experts.size * experts.chosen + experts.shared_size)
