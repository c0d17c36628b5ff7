"""Checkpoints as they come: in several files, in fp8, with layers that nobody needs, incomplete; and what loading them takes."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest
import torch

from pdd.errors import ModelError
from pdd.model.checkpoint import Checkpoint
from pdd.model.config import load_config
from pdd.model.demo import write_demo_model
from pdd.model.families import FAMILIES
from pdd.model.folder import check_folder
from pdd.model.inventory import take_stock
from pdd.model.safetensors_file import SINGLE_NAME, TensorEntry, read_directory, write_file
from pdd.model.shard import Shard
from pdd.model.transformer import load_model
from tests.model.model_harness import Harness
from tests.model.oracle import GENERATED, reference, text

BLOCK = (24, 40)  # rows and columns that share a scale: neither divides what a rank keeps


def rewritten(model: Path, tensors: dict[str, torch.Tensor]) -> None:
    kinds = {torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16"}
    write_file(model / SINGLE_NAME, [
        (name, kinds[tensor.dtype], tuple(tensor.shape),
         lambda tensor=tensor: tensor.contiguous().view(torch.uint8).numpy().tobytes()) for name, tensor in tensors.items()])


def values(model: Path) -> dict[str, torch.Tensor]:
    def read(entry: TensorEntry) -> torch.Tensor:
        data = bytearray(entry.path.read_bytes()[entry.offset : entry.offset + entry.nbytes])
        return torch.frombuffer(data, dtype=torch.float32).view(entry.shape)
    return {name: read(entry) for name, entry in read_directory(model).items()}


def fp8_and_exact(directory: Path, family: str) -> tuple[Path, Path]:
    """A model whose projections are fp8 with a scale per block, and its twin with the same values in float32."""
    fp8, exact = write_demo_model(directory / "fp8", family), write_demo_model(directory / "exact", family)
    packed, plain = {}, {}
    for name, weight in values(fp8).items():
        packed[name] = plain[name] = weight
        if weight.dim() < 2 or not name.endswith("_proj.weight"):
            continue
        rows, columns = (torch.arange(size) // block for size, block in zip(weight.shape, BLOCK, strict=True))
        blocks = [math.ceil(size / block) for size, block in zip(weight.shape, BLOCK, strict=True)]
        scales = torch.zeros(blocks)
        for row in range(blocks[0]):
            for column in range(blocks[1]):
                scales[row, column] = weight[rows == row][:, columns == column].abs().max() / 448
        packed[name] = (weight / scales[rows][:, columns]).to(torch.float8_e4m3fn)
        packed[name + "_scale_inv"] = scales
        plain[name] = packed[name].float() * scales[rows][:, columns]
    rewritten(fp8, packed)
    rewritten(exact, plain)
    edit(fp8, quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)})
    return fp8, exact


def edit(model: Path, **fields: object) -> None:
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**raw, **fields}))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_fp8_weights_are_multiplied_out_wherever_a_slice_begins(family: str, tmp_path: Path) -> None:
    fp8, exact = fp8_and_exact(tmp_path, family)
    quantised, plain = Checkpoint(fp8, load_config(fp8)), Checkpoint(exact, load_config(exact))
    assert sum(entry.dtype == "F8_E4M3" for entry in read_directory(fp8).values()) > 20
    for world in (1, 2, 4):
        for rank in range(world):
            for name, spec in plain.specs.items():
                kept = spec.kept(load_config(exact), Shard(rank, world))
                if kept is None:
                    continue
                got, want = (torch.empty([part.stop - part.start for part in kept]) for _ in range(2))
                quantised.copy_into(got, name, kept)
                plain.copy_into(want, name, kept)
                assert torch.equal(got, want), (name, rank, world)


@pytest.mark.parametrize(("change", "message"), [
    (lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight_scale_inv"), r"up_proj\.weight_scale_inv' is not there"),
    (lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(6, 3)}),
     r"has type F32 and shape \[6, 3\] instead of F32 and \[6, 2\]"),
])
def test_fp8_weights_without_their_scales_are_refused(change, message: str, tmp_path: Path) -> None:
    fp8, exact = fp8_and_exact(tmp_path, "llama")
    with pytest.raises(ModelError, match=r"config\.json has no quantization_config"):
        take_stock(read_directory(fp8), load_config(exact), fp8)
    tensors = {}
    for name, entry in read_directory(fp8).items():
        data = bytearray(entry.path.read_bytes()[entry.offset : entry.offset + entry.nbytes])
        dtype = torch.float8_e4m3fn if entry.dtype == "F8_E4M3" else torch.float32
        tensors[name] = torch.frombuffer(data, dtype=dtype).view(entry.shape)
    change(tensors)
    rewritten(fp8, tensors)
    with pytest.raises(ModelError, match=message):
        check_folder(fp8)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_missing_and_every_mis_shaped_tensor_is_named(family: str, tmp_path: Path) -> None:
    model = write_demo_model(tmp_path, family, num_layers=2)
    path = model / SINGLE_NAME
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    names = [name for name in header if ".layers.0." not in name and name != "__metadata__" and ".experts.1" not in name]
    assert len(names) > 10

    def write(changed: dict[str, object]) -> None:
        encoded = json.dumps(changed).encode()
        path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + length :])

    for name in names:
        write({other: item for other, item in header.items() if other != name})
        with pytest.raises(ModelError, match=f"lacks tensor '{name}'"):
            check_folder(model)
        write({**header, name: {**header[name], "shape": [1, *header[name]["shape"]]}})
        with pytest.raises(ModelError, match=f"'{name}' in model.safetensors has shape"):
            check_folder(model)


def test_layers_for_multi_token_prediction_stay_in_the_file(tmp_path: Path) -> None:
    model = write_demo_model(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    tensors = values(model)
    extra = {name.replace("layers.2", "layers.3"): value for name, value in tensors.items() if ".layers.2." in name}
    extra["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    before = reference_logit(model)
    rewritten(model, {**tensors, **extra})
    assert reference_logit(model) == before
    stock = take_stock(read_directory(model), load_config(model), model)
    assert {*stock.unused} == {*extra}
    assert stock.unused_bytes == sum(value.nbytes for value in extra.values())


def reference_logit(model: Path) -> list[list[int]]:
    harness = Harness(model)
    return harness.run([harness.request(text(5, 40))], 5)


@pytest.mark.parametrize("world", [1, 2])
def test_a_file_is_never_in_memory_next_to_its_copy(world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of the file that are mapped in, at any time: those of one band."""
    model = write_demo_model(tmp_path, hidden_size=256, intermediate_size=1024)
    monkeypatch.setattr("pdd.model.checkpoint._BAND_BYTES", band := 64 << 10)
    seen: list[int] = []
    load_model(model, load_config(model), dtype="float32", max_context=64, shard=Shard(world - 1, world),
               progress=lambda done, total: seen.append(resident(model / SINGLE_NAME)))
    assert len(seen) == 30
    assert max(seen) <= band + (128 << 10) < (model / SINGLE_NAME).stat().st_size // 8


def resident(path: Path) -> int:
    """Bytes of a file in this process' memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "deepseek_v3"])
def test_progress_is_of_this_ranks_bytes(family: str, world: int, tmp_path: Path) -> None:
    model = write_demo_model(tmp_path, family)
    config = load_config(model)
    totals, params = [], []
    for rank in range(world):
        seen: list[tuple[int, int]] = []
        loaded = load_model(model, config, dtype="float32", max_context=64, shard=Shard(rank, world),
                            progress=lambda *at, seen=seen: seen.append(at))
        assert seen == sorted(seen)
        assert seen[-1][0] == seen[-1][1]
        totals.append(seen[-1][1])
        params.append(loaded.param_bytes)
    assert totals == params  # float32 files, and nothing is padded here
    whole = sum(entry.nbytes for entry in read_directory(model).values())
    assert sum(totals) >= whole
    assert world == 1 or max(totals) < 0.75 * whole


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("family", [
    pytest.param(family, marks=() if family in ("qwen3_moe", "deepseek_v3") else pytest.mark.slow) for family in FAMILIES])
def test_what_transformers_writes_is_read(family: str, tmp_path: Path) -> None:
    """Its form of config.json, its names, several files with an index."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(write_demo_model(tmp_path / "demo", family))
    config.initializer_range = 0.2
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved", max_shard_size="150KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    prompts = [text(1, 17), text(2, 40)]
    harness = Harness(tmp_path / "saved", world=2)
    assert harness.run([harness.request(prompt, chunk=13) for prompt in prompts], GENERATED) == reference(
        tmp_path / "saved", prompts)
