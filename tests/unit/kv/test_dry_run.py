"""`pdd plan transfer`: figures that can be checked by hand for two published models, and the arithmetic of time."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from pdd.commands.plan import text
from pdd.errors import ModelError
from pdd.kv.dry_run import NETWORKS, Assumptions, dry_run
from pdd.kv.dry_run_report import Report, Verdict
from pdd.kv.sharding import ShardSpec
from pdd.model.config import parse_config
from pdd.model.fields import Fields
from pdd.model.sketch import LayerWork, Sketch, sketch

CONFIGS = Path(__file__).parents[2] / "model_configs"
R1, QWEN = "deepseek-r1", "qwen3-coder-480b-a35b"


def of(model: str) -> Sketch:
    return sketch(json.loads((CONFIGS / f"{model}.json").read_text()))


def spec(outline: Sketch, tp: int, page: int) -> ShardSpec:
    return ShardSpec(**dataclasses.asdict(outline.kv), page_size=page, num_pages=1, tp=tp)


def planned(model: str, source: tuple[int, int], destination: tuple[int, int], **more: Any) -> Report:
    """`source`, `destination`: (tp, page size)."""
    outline = of(model)
    return dry_run(outline.family, spec(outline, *source), spec(outline, *destination),
                   lambda layer, begin, end: outline.layers[layer].flops(begin, end), prompt_tokens=8192, **more)


def verdict(report: Report, network: str, pages: str) -> Verdict:
    (found,) = (each for each in report.verdicts if (each.network, each.pages) == (network, pages))
    return found


def test_what_a_configuration_says() -> None:
    """Active weights, without embeddings, of models that are published as 37 and 35 billion with them."""
    r1, qwen = of(R1), of(QWEN)
    assert (r1.kv.num_layers, r1.kv.num_kv_heads, r1.kv.tiles, r1.kv.head_dim) == (61, 1, 1, 512 + 64)
    assert (qwen.kv.num_layers, qwen.kv.num_kv_heads, qwen.kv.tiles, qwen.kv.head_dim) == (62, 8, 2, 128)
    for outline, vocabulary, published in ((r1, 2 * 129280 * 7168, 37e9), (qwen, 2 * 151936 * 6144, 35e9)):
        active = sum(layer.active_params for layer in outline.layers) + vocabulary
        assert active == pytest.approx(published, rel=0.02)
    dense, routed = r1.layers[2], r1.layers[3]
    assert dense.active_params - routed.active_params == 3 * 7168 * 18432 - (3 * 7168 * 2048 * 9 + 7168 * 256)


@pytest.mark.parametrize(("change", "said"), [
    ({"num_hidden_layers": 0}, "num_hidden_layers"), ({"model_type": "deepseek_v2", "qk_rope_head_dim": None}, "qk_rope_head_dim"),
    ({"scoring_func": "softmax"}, "scoring_func"),
    ({"torch_dtype": "int8"}, "int8"), ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
])
def test_a_configuration_that_says_too_little(change: dict[str, Any], said: str) -> None:
    config = json.loads((CONFIGS / f"{R1}.json").read_text())
    with pytest.raises(ModelError, match=said):
        sketch({**config, **change})


def test_a_model_without_grouped_heads_has_as_many_as_it_asks_with() -> None:
    plain = {"num_hidden_layers": 2, "num_attention_heads": 6, "hidden_size": 48, "intermediate_size": 9, "dtype": "float16"}
    assert dataclasses.astuple(sketch(plain).kv) == (2, 6, 8, "bfloat16", 2)


@pytest.mark.parametrize("model", [R1, QWEN])
def test_of_a_family_that_runs_a_plan_says_what_running_it_would(model: str) -> None:
    """With everything left out that has a default: a plan of other KV than the nodes have would be a plan for nothing."""
    optional = {"torch_dtype", "first_k_dense_replace", "moe_layer_freq", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim",
                "num_experts", "n_routed_experts", "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers"}
    config = {name: value for name, value in json.loads((CONFIGS / f"{model}.json").read_text()).items() if name not in optional}
    runs, outline = parse_config(Fields(config), Fields({})), sketch(config)
    assert outline.kv == runs.kv_shape(runs.dtype)
    assert outline.kv.dtype == "float32"
    assert [index for index, layer in enumerate(outline.layers) if layer == outline.layers[-1]] == [*runs.moe_layers]


def test_keys_of_other_families_say_which_layers_have_experts() -> None:
    """DeepSeek V2 counts from layer 0, Qwen2-MoE ends each round with one; Mixtral's are as wide as its MLP would be."""
    base = {"num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 100, "num_experts_per_tok": 2}
    shapes = {
        "deepseek_v2": {"n_routed_experts": 4, "moe_intermediate_size": 10, "n_shared_experts": 1, "first_k_dense_replace": 1},
        "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 10, "decoder_sparse_step": 2},
        "mixtral": {"num_local_experts": 4},
    }
    mlps = {}
    for family, more in shapes.items():
        outline = sketch({**base, **more, "model_type": family})
        mlps[family] = [layer.active_params - 4 * 8 * 8 for layer in outline.layers]
    dense, gate = 3 * 8 * 100, 8 * 4
    assert mlps == {"deepseek_v2": [dense, *3 * [gate + 3 * 8 * 30]], "qwen2_moe": 2 * [dense, gate + 3 * 8 * 20],
                    "mixtral": 4 * [gate + 3 * 8 * 200]}


# -- golden -----------------------------------------------------------------------------------------------------------
def test_deepseek_r1_from_eight_copies_to_one_rank() -> None:
    """128 units of 64 tokens of 1,152 bytes, 16 from each of eight copies; each is 72 KiB, more than any NIC needs."""
    assert text(planned(R1, (8, 64), (1, 64), dp=8)) == """\
deepseek_v3: 61 layers, 1 KV head, 1 tile of 576 bfloat16
from  tp 8: 1 head a rank, 8 copies of each; pages of 64 tokens, 72 KiB a layer and rank
to    tp 1 x dp 8: 1 head a rank; pages of 64 tokens, 72 KiB a layer and rank
moves 8191 tokens of KV of a prompt of 8192, in units of 64, steps of 8192

FROM  TO  HEADS  UNITS    BYTES  WRITES  SCATTERED
   0   0      0     16  1.18 MB      16         16
   1   0      0     16  1.18 MB      16         16
   2   0      0     16  1.18 MB      16         16
   3   0      0     16  1.18 MB      16         16
   4   0      0     16  1.18 MB      16         16
   5   0      0     16  1.18 MB      16         16
   6   0      0     16  1.18 MB      16         16
   7   0      0     16  1.18 MB      16         16

OF ALL   UNITS    BYTES  WRITES  SCATTERED
layer      128  9.44 MB     128        128
request   7808   576 MB    7808       7808

NETWORK     PAGES      A WRITE   NEEDS             LAYER  REQUEST  EXPOSED
EFA         adjacent    72 KiB  32 KiB  saturates  189us   11.5ms    189us
EFA         scattered   72 KiB  32 KiB  saturates  189us   11.5ms    189us
ConnectX-7  adjacent    72 KiB  16 KiB  saturates  189us   11.5ms    189us
ConnectX-7  scattered   72 KiB  16 KiB  saturates  189us   11.5ms    189us

computed in 235ms, a layer in 3.85ms, at 400 TFLOP/s a rank; NICs of 400 Gbit/s a rank"""


def test_qwen3_coder_from_eight_ranks_to_four() -> None:
    """Each rank of the decoder puts two heads of two ranks together: 512 units of 8 KiB from each, which lie apart in its
    pages however the pools give them, so a write is too small for either network, and EFA runs out of writes."""
    assert text(planned(QWEN, (8, 16), (4, 16))) == """\
qwen3_moe: 62 layers, 8 KV heads, K and V of 128 bfloat16
from  tp 8: 1 head a rank; pages of 16 tokens, 8 KiB a layer and rank
to    tp 4: 2 heads a rank; pages of 16 tokens, 16 KiB a layer and rank
moves 8191 tokens of KV of a prompt of 8192, in units of 16, steps of 8192

FROM  TO  HEADS  UNITS    BYTES  WRITES  SCATTERED
   0   0      0    512  4.19 MB     512        512
   1   0      1    512  4.19 MB     512        512
   2   1      2    512  4.19 MB     512        512
   3   1      3    512  4.19 MB     512        512
   4   2      4    512  4.19 MB     512        512
   5   2      5    512  4.19 MB     512        512
   6   3      6    512  4.19 MB     512        512
   7   3      7    512  4.19 MB     512        512

OF ALL    UNITS    BYTES  WRITES  SCATTERED
layer      4096  33.6 MB    4096       4096
request  253952  2.08 GB  253952     253952

NETWORK     PAGES      A WRITE   NEEDS             LAYER  REQUEST  EXPOSED
EFA         adjacent     8 KiB  32 KiB  too small  488us   30.2ms    488us
EFA         scattered    8 KiB  32 KiB  too small  488us   30.2ms    488us
ConnectX-7  adjacent     8 KiB  16 KiB  too small  168us   10.4ms    168us
ConnectX-7  scattered    8 KiB  16 KiB  too small  168us   10.4ms    168us

computed in 204ms, a layer in 3.29ms, at 400 TFLOP/s a rank; NICs of 400 Gbit/s a rank"""


def test_equal_shards_merge_when_pages_are_adjacent() -> None:
    report = planned(QWEN, (8, 16), (8, 16))
    assert [(pair.writes_adjacent, pair.writes_scattered) for pair in report.pairs] == [(4, 512)] * 8
    assert verdict(report, "EFA", "adjacent").bytes_per_write == 1 << 20
    assert verdict(report, "EFA", "adjacent").saturates
    assert not verdict(report, "EFA", "scattered").saturates
    in_four = planned(QWEN, (8, 16), (8, 16), assumed=Assumptions(chunk_tokens=2048))
    assert in_four.layer.writes_adjacent == report.layer.writes_adjacent  # 1 MiB is a step's pages here
    assert planned(QWEN, (8, 16), (8, 16), assumed=Assumptions(chunk_tokens=512)).layer.writes_adjacent == 8 * 16


def test_the_last_token_and_those_that_are_there_do_not_travel() -> None:
    report = planned(QWEN, (1, 64), (2, 32), skip_tokens=4096)
    assert (report.moved_tokens, report.layer.units) == (8191, 128 * 2 * 8)  # K and V of each head, 32 tokens at a time
    assert report.layer.nbytes == 4096 * 8 * 2 * 256


# -- time -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(20))
def test_time_is_that_of_a_pipeline(seed: int) -> None:
    """Layers of equal cost in one step: the wire is hidden but for its last layer, or it is the bottleneck from the first on."""
    rng = random.Random(seed)
    work, num_layers = LayerWork(rng.randrange(1, 10**9), rng.randrange(1, 10**5)), rng.randrange(1, 9)
    source = ShardSpec(num_layers, 4, 64, "bfloat16", page_size=16, num_pages=1, tp=rng.choice([1, 2, 4]))
    destination = dataclasses.replace(source, tp=rng.choice([1, 2, 4]))
    assumed = Assumptions(rank_flops=10.0 ** rng.uniform(13, 19), rank_bits_per_second=1e9 * rng.randrange(1, 800))
    report = dry_run("x", source, destination, lambda _, a, b: work.flops(a, b), prompt_tokens=rng.randrange(2, 8000), assumed=assumed)
    computing = work.flops(0, report.moved_tokens) / source.tp / assumed.rank_flops
    assert report.request_compute_seconds == pytest.approx(num_layers * computing)
    for each in report.verdicts:
        busiest_share = 1 / min(source.tp, destination.tp)
        writes = report.layer.writes_adjacent if each.pages == "adjacent" else report.layer.writes_scattered
        wire = max(report.layer.nbytes / (assumed.rank_bits_per_second / 8), writes / each.writes_per_second) * busiest_share
        assert each.layer_seconds == pytest.approx(wire)
        assert each.exposed_seconds == pytest.approx(max(wire, num_layers * wire - (num_layers - 1) * computing))


def test_a_prompt_in_steps_hides_what_one_step_cannot() -> None:
    """What is exposed is the last layer of the last step, an eighth of the prompt."""
    whole, steps = (verdict(planned(QWEN, (8, 16), (8, 16), assumed=Assumptions(chunk_tokens=tokens)), "EFA", "adjacent")
                    for tokens in (8192, 1024))
    assert steps.request_seconds == pytest.approx(whole.request_seconds)
    assert steps.exposed_seconds == pytest.approx(whole.exposed_seconds / 8)


def test_networks_are_the_published_ones() -> None:
    assert NETWORKS == (("EFA", 2_100_000, 32 * 1024), ("ConnectX-7", 11_000_000, 16 * 1024))


def test_two_that_refuse_each_other_have_no_plan() -> None:
    report = planned(QWEN, (8, 16), (3, 24))
    assert [each.field for each in report.refused] == ["page_size", "tp"]
    assert (report.pairs, report.verdicts, report.layer.units) == ((), (), 0)
