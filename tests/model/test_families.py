"""Every family against transformers, token for token, on one rank and on several."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from pdd.model.demo import write_demo_model
from pdd.model.families import FAMILIES
from tests.model.model_harness import Harness
from tests.model.oracle import GENERATED, reference, text

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
DEEP_YARN = {**YARN, "factor": 40.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.8}
WINDOW = {"use_sliding_window": True, "sliding_window": 20}
CASES: dict[str, dict[str, Any]] = {
    "llama-8-kv-heads": dict(family="llama", num_heads=8, num_kv_heads=8),
    "llama-yarn": dict(family="llama", rope_scaling=YARN),
    "mistral": dict(family="mistral", sliding_window=24),
    "mistral-short-window": dict(family="mistral", sliding_window=5, num_kv_heads=1),
    "mistral-no-window": dict(family="mistral", sliding_window=None, head_dim=32),
    "qwen2-windowed-layers": dict(family="qwen2", max_window_layers=1, **WINDOW),
    "qwen3-windowed-layers": dict(family="qwen3", **WINDOW, layer_types=["sliding_attention", "full_attention", "full_attention"]),
    "qwen3_moe": dict(family="qwen3_moe"),
    "qwen3_moe-mixed": dict(family="qwen3_moe", num_experts=6, num_experts_per_tok=3, norm_topk_prob=False, num_kv_heads=1,
                            mlp_only_layers=[0], tie_embeddings=True),
    "deepseek_v3": dict(family="deepseek_v3"),
    "deepseek_v3-yarn": dict(family="deepseek_v3", rope_scaling=DEEP_YARN, norm_topk_prob=False),
    "deepseek_v3-plain-queries": dict(family="deepseek_v3", q_lora_rank=None, n_group=1, topk_group=1, rope_interleave=False,
                                      first_k_dense_replace=0, n_shared_experts=2, attention_bias=True),
}
PROMPTS = [text(1, 1), text(2, 15), text(4, 17), text(6, 131)]
CHUNKS = (1, 7, 16, 50)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A case's model folder and what transformers says, made once."""
    @functools.cache
    def make(case: str) -> tuple[Path, list[list[int]]]:
        directory = write_demo_model(tmp_path_factory.mktemp(case), **CASES[case])
        return directory, reference(directory, PROMPTS)
    return make


def cases() -> list[Any]:
    """Each family on 1, 2 and 4 ranks; its variants on 2 in `make test-all` only."""
    return [pytest.param(case, world, marks=pytest.mark.slow if world == 2 and case not in FAMILIES else ())
            for case in CASES for world in (1, 2, 4)]


@pytest.mark.parametrize(("case", "world"), cases())
def test_greedy_tokens_equal_transformers(case: str, world: int, model_of: Any) -> None:
    """Mixed batches: prompts around a page's edge, odd chunks, some decoding while others still prefill."""
    model, expected = model_of(case)
    harness = Harness(model, world=world)
    requests = [harness.request(prompt, chunk=chunk) for prompt, chunk in zip(PROMPTS, CHUNKS, strict=True)]
    assert harness.run(requests, GENERATED) == expected
    assert {counter.value for counter in harness.counters} == {harness.step_number * harness.layout.num_layers}


@pytest.mark.parametrize("case", [case for case in CASES if "window" in case or case.startswith("deepseek")])
def test_the_plain_backend(case: str, model_of: Any) -> None:
    """The specification of the native kernels."""
    model, expected = model_of(case)
    harness = Harness(model, attention="torch")
    requests = [harness.request(prompt, chunk=chunk) for prompt, chunk in zip(PROMPTS, CHUNKS, strict=True)]
    assert harness.run(requests, GENERATED) == expected
