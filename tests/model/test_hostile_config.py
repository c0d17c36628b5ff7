"""A config.json may come from anywhere: whatever a field holds, it is used or refused by name, and soon."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdd.errors import ModelError
from pdd.model.config import parse_config
from pdd.model.fields import Fields, read_json
from pdd.model.sketch import sketch

CONFIGS = Path(__file__).parents[1] / "model_configs"
VALUES: tuple[Any, ...] = (
    None, 0, -1, 1, 2, 3, 2**31, 2**63, 10**400, 1e308, float("nan"), float("inf"), -0.5, 1.5, "", "x", "\ud83d", [], {}, [0],
    [[]], [None], {"a": 1}, True, False, {"rope_type": "llama3"}, {"rope_type": "yarn", "factor": 0}, {"rope_type": 5},
    {"type": "linear", "factor": "x"}, {"rope_type": "linear", "factor": 10**400}, ["full_attention"] * 2, [{}] * 62,
)
OTHERS = (
    "sliding_window", "layer_types", "n_routed_experts", "num_experts", "q_lora_rank", "kv_lora_rank", "dtype",
    "rope_parameters", "rope_scaling", "quantization_config", "use_sliding_window", "max_window_layers", "moe_layer_freq",
    "decoder_sparse_step", "mlp_only_layers", "partial_rotary_factor",
)
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 100, "vocab_size": 300,
}


def _bases() -> list[dict[str, Any]]:
    qwen = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True}
    return [LLAMA, qwen, *(json.loads(path.read_text()) for path in sorted(CONFIGS.glob("*.json")))]


def _read(config: dict[str, Any]) -> object:
    return parse_config(Fields(config), Fields({}))


def _cases() -> list[Any]:
    """sketch reads a family that does not run by its keys alone."""
    found = [(reader, base) for base in _bases() for reader in (sketch, _read)]
    found += [(sketch, {**base, "model_type": f"other_{base['model_type']}"}) for base in _bases()]
    return [pytest.param(reader, base, id=f"{reader.__name__}-{base['model_type']}") for reader, base in found]


@pytest.mark.parametrize(("reader", "base"), _cases())
def test_any_value_of_any_field_is_used_or_refused(base: dict[str, Any], reader: Callable[[dict[str, Any]], Any]) -> None:
    reader(base)
    refused: list[str] = []
    for name in dict.fromkeys([*base, *OTHERS]):
        for value in VALUES:
            try:
                reader({**base, name: value})
            except ModelError as error:
                refused.append(str(error))
    assert len(refused) > 100
    assert max(map(len, refused)) < 400


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"])
@pytest.mark.parametrize("reader", [sketch, _read])
def test_a_number_beyond_all_models_is_refused_by_name(reader: Callable[[dict[str, Any]], Any], name: str) -> None:
    with pytest.raises(ModelError, match=f"{name} must be at most"):
        reader({**LLAMA, name: 10**10})


@pytest.mark.parametrize(("text", "why"), [("[" * 100_000, "nested too deeply"), (" " * (16 << 20) + "{}", "longer than 16 MiB")])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=why):
        read_json(path)
