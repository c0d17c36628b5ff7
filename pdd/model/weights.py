"""One rank's weights: slices of a checkpoint in memory of their own, in the form that computes fastest."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pdd.model.architecture import ModelConfig
from pdd.model.checkpoint import Checkpoint
from pdd.model.layers import Linear, make_linear
from pdd.model.shard import Shard, length
from pdd.model.tensors import TensorSpec


class Weights:
    """Hands out what `shard` keeps of each tensor, by the checkpoint's names. Progress is told in bytes of the file."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, shard: Shard, dtype: torch.dtype,
                 progress: Callable[[int, int], None] | None = None) -> None:
        self.shard, self.dtype = shard, dtype
        self.param_bytes = 0
        self._checkpoint, self._specs, self._progress = checkpoint, checkpoint.specs, progress
        self._kept = {name: spec.kept(config, shard) for name, spec in self._specs.items()}
        self._total_bytes = sum(checkpoint.file_bytes(name, kept) for name, kept in self._kept.items() if kept is not None)
        self._done_bytes = 0

    def tensor(self, name: str, pad_rows_to: int = 0) -> torch.Tensor:
        """This rank's slice; rows of zeros follow where it has fewer rows than asked for."""
        tensor = self._padded(name, pad_rows_to)
        self.param_bytes += tensor.nbytes
        return tensor

    def linear(self, *names: str, order: torch.Tensor | None = None) -> Linear:
        """Projections of the same input (`NAME.weight`, `NAME.bias` where there is one) as one, stacked by outputs.

        order: int64, the stacked outputs in the order in which they are wanted.
        """
        weight = self._stacked([name + ".weight" for name in names], order)
        biased = self._kept.get(names[0] + ".bias") is not None
        return self.pack(weight, self._stacked([name + ".bias" for name in names], order) if biased else None)

    def padded_linear(self, name: str, rows: int) -> Linear:
        """A projection without bias whose outputs are padded with zeros to `rows`."""
        return self.pack(self._padded(name, rows))

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """A linear layer that owns `weight`."""
        self.param_bytes += weight.nbytes + (bias.nbytes if bias is not None else 0)
        return make_linear(weight, bias)

    def _padded(self, name: str, rows: int) -> torch.Tensor:
        spec, kept = self._specs[name], self._kept[name]
        assert kept is not None, name
        shape = tuple(length(part) for part in kept)
        tensor = torch.empty((max(shape[0], rows), *shape[1:]), dtype=torch.float32 if spec.exact else self.dtype)
        self._fill(tensor[: shape[0]], spec, kept)
        tensor[shape[0] :].zero_()
        return tensor

    def _stacked(self, names: list[str], order: torch.Tensor | None) -> torch.Tensor:
        kept = [part for name in names if (part := self._kept[name]) is not None]
        assert len(kept) == len(names), names
        tensor = torch.empty((sum(length(part[0]) for part in kept), *(length(part) for part in kept[0][1:])),
                             dtype=self.dtype)
        begin = 0
        for name, part in zip(names, kept, strict=True):
            end = begin + length(part[0])
            self._fill(tensor[begin:end], self._specs[name], part)
            begin = end
        return tensor if order is None else tensor[order]

    def _fill(self, target: torch.Tensor, spec: TensorSpec, kept: tuple[slice, ...]) -> None:
        self._checkpoint.copy_into(target, spec.name, kept)
        self._done_bytes += self._checkpoint.file_bytes(spec.name, kept)
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)
