"""Configs, fingerprints and checkpoints of model folders: what is read, what is refused and how it is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pdd.errors import ModelError
from pdd.model.architecture import RopeScaling
from pdd.model.checkpoint import Checkpoint
from pdd.model.config import fingerprint, load_config
from pdd.model.demo import write_demo_model
from pdd.model.safetensors_file import INDEX_NAME, SINGLE_NAME, read_directory, write_file
from pdd.model.shard import Shard
from pdd.model.transformer import load_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_demo_model(tmp_path / "m", num_layers=2)


def edit(model: Path, change: Callable[[dict[str, Any]], None], name: str = "config.json") -> None:
    raw = json.loads((model / name).read_text())
    change(raw)
    (model / name).write_text(json.dumps(raw))


def test_reads_families_and_eos_of_both_files(tmp_path: Path) -> None:
    for family in ("llama", "qwen2", "qwen3"):
        config = load_config(write_demo_model(tmp_path / family, family))
        assert (config.family, config.qkv_bias, config.qk_norm) == (family, family == "qwen2", family == "qwen3")
        assert config.eos_token_ids == (258, 256)  # config.json's, then generation_config.json's
    (tmp_path / "llama" / "generation_config.json").unlink()
    assert load_config(tmp_path / "llama").eos_token_ids == (258,)


@pytest.mark.parametrize(("raw", "theta", "scaling"), [
    ({"rope_theta": 5e5}, 5e5, None),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None),  # transformers 5
    ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}, 1e4, RopeScaling("linear", 2.0)),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
                          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
     5e5, RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)),
])
def test_reads_both_forms_of_rope(model: Path, raw: dict[str, Any], theta: float, scaling: RopeScaling | None) -> None:
    def change(config: dict[str, Any]) -> None:
        del config["rope_theta"], config["rope_scaling"]
        config.update(raw)
    edit(model, change)
    config = load_config(model)
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(("field", "value", "named"), [
    ("model_type", "gemma3", "gemma3"),
    ("architectures", ["LlamaForSequenceClassification"], "LlamaForSequenceClassification"),
    ("hidden_act", "gelu", "hidden_act"),
    ("quantization_config", {"bits": 4}, "quantization_config"),
    ("rope_scaling", {"rope_type": "longrope", "factor": 4.0}, "longrope"),
    ("partial_rotary_factor", 0.5, "partial_rotary_factor"),
    ("num_attention_heads", 3, "num_key_value_heads"),
    ("hidden_size", "64", "hidden_size"),
    ("vocab_size", None, "vocab_size"),
    ("eos_token_id", "stop", "eos_token_id"),
    ("torch_dtype", "int8", "dtype"),
])
def test_refuses_by_name(model: Path, field: str, value: object, named: str) -> None:
    edit(model, lambda raw: raw.update({field: value}))
    with pytest.raises(ModelError, match=named):
        load_config(model)


@pytest.mark.parametrize(("family", "fields", "windows"), [
    ("llama", {"sliding_window": 32}, (0, 0, 0)),
    ("mistral", {"sliding_window": 32}, (32, 32, 32)),
    ("mistral", {"sliding_window": None}, (0, 0, 0)),
    ("qwen2", {"sliding_window": 32, "use_sliding_window": False}, (0, 0, 0)),
    ("qwen2", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}, (0, 32, 32)),
    ("qwen3", {"sliding_window": 32, "use_sliding_window": True,
               "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, (32, 0, 32)),
    ("qwen3_moe", {"sliding_window": 32, "use_sliding_window": True}, (32, 32, 32)),
])
def test_windows_are_where_the_family_has_them(
        family: str, fields: dict[str, Any], windows: tuple[int, ...], tmp_path: Path) -> None:
    assert load_config(write_demo_model(tmp_path, family, **fields)).windows == windows


@pytest.mark.parametrize(("family", "fields", "layers"), [
    ("llama", {}, ()), ("qwen3_moe", {}, (0, 1, 2)), ("qwen3_moe", {"decoder_sparse_step": 2}, (1,)),
    ("qwen3_moe", {"mlp_only_layers": [1]}, (0, 2)), ("deepseek_v3", {"first_k_dense_replace": 2}, (2,))])
def test_experts_are_in_the_layers_that_the_family_says(
        family: str, fields: dict[str, Any], layers: tuple[int, ...], tmp_path: Path) -> None:
    assert load_config(write_demo_model(tmp_path, family, **fields)).moe_layers == layers


@pytest.mark.parametrize("types", [["sliding_attention"] * 3, ["full_attention"], ["full_attention"] * 2 + ["chunked"], "full"])
def test_layer_types_that_say_nothing_clear_are_refused(types: object, tmp_path: Path) -> None:
    """A window for some layers, and no window; or not every layer's kind."""
    model = write_demo_model(tmp_path, "qwen2")
    edit(model, lambda raw: raw.update(layer_types=types))
    with pytest.raises(ModelError, match="layer_types"):
        load_config(model)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        load_config(tmp_path / "none")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        load_config(tmp_path)


# -- fingerprints -----------------------------------------------------------------------------------------------------
def split_in_two(model: Path) -> None:
    """The same checkpoint as two files and an index."""
    entries = list(read_directory(model).values())
    weight_map = {}
    for number, part in enumerate((entries[::2], entries[1::2])):
        name = f"model-{number}.safetensors"
        write_file(model / name, [(e.name, e.dtype, e.shape,
                                   lambda e=e: e.path.read_bytes()[e.offset : e.offset + e.nbytes]) for e in part])
        weight_map.update(dict.fromkeys((entry.name for entry in part), name))
    (model / SINGLE_NAME).unlink()
    (model / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def test_fingerprint_is_of_values_not_of_files(tmp_path: Path) -> None:
    first, second = write_demo_model(tmp_path / "a"), write_demo_model(tmp_path / "b")
    assert fingerprint(first) == fingerprint(second)
    split_in_two(second)
    assert fingerprint(first) == fingerprint(second)
    edit(second, lambda raw: raw.update(eos_token_id=5))  # no value of the cache depends on it
    assert fingerprint(first) == fingerprint(second)


def test_fingerprint_sees_other_weights_and_other_numbers(tmp_path: Path) -> None:
    model = write_demo_model(tmp_path / "a")
    seen = {fingerprint(model), fingerprint(write_demo_model(tmp_path / "b", seed=1)),
            fingerprint(write_demo_model(tmp_path / "c", dtype="bfloat16"))}
    edit(model, lambda raw: raw.update(rope_theta=20000.0))
    seen.add(fingerprint(model))
    edit(model, lambda raw: raw.update(rms_norm_eps=1e-6))
    seen.add(fingerprint(model))
    assert len(seen) == 5
    bias = next(entry for entry in read_directory(model).values() if entry.name == "model.layers.1.mlp.up_proj.weight")
    with bias.path.open("r+b") as file:  # a tensor changed at its very end
        file.seek(bias.offset + bias.nbytes - 1)
        file.write(b"\x01")
    assert fingerprint(model) not in seen


@pytest.mark.parametrize(("family", "more", "of_the_first_release"), [
    ("llama", {}, "32627175296978a6de24f31d35d3844532e3c9f4710a3408ea2d48ef13e1c369"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                "original_max_position_embeddings": 64}}, "b13a7385423b8a0568bae32710a9edc5eb07bd6bc46de069f4064c9e072d74f9"),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 1}, "7eda47e5d26c2f1970f9645d4ba70a4d1dff20640a309b7aff31a2e6fcce8dfc"),
    ("qwen3", {}, "c6996f4a3c48d128f8424c0a90198a50971449b3e5c65eca2b8d46ef1e213ccb"),
])
def test_fingerprint_is_what_older_nodes_say(tmp_path: Path, family: str, more: dict[str, Any], of_the_first_release: str) -> None:
    """Computed by commit ea7af32. If it changes, nodes refuse each other while a cluster is upgraded."""
    config = {"model_type": family, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99, "rope_theta": 10000.0, **more}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_file(tmp_path / SINGLE_NAME, [("model.norm.weight", "F32", (32,), lambda: bytes(range(128)))])
    assert fingerprint(tmp_path) == of_the_first_release


YARN = {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize(("family", "without", "with_it"), [
    ("mistral", {}, {"sliding_window": 8}),
    ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2}, {"decoder_sparse_step": 2}),  # moe_layers
    ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2}, {"norm_topk_prob": True}),  # moe
    ("llama", {"rope_scaling": YARN}, {"rope_scaling": {**YARN, "beta_fast": 16.0}}),
    ("llama", {"rope_scaling": YARN}, {"rope_scaling": {**YARN, "attention_factor": 3.0}}),
])
def test_fingerprint_sees_what_came_later(tmp_path: Path, family: str, without: dict[str, Any], with_it: dict[str, Any]) -> None:
    config = {"model_type": family, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "vocab_size": 99, **without}
    write_file(tmp_path / SINGLE_NAME, [("model.norm.weight", "F32", (32,), lambda: bytes(128))])
    seen = set()
    for fields in (config, {**config, **with_it}):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        seen.add(fingerprint(tmp_path))
    assert len(seen) == 2


# -- checkpoints ------------------------------------------------------------------------------------------------------
def test_sharded_files_load_as_one(model: Path) -> None:
    whole = load_model(model, load_config(model), dtype="float32", max_context=64)
    split_in_two(model)
    parts = load_model(model, load_config(model), dtype="float32", max_context=64)
    assert whole.param_bytes == parts.param_bytes
    assert torch.equal(whole._vocabulary._embedding, parts._vocabulary._embedding)


def test_progress_reaches_the_total(model: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_model(model, load_config(model), dtype="float32", max_context=64, progress=lambda *at: seen.append(at))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == sum(entry.nbytes for entry in read_directory(model).values())


def test_names_a_missing_and_a_mis_shaped_tensor(model: Path) -> None:
    config = load_config(model)
    edit(model, lambda raw: raw.update(num_hidden_layers=3))
    with pytest.raises(ModelError, match=r"lacks tensor 'model\.layers\.2\."):
        load_model(model, load_config(model), dtype="float32", max_context=64)
    edit(model, lambda raw: raw.update(num_hidden_layers=2, intermediate_size=130))
    with pytest.raises(ModelError, match=r"gate_proj.* has shape \[128, 64\], config.json implies \[130, 64\]"):
        load_model(model, load_config(model), dtype="float32", max_context=64)
    assert config.intermediate_size == 128


@pytest.mark.parametrize("damage", ["cut", "header", "empty", "absent"])
def test_damaged_weights_are_named(model: Path, damage: str) -> None:
    path = model / SINGLE_NAME
    data = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(data[:-100])
        case "header":
            path.write_bytes(b"\xff" * 16 + data)
        case "empty":
            path.write_bytes(b"")
        case "absent":
            path.unlink()
    with pytest.raises(ModelError, match=r"truncated|not a safetensors file|holds no"):
        read_directory(model)


def test_index_that_names_an_absent_file(model: Path) -> None:
    split_in_two(model)
    (model / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-1\.safetensors is missing"):
        read_directory(model)


def test_slices_of_ranks_tile_the_tensor(model: Path) -> None:
    """What ranks keep of each tensor covers it once, or, where it is copied, once on each."""
    config = load_config(model)
    checkpoint = Checkpoint(model, config)
    name = "model.layers.0.self_attn."
    for tensor, dim in ((name + "q_proj.weight", 0), (name + "o_proj.weight", 1), ("lm_head.weight", 0)):
        spec = checkpoint.specs[tensor]
        whole = torch.empty(spec.shape)
        checkpoint.copy_into(whole, tensor, tuple(slice(0, size) for size in spec.shape))
        parts = []
        for rank in range(4):
            kept = spec.kept(config, Shard(rank, 4))
            parts.append(torch.empty([part.stop - part.start for part in kept]))
            checkpoint.copy_into(parts[-1], tensor, kept)
        assert torch.equal(torch.cat(parts, dim), whole)
    assert [Shard(rank, 4).kv_heads(2) for rank in range(4)] == [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]
    assert [Shard(rank, 2).kv_heads(4) for rank in range(2)] == [slice(0, 2), slice(2, 4)]
    with pytest.raises(AssertionError, match=r"num_attention_heads \(4\) over 3 ranks"):
        Shard(0, 3).part(4, "num_attention_heads")
    with pytest.raises(AssertionError, match="2 KV heads over 3 ranks"):
        Shard(0, 3).kv_heads(2)


def test_vocabulary_and_experts_go_to_every_rank_count() -> None:
    for world in (1, 2, 3, 4, 7, 8, 13):
        shards = [Shard(rank, world) for rank in range(world)]
        for size in (1, 5, 8, 264, 265):
            rows = [row for shard in shards for row in range(size)[shard.vocab(size)]]
            experts = [expert for shard in shards for expert in shard.experts(size)]
            assert rows == experts == list(range(size))
            assert max(map(len, (shard.experts(size) for shard in shards))) == -(-size // world)
