"""What a step looks like to the model, and the interface of attention backends.

Rows are packed: tokens of all rows in one dimension. Rows of one token (decode) come first, then the segments of rows
with more tokens (prefill chunks). Both kinds append their KV to the pages first and then attend to the pages: there
is no other KV cache.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
import torch

from pdd.kv.layout import KvLayout

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """A row with more than one token in the step: packed tokens [begin, end), the first at position `start`."""

    begin: int
    end: int
    start: int
    table: np.ndarray  # int64 page numbers that hold positions [0, start + end - begin)

    @property
    def kv_len(self) -> int:
        return self.start + self.end - self.begin


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """N single tokens, each of which attends to the KV of its own row."""

    tables: np.ndarray  # int64 [N, max pages of them]; short rows are padded with their own first page
    kv_lens: np.ndarray  # int64 [N], the token itself included

    def __len__(self) -> int:
        return len(self.kv_lens)


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """One step's rows as tensors. T tokens, of which the first D are rows of their own (decode)."""

    tokens: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    pages: torch.Tensor  # int64 [T]: the page where each token's KV goes
    slots: torch.Tensor  # int64 [T]: and the slot in it
    decode: Rows  # the first D tokens
    segments: tuple[Segment, ...]
    logit_rows: torch.Tensor | None  # int64 [S]: packed tokens whose logits are wanted; None: no logits at all
    logits: Rows  # the same S tokens as rows of one token

    @property
    def wants_all(self) -> bool:
        """Whether every token's logits are wanted, as in a step that only decodes."""
        return len(self.logits) == len(self.tokens)


class LayerCounter(Protocol):
    """Counts attended layers where the daemon's watcher sees it."""

    def bump(self) -> object: ...


class Attention(Protocol):
    """Owns the strided views of the KV pages. `plan` once per step, then `run` for layers 0, 1, ... in order.

    Of the last layer nothing is used but the KV and the output of the tokens whose logits are wanted: there, `append`
    and `run_logit_rows` do the same for less.
    """

    def plan(self, batch: Batch) -> None: ...

    def run(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Appends the step's KV to layer `layer` of the pages, then attends.

        Args:
            q: `[T, num_heads, head_dim]`, rotated.
            kv: `[T, 2 * num_kv_heads, head_dim]`: all heads' K (rotated), then all heads' V.
        Returns:
            `[T, num_heads * head_dim]`
        """

    def append(self, layer: int, kv: torch.Tensor) -> None:
        """Appends the step's KV, as in `run`, and does not attend."""

    def run_logit_rows(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attends from the batch's `logit_rows` to what was appended: q `[S, num_heads, head_dim]` to
        `[S, num_heads * head_dim]`."""


def kv_tensor(layout: KvLayout, memory: memoryview) -> torch.Tensor:
    """The region as `[layers, pages, heads, 2, page_size, head_dim]`, over the same bytes."""
    return torch.frombuffer(memory, dtype=TORCH_DTYPES[layout.dtype],
                            count=layout.region_bytes // TORCH_DTYPES[layout.dtype].itemsize).view(layout.shape)
