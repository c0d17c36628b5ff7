"""The dense decoder-only family: Llama, Qwen2 (biases on q, k, v), Qwen3 (norms on q and k). One rank's shard.

Query, key and value weights are one matrix, and so are gate and up: fewer, larger products. The output projections of
attention and MLP are sums over ranks; `ranks` adds them up (None: one rank). Right after the attention's sum, when
every rank has appended its KV, the layer counter is bumped: that is what lets a layer's pages leave the node. Each rank has
a part of the vocabulary: embeddings are summed up, logits gathered.

Of the last layer only two things are used: its KV, and its output for the tokens whose logits are wanted. Nothing else of
it is computed. A prefiller wants no logits: its last layer is three matrix products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as functional

from pdd.errors import ModelError
from pdd.model.attention import TORCH_DTYPES, Attention, Batch, LayerCounter
from pdd.model.checkpoint import Checkpoint, Shard, rows_of
from pdd.model.collectives import Collectives
from pdd.model.config import ModelConfig
from pdd.model.layers import Linear, make_linear, rms_norm, rope_tables, rotate

@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor  # [hidden]
    qkv: Linear  # [hidden] -> [(heads + 2 * kv_heads) * head_dim]
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None
    output: Linear  # [heads * head_dim] -> [hidden]
    post_norm: torch.Tensor
    gate_up: Linear  # [hidden] -> [2 * intermediate]
    down: Linear  # [intermediate] -> [hidden]


class LlamaModel:
    """Weights of one rank and the forward pass over them. Made by `load`."""

    def __init__(self, config: ModelConfig, shard: Shard, dtype: str, max_context: int) -> None:
        self.config = config
        self.dtype = TORCH_DTYPES[dtype]
        self.shard = shard
        self.num_heads = _length(shard.part(config.num_heads, "num_attention_heads"))
        self.num_kv_heads = _length(shard.kv_heads(config.num_kv_heads))
        self.param_bytes = 0
        self._layers: list[_Layer] = []
        self._cos, self._sin = rope_tables(config, max_context, self.dtype)

    def forward(self, batch: Batch, attention: Attention, counter: LayerCounter,
                ranks: Collectives | None = None) -> torch.Tensor | None:
        """Logits `[S, vocab_size]` of the batch's `logit_rows`, or None when it wants none."""
        attention.plan(batch)
        turn = (self._cos[batch.positions], self._sin[batch.positions])  # each [T, 1, head_dim]
        x = self._embed(batch.tokens, ranks)  # [T, hidden]
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            q, kv = self._project(layer, x, turn)
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
            attended = layer.output(attended)
            if ranks is not None:
                ranks.all_reduce(attended)
            counter.bump()
            x = x.add_(attended)
            out = self._mlp(layer, x)
            if ranks is not None:
                ranks.all_reduce(out)
            x = x.add_(out)
        wanted = x[batch.logit_rows] if batch.wants_all else x
        logits = self._head(rms_norm(wanted, self._norm, self.config.rms_eps))
        return logits if ranks is None else ranks.all_gather_last(logits)

    def _embed(self, tokens: torch.Tensor, ranks: Collectives | None) -> torch.Tensor:
        if ranks is None:
            return functional.embedding(tokens, self._embedding)
        mine = tokens - self._vocabulary.start
        is_mine = (mine >= 0) & (mine < len(self._embedding))
        x = functional.embedding(mine.where(is_mine, 0), self._embedding) * is_mine[:, None]
        ranks.all_reduce(x)
        return x

    def _project(
        self, layer: _Layer, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[T, hidden]` to q `[T, heads, head_dim]` and all heads' K, then V, `[T, 2 * kv_heads, head_dim]`."""
        eps, dim, heads, kv_heads = self.config.rms_eps, self.config.head_dim, self.num_heads, self.num_kv_heads
        qkv = layer.qkv(rms_norm(x, layer.input_norm, eps)).view(len(x), heads + 2 * kv_heads, dim)
        q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            q.copy_(rms_norm(q, layer.q_norm, eps))
            k.copy_(rms_norm(k, layer.k_norm, eps))
        both = qkv[:, : heads + kv_heads]  # q and k turn together
        both.copy_(rotate(both, *turn))
        return q, qkv[:, heads:]

    def _mlp(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(rms_norm(x, layer.post_norm, self.config.rms_eps)).chunk(2, dim=-1)
        return layer.down(functional.silu(gate).mul_(up))

    def load_weights(self, checkpoint: Checkpoint) -> None:
        """Takes this rank's slices.

        Raises:
            ModelError: a tensor is missing, mis-shaped, or does not divide over the ranks.
        """
        config, hidden, vocab = self.config, self.config.hidden_size, self.config.vocab_size
        self._vocabulary = self.shard.part(vocab, "vocab_size")
        self._embedding = self._take(checkpoint, "model.embed_tokens.weight", (vocab, hidden), self._vocabulary)
        for index in range(config.num_layers):
            self._layers.append(self._load_layer(checkpoint, f"model.layers.{index}."))
        self._norm = self._take(checkpoint, "model.norm.weight", (hidden,))
        if config.tie_embeddings:
            self._head = self._linear(self._embedding)
        else:
            self._head = self._linear(self._take(checkpoint, "lm_head.weight", (vocab, hidden), self._vocabulary))

    def _load_layer(self, checkpoint: Checkpoint, at: str) -> _Layer:
        config, shard, hidden, dim = self.config, self.shard, self.config.hidden_size, self.config.head_dim
        q_rows = rows_of(shard.part(config.num_heads, "num_attention_heads"), dim)
        kv_rows = rows_of(shard.kv_heads(config.num_kv_heads), dim)
        inner = shard.part(config.intermediate_size, "intermediate_size")
        attn, mlp = at + "self_attn.", at + "mlp."
        parts = [("q_proj", config.num_heads * dim, q_rows), ("k_proj", config.num_kv_heads * dim, kv_rows),
                 ("v_proj", config.num_kv_heads * dim, kv_rows)]
        norms = [self._take(checkpoint, f"{attn}{name}_norm.weight", (dim,)) if config.qk_norm else None
                 for name in "qk"]
        gate_up = [("gate_proj", config.intermediate_size, inner), ("up_proj", config.intermediate_size, inner)]
        return _Layer(
            input_norm=self._take(checkpoint, at + "input_layernorm.weight", (hidden,)),
            qkv=self._stacked(checkpoint, attn, parts, config.qkv_bias), q_norm=norms[0], k_norm=norms[1],
            output=self._summed(checkpoint, attn + "o_proj", config.num_heads * dim, q_rows, config.output_bias),
            post_norm=self._take(checkpoint, at + "post_attention_layernorm.weight", (hidden,)),
            gate_up=self._stacked(checkpoint, mlp, gate_up, config.mlp_bias),
            down=self._summed(checkpoint, mlp + "down_proj", config.intermediate_size, inner, config.mlp_bias))

    def _stacked(self, checkpoint: Checkpoint, at: str, parts: list[tuple[str, int, slice]], has_bias: bool) -> Linear:
        """Several projections of the same input as one matrix, each cut by rows (its outputs)."""
        hidden, total = self.config.hidden_size, sum(_length(rows) for _, _, rows in parts)
        weight = torch.empty(total, hidden, dtype=self.dtype)
        bias = torch.empty(total, dtype=self.dtype) if has_bias else None
        begin = 0
        for name, size, rows in parts:
            end = begin + _length(rows)
            checkpoint.copy_into(weight[begin:end], f"{at}{name}.weight", (size, hidden), rows=rows)
            if bias is not None:
                checkpoint.copy_into(bias[begin:end], f"{at}{name}.bias", (size,), rows=rows)
            begin = end
        return self._linear(weight, bias)

    def _summed(self, checkpoint: Checkpoint, name: str, size: int, columns: slice, has_bias: bool) -> Linear:
        """A projection cut by columns (its inputs): results are summed over ranks, so rank 0 alone adds the bias."""
        hidden = self.config.hidden_size
        weight = torch.empty(hidden, _length(columns), dtype=self.dtype)
        checkpoint.copy_into(weight, name + ".weight", (hidden, size), columns=columns)
        bias = self._take(checkpoint, name + ".bias", (hidden,)) if has_bias and self.shard.rank == 0 else None
        return self._linear(weight, bias)

    def _take(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], rows: slice | None = None) -> torch.Tensor:
        num_rows = shape[0] if rows is None else _length(rows)
        tensor = torch.empty((num_rows, *shape[1:]), dtype=self.dtype)
        checkpoint.copy_into(tensor, name, shape, rows=rows)
        self.param_bytes += tensor.nbytes
        return tensor

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        self.param_bytes += weight.nbytes + (bias.nbytes if bias is not None else 0)
        return make_linear(weight, bias)


def load_model(model_dir: str | Path, config: ModelConfig, *, dtype: str, max_context: int, shard: Shard | None = None,
               progress: Callable[[int, int], None] | None = None) -> LlamaModel:
    """One rank's model, ready to run. dtype: a key of kv.layout.DTYPE_BYTES."""
    model = LlamaModel(config, shard or Shard(), dtype, max_context)
    checkpoint = Checkpoint(Path(model_dir), progress)
    try:
        with torch.inference_mode():
            model.load_weights(checkpoint)
    except (OSError, RuntimeError) as error:
        raise ModelError(f"the checkpoint in {model_dir} cannot be loaded: {error}") from error
    finally:
        checkpoint.close()
    return model


def _length(part: slice) -> int:
    return part.stop - part.start
