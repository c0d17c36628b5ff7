"""Over how many ranks a model divides. Pure; no torch.

Ranks have equal shares of query heads, MLP rows and vocabulary. KV heads are divided, or copied when there are more ranks
than heads.
"""

from __future__ import annotations

from pdd.errors import ConfigError
from pdd.model.config import ModelConfig

MOST_RANKS = 64


def refusals(config: ModelConfig, tp: int) -> tuple[str, ...]:
    """Why the model does not divide over `tp` ranks, by field of its config.json; empty when it does."""
    divided = (("num_attention_heads", config.num_heads), ("intermediate_size", config.intermediate_size),
               ("vocab_size", config.vocab_size))
    found = [f"{name} ({size}) does not divide over {tp} ranks" for name, size in divided if size % tp]
    if config.num_kv_heads % tp and tp % config.num_kv_heads:
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
