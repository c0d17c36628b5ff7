"""A Hugging Face model folder's configuration as one frozen ModelConfig, and the fingerprint of its weights. No torch.

Reads config.json and generation_config.json in the forms of transformers 4 and 5. What would change the numbers and is
not run here (sliding windows, other activations, unknown rope scaling, quantised weights) is refused by name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from pdd.errors import ModelError
from pdd.model.safetensors_file import read_directory

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_SUPPORTED = "pdd runs dense Llama (SmolLM2 too), Qwen2 and Qwen3 checkpoints in safetensors form."
_DTYPES = {"bfloat16": "bfloat16", "float16": "bfloat16", "float32": "float32"}  # fp16 weights run as bf16
_HINT_FOLDER = "Set model.path (--model) to a Hugging Face model folder; `pdd model import` makes one of a GGUF file."
_HINT_READ = "The user of the daemon must be able to read the folder and all files in it (chmod, chown)."
_SAMPLE_BYTES = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. kind "linear" uses `factor` alone; "llama3" all fields."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192  # tokens


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a dense decoder-only model of a supported family needs to run."""

    family: str  # a key of FAMILIES
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool
    # Below: nothing that changes a value of the KV cache; not part of the fingerprint.
    max_position: int  # tokens
    dtype: str  # "bfloat16" or "float32": what `auto` means
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def load_config(model_dir: str | Path) -> ModelConfig:
    """The configuration of the checkpoint in `model_dir`.

    Raises:
        ModelError: no readable config.json there, or a family, field or value that pdd does not run.
    """
    model_dir = Path(model_dir)
    list_folder(model_dir)
    raw = _read_json(model_dir / "config.json", required=True)
    generation = _read_json(model_dir / "generation_config.json", required=False)
    family = _family(raw)
    _refuse_unsupported(raw, family)
    hidden, heads = _integer(raw, "hidden_size"), _integer(raw, "num_attention_heads")
    kv_heads = _integer(raw, "num_key_value_heads", heads)
    head_dim = _integer(raw, "head_dim", hidden // heads)
    if heads % kv_heads:
        raise ModelError(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim {head_dim} is odd; rotary embedding needs pairs")
    theta, scaling = _rope(raw)
    bias = bool(raw.get("attention_bias", False))
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    if dtype not in _DTYPES:
        raise ModelError(f"config.json: dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    eos = _token_ids(raw, "eos_token_id") + _token_ids(generation, "eos_token_id")
    bos = _token_ids(raw, "bos_token_id")
    return ModelConfig(
        family=family, hidden_size=hidden, intermediate_size=_integer(raw, "intermediate_size"),
        num_layers=_integer(raw, "num_hidden_layers"), num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        vocab_size=_integer(raw, "vocab_size"), rms_eps=_number(raw, "rms_norm_eps", 1e-6), rope_theta=theta,
        rope_scaling=scaling, tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=True if family == "qwen2" else bias, output_bias=False if family == "qwen2" else bias,
        mlp_bias=family == "llama" and bool(raw.get("mlp_bias", False)), qk_norm=family == "qwen3",
        max_position=_integer(raw, "max_position_embeddings", 2048), dtype=_DTYPES[dtype],
        eos_token_ids=tuple(dict.fromkeys(eos)), bos_token_id=bos[0] if bos else None)


def fingerprint(model_dir: str | Path) -> str:
    """64 hex digits that two nodes must agree on before they exchange KV.

    Over the config fields that shape the KV cache, and per tensor its name, dtype, shape and three samples of 1 KiB:
    fast at any size, the same however the checkpoint is split into files, different when a tensor was trained further.
    It is a guard against mistakes, not against an adversary: a change between the samples goes unseen.
    """
    config = dataclasses.asdict(load_config(model_dir))
    for name in ("max_position", "dtype", "eos_token_ids", "bos_token_id"):
        del config[name]
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    files: dict[Path, int] = {}
    try:
        for name, entry in sorted(read_directory(Path(model_dir)).items()):
            if entry.path not in files:
                files[entry.path] = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
            digest.update(f"\n{name} {entry.dtype} {entry.shape}\n".encode())
            last = max(0, entry.nbytes - _SAMPLE_BYTES)
            for at in sorted({0, last // 2, last}):
                size = min(_SAMPLE_BYTES, entry.nbytes - at)
                digest.update(os.pread(files[entry.path], size, entry.offset + at))
    finally:
        for fd in files.values():
            os.close(fd)
    return digest.hexdigest()


def list_folder(model_dir: Path) -> list[str]:
    """The names of the files in `model_dir`.

    Raises:
        ModelError: it is missing, no folder, or not for this user.
    """
    try:
        return sorted(os.listdir(model_dir))
    except FileNotFoundError:
        raise ModelError(f"model folder {model_dir} does not exist", hint=_HINT_FOLDER) from None
    except NotADirectoryError:
        raise ModelError(f"{model_dir} is a file, not a model folder", hint=_HINT_FOLDER) from None
    except OSError as error:
        raise ModelError(f"model folder {model_dir} cannot be read: {error.strerror}", hint=_HINT_READ) from None


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not required:
            return {}
        raise ModelError(f"{path} is missing", hint=_HINT_FOLDER) from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", hint=_HINT_READ) from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}", hint="Copy the checkpoint again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def _family(raw: dict[str, Any]) -> str:
    family = raw.get("model_type")
    architectures = raw.get("architectures") or []
    if family not in FAMILIES or (architectures and FAMILIES[family] not in architectures):
        raise ModelError(f"model type {family!r} with architectures {architectures} is not supported", hint=_SUPPORTED)
    return str(family)


def _refuse_unsupported(raw: dict[str, Any], family: str) -> None:
    if raw.get("quantization_config"):
        raise ModelError("config.json: quantization_config: quantised weights are not supported",
                         hint="Use a bfloat16, float16 or float32 checkpoint.")
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"config.json: hidden_act {activation!r} is not supported; only silu is")
    if raw.get("partial_rotary_factor", 1.0) not in (None, 1.0, 1):
        raise ModelError("config.json: partial_rotary_factor other than 1 is not supported")
    sliding_types = "sliding_attention" in (raw.get("layer_types") or [])
    window = raw.get("sliding_window")
    if sliding_types or (family != "llama" and raw.get("use_sliding_window") and window):
        raise ModelError(f"config.json: sliding_window {window} is in use; sliding attention is not supported",
                         hint=_SUPPORTED)


def _rope(raw: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
        raise ModelError("config.json: rope_parameters per layer type are not supported")
    theta = _number(parameters, "rope_theta", _number(raw, "rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind in ("default", None):
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", _number(parameters, "factor"))
    if kind == "llama3":
        return theta, RopeScaling("llama3", _number(parameters, "factor"), _number(parameters, "low_freq_factor"),
                                  _number(parameters, "high_freq_factor"),
                                  _integer(parameters, "original_max_position_embeddings"))
    raise ModelError(f"config.json: rope scaling {kind!r} is not supported; default, linear and llama3 are")


def _integer(raw: dict[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"config.json: {name} must be a positive integer, is {value!r}")
    return value


def _number(raw: dict[str, Any], name: str, default: float | None = None) -> float:
    value = raw.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelError(f"config.json: {name} must be a positive number, is {value!r}")
    return float(value)


def _token_ids(raw: dict[str, Any], name: str) -> list[int]:
    value = raw.get(name)
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and item >= 0 for item in ids):
        raise ModelError(f"{name} must be a token id or a list of them, is {value!r}")
    return ids
