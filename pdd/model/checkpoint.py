"""Reads slices of the tensors of a safetensors checkpoint into memory of the caller's.

Files are mapped: only the pages of the wanted slices are read, a band of rows at a time, and each band is given back to the
kernel once it is copied, so that a checkpoint is never in memory next to its copy. fp8 weights with a scale per block
(`NAME_scale_inv`) are multiplied out on the way, also where a slice begins within a block. Which tensors there are, and
which slices a rank keeps, is model/tensors.py's business.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import torch

from pdd.model.architecture import ModelConfig
from pdd.model.inventory import SCALE_SUFFIX, SCALED, take_stock
from pdd.model.safetensors_file import TensorEntry, read_directory

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
           "F8_E4M3": torch.float8_e4m3fn}
_BAND_BYTES = 8 << 20  # of a file's pages that are mapped in at a time
_FAULT_AROUND = 2 << 20  # the kernel maps what the page cache has around a fault, up to the largest folio


class Checkpoint:
    """The mapped tensors of a model folder, which are all there (model/inventory.py)."""

    def __init__(self, model_dir: Path, config: ModelConfig) -> None:
        """
        Raises:
            ModelError: a tensor is missing, mis-shaped, or of a type that cannot be read.
        """
        self._entries = read_directory(model_dir)
        self._block = config.weight_block
        self._maps: dict[Path, mmap.mmap] = {}
        self.specs = take_stock(self._entries, config, model_dir).specs

    def file_bytes(self, name: str, kept: tuple[slice, ...]) -> int:
        """Bytes that a slice of tensor `name` takes in its file."""
        entry, share = self._entries[name], 1
        for part in kept:
            share *= part.stop - part.start
        return share * _DTYPES[entry.dtype].itemsize

    def copy_into(self, target: torch.Tensor, name: str, kept: tuple[slice, ...]) -> None:
        """Copies a slice of a tensor into `target`, converting to its dtype."""
        entry = self._entries[name]
        source = self._view(entry)
        first, *others = kept
        rows_of_target = 0
        for band in _bands(entry, first):
            values = source[(band, *others)]
            if entry.dtype == SCALED:
                values = values.float() * self._scales(entry, (band, *others))
            rows = band.stop - band.start
            target[rows_of_target : rows_of_target + rows].copy_(values)
            rows_of_target += rows
            self._give_back(entry, band)

    def close(self) -> None:
        """Drops the maps; the kernel unmaps them once no tensor looks into them."""
        self._maps.clear()

    def _scales(self, entry: TensorEntry, kept: tuple[slice, ...]) -> torch.Tensor:
        """The scale of each value of a slice: `[rows, columns]`."""
        assert self._block is not None
        rows, columns = (torch.arange(part.start, part.stop) // block for part, block in zip(kept, self._block, strict=True))
        return self._view(self._entries[entry.name + SCALE_SUFFIX])[rows][:, columns]

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

    def _give_back(self, entry: TensorEntry, rows: slice) -> None:
        """Unmaps the pages of rows, and what the kernel mapped around them; the page cache keeps them for the other ranks."""
        row_bytes, mapped = entry.nbytes // max(1, entry.shape[0]), self._maps[entry.path]
        begin = max(0, entry.offset + rows.start * row_bytes - _FAULT_AROUND) // mmap.PAGESIZE * mmap.PAGESIZE
        end = min(len(mapped), entry.offset + rows.stop * row_bytes + _FAULT_AROUND)
        mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _bands(entry: TensorEntry, rows: slice) -> Iterator[slice]:
    """`rows` of a tensor in pieces of about _BAND_BYTES."""
    step = max(1, _BAND_BYTES // max(1, entry.nbytes // max(1, entry.shape[0])))
    for begin in range(rows.start, rows.stop, step):
        yield slice(begin, min(begin + step, rows.stop))
