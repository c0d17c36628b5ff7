"""Loads one rank's slices of a safetensors checkpoint.

Files are mapped, not read: a rank touches only the bytes of its own slices. Progress is reported in bytes of the mapped
tensors that have been taken. How a model's tensors divide over ranks is said by `Shard`; which tensors there are is the
model's business (model/llama.py).
"""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable
from pathlib import Path

import torch

from pdd.errors import ModelError
from pdd.model.safetensors_file import TensorEntry, read_directory

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """One rank of a tensor-parallel group."""

    rank: int = 0
    world: int = 1

    def part(self, size: int, what: str) -> slice:
        """This rank's contiguous share of `size` equal things (query heads, rows of the MLP)."""
        if size % self.world:
            raise ModelError(f"{what} ({size}) does not divide over {self.world} ranks")
        share = size // self.world
        return slice(self.rank * share, (self.rank + 1) * share)

    def kv_heads(self, num_kv_heads: int) -> slice:
        """This rank's KV heads: its share, or the one head it has a copy of when there are more ranks than heads."""
        if self.world <= num_kv_heads:
            return self.part(num_kv_heads, "num_key_value_heads")
        if self.world % num_kv_heads:
            raise ModelError(f"{self.world} ranks are no multiple of num_key_value_heads ({num_kv_heads})")
        head = self.rank // (self.world // num_kv_heads)
        return slice(head, head + 1)


def rows_of(heads: slice, head_dim: int) -> slice:
    """Rows of a projection that belong to `heads`."""
    return slice(heads.start * head_dim, heads.stop * head_dim)


class Checkpoint:
    """The mapped tensors of a model folder."""

    def __init__(self, model_dir: Path, progress: Callable[[int, int], None] | None = None) -> None:
        self.model_dir = model_dir
        self._entries = read_directory(model_dir)
        self._maps: dict[Path, mmap.mmap] = {}
        self._progress = progress
        self._done_bytes = 0
        self._total_bytes = sum(entry.nbytes for entry in self._entries.values())

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def copy_into(self, target: torch.Tensor, name: str, shape: tuple[int, ...], rows: slice | None = None,
                  columns: slice | None = None) -> None:
        """Copies a slice of tensor `name` into `target`, converting to its dtype.

        Raises:
            ModelError: the tensor is missing, is of another shape than `shape`, or of a type that is not floating
            point.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise ModelError(f"the checkpoint in {self.model_dir} lacks tensor {name!r}",
                             hint="Its config.json and its weights may be of different models.")
        if entry.shape != shape:
            raise ModelError(f"tensor {name!r} in {entry.path.name} has shape {list(entry.shape)}, "
                             f"config.json implies {list(shape)}")
        if entry.dtype not in _DTYPES:
            raise ModelError(f"tensor {name!r} in {entry.path.name} is of type {entry.dtype}",
                             hint="pdd loads F32, F16 and BF16 weights.")
        source = self._view(entry)
        if rows is not None:
            source = source[rows]
        if columns is not None:
            source = source[:, columns]
        target.copy_(source)
        self._done_bytes += entry.nbytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)

    def close(self) -> None:
        """Drops the maps; the kernel unmaps them once no tensor looks into them."""
        self._maps.clear()

    def _view(self, entry: TensorEntry) -> torch.Tensor:
        mapped = self._maps.get(entry.path)
        if mapped is None:
            with entry.path.open("rb") as file:
                # A private writable map: torch wants writable memory; nothing writes to it.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._maps[entry.path] = mapped
        dtype = _DTYPES[entry.dtype]
        flat = torch.frombuffer(mapped, dtype=dtype, count=entry.nbytes // dtype.itemsize, offset=entry.offset)
        return flat.view(entry.shape)
