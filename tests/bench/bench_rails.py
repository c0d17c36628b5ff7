"""What NICs add, and what a page costs the worker.

    python tests/bench/bench_rails.py [--cost BUILD/tests/native/sender_cost] [--library PATH] [--json OUT]

NICs: two nodes in network namespaces joined by cables that tbf holds to one rate each; the same scattered pages over one,
two and four of them, in turns; a ratio is the median over the turns. Needs root; says so and goes on without.
Cost: 1 to 4,096 transfer sets of 1 to 4,096 pages through the worker's Sender over a port that does nothing, per page.
`sender_cost` is built by `make native-test`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fabric"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_fabric import FOREIGN, cpu_seconds
from common import median, report
from fabric_node import PAGE, spawn
from namespaces import Unavailable, two_hosts

from pdd.fabric import _native as native

COST = Path(__file__).resolve().parents[2] / "build/native-tests/tests/native/sender_cost"
RATE = 400  # Mbit/s of one cable: four of them leave a small machine idle
Bounds = list[tuple[str, float, str, float]]


class Rails:
    """A pair of nodes joined by some of the cables."""

    def __init__(self, library: str, hosts: Any, nics: slice, pages: int, stack: ExitStack) -> None:
        here, there = hosts
        self.pages = pages
        self.reader = spawn(library, "tcp", there.addresses[nics], 2 * pages, prefix=there.prefix)
        stack.callback(self.reader.stop)
        self.writer = spawn(library, "tcp", here.addresses[nics], 2 * pages, prefix=here.prefix)
        stack.callback(self.writer.stop)
        self.to_reader, self.from_writer = self.writer.open(), self.reader.open()
        self.writer.connect(self.to_reader, self.reader.describe(self.from_writer))
        self.reader.connect(self.from_writer, self.writer.describe(self.to_reader, False))

    def round(self) -> float:
        key = self.reader.call("imm_allocate", self.from_writer)
        self.reader.call("imm_arm", key, self.pages)
        self.reader.send("wait", native.IMM_REACHED, key, 120.0)
        start = time.perf_counter()
        transfer = self.writer.push(self.to_reader, key, list(range(self.pages)), list(range(0, 2 * self.pages, 2)))
        self.reader.receive()
        seconds = time.perf_counter() - start
        self.writer.wait(native.TRANSFER_DONE, transfer, 120.0)
        self.reader.call("imm_retire", key)
        return seconds


def measure_nics(args: argparse.Namespace, rows: list[dict[str, Any]], bounds: Bounds) -> None:
    library = native.library(args.library)["path"]
    slow = RATE // 4
    try:
        with two_hosts([RATE] * 4 + [slow]) as hosts, ExitStack() as stack:
            contenders = {
                "1 NIC": slice(0, 1), "2 NICs": slice(0, 2), "4 NICs": slice(0, 4), "1 and a slow one": slice(3, 5),
            }  # fmt: skip
            rails = {name: Rails(library, hosts, nics, args.pages, stack) for name, nics in contenders.items()}
            seconds: dict[str, list[float]] = {name: [] for name in rails}
            for turn in range(args.rounds + 1):
                for name, rail in rails.items():
                    elapsed = rail.round()
                    if turn > 0:  # the first connects
                        seconds[name].append(elapsed)
    except Unavailable as error:
        print(f"NICs not measured: {error}")
        return
    for name, times in seconds.items():
        gain = median([one / some for one, some in zip(seconds["1 NIC"], times, strict=True)])
        mbit = args.pages * PAGE * 8 / median(times) / 1e6
        rows.append({"what": f"{name}, {RATE} Mbit/s" + (f" and {slow}" if "slow" in name else ""),
                     "Mbit/s": mbit, "of 1 NIC": gain})  # fmt: skip
        if name in ("2 NICs", "4 NICs"):
            bounds.append((f"{name} of one", gain, ">=", 0.9 * int(name[0])))


def measure_cost(args: argparse.Namespace, rows: list[dict[str, Any]], bounds: Bounds) -> None:
    if not args.cost:
        print("cost not measured: no sender_cost")
        return
    start, everyone = time.perf_counter(), cpu_seconds([])[0]
    before = os.times()
    cells = json.loads(subprocess.run([args.cost, str(args.repeats)], capture_output=True, check=True).stdout)
    after = os.times()
    own = sum(after[:4]) - sum(before[:4])  # this process and the program, which has ended
    foreign = (cpu_seconds([])[0] - everyone - own) / (time.perf_counter() - start)
    for cell in cells:
        rows.append({"what": f"{cell['sets']} sets of {cell['pages']} pages", "ns/page": cell["post_ns"],
                     "ns/set": cell["set_ns"]})  # fmt: skip
    if foreign > FOREIGN:
        print(f"  VOID   the bound on cost is not judged: others used {foreign:.2f} cores, and the memory")
        return
    def spread(costs: list[float]) -> float:
        return max(costs) / min(costs)

    most = max(cell["sets"] for cell in cells)
    many = [cell["post_ns"] for cell in cells if cell["sets"] == most]
    bounds.append((f"cost per page of {most} transfers, dearest size of the cheapest", spread(many), "<=", 1.2))
    # A transfer of one page pays for itself in that page, however few there are.
    bounds.append(("cost per page, dearest cell of the cheapest", spread([cell["post_ns"] for cell in cells]), "<=", 1.2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", default=str(COST) if COST.exists() else "", help="path of the sender_cost program")
    parser.add_argument("--library", default="", help="libfabric to use (default: the one a node would choose)")
    parser.add_argument("--pages", type=int, default=4096, help="of 4 KiB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", help="not used: make bench gives it to every benchmark")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    bounds: Bounds = []
    measure_nics(args, rows, bounds)
    measure_cost(args, rows, bounds)
    return report("rails", rows, bounds, args.json)


if __name__ == "__main__":
    sys.exit(main())
