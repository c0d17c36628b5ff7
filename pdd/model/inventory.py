"""Holds a checkpoint's tensors against what config.json implies. Headers only; no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from pdd.errors import ModelError
from pdd.model.architecture import ModelConfig
from pdd.model.safetensors_file import TensorEntry
from pdd.model.tensors import TensorSpec, tensors_of

READABLE = ("F32", "F16", "BF16", "F64", "F8_E4M3")
SCALED = "F8_E4M3"
SCALE_SUFFIX = "_scale_inv"


@dataclasses.dataclass(frozen=True, slots=True)
class Inventory:
    """Of a checkpoint that is whole."""

    specs: Mapping[str, TensorSpec]  # of the tensors that the model uses
    used_bytes: int  # of them and their scales, in the files
    unused: tuple[str, ...]  # tensors that are left in the files, such as layers for multi-token prediction
    unused_bytes: int


def take_stock(entries: Mapping[str, TensorEntry], config: ModelConfig, model_dir: Path) -> Inventory:
    """What of the checkpoint is used, and what is not.

    Raises:
        ModelError: a tensor is missing, mis-shaped or of a type that cannot be read; names the first.
    """
    specs = {spec.name: spec for spec in tensors_of(config)}
    missing = [name for name in specs if name not in entries]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"the checkpoint in {model_dir} lacks tensor {missing[0]!r}{more}",
                         hint="Its config.json and its weights may be of different models.")
    used = set(specs)
    for name, spec in specs.items():
        entry = entries[name]
        if entry.shape != spec.shape:
            raise ModelError(f"tensor {name!r} in {entry.path.name} has shape {list(entry.shape)}, "
                             f"config.json implies {list(spec.shape)}")
        if entry.dtype not in READABLE:
            raise ModelError(f"tensor {name!r} in {entry.path.name} is of type {entry.dtype}",
                             hint="pdd loads F32, F16, BF16 and block-scaled F8_E4M3 weights.")
        if entry.dtype == SCALED:
            _check_scales(entries, entry, config.weight_block)
            used.add(name + SCALE_SUFFIX)
    unused = tuple(name for name in entries if name not in used)
    return Inventory(specs, sum(entries[name].nbytes for name in used), unused, sum(entries[name].nbytes for name in unused))


def _check_scales(entries: Mapping[str, TensorEntry], entry: TensorEntry, block: tuple[int, int] | None) -> None:
    where = f"tensor {entry.name!r} in {entry.path.name} is of type {entry.dtype}, but "
    if block is None:
        raise ModelError(where + "config.json has no quantization_config with a weight_block_size")
    scales = entries.get(entry.name + SCALE_SUFFIX)
    if scales is None:
        raise ModelError(where + f"{entry.name + SCALE_SUFFIX!r} is not there", hint="Copy the checkpoint again.")
    blocks = tuple(-(-size // length) for size, length in zip(entry.shape, block, strict=False))
    if scales.dtype != "F32" or scales.shape != blocks or len(entry.shape) != 2:
        raise ModelError(where + f"{scales.name!r} has type {scales.dtype} and shape {list(scales.shape)} instead of "
                                 f"F32 and {list(blocks)}")
