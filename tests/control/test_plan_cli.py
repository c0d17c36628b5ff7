"""pdd plan transfer: as a user would run it, on nothing but a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdd.commands.plan import parse_layout
from pdd.errors import UsageError
from pdd.kv.dry_run_report import Report
from tests.tree.imports import ROOT

CONFIGS = ROOT / "tests" / "model_configs"

R1 = """\
deepseek_v3: 61 layers, 1 KV head, 1 tile of 576 bfloat16
from  tp 4: 1 head a rank, 4 copies of each; pages of 64 tokens, 72 KiB a layer and rank
to    tp 1 x dp 8: 1 head a rank; pages of 64 tokens, 72 KiB a layer and rank
moves 8191 tokens of KV of a prompt of 8192, in units of 64, steps of 8192

FROM  TO  HEADS  UNITS    BYTES  WRITES  SCATTERED
   0   0      0     32  2.36 MB      32         32
   1   0      0     32  2.36 MB      32         32
   2   0      0     32  2.36 MB      32         32
   3   0      0     32  2.36 MB      32         32

OF ALL   UNITS    BYTES  WRITES  SCATTERED
layer      128  9.44 MB     128        128
request   7808   576 MB    7808       7808
"""


def test_a_plan_for_people_and_one_for_programs(pdd: Any) -> None:
    words = ("plan", "transfer", str(CONFIGS / "deepseek-r1.json"), "--from", "tp=4,page=64", "--to", "tp=1,dp=8,page=64")
    shown = pdd(*words)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(R1)
    document = json.loads(pdd("--json", *words).stdout)
    assert json.loads(msgspec.json.encode(msgspec.convert(document, Report))) == document
    assert document["schema"] == "pdd.plan_transfer/1"
    assert document["destination"]["dp"] == 8


def test_two_that_do_not_fit_are_told_why(pdd: Any) -> None:
    model = str(CONFIGS / "qwen3-coder-480b-a35b.json")
    shown = pdd("plan", "transfer", model, "--from", "tp=8,page=16", "--to", "tp=3,page=24,dtype=float32")
    assert shown.returncode == 7
    assert shown.stdout.splitlines()[-4:] == [
        "refused: these two cannot work together",
        "  dtype bfloat16 at the prefiller, float32 at the decoder",
        "  page_size 16 at the prefiller, 24 at the decoder",
        "  tp 8 for 8 heads at the prefiller, 3 for 8 heads at the decoder",
    ]


@pytest.mark.parametrize(("words", "code", "said"), [
    (("--from", "tp=8,pages=16"), 2, '--from: "pages=16" is none of'),
    (("--from", "dp=2"), 2, "--from: a prefiller has one group"),
    (("--skip", "8"), 2, "--skip: 8 of 8192 tokens cannot be skipped in units of 16"),
    (("--to", "dtype=int8"), 2, "--to: dtype int8 is none of"),
])
def test_a_mistake_is_named(pdd: Any, words: tuple[str, ...], code: int, said: str) -> None:
    shown = pdd("plan", "transfer", str(CONFIGS / "deepseek-r1.json"), *words)
    assert (shown.returncode, shown.stdout) == (code, "")
    assert said in shown.stderr


def test_a_model_that_is_none(pdd: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 1}')
    shown = pdd("plan", "transfer", str(tmp_path))
    assert shown.returncode == 78
    assert "num_hidden_layers must be a positive integer" in shown.stderr
    assert "nowhere cannot be read" in pdd("plan", "transfer", str(tmp_path / "nowhere")).stderr


@pytest.mark.parametrize("words", ["tp=0", "tp=-1", "tp", "tp=4097", "page=x", "tp=1;page=2", "tp=²"])
def test_a_layout_that_cannot_be(words: str) -> None:
    with pytest.raises(UsageError, match="--to: "):
        parse_layout(words, "--to")
