"""A decoder-only transformer: embedding, layers of an attention block and an MLP block, head. One rank's shard.

What the blocks return are sums over ranks; `ranks` adds them up (None: one rank). Right after the attention's sum, when
every rank has appended its KV, the layer counter is bumped: that is what lets a layer's pages leave the node.

Of the last layer only two things are used: its KV, and its output for the tokens whose logits are wanted. Nothing else of
it is computed. A prefiller wants no logits: its last layer is a projection and the append.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from pdd.errors import ModelError
from pdd.model.architecture import ModelConfig
from pdd.model.attention import TORCH_DTYPES, Attention, Batch, LayerCounter
from pdd.model.blocks import AttentionBlock, GroupedAttention, Mlp, MlpBlock
from pdd.model.checkpoint import Checkpoint
from pdd.model.collectives import Collectives
from pdd.model.layers import rms_norm
from pdd.model.mla import LatentProjections
from pdd.model.moe import ExpertLayer
from pdd.model.rope import rope_tables
from pdd.model.shard import Shard, length
from pdd.model.tensors import FINAL_NORM, layer_name
from pdd.model.vocabulary import Vocabulary
from pdd.model.weights import Weights


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor  # [hidden]
    attention: AttentionBlock
    post_norm: torch.Tensor
    mlp: MlpBlock


class Transformer:
    """Weights of one rank and the forward pass over them. Made by `load_model`."""

    def __init__(self, config: ModelConfig, weights: Weights, max_context: int) -> None:
        self.config = config
        self.dtype = weights.dtype
        self.shard = weights.shard
        self.num_heads = length(weights.shard.part(config.num_heads, "num_attention_heads"))
        self.num_kv_heads = length(weights.shard.kv_heads(config.num_kv_heads))
        turned = config.mla.rope_dim if config.mla else config.head_dim
        self._cos, self._sin = rope_tables(turned, config.rope_theta, config.rope_scaling, max_context, self.dtype)
        self._vocabulary = Vocabulary(weights, config)
        self._layers = [_load_layer(weights, config, layer) for layer in range(config.num_layers)]
        self._norm = weights.tensor(FINAL_NORM)
        self.param_bytes = weights.param_bytes

    @property
    def latent_blocks(self) -> list[LatentProjections]:
        """The attention blocks of a model with MLA, by layer."""
        return [layer.attention for layer in self._layers if isinstance(layer.attention, LatentProjections)]

    def forward(self, batch: Batch, attention: Attention, counter: LayerCounter,
                ranks: Collectives | None = None) -> torch.Tensor | None:
        """Logits `[S, vocab_size]` of the batch's `logit_rows`, or None when it wants none."""
        attention.plan(batch)
        turn = (self._cos[batch.positions], self._sin[batch.positions])  # each [T, 1, dim]
        x = self._vocabulary.embed(batch.tokens, ranks)  # [T, hidden]
        eps, last = self.config.rms_eps, len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            q, kv = layer.attention.project(rms_norm(x, layer.input_norm, eps), turn)
            if index < last or batch.wants_all:
                attended = attention.run(index, q, kv)
            else:
                attention.append(index, kv)
                if batch.logit_rows is None:
                    if ranks is not None:
                        ranks.ordered()  # every rank has appended
                    counter.bump()
                    return None
                x, attended = x[batch.logit_rows], attention.run_logit_rows(index, q[batch.logit_rows])
            x = _added(x, layer.attention.output(attended), ranks)
            counter.bump()
            x = _added(x, layer.mlp(rms_norm(x, layer.post_norm, eps)), ranks)
        wanted = x[batch.logit_rows] if batch.wants_all else x
        return self._vocabulary.logits(rms_norm(wanted, self._norm, eps), ranks)


def _added(x: torch.Tensor, summand: torch.Tensor, ranks: Collectives | None) -> torch.Tensor:
    """x plus all ranks' summands."""
    if ranks is not None:
        ranks.all_reduce(summand)
    return x.add_(summand)


def _load_layer(weights: Weights, config: ModelConfig, layer: int) -> _Layer:
    at = layer_name(layer)
    return _Layer(
        input_norm=weights.tensor(at + "input_layernorm.weight"),
        attention=(LatentProjections(weights, config, config.mla, at + "self_attn.") if config.mla
                   else GroupedAttention(weights, config, at + "self_attn.")),
        post_norm=weights.tensor(at + "post_attention_layernorm.weight"),
        mlp=(ExpertLayer(weights, config, config.moe, at + "mlp.") if config.moe and layer in config.moe_layers
             else Mlp(weights, at + "mlp.")))


def load_model(model_dir: str | Path, config: ModelConfig, *, dtype: str, max_context: int, shard: Shard | None = None,
               progress: Callable[[int, int], None] | None = None) -> Transformer:
    """One rank's model, ready to run. dtype: a key of kv.layout.DTYPE_BYTES. progress: of this rank's bytes of the files.

    Raises:
        ModelError: a tensor is missing, mis-shaped or unreadable.
    """
    checkpoint = Checkpoint(Path(model_dir), config)
    try:
        with torch.inference_mode():
            weights = Weights(checkpoint, config, shard or Shard(), TORCH_DTYPES[dtype], progress)
            return Transformer(config, weights, max_context)
    except (OSError, RuntimeError) as error:
        raise ModelError(f"the checkpoint in {model_dir} cannot be loaded: {error}") from error
    finally:
        checkpoint.close()
