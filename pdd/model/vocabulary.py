"""Tokens to hidden states and back: each rank has a share of the vocabulary's rows."""

from __future__ import annotations

import torch
import torch.nn.functional as functional

from pdd.model.architecture import ModelConfig
from pdd.model.collectives import Collectives
from pdd.model.shard import length
from pdd.model.tensors import EMBEDDING, HEAD
from pdd.model.weights import Weights


class Vocabulary:
    """The embedding and the output head. Rows that pad the last ranks' shares are zero and never chosen."""

    def __init__(self, weights: Weights, config: ModelConfig) -> None:
        part = weights.shard.vocab(config.vocab_size)
        self._first, self._count = part.start, length(part)
        self._size = config.vocab_size
        share = weights.shard.vocab_share(config.vocab_size)
        self._embedding = weights.tensor(EMBEDDING, pad_rows_to=share)
        # The head of a tied model has a copy in its own layout: looking rows up and multiplying want different ones.
        self._head = (weights.pack(self._embedding) if config.tie_embeddings
                      else weights.padded_linear(HEAD, share))

    def embed(self, tokens: torch.Tensor, ranks: Collectives | None) -> torch.Tensor:
        """int64 `[T]` to `[T, hidden]`."""
        if ranks is None:
            return functional.embedding(tokens, self._embedding)
        local = tokens - self._first
        elsewhere = (local < 0) | (local >= self._count)
        x = functional.embedding(local.masked_fill(elsewhere, 0), self._embedding).masked_fill_(elsewhere[:, None], 0)
        ranks.all_reduce(x)
        return x

    def logits(self, x: torch.Tensor, ranks: Collectives | None) -> torch.Tensor:
        """Normed hidden states `[S, hidden]` to `[S, vocab_size]`, on every rank."""
        own = self._head(x)
        return own if ranks is None else ranks.all_gather_last(own)[:, : self._size]
