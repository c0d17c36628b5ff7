"""The forward pass against transformers, token for token, through step plans."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from pdd.engine.batch import NewRow, Row, Sampling, StepPlan
from pdd.engine.rank_runner import BadPlan
from pdd.kv.layout import KvLayout
from pdd.model.attention import Batch, Rows, Segment
from pdd.model.attn_torch import TorchAttention
from pdd.model.backends import make_attention
from pdd.model.config import load_config
from pdd.model.demo import write_demo_model
from pdd.model.layers import DenseLinear, PackedLinear, can_pack
from pdd.model.shard import Shard
from pdd.model.transformer import load_model
from tests.model.model_harness import FakeCounter, Harness, in_ranks
from tests.model.oracle import GENERATED, reference, text

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
CASES = {
    "llama": dict(family="llama"),
    "llama-tied-mha": dict(family="llama", tie_embeddings=True, num_kv_heads=4),
    "llama-llama3-rope": dict(family="llama", rope_theta=500000.0, rope_scaling=LLAMA3),
    "llama-linear-rope": dict(family="llama", rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "qwen2": dict(family="qwen2", num_kv_heads=1),
    "qwen2-tied": dict(family="qwen2", tie_embeddings=True),
    "qwen3-wide-heads": dict(family="qwen3", head_dim=32),
    "qwen3-tied-narrow-heads": dict(family="qwen3", tie_embeddings=True, head_dim=24),
}
NATIVE = importlib.util.find_spec("pdd.model._attention") is not None


@pytest.mark.parametrize("attention", ["torch", "native"])
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_transformers(case: str, attention: str, tmp_path: Path) -> None:
    """Mixed batches: prompts of lengths around a page edge, odd chunks, some decoding while others still prefill."""
    write_demo_model(tmp_path, **CASES[case])
    prompts = [text(1, 1), text(2, 15), text(3, 16), text(4, 17), text(5, 100), text(6, 131)]
    if attention == "native" and (not NATIVE or CASES[case].get("head_dim", 16) % 16):
        pytest.skip("the native attention kernel is not built, or does not take this head_dim")
    harness = Harness(tmp_path, attention=attention)
    chunks = (1, 7, 16, 17, 33, 64)
    requests = [harness.request(prompt, chunk=chunk) for prompt, chunk in zip(prompts, chunks, strict=True)]
    assert harness.run(requests, GENERATED) == reference(tmp_path, prompts)
    assert harness.counter.value == harness.step_number * harness.layout.num_layers


@pytest.mark.parametrize("page_size", [1, 8, 64])
def test_page_size_does_not_change_tokens(page_size: int, tmp_path: Path) -> None:
    write_demo_model(tmp_path)
    prompts = [text(7, 70), text(8, 40)]
    harness = Harness(tmp_path, page_size=page_size, num_pages=256)
    got = harness.run([harness.request(prompt, chunk=29) for prompt in prompts], GENERATED)
    assert got == reference(tmp_path, prompts)


def decoded_after_prefill(model_dir: Path, prompt: list[int], spoilt_page: int | None = None) -> list[int]:
    """As on a decoder whose pages a prefiller filled: one token at start = n - 1, all pages new to the row."""
    harness = Harness(model_dir)
    prefill = harness.request(prompt[:-1], sampling=None, chunk=20)
    while prefill.done < len(prefill.tokens):
        assert harness.step([prefill]).sampled == ()
    pages = [int(page) for page in harness.runner._rows[prefill.row_id].table[: prefill.num_pages]]
    if spoilt_page is not None:
        harness.kv[:, pages[spoilt_page]] = 0
    request = harness.request(prompt)
    request.done = len(prompt) - 1
    harness.free.extend(reversed(pages))  # popped again in the same order
    return harness.run([request], GENERATED)[0]


@pytest.mark.parametrize("length", [2, 16, 17, 18, 50])
def test_decoder_continues_from_pages_that_another_filled(length: int, tmp_path: Path) -> None:
    write_demo_model(tmp_path)
    prompt = text(length, length)
    assert decoded_after_prefill(tmp_path, prompt) == reference(tmp_path, [prompt])[0]


def test_wrong_kv_changes_tokens(tmp_path: Path) -> None:
    """The demo model is sensitive enough for the tests above to mean something: one lost page of seven is seen."""
    write_demo_model(tmp_path)
    prompt = text(9, 100)
    assert decoded_after_prefill(tmp_path, prompt, spoilt_page=2) != reference(tmp_path, [prompt])[0]


@pytest.mark.parametrize("attention", ["torch", ""])
def test_rows_never_look_into_pages_of_others(attention: str, tmp_path: Path) -> None:
    """A batch pads short block tables; not with page 0, whose owner may hold anything there."""
    write_demo_model(tmp_path)
    prompts = [text(11, 100), text(12, 5)]
    harness = Harness(tmp_path, attention=attention)
    harness.free.remove(0)
    harness.kv[:, 0] = float("nan")
    assert harness.run([harness.request(prompt) for prompt in prompts], GENERATED) == reference(tmp_path, prompts)


def test_tokens_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    """A sampled row alone, in company, and after a preemption gives the same tokens."""
    write_demo_model(tmp_path)
    sampling = Sampling(temperature=1.3, top_p=0.9, seed=77, frequency_penalty=0.3)
    prompt = text(10, 40)
    alone = Harness(tmp_path)
    want = alone.run([alone.request(prompt, sampling=sampling)], GENERATED)[0]
    crowd = Harness(tmp_path, seed=5)
    requests = [crowd.request(text(20 + index, 30 + index), sampling=Sampling(temperature=1.0, seed=index))
                for index in range(5)]
    requests.insert(2, subject := crowd.request(prompt, sampling=sampling, chunk=11))
    crowd.run(requests, 5)
    subject.known, subject.done, subject.num_pages = False, 0, 0  # preempted: pages lost, starts over
    subject.row_id = 100
    crowd.step([subject], gone=tuple(request.row_id for request in requests if request is not subject))
    assert crowd.run([subject], GENERATED)[0] == want


@pytest.mark.parametrize(("family", "kv_heads", "vocab"), [
    ("qwen2", 2, 264), ("llama", 1, 264), ("llama", 2, 265), ("qwen3_moe", 1, 263), ("deepseek_v3", 1, 266)])
def test_ranks_give_the_logits_of_one(family: str, kv_heads: int, vocab: int, tmp_path: Path) -> None:
    """KV heads that are divided and such that are copied; a vocabulary that is and one that is not a multiple of the ranks."""
    write_demo_model(tmp_path, family, num_kv_heads=kv_heads, vocab_size=vocab)
    config = load_config(tmp_path)
    batch = _one_segment(text(3, 33))
    whole = _logits(tmp_path, config, Shard(), batch)
    for world in (2, 4):
        results = in_ranks(world, lambda rank, ranks, world=world: _logits(tmp_path, config, Shard(rank, world), batch, ranks))
        for logits in results:
            assert logits.shape == whole.shape
            assert torch.equal(logits, results[0])
            torch.testing.assert_close(logits, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=pytest.mark.skipif(not NATIVE, reason="not built"))])
def test_the_last_layer_is_computed_for_wanted_tokens_alone(tmp_path: Path, backend: str) -> None:
    """Two decode rows and a chunk: the same logits whether all are wanted or some, the same KV when none are."""
    write_demo_model(tmp_path)
    config = load_config(tmp_path)
    model = load_model(tmp_path, config, dtype="float32", max_context=256)
    layout = KvLayout(config.num_layers, 16, model.num_kv_heads, 16, config.head_dim, "float32")
    before = torch.randn(layout.shape, generator=torch.Generator().manual_seed(3))
    tables, lens = np.array([[3, 4, 5], [6, 6, 6]], np.int64), np.array([40, 7], np.int64)
    chunk = Segment(2, 22, 10, np.array([8, 9], np.int64))
    positions = torch.cat([torch.from_numpy(lens - 1), torch.arange(10, 30)])
    pages = torch.cat([torch.tensor([5, 6]), torch.from_numpy(chunk.table)[torch.arange(10, 30) // 16]])
    every = Rows(np.concatenate([tables, np.tile(np.array([8, 9, 9], np.int64), (20, 1))]), (positions + 1).numpy())
    results = {}
    for name, wanted in {"all": list(range(22)), "some": [1, 21], "none": []}.items():
        batch = Batch(torch.arange(22) + 5, positions, pages, positions % 16, Rows(tables, lens), (chunk,),
                      torch.tensor(wanted) if wanted else None, Rows(every.tables[wanted], every.kv_lens[wanted]))
        kv, counter = before.clone(), FakeCounter()
        with torch.inference_mode():
            attention, chosen = make_attention(model, layout, kv, plain=backend == "torch")
            assert chosen == backend
            logits = model.forward(batch, attention, counter)
        assert counter.value == config.num_layers
        results[name] = logits, kv
    assert results["none"][0] is None
    torch.testing.assert_close(results["some"][0], results["all"][0][[1, 21]], atol=1e-4, rtol=1e-4)
    for name in ("some", "none"):
        torch.testing.assert_close(results[name][1], results["all"][1], atol=1e-5, rtol=1e-5)


def _one_segment(prompt: list[int]) -> Batch:
    count = len(prompt)
    positions = torch.arange(count)
    table = torch.arange(-(-count // 16)).numpy()
    return Batch(torch.tensor(prompt), positions, positions // 16, positions % 16,
                 Rows(np.zeros((0, 0), np.int64), np.zeros(0, np.int64)), (Segment(0, count, 0, table),),
                 torch.tensor([count - 1]), Rows(table[None, :], np.array([count])))


def _logits(directory: Path, config, shard: Shard, batch: Batch, ranks=None) -> torch.Tensor:
    model = load_model(directory, config, dtype="float32", max_context=256, shard=shard)
    layout = config.kv_shape("float32").layout_over(shard.world, 16, 8)
    attention, _ = make_attention(model, layout, torch.zeros(layout.shape), plain=True)
    with torch.inference_mode():
        return model.forward(batch, attention, FakeCounter(), ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 8, 65])
def test_packed_linear_equals_dense(dtype: torch.dtype, rows: int) -> None:
    if not can_pack(dtype):
        pytest.skip("this torch has no packed oneDNN linear")
    generator = torch.Generator().manual_seed(rows)
    weight, bias = torch.randn(96, 64, generator=generator).to(dtype), torch.randn(96, generator=generator).to(dtype)
    x = torch.randn(rows, 64, generator=generator).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1  # one bf16 step at |y| ~ 16
    packed, dense = PackedLinear(weight, bias)(x), DenseLinear(weight, bias)(x)
    torch.testing.assert_close(packed, dense, atol=tolerance, rtol=tolerance)


def test_bf16_stays_near_fp32(tmp_path: Path) -> None:
    """bf16 is no token-for-token test (near ties), but the first logits must be near."""
    write_demo_model(tmp_path)
    config, batch = load_config(tmp_path), _one_segment(text(1, 40))
    exact = _logits(tmp_path, config, Shard(), batch)
    model = load_model(tmp_path, config, dtype="bfloat16", max_context=256)
    layout = KvLayout(config.num_layers, 8, model.num_kv_heads, 16, config.head_dim, "bfloat16")
    attention = TorchAttention(layout, torch.zeros(layout.shape, dtype=torch.bfloat16), model.num_heads)
    with torch.inference_mode():
        near = model.forward(batch, attention, FakeCounter())
    assert near.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(near.float(), exact)[0] > 0.98


BAD_ROWS = {
    "unknown row": (Row(9, (1,), 0, (0,), sample=False), "row 9: is not known"),
    "no tokens": (Row(1, (), 0, (0,), sample=False), "has no tokens"),
    "no page": (Row(1, (1,) * 17, 0, (3,), sample=False), "do not hold 17"),
    "page out of range": (Row(1, (1,), 0, (128,), sample=False), r"not all within \[0, 128\)"),
    "negative page": (Row(1, (1,), 0, (-1,), sample=False), "not all within"),
    "beyond the context": (Row(1, (1,), 2048, (0,) * 129, sample=False), "leave the context of 2048"),
    "token out of range": (Row(1, (264,), 0, (0,), sample=False), "token id is outside"),
    "sampled without parameters": (Row(2, (1,), 0, (0,), sample=True), "without sampling parameters"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_plan_is_refused_before_it_touches_a_page(case: str, tmp_path: Path) -> None:
    write_demo_model(tmp_path)
    harness = Harness(tmp_path)
    row, message = BAD_ROWS[case]
    new = (NewRow(1, (1,), (), Sampling()), NewRow(2, (1,), (), None))
    with pytest.raises(BadPlan, match=message):
        harness.runner.run(StepPlan(0, (), new, (row,)))
    assert (harness.kv == 1e3).all()
    assert harness.counter.value == 0
    with pytest.raises(BadPlan, match="step 5 came where step 0"):
        harness.runner.run(StepPlan(5, (), (), ()))


def test_empty_plan_bumps_the_counter(tmp_path: Path) -> None:
    """The watcher's arithmetic (step * layers + layer + 1) holds for a step without rows too."""
    write_demo_model(tmp_path)
    harness = Harness(tmp_path)
    harness.step([])
    assert harness.counter.value == harness.layout.num_layers
