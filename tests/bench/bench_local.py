"""KV between two nodes of one host through shared memory, against memcpy and process_vm_writev, all in one run.

    python tests/bench/bench_local.py [--loop BUILD/tests/native/copy_loop] [--json OUT]

Rounds, turns, ratios and the judgement of a run that others disturbed are those of bench_fabric.py. The sizes are
scattered pages of 4, 16 and 64 KiB, and adjacent ones of 64 KiB, which everybody moves 1 MiB at a time. `memcpy` is one
thread that copies and counts nothing; process_vm_writev is what NIXL's UCX uses on one host ("cma"), here without NIXL.

Bounds: from 64 KiB on, 0.85 of memcpy. NIXL itself is not run: every contender tried once (best of several passes, scattered
pages, 64 to a request), it reached 3.5 and 3.1 GB/s at 16 and 64 KiB and 788,000 pages/s at 4 KiB where the bare
process_vm_writev reached 4.3, 4.7 and 740,000; the bounds over it (1.2 x, and 1.5 x the pages) are put in terms of that.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_fabric import Bare, Pdd, judge, measure, ratio
from common import median

LOOP = Path(__file__).resolve().parents[2] / "build/native-tests/tests/native/copy_loop"
ROUND_BYTES = 128 << 20  # more than the last level of cache
SHAPES = [("scattered", 4 << 10), ("scattered", 16 << 10), ("scattered", 64 << 10), ("adjacent", 64 << 10)]
# of process_vm_writev, by shape
OVER_NIXL = {("scattered", 4 << 10): 1.5 * 788 / 740, ("scattered", 16 << 10): 1.2 * 3.5 / 4.3,
             ("scattered", 64 << 10): 1.2 * 3.1 / 4.7}  # fmt: skip
OF_MEMCPY = {("scattered", 64 << 10): 0.85, ("adjacent", 64 << 10): 0.85}


class Copy(Bare):
    """A process that copies by itself."""

    def __init__(self, binary: str, job: list[str]) -> None:
        self.name = "memcpy"
        self.receiver = self.sender = subprocess.Popen(
            [binary, "memcpy", *job], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def pids(self) -> list[int]:
        return [self.sender.pid]

    def close(self) -> None:
        self.sender.stdin.close()
        self.sender.wait(10)
        self.sender.stdout.close()


@contextmanager
def contenders(args: argparse.Namespace, pattern: str, provider: str) -> Iterator[list[Any]]:
    job = [str(args.pages), str(args.page_bytes), pattern, str(args.window)]
    with ExitStack() as stack:
        found: list[Any] = [
            Pdd(args, pattern, provider), Copy(args.loop, job),
            Bare("process_vm_writev", args.loop, ["writev-recv"], ["writev-send"], job),
        ]  # fmt: skip
        for contender in found:
            stack.callback(contender.close)
        yield found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", default=str(LOOP), help="path of the copy_loop program, which `make native-test` builds")
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", help="not used: make bench gives it to every benchmark")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    args.library = ""

    rows: list[dict[str, Any]] = []
    bounds: list[tuple[str, float, str, float]] = []
    busiest = 0.0
    for pattern, args.page_bytes in SHAPES:
        args.pages = ROUND_BYTES // args.page_bytes
        seconds, foreign = measure(args, pattern, "local", contenders)
        busiest = max(busiest, foreign)
        shape = f"{pattern} {args.page_bytes >> 10} KiB"
        for name, times in seconds.items():
            rows.append({
                "shape": shape, "contender": name, "GB/s": ROUND_BYTES / median(times) / 1e9,
                "thousand pages/s": args.pages / median(times) / 1e3, "of memcpy": ratio(seconds, "memcpy", name),
                "of process_vm_writev": ratio(seconds, "process_vm_writev", name), "foreign": foreign,
            })  # fmt: skip
        for base, bound in (("memcpy", OF_MEMCPY), ("process_vm_writev", OVER_NIXL)):
            if (pattern, args.page_bytes) in bound:
                bounds.append(
                    (f"{shape}: pdd of {base}", ratio(seconds, base, "pdd"), ">=", bound[pattern, args.page_bytes])
                )
    title = f"{ROUND_BYTES >> 20} MiB a round, window {args.window}, local"
    return judge(title, rows, bounds, args.json, busiest)


if __name__ == "__main__":
    sys.exit(main())
