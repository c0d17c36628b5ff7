"""What planning a transfer costs: 128k tokens, 80 layers, shards of several kinds.

    python tests/bench/bench_plan.py [--repeats N] [--json OUT]

Planned as a prefiller does when a request gets its pages: the arrays of all pairs of ranks, then the fabric's plans of
them; then what every step asks, which entries its chunk makes sendable. Pages are scattered. Each is timed `repeats`
times, the median counts. Beside it, in the same turns, a plain copy of the arrays that the plan consists of: the least
that making them can cost.

Bounds: 50 ms for the whole plan of 128k tokens from TP 8 to 4, and 2 us for each page of each layer of each pair, which
is as much as a plan would cost that every layer made again.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import median, report

from pdd.fabric import _native as native
from pdd.kv.sharding import ShardSpec, ShardWrites, plan_node_writes

TOKENS = 128 << 10
CHUNK = 2048
BUDGET_SECONDS = 50e-3
PAGE_LAYER_SECONDS = 2e-6
GQA = ShardSpec(num_layers=80, num_kv_heads=8, head_dim=128, dtype="bfloat16", page_size=16, num_pages=20_000, tp=8)
MLA = ShardSpec(num_layers=80, num_kv_heads=1, head_dim=576, dtype="bfloat16", tiles=1, page_size=16, num_pages=20_000, tp=8)
SHAPES = {
    "8 -> 4": (GQA, dataclasses.replace(GQA, tp=4)),
    "4 -> 8": (dataclasses.replace(GQA, tp=4), GQA),
    "8 -> 8": (GQA, GQA),
    "8 -> 4, pages 16 -> 32": (GQA, dataclasses.replace(GQA, tp=4, page_size=32)),
    "MLA 8 -> 1": (MLA, dataclasses.replace(MLA, tp=1)),
    "MLA 8 -> 8": (MLA, MLA),
}


def native_plan(writes: ShardWrites) -> Any:
    return native.WritePlan(
        src_region=writes.src_rank, dst_region=writes.dst_rank, src_offset=writes.src_offset, dst_offset=writes.dst_offset,
        nbytes=writes.nbytes, units=writes.units, src_layer_stride=writes.src_layer_stride,
        dst_layer_stride=writes.dst_layer_stride, num_layers=writes.num_layers,
    )


def measure(source: ShardSpec, destination: ShardSpec, repeats: int) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    tables = [rng.permutation(spec.num_pages)[: TOKENS // spec.page_size].tolist() for spec in (source, destination)]
    arrays, plans, chunks, copies = [], [], [], []
    for _ in range(repeats + 1):  # the first touches memory and is left out
        start = time.perf_counter()
        writes = plan_node_writes(source, destination, num_tokens=TOKENS, src_pages=tables[0], dst_pages=tables[1])
        arrays.append(time.perf_counter() - start)
        start = time.perf_counter()
        kept = [native_plan(each) for each in writes]
        plans.append(time.perf_counter() - start)
        start = time.perf_counter()
        ends = [each.entries(begin, begin + CHUNK)[1] for begin in range(0, TOKENS, CHUNK) for each in writes]
        chunks.append((time.perf_counter() - start) / (TOKENS // CHUNK))
        assert ends[-1] == len(kept[-1])
        start = time.perf_counter()
        for each in writes:
            for column in (each.src_offset, each.dst_offset, each.nbytes, each.units):
                column.copy()
        copies.append(time.perf_counter() - start)
    whole = median([a + b for a, b in zip(arrays[1:], plans[1:], strict=True)])
    pages = len(writes) * TOKENS // min(source.page_size, destination.page_size) * source.num_layers
    return {
        "pairs": len(writes), "entries": sum(map(len, writes)), "arrays ms": 1e3 * median(arrays[1:]),
        "native ms": 1e3 * median(plans[1:]), "a step us": 1e6 * median(chunks[1:]), "of 50 ms": whole / BUDGET_SECONDS,
        "of 2 us": whole / pages / PAGE_LAYER_SECONDS, "of a copy": whole / median(copies[1:]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--model", help="not used: make bench gives it to every benchmark")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    bounds: list[tuple[str, float, str, float]] = []
    for name, (source, destination) in SHAPES.items():
        row = measure(source, destination, args.repeats)
        rows.append({"shards": name, **row})
        bounds.append((f"{name}: of 2 us a page, layer and pair", row["of 2 us"], "<=", 1.0))
    bounds.append(("8 -> 4: the plan of the 50 ms", rows[0]["of 50 ms"], "<=", 1.0))
    return report(f"planning {TOKENS >> 10}k tokens, {GQA.num_layers} layers", rows, bounds, args.json)


if __name__ == "__main__":
    sys.exit(main())
