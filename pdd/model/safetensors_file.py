"""Reads the directory of safetensors files and writes them. No torch, no numpy types: bf16 has none.

A file is: u64 little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, the tensors' bytes.
Reading yields where each tensor lies; whoever wants its values maps the file (model/checkpoint.py).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

from pdd.errors import ModelError

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
              "F8_E4M3": 1, "F8_E5M2": 1}
_MAX_HEADER_BYTES = 100 << 20
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies."""

    name: str
    path: Path
    dtype: str  # a key of ITEM_BYTES
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one file by name.

    Raises:
        ModelError: the file is missing, truncated, or not safetensors.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelError(f"{path} is not a safetensors file: its header claims {length} of {size} bytes")
            header = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing", hint="Download or convert the checkpoint again.") from error
    except OSError as error:
        raise _unreadable(path, error) from error
    except (struct.error, ValueError) as error:
        raise ModelError(f"{path} is not a safetensors file: {error}") from error
    entries: dict[str, TensorEntry] = {}
    for name, item in header.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = item["data_offsets"]
            entry = TensorEntry(name, path, item["dtype"], tuple(item["shape"]), 8 + length + begin, end - begin)
            expected = math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{path}: the header entry of tensor {name!r} is malformed: {error!r}") from error
        if entry.nbytes != expected:
            raise ModelError(f"{path}: tensor {name!r} has {entry.nbytes} bytes, its shape needs {expected}")
        if entry.offset + entry.nbytes > size:
            raise ModelError(f"{path} is truncated: tensor {name!r} ends at byte {entry.offset + entry.nbytes} "
                             f"of {size}", hint="Copy the checkpoint again.")
        entries[name] = entry
    return entries


def _unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError(f"{path} cannot be read: {error.strerror}",
                      hint="The user of the daemon must be able to read it (chmod, chown); else copy the checkpoint again.")


def read_directory(model_dir: Path) -> dict[str, TensorEntry]:
    """All tensors of a checkpoint: those of its index file, else of model.safetensors, else of every *.safetensors.

    Raises:
        ModelError: no weights there, or a listed file or tensor is missing.
    """
    index = model_dir / INDEX_NAME
    if index.exists():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except OSError as error:
            raise _unreadable(index, error) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{index} is not an index of safetensors files: {error!r}") from error
        headers = {name: read_header(model_dir / name) for name in sorted(set(weight_map.values()))}
        for tensor, name in weight_map.items():
            if tensor not in headers[name]:
                raise ModelError(f"{index} places tensor {tensor!r} in {name}, which lacks it")
        return {tensor: headers[name][tensor] for tensor, name in weight_map.items()}
    single = model_dir / SINGLE_NAME
    paths = [single] if single.exists() else sorted(model_dir.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{model_dir} holds no *.safetensors file",
                         hint="pdd reads safetensors checkpoints; convert a GGUF file with `pdd model import`.")
    entries: dict[str, TensorEntry] = {}
    for path in paths:
        entries.update(read_header(path))
    return entries


def write_file(path: Path, tensors: Iterable[tuple[str, str, tuple[int, ...], Callable[[], bytes]]]) -> None:
    """Writes (name, dtype, shape, bytes maker) tensors; each maker runs once, so one tensor is in memory at a time."""
    items = list(tensors)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape, _ in items:
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-(8 + len(encoded)) % 64)  # tensors start on a cache line
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name, dtype, shape, make in items:
            data = make()
            if len(data) != math.prod(shape) * ITEM_BYTES[dtype]:
                raise ValueError(f"tensor {name!r}: {len(data)} bytes do not fill {shape} of {dtype}")
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
