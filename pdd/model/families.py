"""The families that pdd runs: one table. A new family is a new entry, and a block of model/ when it computes anew.

An entry says what sets a family apart from Llama: what its config.json leaves out, or says in its own words. Everything
that the families have in common is read by model/config.py; tensors' names and shapes follow in model/tensors.py.
No torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from pdd.errors import ModelError
from pdd.model.architecture import Mla, Moe
from pdd.model.fields import Fields


def _sees_all(fields: Fields, num_layers: int) -> tuple[int, ...]:
    return (0,) * num_layers


def _window_everywhere(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Mistral: every layer, if config.json has a window at all."""
    return (fields.integer("sliding_window", 0),) * num_layers


def _window_if_used(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Qwen3-MoE: every layer, where it is switched on."""
    return ((fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window") else 0),) * num_layers


def _window_by_layer(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Qwen2 and Qwen3: where it is switched on, the layers that `layer_types` names, else those from `max_window_layers` on."""
    window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window") else 0
    types = fields.texts("layer_types")
    if fields.get("layer_types") is None:
        first = fields.integer("max_window_layers", 28, least=0)
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    if len(types) != num_layers or not {*types} <= {"full_attention", "sliding_attention"}:
        raise ModelError(f"config.json: layer_types must say of each of {num_layers} layers full_attention or "
                         "sliding_attention")
    if not window and "sliding_attention" in types:
        raise ModelError("config.json: layer_types has sliding_attention, but use_sliding_window is off")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _qwen3_moe(fields: Fields, num_layers: int) -> tuple[Moe, tuple[int, ...]]:
    step, dense = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    experts = fields.integer("num_experts" if fields.get("num_experts") else "num_local_experts", 128)
    moe = Moe(num_experts=experts, top_k=fields.integer("num_experts_per_tok", 8),
              intermediate_size=fields.integer("moe_intermediate_size", 768), scoring="softmax",
              normalised=fields.flag("norm_topk_prob"))
    return moe, tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)


def _deepseek_moe(fields: Fields, num_layers: int) -> tuple[Moe, tuple[int, ...]]:
    method, scoring = fields.word("topk_method", "noaux_tc"), fields.word("scoring_func", "sigmoid")
    if method != "noaux_tc" or scoring != "sigmoid":
        raise ModelError(f"config.json: topk_method {method!r} with scoring_func {scoring!r} is not "
                         "supported; noaux_tc with sigmoid is")
    size = fields.integer("moe_intermediate_size", 2048)
    shared = fields.integer("n_shared_experts", 1, least=0)
    moe = Moe(num_experts=fields.integer("n_routed_experts", 256), top_k=fields.integer("num_experts_per_tok", 8),
              intermediate_size=size, scoring="sigmoid", normalised=fields.flag("norm_topk_prob", True),
              scale=fields.number("routed_scaling_factor", 2.5), shared_size=size * shared,
              num_groups=fields.integer("n_group", 8), top_groups=fields.integer("topk_group", 4), correction_bias=True)
    if (step := fields.integer("moe_layer_freq", 1)) != 1:
        raise ModelError(f"config.json: moe_layer_freq {step} is not supported; only 1 is")
    return moe, tuple(range(fields.integer("first_k_dense_replace", 3, least=0), num_layers))


def _deepseek_mla(fields: Fields) -> Mla:
    nope, rope = fields.integer("qk_nope_head_dim", 128), fields.integer("qk_rope_head_dim", 64)
    scaling = fields.rope()
    scale = (nope + rope) ** -0.5
    stretch = scaling.number("mscale_all_dim", 0.0)
    if scaling.word("rope_type", scaling.word("type", "default")) != "default" and stretch:
        scale *= yarn_amplitude(scaling.number("factor"), stretch) ** 2
    return Mla(q_lora_rank=fields.integer("q_lora_rank", 0), kv_lora_rank=fields.integer("kv_lora_rank", 512), rope_dim=rope,
               nope_dim=nope, v_dim=fields.integer("v_head_dim", 128), interleaved=fields.flag("rope_interleave", True),
               scale=scale)


def yarn_amplitude(factor: float, weight: float = 1.0) -> float:
    """How much yarn enlarges what is stretched by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """What sets a family apart."""

    architecture: str  # as config.json has it
    qkv_bias: bool | None = None  # None: as `attention_bias` of config.json says
    output_bias: bool | None = None
    mlp_bias: bool = False  # whether `mlp_bias` of config.json counts
    qk_norm: bool = False
    windows: Callable[[Fields, int], tuple[int, ...]] = _sees_all
    moe: Callable[[Fields, int], tuple[Moe, tuple[int, ...]]] | None = None  # and which layers have experts
    mla: Callable[[Fields], Mla] | None = None


FAMILIES = {  # by model_type of config.json
    "llama": Family("LlamaForCausalLM", mlp_bias=True),
    "mistral": Family("MistralForCausalLM", qkv_bias=False, output_bias=False, windows=_window_everywhere),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, output_bias=False, windows=_window_by_layer),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, windows=_window_by_layer),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_norm=True, windows=_window_if_used, moe=_qwen3_moe),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", moe=_deepseek_moe, mla=_deepseek_mla),
}
SUPPORTED = ("pdd runs Llama (SmolLM2 too), Mistral, Qwen2, Qwen3, Qwen3-MoE and DeepSeek V3 (R1 too) checkpoints in "
             "safetensors form.")
