"""What looking at a node costs, and how soon it answers: commands, control API, event streams, flight recorder, memory.

    python tests/bench/bench_operator.py --model DIR [--cost BUILD/tests/native/sender_cost] [--only PART,...] [--json OUT]

    commands   wall time of `pdd --help`, `version`, `status` and `top --once` on a live node; a bare Python beside them
    status     /v1/status while eight streams decode and 1,024-token prompts are prefilled in chunks on the same node; an echo
               over a Unix socket between two bare processes beside it, which is what the machine alone costs then
    events     CPU of the daemon per reader of all that `pdd top` reads, at 1,000 requests/s (busy_node.py says what of that
               node is synthetic), readers and none in turns; then how late the lines of some are while others read nothing
    recorder   the engine's CPU with the history of states and with none, in turns, and of a write with its cell of the
               native log and without (`make native-test` builds sender_cost), as shares of a real step of eight streams;
               and what it all keeps when it is full
"""

from __future__ import annotations

import argparse
import json
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from tests.bench import readers, recorder
from tests.bench.bench_interference import STREAMS, decode_gaps
from tests.bench.common import arguments, median, model_name, percentile, report, resident_bytes
from tests.cluster import PDD, Node

COST = pathlib.Path(__file__).resolve().parents[2] / "build/native-tests/tests/native/sender_cost"
PARTS = ("commands", "status", "events", "recorder")
Bounds = list[tuple[str, float, str, float]]
Rows = list[dict[str, Any]]


def seconds(argv: list[str]) -> float:
    start = time.monotonic()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - start


def commands(node: Node, repeats: int, rows: Rows, bounds: Bounds) -> None:
    at = [*PDD, "--run-dir", str(node.run_dir), "-i", node.name]
    limits = {"--help": 0.2, "version": 0.2, "status": 0.2, "top --once": 1.0}
    calls = {"python -c pass": [sys.executable, "-c", "pass"], **{name: [*at, *name.split()] for name in limits}}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, argv in calls.items():
            times[name].append(seconds(argv))
    for name, values in times.items():
        values = values[1:]  # the first fills the page cache
        rows.append({"what": name, "p50_ms": median(values) * 1e3, "p90_ms": percentile(values, 0.9) * 1e3})
        if name in limits:
            bounds.append((f"pdd {name}, seconds", median(values), "<=", limits[name]))


# -- the status of a busy node -----------------------------------------------------------------------------------------
def echo(connection: socket.socket) -> None:
    while data := connection.recv(64):
        connection.sendall(data)


def probe(run_dir: str, name: str, wanted: float) -> None:
    """In a process of its own, as an operator is: prints times of both, once the node is at full load."""
    from pdd.control.client import Client

    client = Client(pathlib.Path(run_dir) / name, timeout=10.0)
    bare = socket.socket(socket.AF_UNIX)
    bare.connect(f"{run_dir}/echo")
    while client.get("/v1/status")["batch_size"] < STREAMS:
        time.sleep(0.05)
    time.sleep(1)
    status, echoes = [], []
    end = time.monotonic() + wanted - 1
    while time.monotonic() < end:
        begin = time.monotonic()
        client.get("/v1/status")
        status.append(time.monotonic() - begin)
        time.sleep(0.01)
        begin = time.monotonic()
        bare.sendall(b"x")
        bare.recv(64)
        echoes.append(time.monotonic() - begin)
        time.sleep(0.01)
    print(json.dumps({"status": status, "echo": echoes}))


def status(node: Node, wanted: float, rows: Rows, bounds: Bounds) -> float:
    """Returns the seconds of a step of eight decoding streams."""
    model, here = model_name(node), [sys.executable, __file__, "--model", ""]
    step = 0.0
    with subprocess.Popen([*here, "--echo", f"{node.run_dir}/echo"], stdout=subprocess.PIPE) as echoing:
        assert echoing.stdout is not None
        echoing.stdout.readline()
        for loaded in (None, node):
            with subprocess.Popen([*here, "--probe", str(node.run_dir), node.name, str(wanted)], stdout=subprocess.PIPE) as probing:
                gaps, prompts = decode_gaps(node, loaded, wanted + 2, model)
                assert probing.stdout is not None
                times = json.loads(probing.stdout.read())
            load = f"8 streams and {prompts} prompts" if loaded else "8 streams"
            step = step or median(gaps)
            for what, values in times.items():
                rows.append({"what": f"{what}, {load}", "p50_ms": median(values) * 1e3, "p99_ms": percentile(values, 0.99) * 1e3,
                             "times": len(values)})
        echoing.terminate()
    bounds.append(("/v1/status p99 at full load, seconds", percentile(times["status"], 0.99), "<=", 0.02))
    return step


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=11, help="of each command")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load")
    parser.add_argument("--cost", default=str(COST) if COST.exists() else "", help="path of the sender_cost program")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to measure")
    parser.add_argument("--probe", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--echo", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe:
        probe(args.probe[0], args.probe[1], float(args.probe[2]))
        return 0
    if args.echo:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(args.echo)
            listener.listen(2)
            print("up", flush=True)
            while True:
                echo(listener.accept()[0])
    parts = args.only.split(",")
    run_dir = pathlib.Path(tempfile.mkdtemp(prefix="pdd-bench-"))
    rows: Rows = []
    bounds: Bounds = []
    node = Node("b0", "both", args.model, run_dir, sets=["model.dtype=bfloat16", "kv.num_pages=1024", "engine.threads=2",
                                                         "engine.max_batch_tokens=512"])
    step = 0.0
    try:
        if {"commands", "status", "recorder"} & {*parts}:
            node.start().wait_ready(180)
            rows.append({"what": "daemon, idle, without its rank", "resident_mb": resident_bytes(node.pid) / 1e6})
        if "commands" in parts:
            commands(node, args.repeats, rows, bounds)
        if {"status", "recorder"} & {*parts}:
            step = status(node, args.seconds, rows, bounds)
            rows.append({"what": "daemon, after that", "resident_mb": resident_bytes(node.pid) / 1e6})
    finally:
        node.kill()
    if "recorder" in parts:
        recorder.measure(args.cost, step, rows, bounds)
    if "events" in parts:
        readers.measure(run_dir, args.seconds, rows, bounds)
    return report("operator", rows, bounds, args.json)


if __name__ == "__main__":
    sys.exit(main())
