"""Chooses the attention backend of a rank: the fastest that is built and takes the model's geometry."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from pdd.kv.layout import KvLayout
from pdd.model.attention import Attention
from pdd.model.attn_torch import TorchAttention
from pdd.model.mla import LatentAttention
from pdd.model.transformer import Transformer


def make_attention(model: Transformer, layout: KvLayout, kv: torch.Tensor, *, plain: bool = False) -> tuple[Attention, str]:
    """(the backend over the pages `kv`, its name for the daemon's status). plain: the one that is the specification."""
    config, heads = model.config, model.num_heads
    native = None if plain else _native()
    if config.mla is not None:
        rows = None
        if native is not None and native.supports_latents(layout, config.mla.kv_lora_rank):
            rows = native.NativeRowsAttention
        latent = LatentAttention(layout, kv, heads, config.windows, config.mla, model.latent_blocks, rows)
        return latent, "torch" if rows is None else "native"
    if native is not None and native.supports(layout):
        return native.NativeAttention(layout, kv, heads, config.windows), "native"
    return TorchAttention(layout, kv, heads, config.windows), "torch"


def _native() -> ModuleType | None:
    try:
        return importlib.import_module("pdd.model.attn_native")
    except ImportError:
        return None
