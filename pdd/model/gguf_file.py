"""Reads a GGUF file: its metadata, where its tensors lie, and their values as float32. numpy only.

A file is: magic, version, counts, key-value metadata, tensor records (name, dims, type, offset), aligned tensor data.
Types F32, F16, BF16, Q4_0, Q4_1 and Q8_0; others are refused by name. Dequantised values are bit-identical to those of
the `gguf` package (a test compares). Nothing is written here.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from pdd.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
# type number: (name, values per block, bytes per block)
_TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 8: ("Q8_0", 32, 34),
          30: ("BF16", 1, 2)}


@dataclasses.dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]  # row-major, as numpy and torch write it (the file has it reversed)
    type_number: int
    offset: int  # bytes from the start of the tensor data


class GgufFile:
    """A mapped GGUF file. Close it, or use it as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._data_start = self._parse()
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError) as error:
            raise ModelError(f"{path} is damaged or no GGUF file: {error!r}") from error

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._map.close()

    def load(self, name: str) -> np.ndarray:
        """The values of one tensor, float32, C-contiguous, of the tensor's shape."""
        tensor = self.tensors[name]
        if tensor.type_number not in _TYPES:
            raise ModelError(f"{self.path}: tensor {name!r} has GGUF type {tensor.type_number}, which is not supported",
                             hint="Supported: " + ", ".join(kind for kind, _, _ in _TYPES.values()) + ".")
        kind, block_values, block_bytes = _TYPES[tensor.type_number]
        count = math.prod(tensor.shape)
        if tensor.shape[-1] % block_values:
            raise ModelError(f"{self.path}: rows of {tensor.shape[-1]} values of {name!r} are no whole {kind} blocks")
        begin = self._data_start + tensor.offset
        end = begin + count // block_values * block_bytes
        if end > len(self._map):
            raise ModelError(f"{self.path} is truncated: tensor {name!r} ends at byte {end} of {len(self._map)}")
        raw = np.frombuffer(self._map[begin:end], dtype=np.uint8)  # a copy: the map can be closed
        return _dequantize(kind, raw.reshape(-1, block_bytes)).reshape(tensor.shape)

    def _parse(self) -> int:
        """Fills metadata and tensors; the file offset where tensor data starts."""
        magic, version, num_tensors, num_keys = struct.unpack_from("<4sIQQ", self._map)
        if magic != b"GGUF" or version not in (2, 3):
            raise ModelError(f"{self.path} is no GGUF file of version 2 or 3")
        self._at = 24
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        for _ in range(num_tensors):
            name, dims = self._string(), self._scalar("I")
            if dims > _MAX_DIMS:
                raise ModelError(f"{self.path} is damaged: tensor {name!r} claims {dims} dimensions")
            shape = tuple(self._scalar("Q") for _ in range(dims))[::-1]
            self.tensors[name] = GgufTensor(name, shape, self._scalar("I"), self._scalar("Q"))
        alignment = int(self.metadata.get("general.alignment", 32))
        return -(-self._at // alignment) * alignment

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._map, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        size = self._scalar("Q")
        if size > len(self._map) - self._at:
            raise ModelError(f"{self.path} is damaged: a string of {size} bytes at byte {self._at}")
        self._at += size
        return self._map[self._at - size : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        item, count = self._scalar("I"), self._scalar("Q")
        if count > len(self._map) - self._at:
            raise ModelError(f"{self.path} is damaged: an array of {count} items at byte {self._at}")
        if item == _STRING:
            return [self._string() for _ in range(count)]
        size = count * struct.calcsize("<" + _SCALARS[item])
        values = struct.unpack_from(f"<{count}{_SCALARS[item]}", self._map, self._at)
        self._at += size
        return list(values)


def _dequantize(kind: str, blocks: np.ndarray) -> np.ndarray:
    """float32 values of uint8 blocks `[num_blocks, block_bytes]`."""
    if kind == "F32":
        return blocks.view("<f4")
    if kind == "F16":
        return blocks.view("<f2").astype(np.float32)
    if kind == "BF16":
        return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)
    scale = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)  # [num_blocks, 1]
    if kind == "Q8_0":
        return blocks[:, 2:].view(np.int8).astype(np.float32) * scale
    if kind == "Q4_0":
        return scale * (_nibbles(blocks[:, 2:]) - np.float32(8))
    minimum = np.ascontiguousarray(blocks[:, 2:4]).view("<f2").astype(np.float32)
    return scale * _nibbles(blocks[:, 4:]) + minimum  # Q4_1


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """`[n, 16]` bytes to `[n, 32]` float32: all low nibbles, then all high ones."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.float32)
