"""Writes a tiny random model folder: real enough to serve, small enough for a test. Needs numpy and tokenizers only.

The weights are random but not arbitrary. Queries and keys are scaled up, so that attention is sharp and the next token
depends on single earlier tokens: a wrong page of KV changes what greedy decoding says. The untied output head favours
printable ASCII, so that a demo prints text, if nonsense. The tokenizer knows the 256 bytes and five special tokens; a
text of n bytes is n tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pdd.errors import ModelError
from pdd.model.config import FAMILIES
from pdd.model.safetensors_file import SINGLE_NAME, write_file
from pdd.model.tokenizer import byte_characters

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>")  # ids 256 ...
END_OF_TEXT, IM_START, IM_END = 256, 257, 258
_MIN_VOCAB = 256 + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


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
) -> Path:
    """Writes config, weights and tokenizer into `directory` and returns it. The same arguments give the same bytes."""
    if family not in FAMILIES:
        raise ModelError(f"demo family {family!r} is not one of {', '.join(FAMILIES)}")
    if vocab_size < _MIN_VOCAB:
        raise ModelError(f"a demo vocabulary needs at least {_MIN_VOCAB} tokens, not {vocab_size}")
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [FAMILIES[family]], "model_type": family, "hidden_size": hidden_size,
        "intermediate_size": intermediate_size, "num_hidden_layers": num_layers, "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads, "head_dim": head_dim or hidden_size // num_heads,
        "vocab_size": vocab_size, "max_position_embeddings": max_context, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_theta": rope_theta, "rope_scaling": rope_scaling, "tie_word_embeddings": tie_embeddings,
        "attention_bias": False, "bos_token_id": None, "eos_token_id": IM_END, "torch_dtype": dtype,
    }
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {"eos_token_id": [IM_END, END_OF_TEXT]})
    write_file(path / SINGLE_NAME, _tensors(config, seed))
    _write_tokenizer(path)
    return path


def _tensors(config: dict[str, Any], seed: int) -> Iterator[tuple[str, str, tuple[int, ...], Callable[[], bytes]]]:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads, vocab = config["num_attention_heads"], config["num_key_value_heads"], config["vocab_size"]
    bf16 = config["torch_dtype"] == "bfloat16"
    kind = "BF16" if bf16 else "F32"

    def tensor(name: str, shape: tuple[int, ...], make: Callable[[np.random.Generator], np.ndarray]) -> tuple[
            str, str, tuple[int, ...], Callable[[], bytes]]:
        def data() -> bytes:
            # Seeded per tensor: a tensor's values do not depend on which others the family has.
            values = make(np.random.default_rng([seed, *name.encode()])).astype("<f4")
            return to_bf16(values).tobytes() if bf16 else values.tobytes()
        return name, kind, shape, data

    def weight(name: str, rows: int, columns: int, gain: float = 1.0) -> Any:
        return tensor(name, (rows, columns), lambda rng: rng.normal(0, gain / math.sqrt(columns), (rows, columns)))

    def vector(name: str, size: int, mean: float, spread: float) -> Any:
        return tensor(name, (size,), lambda rng: rng.normal(mean, spread, size))

    yield tensor("model.embed_tokens.weight", (vocab, hidden), lambda rng: rng.normal(0, 1, (vocab, hidden)))
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield vector(at + "input_layernorm.weight", hidden, 1.0, 0.1)
        for name, rows, gain in (("q", heads * dim, 2.0), ("k", kv_heads * dim, 2.0), ("v", kv_heads * dim, 1.0)):
            yield weight(f"{at}self_attn.{name}_proj.weight", rows, hidden, gain)
            if config["model_type"] == "qwen2":
                yield vector(f"{at}self_attn.{name}_proj.bias", rows, 0.0, 0.2)
        if config["model_type"] == "qwen3":
            yield vector(at + "self_attn.q_norm.weight", dim, 2.0, 0.1)
            yield vector(at + "self_attn.k_norm.weight", dim, 1.0, 0.1)
        yield weight(at + "self_attn.o_proj.weight", hidden, heads * dim, 2.0)
        yield vector(at + "post_attention_layernorm.weight", hidden, 1.0, 0.1)
        yield weight(at + "mlp.gate_proj.weight", inner, hidden)
        yield weight(at + "mlp.up_proj.weight", inner, hidden)
        yield weight(at + "mlp.down_proj.weight", hidden, inner)
    yield vector("model.norm.weight", hidden, 1.0, 0.1)
    if not config["tie_word_embeddings"]:
        yield tensor("lm_head.weight", (vocab, hidden), lambda rng: _output_head(rng, vocab, hidden))


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
