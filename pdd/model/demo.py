"""Writes a tiny random model folder: real enough to serve, small enough for a test. Needs numpy and tokenizers only.

The weights are random but not arbitrary. Queries and keys are scaled up, so that attention is sharp and the next token
depends on single earlier tokens: a wrong page of KV changes what greedy decoding says. The untied output head favours
printable ASCII, so that a demo prints text, if nonsense. The tokenizer knows the 256 bytes and five special tokens; a
text of n bytes is n tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pdd.errors import ModelError
from pdd.model.config import load_config
from pdd.model.families import FAMILIES
from pdd.model.safetensors_file import SINGLE_NAME, write_file
from pdd.model.tensors import EMBEDDING, HEAD, TensorSpec, tensors_of
from pdd.model.tokenizer import byte_characters

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>")  # ids 256 ...
END_OF_TEXT, IM_START, IM_END = 256, 257, 258
_MIN_VOCAB = 256 + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_LOUD = ("q_proj", "k_proj", "o_proj", "q_b_proj", "kv_b_proj")  # scaled up, see above
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}
_OWN_FIELDS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 24},
    "qwen3_moe": {"num_experts": 8, **_EXPERTS},
    "deepseek_v3": {
        "num_key_value_heads": None, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
        "v_head_dim": 24, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 1.5, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, **_EXPERTS},
}


def write_demo_model(
    directory: str | Path,
    family: str = "llama",
    *,
    seed: int = 0,
    num_layers: int = 3,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 0,  # 0: hidden_size / num_heads
    vocab_size: int = 264,
    max_context: int = 4096,  # tokens
    tie_embeddings: bool = False,
    rope_theta: float = 10000.0,
    rope_scaling: dict[str, Any] | None = None,  # as config.json has it, e.g. rope_type llama3
    dtype: str = "float32",
    **more: Any,  # fields of config.json, over those that the family has by itself
) -> Path:
    """Writes config, weights and tokenizer into `directory` and returns it. The same arguments give the same bytes."""
    if family not in FAMILIES:
        raise ModelError(f"demo family {family!r} is not one of {', '.join(FAMILIES)}")
    if vocab_size < _MIN_VOCAB:
        raise ModelError(f"a demo vocabulary needs at least {_MIN_VOCAB} tokens, not {vocab_size}")
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [FAMILIES[family].architecture], "model_type": family, "hidden_size": hidden_size,
        "intermediate_size": intermediate_size, "num_hidden_layers": num_layers, "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads, "head_dim": head_dim or hidden_size // num_heads,
        "vocab_size": vocab_size, "max_position_embeddings": max_context, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_theta": rope_theta, "rope_scaling": rope_scaling, "tie_word_embeddings": tie_embeddings,
        "attention_bias": False, "bos_token_id": None, "eos_token_id": IM_END, "torch_dtype": dtype,
        **_OWN_FIELDS.get(family, {}), **more,
    }
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {"eos_token_id": [IM_END, END_OF_TEXT]})
    bf16 = dtype == "bfloat16"
    write_file(path / SINGLE_NAME, (_tensor(spec, seed, bf16) for spec in tensors_of(load_config(path))))
    _write_tokenizer(path)
    return path


def _tensor(spec: TensorSpec, seed: int, bf16: bool) -> tuple[str, str, tuple[int, ...], Callable[[], bytes]]:
    def data() -> bytes:
        # Seeded per tensor: a tensor's values do not depend on which others the family has.
        values = _values(spec, np.random.default_rng([seed, *spec.name.encode()])).astype("<f4")
        return to_bf16(values).tobytes() if bf16 else values.tobytes()

    return spec.name, "BF16" if bf16 else "F32", spec.shape, data


def _values(spec: TensorSpec, rng: np.random.Generator) -> np.ndarray:
    if spec.name == EMBEDDING:
        return rng.normal(0, 1, spec.shape)
    if spec.name == HEAD:
        return _output_head(rng, *spec.shape)
    if len(spec.shape) == 1:
        bias = spec.name.endswith("bias")
        mean = 0.0 if bias else 2.0 if spec.name.endswith("q_norm.weight") else 1.0
        return rng.normal(mean, 0.2 if bias else 0.1, spec.shape)
    return rng.normal(0, (2.0 if spec.name.split(".")[-2] in _LOUD else 1.0) / math.sqrt(spec.shape[1]), spec.shape)


def _output_head(rng: np.random.Generator, vocab: int, hidden: int) -> np.ndarray:
    """Rows of letters, digits and marks speak up to 6 times louder than those of control bytes and specials."""
    loudness = np.full((vocab, 1), 0.5)
    loudness[32:127] = 2.0
    loudness[[32, *range(97, 123)]] = 3.0  # space and a-z
    return rng.normal(0, 1 / math.sqrt(hidden), (vocab, hidden)) * loudness


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 rounded to nearest-even bfloat16, as uint16 bit patterns. NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype="<f4").view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype("<u2")


def _write_tokenizer(path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {character: byte for byte, character in byte_characters().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(path / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "add_bos_token": False, "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
    })


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
