"""pdd model check: as a user would run it, on a whole model and on nothing but a config.json."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdd.commands.documents import ModelCheck, ModelGroup
from pdd.commands.model import text
from pdd.model.demo import write_demo_model
from tests.tree.imports import ROOT

CONFIGS = ROOT / "tests" / "model_configs"

SHOWN = """\
llama  134.5M parameters  bfloat16  30 layers  context 8192
weights  269 MB, whole; 3 tensors more (12 MB) not used
kv       23 kB a token, 369 kB a page of 16 tokens
memory   1 GB free here; 0.2 of what weights leave is for KV

TP  WEIGHTS  KV A TOKEN  KV A PAGE  PAGES  TOKENS
 1   326 MB       23 kB     369 kB    365    5840
 2        -           -          -      -       -  num_attention_heads (9) does not divide over 2 ranks"""
DOCUMENT = ModelCheck(
    model="m", family="llama", parameters=134_515_008, dtype="bfloat16", num_layers=30, max_context=8192,
    file_bytes=269_030_016, unused_tensors=3, unused_bytes=12_000_000, kv_token_bytes=23_040, page_size=16, page_bytes=368_640,
    free_bytes=10**9, memory_fraction=0.2, fits=True, groups=(
        ModelGroup(tp=1, refused=(), fits=True, param_bytes=325_653_120, kv_token_bytes=23_040, page_bytes=368_640,
                   num_pages=365, missing_bytes=0),
        ModelGroup(tp=2, refused=("num_attention_heads (9) does not divide over 2 ranks",), fits=False, param_bytes=0,
                   kv_token_bytes=0, page_bytes=0, num_pages=0, missing_bytes=0)))


def test_what_people_see() -> None:
    assert text(DOCUMENT) == SHOWN
    none_fits = msgspec.structs.replace(DOCUMENT, fits=False, file_bytes=None, groups=(
        msgspec.structs.replace(DOCUMENT.groups[0], fits=False, num_pages=0, missing_bytes=10**9),))
    assert "weights  not there: config.json alone" in text(none_fits)
    assert text(none_fits).endswith("1 GB of memory are missing\n\ndoes not fit this machine")


def test_a_whole_model(pdd: Any, tmp_path: Path) -> None:
    model = write_demo_model(tmp_path, num_heads=4, num_kv_heads=2)
    shown = pdd("model", "check", str(model))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("llama  ")
    assert ", whole\n" in shown.stdout
    document = json.loads(pdd("--json", "model", "check", str(model)).stdout)
    checked = msgspec.convert(document, ModelCheck)
    assert json.loads(msgspec.json.encode(checked)) == document
    groups = {group.tp: group for group in checked.groups}
    assert {tp for tp, group in groups.items() if not group.refused} == {1, 2, 4}
    assert groups[8].refused == ("num_attention_heads (4) does not divide over 8 ranks",)
    assert [groups[tp].kv_token_bytes for tp in (1, 2, 4)] == [3 * 2 * 2 * 16 * 4, 3 * 2 * 16 * 4, 3 * 2 * 16 * 4]
    assert checked.kv_token_bytes == groups[1].kv_token_bytes
    # 4 ranks hold two copies of each head: pages take twice the memory
    assert groups[4].num_pages == pytest.approx(groups[1].num_pages / 2, rel=0.2)


def test_models_that_are_too_large(pdd: Any) -> None:
    """Their parameters are those that were published: 671 and 480 billion."""
    for name, family, parameters in (("deepseek-r1", "deepseek_v3", 671e9), ("qwen3-coder-480b-a35b", "qwen3_moe", 480e9)):
        shown = pdd("--json", "model", "check", str(CONFIGS / f"{name}.json"))
        assert shown.returncode == 7
        document = json.loads(shown.stdout)
        assert (document["family"], document["fits"], document["file_bytes"]) == (family, False, None)
        assert document["parameters"] == pytest.approx(parameters, rel=0.002)
        weights = [group["param_bytes"] * group["tp"] for group in document["groups"] if not group["refused"]]
        assert weights[0] == pytest.approx(2 * document["parameters"], rel=0.01)
        assert all(group["missing_bytes"] > 0 for group in document["groups"] if not group["refused"])


def test_a_model_that_is_none_or_not_whole(pdd: Any, tmp_path: Path) -> None:
    model = write_demo_model(tmp_path / "m")
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**raw, "intermediate_size": 130}))
    shown = pdd("model", "check", str(model))
    assert shown.returncode == 78
    assert "gate_proj.weight' in model.safetensors has shape [128, 64], config.json implies [130, 64]" in shown.stderr
    shown = pdd("model", "check", str(tmp_path / "nowhere"))
    assert shown.returncode == 78
    assert "does not exist" in shown.stderr


def test_torch_is_not_imported() -> None:
    code = ("import sys; from pathlib import Path; from pdd.commands.common import Globals; from pdd.commands.model import check;"
            f"check(Globals(), Path({str(CONFIGS / 'deepseek-r1.json')!r})); sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL, timeout=60).returncode == 0
