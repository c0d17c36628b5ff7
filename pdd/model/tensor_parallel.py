"""Over how many ranks a model divides, and what each then keeps. Pure; no torch.

Ranks have equal shares of query heads and of the rows of dense and shared MLPs. KV heads are divided, or copied when there are
more ranks than heads. Vocabulary and experts divide over any number (model/shard.py says how).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math

from pdd.errors import ConfigError
from pdd.kv.layout import DTYPE_BYTES, heads_divide
from pdd.model.architecture import ModelConfig
from pdd.model.shard import Shard, length
from pdd.model.tensors import TensorSpec, tensors_of

MOST_RANKS = 64


def refusals(config: ModelConfig, tp: int) -> tuple[str, ...]:
    """Why the model does not divide over `tp` ranks, by field of its config.json; empty when it does."""
    divided = [("num_attention_heads", config.num_heads)]
    if len(config.moe_layers) < config.num_layers:
        divided.append(("intermediate_size", config.intermediate_size))
    if config.moe and config.moe.shared_size:
        divided.append(("the shared experts' intermediate size", config.moe.shared_size))
    found = [f"{name} ({size}) does not divide over {tp} ranks" for name, size in divided if size % tp]
    if not heads_divide(config.num_kv_heads, tp):
        found.append(f"num_key_value_heads ({config.num_kv_heads}) and {tp} ranks: neither divides the other")
    return tuple(found)


def working_sizes(config: ModelConfig) -> tuple[int, ...]:
    """All numbers of ranks that the model divides over."""
    return tuple(tp for tp in range(1, MOST_RANKS + 1) if not refusals(config, tp))


def check_tp(config: ModelConfig, tp: int) -> None:
    """Raises ConfigError when the model does not divide over `tp` ranks; says over how many it does."""
    found = refusals(config, tp)
    if found:
        works = ", ".join(map(str, working_sizes(config)))
        raise ConfigError(f"this model cannot run on {tp} ranks: {'; '.join(found)}",
                          hint=f"Set engine.tp (--tp) to one of {works}.")


def num_parameters(config: ModelConfig) -> int:
    """Values of all weights that the model uses."""
    return sum(count * math.prod(spec.shape) for spec, count in _kinds(config))


def param_bytes(config: ModelConfig, shard: Shard, dtype: str) -> int:
    """Bytes of the weights that `shard` keeps in memory, as loading them takes (model/weights.py)."""
    total = 0
    for spec, count in _kinds(config):
        if config.moe is not None and spec.division == "expert":
            count = count // config.moe.num_experts * len(shard.experts(config.moe.num_experts))
            sizes = list(spec.shape)
        elif (kept := spec.kept(config, shard)) is None:
            continue
        else:
            sizes = [length(part) for part in kept]
        if spec.division == "vocab":
            sizes[0] = shard.vocab_share(config.vocab_size)
            if config.tie_embeddings:
                count = 2  # one to look up, one to multiply with
        total += count * math.prod(sizes) * (4 if spec.exact else DTYPE_BYTES[dtype])
    return total


@functools.cache
def _kinds(config: ModelConfig) -> tuple[tuple[TensorSpec, int], ...]:
    """Tensors that differ in nothing but layer and expert, and how many there are: large models have tens of thousands."""
    counts: collections.Counter[TensorSpec] = collections.Counter()
    for spec in tensors_of(config):
        counts[dataclasses.replace(spec, name=".".join(spec.name.split(".")[-2:]), expert=-1)] += 1
    return tuple(counts.items())
