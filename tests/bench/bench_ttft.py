"""Time to first token on idle nodes: a prefiller and a decoder against one node that does both, prompts of 256, 1,024, 2,000 tokens.

Interleaved, one engine thread per node and no pinning, as an operator starts them, warm and after 1.3 s of idleness. The price of
disaggregation may be one decode step, with that prompt's KV, plus 5 ms. Differences are of pairs that ran one after the other,
because the machine's speed drifts by more than what is measured; beside them what the pair took beyond its own prefill's
compute, by the request's story, which does not drift. Also the share of the transfer that hid under that compute.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from pdd.errors import RefusedInState
from tests.bench.common import arguments, median, model_name, prompt_of, report, stream
from tests.cluster import Node


def finished(node: Node, request_id: str) -> dict[str, Any]:
    """A node's record of a request; the node may still be tidying up when the client has its answer."""
    for _ in range(100):
        record: dict[str, Any]
        try:
            record = node.control(f"/v1/requests/{request_id}")
        except RefusedInState:
            record = {}
        if record.get("exposed_seconds") is not None:
            return record
        time.sleep(0.02)
    raise RuntimeError(f"{node.name} has no record of {request_id}: {node.log[-2000:]}")


def compare(
    p0: Node, d0: Node, b0: Node, model: str, length: int, pause: float, repeats: int
) -> dict[str, float]:
    """Both ways `repeats` times, in turns; which goes first alternates, as the second finds the caches of the first."""
    pair, alone, beyond, hidden, exposed = [], [], [], [], []
    for i in range(repeats):
        for disaggregated in (True, False) if i % 2 else (False, True):
            time.sleep(pause)
            if not disaggregated:
                alone.append(stream(b0, model, prompt_of(length, 100 + i), 1).ttft)
                continue
            answer = stream(d0, model, prompt_of(length, 200 + i), 1)
            pair.append(answer.ttft)
            record = finished(p0, answer.request_id.split("-", 1)[1])
            story = d0.control(f"/v1/requests/{record['id']}/explain")["ttft"]
            beyond.append(answer.ttft - story["prefill_compute_seconds"])
            exposed.append(record["exposed_seconds"])
            hidden.append(record["hidden_ratio"])
    extra = median([with_pair - without for with_pair, without in zip(pair, alone, strict=True)])
    return {"pair_ms": median(pair) * 1e3, "both_ms": median(alone) * 1e3, "extra_ms": extra * 1e3,
            "beyond_ms": median(beyond) * 1e3, "exposed_ms": median(exposed) * 1e3, "hidden": median(hidden)}


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2000], metavar="TOKENS")
    parser.add_argument("--local", action="store_true", help="KV through memory, as nodes of one host do unless told (else tcp)")
    args = parser.parse_args()
    run_dir = pathlib.Path(tempfile.mkdtemp(prefix="pdd-bench-"))
    sets = ["model.dtype=bfloat16", "kv.num_pages=512", "engine.threads=1"]
    sets += ["fabric.local=auto"] if args.local else []
    p0 = Node("p0", "prefill", args.model, run_dir, sets=sets)
    d0 = Node("d0", "decode", args.model, run_dir, peers=[p0.peer_address], sets=sets)
    b0 = Node("b0", "both", args.model, run_dir, sets=sets)
    nodes = [p0, d0, b0]
    rows, bounds = [], []
    try:
        for node in nodes:
            node.start()
            node.wait_ready(180)
        d0.wait("its prefiller", lambda s: any(p["state"] == "up" for p in s["peers"]), 30)
        model = model_name(b0)
        for length in args.lengths:  # warm every shape on both
            stream(b0, model, prompt_of(length, 1), 12)
            stream(d0, model, prompt_of(length, 1), 12)
        for length in args.lengths:
            step = median(stream(d0, model, prompt_of(length, 3), 40).gaps())
            for pause in (0.0, 1.3):
                row = compare(p0, d0, b0, model, length, pause, args.repeats)
                rows.append({"prompt": length, "idle_s": pause, **row, "step_ms": step * 1e3})
                extra, hidden = row["extra_ms"] / 1e3, row["hidden"]
                bounds.append((f"{length} tokens after {pause} s: (pair - both) / (decode step + 5 ms)", extra / (step + 0.005), "<=", 1.0))
                if length == 1024 and not pause:
                    bounds.append(("share of the transfer hidden at 1,024 tokens", hidden, ">=", 0.9))
    finally:
        for node in nodes:
            node.kill()
    return report("ttft, local" if args.local else "ttft, tcp", rows, bounds, args.json)


if __name__ == "__main__":
    sys.exit(main())
