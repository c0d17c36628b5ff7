"""Wall time of the commands that an operator types most: `pdd --help`, `pdd version` and `pdd status` of a live node.

The bound is 200 ms each; a bare Python that imports nothing is measured in the same run, to tell a slow machine.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from tests.bench.common import arguments, median, percentile, report
from tests.cluster import PDD, Node


def seconds(argv: list[str]) -> float:
    start = time.monotonic()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - start


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    run_dir = pathlib.Path(tempfile.mkdtemp(prefix="pdd-bench-"))
    node = Node("b0", "both", args.model, run_dir, sets=["engine.threads=1"]).start()
    at = ["--run-dir", str(run_dir), "-i", "b0"]
    commands = {"python -c pass": [sys.executable, "-c", "pass"], "pdd --help": [*PDD, "--help"],
                "pdd version": [*PDD, *at, "version"], "pdd status": [*PDD, *at, "status"]}
    rows, bounds = [], []
    try:
        node.wait_ready(180)
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(args.repeats + 1):
            for name, argv in commands.items():
                times[name].append(seconds(argv))
        for name, values in times.items():
            values = values[1:]  # the first fills the page cache
            rows.append({"command": name, "median_ms": median(values) * 1e3, "p90_ms": percentile(values, 0.9) * 1e3})
            if name != "python -c pass":
                bounds.append((f"{name}, seconds", median(values), "<=", 0.2))
    finally:
        node.kill()
    return report("cli", rows, bounds, args.json)


if __name__ == "__main__":
    sys.exit(main())
