"""KV between unequal shards against equal ones, over the real fabric between two processes, all in one run.

    python tests/bench/bench_shard.py [--library PATH] [--rounds N] [--json OUT]

The plans are those of a node (`plan_node_writes`), of one layer: TP 1 -> 1, 2 -> 1 and 1 -> 2 move the same tokens of the
same two heads in writes of the same size, to scattered pages, so that nothing merges. A rank is a region of its own.
Rounds, turns, ratios and the judgement of a run that others disturbed are those of bench_fabric.py.

Bound: unequal shards at 0.9 of the bytes per second of equal ones.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fabric"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_fabric import BIND, judge, measure, ratio
from bench_plan import native_plan
from common import median
from fabric_node import PAGE, Node, RemoteNode, spawn

from pdd.fabric import _native as native
from pdd.kv.sharding import ShardSpec, node_bytes, node_units, plan_node_writes

ROUND_BYTES = 64 << 20
SHAPES = ((1, 1), (2, 1), (1, 2))


def spec(tp: int, unit_tokens: int) -> ShardSpec:
    num_pages = 2 * ROUND_BYTES // (unit_tokens * 2 * 2 * 256)  # of two heads, K and V, 256 bytes a token
    return ShardSpec(num_layers=1, num_kv_heads=2, head_dim=128, dtype="bfloat16", page_size=unit_tokens,
                     num_pages=num_pages, tp=tp)


class Shards:
    """One pair of degrees; all share two nodes of two regions each."""

    def __init__(self, writer: Node, reader: RemoteNode, ends: tuple[int, int], degrees: tuple[int, int], write_bytes: int) -> None:
        self.name = f"{degrees[0]} -> {degrees[1]}"
        self.writer, self.reader, self.ends = writer, reader, ends
        # A write is both heads of a page between equal shards, one head of a page twice as long between others.
        unit_tokens = write_bytes // 512 // (2 if degrees == (1, 1) else 1)
        source, destination = (spec(tp, unit_tokens) for tp in degrees)
        num_tokens = source.num_pages // 2 * unit_tokens
        rng = np.random.default_rng(1)
        pages = [rng.permutation(each.num_pages)[: each.num_pages // 2].tolist() for each in (source, destination)]
        writes = plan_node_writes(source, destination, num_tokens=num_tokens, src_pages=pages[0], dst_pages=pages[1])
        assert {int(each.nbytes[0]) for each in writes} == {write_bytes}
        assert node_bytes(source, destination, num_tokens) == ROUND_BYTES
        self.units = node_units(source, destination, num_tokens)
        self.plans = [(native_plan(each), len(each)) for each in writes]
        self.watch = writer.watch()

    def round(self) -> float:
        fabric, (ours, theirs) = self.writer.fabric, self.ends
        key = self.reader.call("imm_allocate", theirs)
        self.reader.call("imm_arm", key, self.units)
        self.reader.send("wait", native.IMM_REACHED, key, 60.0)
        start = time.perf_counter()
        transfer = fabric.open_transfer(ours, key)
        for plan, length in self.plans:
            fabric.arm(transfer, self.watch, 0, plan, 0, length)
        fabric.finish(transfer)
        self.reader.receive()
        seconds = time.perf_counter() - start
        self.writer.wait(native.TRANSFER_DONE, transfer, 60.0)
        self.reader.call("imm_retire", key)
        return seconds

    def pids(self) -> list[int]:
        return [self.reader.process.pid] if self.name == "1 -> 1" else []


@contextmanager
def contenders(args: argparse.Namespace, pattern: str, provider: str) -> Iterator[list[Any]]:
    num_small = 2 * ROUND_BYTES // PAGE
    with ExitStack() as stack:
        reader = spawn(args.library, provider, [BIND], num_small)
        stack.callback(reader.stop)
        writer = Node(args.library, provider, [BIND], num_small, window_ops=args.window)
        stack.callback(writer.close)
        writer.fill(1)
        assert (writer.add_region(), reader.add_region()) == (1, 1)
        ours, theirs = writer.open(), reader.open()
        writer.connect(ours, reader.describe(theirs))
        reader.connect(theirs, writer.describe(ours, False))
        yield [Shards(writer, reader, (ours, theirs), degrees, args.write_bytes) for degrees in SHAPES]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="", help="libfabric to use (default: the one a node would choose)")
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--model", help="not used: make bench gives it to every benchmark")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    chosen = native.library(args.library)
    args.library = chosen["path"]
    provider = native.probe(args.library)[0]["provider"]

    rows: list[dict[str, Any]] = []
    bounds: list[tuple[str, float, str, float]] = []
    busiest = 0.0
    for args.write_bytes in (16 << 10, 64 << 10):
        seconds, foreign = measure(args, "scattered", provider, contenders)
        busiest = max(busiest, foreign)
        for name, times in seconds.items():
            of_equal = ratio(seconds, "1 -> 1", name)
            rows.append({"TP": name, "write KiB": args.write_bytes >> 10, "GB/s": ROUND_BYTES / median(times) / 1e9,
                         "of 1 -> 1": of_equal, "foreign": foreign})  # fmt: skip
            if name != "1 -> 1":
                bounds.append((f"{args.write_bytes >> 10} KiB: TP {name} of 1 -> 1", of_equal, ">=", 0.9))
    title = f"{ROUND_BYTES >> 20} MiB a round, window {args.window}, {provider} of {chosen['version']}"
    return judge(title, rows, bounds, args.json, busiest)


if __name__ == "__main__":
    sys.exit(main())
