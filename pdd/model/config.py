"""A Hugging Face model folder's configuration as one frozen ModelConfig, and the fingerprint of its weights. No torch.

Reads config.json and generation_config.json in the forms of transformers 4 and 5. What sets a family apart is said in
model/families.py. What would change the numbers and is not run here (other activations, unknown rope scaling, weights
quantised in other ways than fp8 blocks) is refused by name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from pdd.errors import ModelError
from pdd.model.architecture import ModelConfig, Moe, RopeScaling
from pdd.model.families import FAMILIES, SUPPORTED, yarn_amplitude
from pdd.model.fields import MOST_LAYERS, Fields, read_json
from pdd.model.safetensors_file import read_directory

_HINT_FOLDER = "Set model.path (--model) to a Hugging Face model folder; `pdd model import` makes one of a GGUF file."
_HINT_READ = "The user of the daemon must be able to read the folder and all files in it (chmod, chown)."
_SAMPLE_BYTES = 1024
_NOT_OF_THE_CACHE = ("max_position", "dtype", "weight_block", "eos_token_ids", "bos_token_id")
# Fields that came after the first release: older nodes hash none of them, so neither does this one where they say nothing.
_LATER: dict[str, Any] = {"mla": None, "moe": None, "moe_layers": ()}
_LATER_OF_ROPE = ("beta_fast", "beta_slow", "truncate", "amplitude")


def load_config(model_dir: str | Path) -> ModelConfig:
    """The configuration of the checkpoint in `model_dir`.

    Raises:
        ModelError: no readable config.json there, or a family, field or value that pdd does not run.
    """
    model_dir = Path(model_dir)
    list_folder(model_dir)
    fields = Fields(_read_json(model_dir / "config.json", required=True))
    generation = Fields(_read_json(model_dir / "generation_config.json", required=False))
    return parse_config(fields, generation)


def load_config_file(path: Path) -> ModelConfig:
    """The configuration that a config.json describes, whatever it is called and whatever is beside it. Raises ModelError."""
    return parse_config(Fields(_read_json(path, required=True)), Fields({}))


def parse_config(fields: Fields, generation: Fields) -> ModelConfig:
    """The configuration that config.json and generation_config.json describe.

    Raises:
        ModelError: a family, field or value that pdd does not run.
    """
    name = _family(fields)
    family = FAMILIES[name]
    _refuse_unsupported(fields)
    weight_block = _weight_block(fields)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    mla = family.mla(fields) if family.mla else None
    if mla is not None:
        kv_heads, head_dim, turned = 1, mla.kv_lora_rank + mla.rope_dim, mla.rope_dim
    else:
        kv_heads = fields.integer("num_key_value_heads", heads)
        head_dim = turned = fields.integer("head_dim", hidden // heads)
    if heads % kv_heads:
        raise ModelError(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if turned % 2:
        raise ModelError(f"config.json: head_dim {turned} is odd; rotary embedding needs pairs")
    theta, scaling = _rope(fields)
    bias = fields.flag("attention_bias")
    dtype = fields.dtype()
    moe, moe_layers = family.moe(fields, num_layers) if family.moe else (None, ())
    if moe is not None:
        _check_moe(moe)
    bos = fields.token_ids("bos_token_id")
    return ModelConfig(
        family=name, hidden_size=hidden, intermediate_size=fields.integer("intermediate_size"), num_layers=num_layers,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, vocab_size=fields.integer("vocab_size"),
        rms_eps=fields.number("rms_norm_eps", 1e-6), rope_theta=theta, rope_scaling=scaling,
        tie_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias if family.output_bias is None else family.output_bias,
        mlp_bias=family.mlp_bias and fields.flag("mlp_bias"), qk_norm=family.qk_norm,
        windows=family.windows(fields, num_layers), mla=mla, moe=moe, moe_layers=moe_layers,
        max_position=fields.integer("max_position_embeddings", 2048), dtype=dtype,
        weight_block=weight_block,
        eos_token_ids=tuple(dict.fromkeys(fields.token_ids("eos_token_id") + generation.token_ids("eos_token_id"))),
        bos_token_id=bos[0] if bos else None)


def fingerprint(model_dir: str | Path) -> str:
    """64 hex digits that two nodes must agree on before they exchange KV.

    Over the config fields that shape the KV cache, and per tensor its name, dtype, shape and three samples of 1 KiB:
    fast at any size, the same however the checkpoint is split into files, different when a tensor was trained further.
    It is a guard against mistakes, not against an adversary: a change between the samples goes unseen. Nodes of several
    versions compare it: of a checkpoint that an older version ran, it stays what that version says.
    """
    digest = hashlib.sha256(json.dumps(_shaping(load_config(model_dir)), sort_keys=True).encode())
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


def _shaping(config: ModelConfig) -> dict[str, Any]:
    """The fields that shape the KV cache; of the later ones those that say something."""
    fields = dataclasses.asdict(config)
    silent = {name for name, nothing in _LATER.items() if fields[name] == nothing}
    if not any(config.windows):
        silent.add("windows")
    for name in (*_NOT_OF_THE_CACHE, *silent):
        del fields[name]
    if config.rope_scaling is not None:
        for field in dataclasses.fields(RopeScaling):
            if field.name in _LATER_OF_ROPE and fields["rope_scaling"][field.name] == field.default:
                del fields["rope_scaling"][field.name]
    return fields


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
        return read_json(path, _HINT_READ)
    except FileNotFoundError as error:
        if not required:
            return {}
        raise ModelError(f"{path} is missing", hint=_HINT_FOLDER) from error


def _family(fields: Fields) -> str:
    family = fields.word("model_type", "")
    architectures = fields.texts("architectures")
    if family not in FAMILIES or (architectures and FAMILIES[family].architecture not in architectures):
        raise ModelError(f"model type {family!r} with architectures {architectures} is not supported", hint=SUPPORTED)
    return family


def _refuse_unsupported(fields: Fields) -> None:
    activation = fields.word("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"config.json: hidden_act {activation!r} is not supported; only silu is")
    if fields.number("partial_rotary_factor", 1.0) != 1:
        raise ModelError("config.json: partial_rotary_factor other than 1 is not supported")


def _weight_block(fields: Fields) -> tuple[int, int] | None:
    quantisation = fields.get("quantization_config")
    if not quantisation:
        return None
    block = quantisation.get("weight_block_size") if isinstance(quantisation, dict) else None
    if (isinstance(block, list) and len(block) == 2 and quantisation.get("quant_method") == "fp8"
            and all(isinstance(size, int) and size > 0 for size in block)):
        return block[0], block[1]
    raise ModelError("config.json: quantization_config: of quantised weights only fp8 in scaled blocks is supported",
                     hint="Use a checkpoint in bfloat16, float16, float32, or fp8 with weight_block_size.")


def _check_moe(moe: Moe) -> None:
    if moe.num_experts % moe.num_groups or moe.top_groups > moe.num_groups:
        raise ModelError(f"config.json: {moe.num_experts} experts do not form {moe.num_groups} groups of which "
                         f"{moe.top_groups} are chosen")
    if moe.top_k > moe.top_groups * (moe.num_experts // moe.num_groups):
        raise ModelError(f"config.json: num_experts_per_tok {moe.top_k} is more than the experts to choose from")


def _rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """(theta, scaling)."""
    scaling = fields.rope()
    theta = scaling.number("rope_theta", fields.number("rope_theta", 10000.0))
    kind = scaling.word("rope_type", scaling.word("type", "default"))
    max_position = fields.integer("max_position_embeddings", 2048)
    original = scaling.integer("original_max_position_embeddings", max_position)
    match kind:
        case "default":
            return theta, None
        case "linear":
            return theta, RopeScaling("linear", scaling.number("factor"))
        case "llama3":
            return theta, RopeScaling("llama3", scaling.number("factor"), scaling.number("low_freq_factor"),
                                      scaling.number("high_freq_factor"), original)
        case "yarn":
            return theta, _yarn(scaling, original, max_position)
    raise ModelError(f"config.json: rope scaling {kind!r} is not supported; default, linear, llama3 and yarn are")


def _yarn(scaling: Fields, original: int, max_position: int) -> RopeScaling:
    factor = scaling.number("factor", max_position / original)
    mscale, all_dim = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    amplitude = yarn_amplitude(factor)
    if mscale and all_dim:
        amplitude = yarn_amplitude(factor, mscale) / yarn_amplitude(factor, all_dim)
    return RopeScaling("yarn", factor, original_max_position=original, beta_fast=scaling.number("beta_fast", 32.0),
                       beta_slow=scaling.number("beta_slow", 1.0), truncate=scaling.flag("truncate", True),
                       amplitude=scaling.number("attention_factor", amplitude))
