"""The tensors of a checkpoint: name, shape, and how ranks divide each. No torch.

What is loaded, what is missing, what a demo model holds and what `pdd model check` counts all follow from this one list.
Names are those of Hugging Face checkpoints. Layers beyond num_layers (DeepSeek's for multi-token prediction) are not in it:
they are left in the file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from pdd.model.architecture import Mla, ModelConfig
from pdd.model.shard import Shard

# "heads", "kv_heads", "inner": an even share along `axis`. "vocab": rows. "expert": all of it on the rank that has the
# expert. "first": all of it on rank 0 (a bias of results that are summed over ranks). "copy": all of it on every rank.
Division = Literal["copy", "heads", "kv_heads", "inner", "vocab", "expert", "first"]
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as the checkpoint has it."""

    name: str
    shape: tuple[int, ...]
    division: Division = "copy"
    axis: int = 0
    expert: int = -1
    exact: bool = False  # kept in float32 whatever the model runs in

    def kept(self, config: ModelConfig, shard: Shard) -> tuple[slice, ...] | None:
        """What `shard` keeps, a slice of each dimension; None: nothing."""
        whole = tuple(slice(0, size) for size in self.shape)
        match self.division:
            case "copy":
                return whole
            case "first":
                return whole if shard.rank == 0 else None
            case "expert":
                assert config.moe is not None
                return whole if self.expert in shard.experts(config.moe.num_experts) else None
            case "vocab":
                part = shard.vocab(config.vocab_size)
            case "heads":
                part = _widened(shard.part(config.num_heads, "num_attention_heads"), self.shape[self.axis], config.num_heads)
            case "kv_heads":
                part = _widened(shard.kv_heads(config.num_kv_heads), self.shape[self.axis], config.num_kv_heads)
            case "inner":
                part = shard.part(self.shape[self.axis], self.name.split(".")[-2] + "'s inner size")
        return (*whole[: self.axis], part, *whole[self.axis + 1 :])


def layer_name(layer: int) -> str:
    return f"model.layers.{layer}."


def tensors_of(config: ModelConfig) -> Iterator[TensorSpec]:
    """All tensors that the model has, in the order in which they are loaded."""
    hidden = config.hidden_size
    yield TensorSpec(EMBEDDING, (config.vocab_size, hidden), "vocab")
    for layer in range(config.num_layers):
        at = layer_name(layer)
        yield TensorSpec(at + "input_layernorm.weight", (hidden,))
        if config.mla is not None:
            yield from _latent_attention(config, config.mla, at + "self_attn.")
        else:
            yield from _attention(config, at + "self_attn.")
        yield TensorSpec(at + "post_attention_layernorm.weight", (hidden,))
        if layer in config.moe_layers:
            yield from _experts(config, at + "mlp.")
        else:
            yield from _mlp(at + "mlp.", hidden, config.intermediate_size, config.mlp_bias)
    yield TensorSpec(FINAL_NORM, (hidden,))
    if not config.tie_embeddings:
        yield TensorSpec(HEAD, (config.vocab_size, hidden), "vocab")


def _attention(config: ModelConfig, at: str) -> Iterator[TensorSpec]:
    hidden, dim = config.hidden_size, config.head_dim
    divisions: tuple[tuple[str, int, Division], ...] = (
        ("q", config.num_heads, "heads"), ("k", config.num_kv_heads, "kv_heads"), ("v", config.num_kv_heads, "kv_heads"))
    for name, heads, division in divisions:
        yield TensorSpec(f"{at}{name}_proj.weight", (heads * dim, hidden), division)
        if config.qkv_bias:
            yield TensorSpec(f"{at}{name}_proj.bias", (heads * dim,), division)
    if config.qk_norm:
        yield TensorSpec(at + "q_norm.weight", (dim,))
        yield TensorSpec(at + "k_norm.weight", (dim,))
    yield from _summed(at + "o_proj", hidden, config.num_heads * dim, "heads", config.output_bias)


def _latent_attention(config: ModelConfig, mla: Mla, at: str) -> Iterator[TensorSpec]:
    hidden, heads = config.hidden_size, config.num_heads
    queries = heads * (mla.nope_dim + mla.rope_dim)
    if mla.q_lora_rank:
        yield from _copied(at + "q_a_proj", mla.q_lora_rank, hidden, config.qkv_bias)
        yield TensorSpec(at + "q_a_layernorm.weight", (mla.q_lora_rank,))
        yield TensorSpec(at + "q_b_proj.weight", (queries, mla.q_lora_rank), "heads")
    else:
        yield TensorSpec(at + "q_proj.weight", (queries, hidden), "heads")
    yield from _copied(at + "kv_a_proj_with_mqa", mla.kv_lora_rank + mla.rope_dim, hidden, config.qkv_bias)
    yield TensorSpec(at + "kv_a_layernorm.weight", (mla.kv_lora_rank,))
    yield TensorSpec(at + "kv_b_proj.weight", (heads * (mla.nope_dim + mla.v_dim), mla.kv_lora_rank), "heads")
    yield from _summed(at + "o_proj", hidden, heads * mla.v_dim, "heads", config.output_bias)


def _mlp(at: str, hidden: int, inner: int, bias: bool) -> Iterator[TensorSpec]:
    for name in ("gate_proj", "up_proj"):
        yield TensorSpec(f"{at}{name}.weight", (inner, hidden), "inner")
        if bias:
            yield TensorSpec(f"{at}{name}.bias", (inner,), "inner")
    yield from _summed(at + "down_proj", hidden, inner, "inner", bias)


def _experts(config: ModelConfig, at: str) -> Iterator[TensorSpec]:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    yield TensorSpec(at + "gate.weight", (moe.num_experts, hidden), exact=moe.scoring == "sigmoid")
    if moe.correction_bias:
        yield TensorSpec(at + "gate.e_score_correction_bias", (moe.num_experts,), exact=True)
    for expert in range(moe.num_experts):
        for spec in _mlp(f"{at}experts.{expert}.", hidden, moe.intermediate_size, bias=False):
            yield dataclasses.replace(spec, division="expert", expert=expert)
    if moe.shared_size:
        yield from _mlp(at + "shared_experts.", hidden, moe.shared_size, bias=False)


def _copied(name: str, rows: int, columns: int, bias: bool) -> Iterator[TensorSpec]:
    yield TensorSpec(name + ".weight", (rows, columns))
    if bias:
        yield TensorSpec(name + ".bias", (rows,))


def _summed(name: str, rows: int, columns: int, division: Division, bias: bool) -> Iterator[TensorSpec]:
    """A projection cut by columns (its inputs): results are summed over ranks, so rank 0 alone adds the bias."""
    yield TensorSpec(name + ".weight", (rows, columns), division, axis=1)
    if bias:
        yield TensorSpec(name + ".bias", (rows,), "first")


def _widened(part: slice, size: int, count: int) -> slice:
    """A range of `count` equal things as one of the `size` rows that they make up."""
    width = size // count
    return slice(part.start * width, part.stop * width)
