"""Decode latency while prompts pour in: a decoder fed by a prefiller, against one node that does both.

Eight streams decode; one process sends 1,024-token prompts back to back (max_tokens = 1), then every setting is measured idle. Each
node has one core. Rivals: role `both` with both cores and a large chunk, and, the fair one, with a 256-token chunk. Then: the
TTFT of 64-token prompts at the prefiller under that load.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from tests.bench.common import Stream, arguments, median, model_name, percentile, prompt_of, report, stream
from tests.cluster import Node

STREAMS, CONTEXT, LONG, SHORT = 8, 256, 1024, 64


def decode_gaps(target: Node, loaded: Node | None, seconds: float, model: str) -> tuple[list[float], int]:
    """Gaps between tokens of 8 streams on `target` over `seconds`, while `loaded` gets long prompts; how many it finished."""
    tokens = int(seconds * 40) + 60
    streams: list[Stream] = []
    threads = [threading.Thread(target=lambda i=i: streams.append(stream(target, model, prompt_of(CONTEXT, 1000 + i), tokens)))
               for i in range(STREAMS)]
    stop = threading.Event()
    finished = [0]

    def pour() -> None:
        seed = 5000
        while not stop.is_set():
            stream(loaded, model, prompt_of(LONG, seed), 1)  # type: ignore[arg-type]
            finished[0] += 1
            seed += 1

    for thread in threads:
        thread.start()
    target.wait("all streams decoding", lambda s: s["batch_size"] >= STREAMS, 120)
    pourer = threading.Thread(target=pour)
    begin = time.monotonic()
    if loaded is not None:
        pourer.start()
    time.sleep(seconds)
    end = time.monotonic()
    stop.set()
    if loaded is not None:
        pourer.join()
    for row in target.control("/v1/requests")["requests"]:  # what is left of the streams is not needed
        target.control(f"/v1/requests/{row['id']}", "DELETE")
    for thread in threads:
        thread.join()
    return [g for s in streams for g in s.gaps(begin, end)], finished[0]


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=15.0)
    args = parser.parse_args()
    run_dir = pathlib.Path(tempfile.mkdtemp(prefix="pdd-bench-"))
    sets = ["model.dtype=bfloat16", "kv.num_pages=1024", "engine.threads=1"]
    p0 = Node("p0", "prefill", args.model, run_dir, sets=[*sets, "engine.max_batch_tokens=512"], cpus=[0])
    d0 = Node("d0", "decode", args.model, run_dir, peers=[p0.peer_address], sets=sets, cpus=[1])
    rows, bounds = [], []

    def row(name: str, gaps: list[float], prompts: int) -> dict[str, float]:
        figures = {"p50_ms": median(gaps) * 1e3, "p90_ms": percentile(gaps, 0.9) * 1e3, "p99_ms": percentile(gaps, 0.99) * 1e3}
        rows.append({"setting": name, **figures, "prompts_per_s": prompts / args.seconds})
        return figures

    try:
        p0.start()
        d0.start()
        for node in (p0, d0):
            node.wait_ready(180)
        d0.wait("its prefiller", lambda s: any(p["state"] == "up" for p in s["peers"]), 30)
        model = model_name(d0)
        for i in range(2):  # warm every shape once
            stream(d0, model, prompt_of(LONG, i), 8)
        idle = row("pair, idle", *decode_gaps(d0, None, args.seconds, model))
        load = row("pair, 1,024-token prompts back to back", *decode_gaps(d0, d0, args.seconds, model))
        bounds += [("decode gap under load / idle, p50", load["p50_ms"] / idle["p50_ms"], "<=", 1.15),
                   ("decode gap under load / idle, p99", load["p99_ms"] / idle["p99_ms"], "<=", 1.3)]

        short_idle = [stream(d0, model, prompt_of(SHORT, 9000 + i), 1).ttft for i in range(20)]
        chunk = max(stream(d0, model, prompt_of(512, 9100 + i), 1).ttft for i in range(3))
        stop = threading.Event()

        def pour() -> None:
            seed = 20000
            while not stop.is_set():
                stream(d0, model, prompt_of(LONG, seed), 1)
                seed += 1

        pourers = [threading.Thread(target=pour) for _ in range(2)]
        for thread in pourers:
            thread.start()
        time.sleep(1)
        short_load = [stream(d0, model, prompt_of(SHORT, 30000 + i), 1).ttft for i in range(40)]
        stop.set()
        for thread in pourers:
            thread.join()
        rows.append({"setting": "TTFT of 64-token prompts, idle", "p50_ms": median(short_idle) * 1e3, "p90_ms": percentile(short_idle, 0.9) * 1e3})
        rows.append({"setting": "TTFT of 64-token prompts, loaded", "p50_ms": median(short_load) * 1e3, "p90_ms": percentile(short_load, 0.9) * 1e3})
        bounds.append(("short TTFT p90 under load / (2 x idle p90 + one chunk)",
                       percentile(short_load, 0.9) / (2 * percentile(short_idle, 0.9) + chunk), "<=", 1.0))
        for node in (d0, p0):
            node.stop()
        for chunk_tokens in (2048, 256):
            b0 = Node(f"b{chunk_tokens}", "both", args.model, run_dir, cpus=[0, 1],
                      sets=["model.dtype=bfloat16", "kv.num_pages=1024", "engine.threads=2", f"engine.max_batch_tokens={chunk_tokens}"])
            b0.start()
            b0.wait_ready(180)
            stream(b0, model, prompt_of(LONG, 1), 8)
            row(f"both, 2 cores, {chunk_tokens}-token chunk, idle", *decode_gaps(b0, None, args.seconds, model))
            row(f"both, 2 cores, {chunk_tokens}-token chunk, loaded", *decode_gaps(b0, b0, args.seconds, model))
            b0.stop()
    finally:
        for node in (p0, d0):
            node.kill()
    return report("interference", rows, bounds, args.json)


if __name__ == "__main__":
    sys.exit(main())
