"""The native decode kernel against the torch backend, which is its specification."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from pdd.kv.layout import KvLayout
from pdd.model.attention import TORCH_DTYPES, Batch, Rows, Segment
from pdd.model.attn_torch import Tiles, TorchAttention, TorchRowsAttention

native = pytest.importorskip("pdd.model._attention", reason="the native attention kernel is not built")
from pdd.model import attn_native  # noqa: E402
from pdd.model.attn_native import NativeAttention  # noqa: E402

NUM_PAGES = 400
SHAPES = {  # heads, kv heads, head_dim, page size
    "group of 3": (9, 3, 64, 16),
    "no groups": (4, 4, 32, 16),
    "group of 7": (14, 2, 64, 8),
    "group of 4": (8, 2, 128, 16),
    "group of 8": (8, 1, 16, 16),
    "group of 2, odd pages": (4, 2, 48, 7),
    "pages of one": (5, 5, 32, 1),
    "pages over a chunk": (6, 2, 80, 300),
}
NO_ROWS = Rows(np.zeros((0, 0), np.int64), np.zeros(0, np.int64))
LENGTHS = (1, 2, 15, 16, 17, 31, 255, 256, 257, 300)


def batch_of(layout: KvLayout, lengths: tuple[int, ...], seed: int = 0) -> Batch:
    """One decode row per length, its pages scattered and shared with no other row."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(layout.num_pages)
    width = max(layout.num_pages_for(length) for length in lengths)
    tables, used = np.zeros((len(lengths), width), np.int64), 0
    for row, length in enumerate(lengths):
        count = layout.num_pages_for(length)
        tables[row, :count] = order[used : used + count]
        tables[row, count:] = tables[row, 0]
        used += count
    assert used <= layout.num_pages
    lens = np.array(lengths, np.int64)
    positions = lens - 1
    pages = tables[np.arange(len(lengths)), positions // layout.page_size]
    return Batch(torch.zeros(len(lengths), dtype=torch.int64), torch.from_numpy(positions), torch.from_numpy(pages),
                 torch.from_numpy(positions % layout.page_size), Rows(tables, lens), (), None, NO_ROWS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kernel", "threads"), [("base", 1), ("x86-64-v3", 1), ("x86-64-v4", 3)])
def test_equals_torch(shape: str, dtype: str, kernel: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, kv_heads, head_dim, page_size = SHAPES[shape]
    lengths = LENGTHS if page_size > 1 else (1, 2, 17, 256, 100)
    layout = KvLayout(2, NUM_PAGES, kv_heads, page_size, head_dim, dtype)
    try:
        native.DecodeAttention(num_heads=1, num_kv_heads=1, head_dim=16, page_size=1, num_pages=1, bf16=False,
                               threads=1, instruction_set=kernel)
    except ValueError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    chosen = functools.partial(native.DecodeAttention, instruction_set=kernel)
    monkeypatch.setattr(attn_native, "DecodeAttention", chosen)
    generator = torch.Generator().manual_seed(7)
    kv = torch.randn(layout.shape, generator=generator).to(TORCH_DTYPES[dtype])
    batch = batch_of(layout, lengths)
    outs, caches = [], []
    for backend in (TorchAttention, NativeAttention):
        cache = kv.clone()
        attention = backend(layout, cache, heads, (0, 19))  # the second layer sees the last 19 tokens
        attention.plan(batch)
        generator.manual_seed(8)
        for layer in range(2):
            fused = (torch.randn(len(lengths), heads + 2 * kv_heads, head_dim, generator=generator) * 2).to(kv.dtype)
            outs.append(attention.run(layer, fused[:, :heads], fused[:, heads:]))
        caches.append(cache)
    assert torch.equal(*caches)
    tolerance = 1e-5 if dtype == "float32" else 0.04  # one bf16 step at 8 is 0.03
    for plain, fast in zip(outs[:2], outs[2:], strict=True):
        torch.testing.assert_close(fast, plain, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "latent", "rope", "page_size"), [(16, 512, 64, 16), (5, 32, 16, 7), (1, 16, 16, 1)])
def test_latents_equal_torch(heads: int, latent: int, rope: int, page_size: int, dtype: str) -> None:
    """One tile per token: keys whose first part is the value; heads that are no multiple of those done together."""
    layout = KvLayout(2, NUM_PAGES, 1, page_size, latent + rope, dtype, tiles=1)
    assert attn_native.supports_latents(layout, latent)
    generator = torch.Generator().manual_seed(7)
    kv = torch.randn(layout.shape, generator=generator).to(TORCH_DTYPES[dtype])
    lengths = LENGTHS if page_size > 1 else (1, 2, 17, 256, 100)
    rows = batch_of(layout, lengths).decode
    q = torch.randn(len(lengths), heads, layout.head_dim, generator=generator).to(kv.dtype)
    plain = TorchRowsAttention(layout, Tiles(layout, kv), heads, (0, 19), latent, 0.07)
    fast = attn_native.NativeRowsAttention(layout, kv, heads, (0, 19), latent, 0.07)
    tolerance = 1e-5 if dtype == "float32" else 0.04
    for layer in range(2):
        outs = [torch.empty(len(lengths), heads, latent, dtype=kv.dtype) for _ in range(2)]
        for backend, out in zip((plain, fast), outs, strict=True):
            backend.plan(rows)
            backend.run(layer, q, out)
        torch.testing.assert_close(outs[1], outs[0], atol=tolerance, rtol=tolerance)


def test_large_scores_do_not_overflow() -> None:
    """Scores of 1e4 in the second chunk: what was summed before must shrink to nothing, not to NaN."""
    layout = KvLayout(1, 32, 1, 16, 16, "float32")
    kv = torch.zeros(layout.shape)
    batch = batch_of(layout, (300,))
    table = batch.decode.tables[0]
    for position in range(300):
        page, slot = int(table[position // 16]), position % 16
        kv[0, page, 0, 0, slot] = 1000.0 if position == 280 else -1000.0 if position % 2 else 0.5
        kv[0, page, 0, 1, slot] = float(position)
    attention = NativeAttention(layout, kv, 1)
    attention.plan(batch)
    out = attention.run(0, torch.full((1, 1, 16), 3.0), torch.zeros(1, 2, 16))
    assert (out == 280.0).all()


def test_mixed_with_segments() -> None:
    layout = KvLayout(1, 64, 2, 16, 32, "float32")
    kv = torch.randn(layout.shape, generator=torch.Generator().manual_seed(1))
    rows = batch_of(layout, (5, 40))
    spare = np.setdiff1d(np.arange(64), rows.decode.tables)[:3]
    positions = torch.arange(20, 45)
    batch = Batch(torch.zeros(27, dtype=torch.int64), torch.cat([rows.positions, positions]),
                  torch.cat([rows.pages, torch.from_numpy(spare)[positions // 16]]),
                  torch.cat([rows.slots, positions % 16]), rows.decode, (Segment(2, 27, 20, spare),), None, NO_ROWS)
    fused = torch.randn(27, 8, 32, generator=torch.Generator().manual_seed(2))
    outs = []
    for backend in (TorchAttention, NativeAttention):
        attention = backend(layout, kv.clone(), 4)
        attention.plan(batch)
        outs.append(attention.run(0, fused[:, :4], fused[:, 4:]))
    torch.testing.assert_close(outs[1], outs[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("page", "length", "message"), [
    (NUM_PAGES, 20, f"row 1 names page {NUM_PAGES}"), (-1, 20, "row 1 names page -1"), (0, 33, "row 1 of 33 tokens"),
    (0, 0, "row 1 of 0 tokens")])
def test_a_table_that_leaves_the_region_is_refused(page: int, length: int, message: str) -> None:
    attention = native.DecodeAttention(num_heads=1, num_kv_heads=1, head_dim=16, page_size=16, num_pages=NUM_PAGES,
                                       bf16=False, threads=1)
    tables = np.array([[0, 1], [2, page]], np.int64)
    lens = np.array([3, length], np.int64)
    with pytest.raises(IndexError, match=message):
        attention.plan(tables.ctypes.data, lens.ctypes.data, 2, 2)


@pytest.mark.parametrize("changes", [{"head_dim": 24}, {"num_heads": 3, "num_kv_heads": 2}, {"page_size": 0}, {"tiles": 3},
                                     {"value_dim": 8, "tiles": 1}, {"value_dim": 32, "tiles": 1}, {"head_dim": 32, "value_dim": 16}])
def test_other_geometries_are_refused(changes: dict[str, int]) -> None:
    fields = dict(num_heads=2, num_kv_heads=2, head_dim=16, page_size=16, num_pages=1, bf16=False, threads=1) | changes
    with pytest.raises(ValueError, match="multiple of 16"):
        native.DecodeAttention(**fields)


@pytest.mark.skipif(not native.ChunkAttention.supported(), reason="this CPU has no AVX512_BF16")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("start", "length"), [(0, 2), (0, 16), (0, 63), (0, 200), (1, 2), (15, 66), (130, 65), (256, 128)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "page_size"), [(9, 3, 64, 16), (4, 4, 32, 8), (8, 1, 128, 64)])
def test_chunks_equal_torch(heads: int, kv_heads: int, head_dim: int, page_size: int, start: int, length: int, threads: int,
                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the edges of pages, of groups of 16 and blocks of 128 keys, of 8 and 64 queries; pages scattered."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    layout = KvLayout(2, 80, kv_heads, page_size, head_dim, "bfloat16")
    assert attn_native.supports_chunks(layout)
    generator = torch.Generator().manual_seed(start + length)
    kv = torch.randn(layout.shape, generator=generator).to(torch.bfloat16)
    table = np.random.default_rng(start).permutation(layout.num_pages)[: layout.num_pages_for(start + length)]
    positions = torch.arange(start, start + length)
    pages = torch.from_numpy(table)[positions // page_size]
    segment = Segment(0, length, start, table)
    batch = Batch(positions, positions, pages, positions % page_size, NO_ROWS, (segment,), None, NO_ROWS)
    fused = (torch.randn(length, heads + 2 * kv_heads, head_dim, generator=generator) * 2).to(torch.bfloat16)
    for window in (0, 1, 20, 129):
        outs = []
        for backend in (TorchAttention, NativeAttention):
            attention = backend(layout, kv.clone(), heads, (0, window))
            attention.plan(batch)
            outs.append(attention.run(1, fused[:, :heads], fused[:, heads:]))
        torch.testing.assert_close(outs[1], outs[0], atol=0.04, rtol=0.04)


@pytest.mark.skipif(not native.ChunkAttention.supported(), reason="this CPU has no AVX512_BF16")
@pytest.mark.parametrize(("pages", "start", "length", "message"), [
    ([0, 80], 0, 20, "names page 80 of 80"), ([0, -1], 0, 20, "names page -1"), ([0, 1], 0, 33, r"\[0, 33\) does not fit 2"),
    ([0, 1], -1, 5, "does not fit"), ([0, 1], 0, 0, "does not fit")])
def test_a_chunk_that_leaves_the_region_is_refused(pages: list[int], start: int, length: int, message: str) -> None:
    kernel = native.ChunkAttention(num_heads=1, num_kv_heads=1, head_dim=32, page_size=16, num_pages=80, threads=1)
    table = np.array(pages, np.int64)
    with pytest.raises(IndexError, match=message):
        kernel.run(0, table.ctypes.data, len(table), start, length, 0, 32, 0)
