"""Over how many ranks a model divides, and that what is counted beforehand is what loading takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pdd.model.config import load_config
from pdd.model.demo import write_demo_model
from pdd.model.families import FAMILIES
from pdd.model.fit import group_fit, sizes_to_look_at
from pdd.model.shard import Shard
from pdd.model.tensor_parallel import num_parameters, param_bytes, refusals
from pdd.model.tensors import tensors_of
from pdd.model.transformer import load_model


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_counted_is_what_loading_takes(family: str, tmp_path: Path) -> None:
    for case in ({"vocab_size": 265}, {"tie_embeddings": True}):
        config = load_config(model := write_demo_model(tmp_path / str(len(case)) / "".join(case), family, **case))
        assert num_parameters(config) == sum(
            entry.nbytes // 4 for entry in _entries(model))
        for world, dtype in ((1, "float32"), (4, "bfloat16")):
            for rank in range(world):
                loaded = load_model(model, config, dtype=dtype, max_context=64, shard=Shard(rank, world))
                assert param_bytes(config, Shard(rank, world), dtype) == loaded.param_bytes


def _entries(model: Path) -> list:
    from pdd.model.safetensors_file import read_directory
    return list(read_directory(model).values())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_divides_where_nothing_is_refused_and_nowhere_else(family: str, tmp_path: Path) -> None:
    config = load_config(write_demo_model(tmp_path, family, num_heads=12, num_kv_heads=4, hidden_size=96,
                                          intermediate_size=144))
    assert refusals(config, 1) == ()
    for tp in range(1, 17):
        try:
            for spec in tensors_of(config):
                spec.kept(config, Shard(tp - 1, tp))
            divides = True
        except AssertionError:
            divides = False
        assert divides == (refusals(config, tp) == ())


def test_the_largest_pool(tmp_path: Path) -> None:
    config = load_config(write_demo_model(tmp_path, num_heads=4, num_kv_heads=2))
    assert set(sizes_to_look_at(config)) == {1, 2, 4, 8, 16}
    whole = param_bytes(config, Shard(), "float32")
    page = 3 * 2 * 2 * 16 * 16 * 4  # layers, heads, K and V, tokens, dim, bytes
    for free, pages, missing in ((whole + 10 * page, 5, 0), (whole + page, 0, 0), (whole - 8, 0, 8)):
        fit = group_fit(config, 1, dtype="float32", page_size=16, free_bytes=free, fraction=0.5)
        assert (fit.num_pages, fit.missing_bytes, fit.fits) == (pages, missing, pages > 0)
    assert dataclasses.replace(fit, refused=("why",)).fits is False
    every = sum(param_bytes(config, Shard(rank, 4), "float32") for rank in range(4))
    fit = group_fit(config, 4, dtype="float32", page_size=16, free_bytes=every + 10 * page, fraction=1.0)
    assert (fit.page_bytes, fit.num_pages) == (page // 2, 5)  # two copies of each head
