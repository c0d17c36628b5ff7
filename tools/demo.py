"""`make demo`: one prefiller and two decoders on loopback answer a chat with the real model; a `both` node checks them.

Shows per request where the time went and what crossed the fabric. --keep leaves the nodes up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import shutil
import sys
import tempfile
import time
import urllib.request
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from tests.cluster import Node

QUESTIONS = {
    "d0": "What is the capital of France? Answer in one sentence.",
    "d1": "Write two sentences about the sea.",
}


def chat(node: Node, question: str, *, show: bool) -> tuple[str, str, dict[str, float]]:
    """Streams one greedy answer. Returns the text, the request id, and the times that a client sees (seconds)."""
    body = {"model": "demo", "messages": [{"role": "user", "content": question}], "stream": True, "temperature": 0,
            "max_tokens": 60}
    models = json.load(urllib.request.urlopen(f"{node.url}/v1/models", timeout=10))
    body["model"] = models["data"][0]["id"]
    request = urllib.request.Request(f"{node.url}/v1/chat/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    start = time.monotonic()
    arrivals: list[float] = []
    text, request_id = "", ""
    with urllib.request.urlopen(request, timeout=120) as response:
        for raw in response:
            line = raw.decode().strip()
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise SystemExit(f"{node.name}: {event['error']['message']}")
            request_id = event["id"]
            piece = event["choices"][0]["delta"].get("content") if event["choices"] else None
            if piece:
                arrivals.append(time.monotonic() - start)
                text += piece
                if show:
                    print(piece, end="", flush=True)
    if show:
        print()
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    return text, request_id, {"first": arrivals[0] if arrivals else 0.0, "gap": sum(gaps) / len(gaps) if gaps else 0.0}


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def show_times(decoder: Node, prefiller: Node, request_id: str, client: dict[str, float]) -> None:
    """Where the time of one request went, from the two nodes' own records of it."""
    key = request_id.split("-", 1)[1]
    ours: dict[str, Any] = decoder.control(f"/v1/requests/{key}")
    theirs: dict[str, Any] = prefiller.control(f"/v1/requests/{key}")
    known = (ours["queue_seconds"], theirs["queue_seconds"], theirs["prefill_seconds"], theirs["exposed_seconds"])
    rest = client["first"] - sum(seconds or 0.0 for seconds in known)
    print(f"   queue {milliseconds(ours['queue_seconds'])} · prefill {milliseconds(theirs['prefill_seconds'])}"
          f" (queued there {milliseconds(theirs['queue_seconds'])}) · exposed transfer {milliseconds(theirs['exposed_seconds'])}"
          f" · decode step and HTTP {milliseconds(rest)}"
          f" → first token {milliseconds(client['first'])} · per token {milliseconds(client['gap'])}")
    print(f"   {theirs['transfer']['pages']} pages in {theirs['transfer']['writes']} writes, {theirs['transfer']['bytes'] / 1e6:.2f} MB,"
          f" {ours['transfer']['units']} units counted by immediates, over {theirs['transfer']['via']}")


def curl_of_a_chat(node: Node) -> str:
    """A line for the shell."""
    body = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64}
    return f"curl -s {node.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


def how_to_go_on(nodes: list[Node], run_dir: pathlib.Path) -> str:
    """What --keep leaves behind, how to look at it, and how to be rid of it."""
    pdd = pathlib.Path(sys.executable).parent / "pdd"
    pdd = pdd.relative_to(pathlib.Path.cwd()) if pdd.is_relative_to(pathlib.Path.cwd()) else pdd
    command = f"{pdd} --run-dir {run_dir}"
    decoder = next(node for node in nodes if node.role == "decode")
    return "\n".join([
        "\nThe nodes are up:",
        *(f"  {node.name} {node.role:8} pid {node.pid:<8} {node.url}" for node in nodes),
        "Look at them:",
        f"  {command} top                all of them, live; -i NAME: one",
        f"  {command} -i d0 status       one line",
        f"  {command} -i d0 requests     what runs; `requests show ID` and `explain ID` also when it is over",
        f"  {command} -i p0 transfers    what was written to whom",
        f"Talk to them (any node but p0):\n  {curl_of_a_chat(decoder)}",
        f"Their logs: {run_dir}/NAME.log",
        f"Stop them: kill {' '.join(str(node.pid) for node in nodes)}",
        f"When they have ended the directory can go: rm -r {run_dir}",
    ])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--keep", action="store_true", help="leave the nodes up")
    args = parser.parse_args()
    model: list[str] | str = args.model
    run_dir = pathlib.Path(tempfile.mkdtemp(prefix="pdd-demo-"))
    if not (pathlib.Path(args.model) / "config.json").exists():
        print("! the real model is not to be had here: tiny random weights instead (the text will be noise)")
        from pdd.model.demo import write_demo_model
        model = str(run_dir / "demo-model")
        write_demo_model(pathlib.Path(model))
    # fp32: greedy tokens are then the same whichever node prefilled; bf16 has near-ties that batch shape can flip
    sets = ["engine.threads=1", "model.dtype=float32"]
    p0 = Node("p0", "prefill", model, run_dir, sets=sets, outlives=args.keep)
    d0 = Node("d0", "decode", model, run_dir, peers=[p0.peer_address], sets=sets, outlives=args.keep)
    d1 = Node("d1", "decode", model, run_dir, peers=[p0.peer_address], sets=sets, outlives=args.keep)
    b0 = Node("b0", "both", model, run_dir, sets=sets, outlives=args.keep)
    nodes = [p0, d0, d1, b0]
    ok = False
    try:
        print("· starting one prefiller (p0), two decoders (d0, d1) and, to check them, one node that does both (b0), in fp32\n"
              "  (with fabric.local=off, to show the network path over tcp: nodes of one host would use its memory)")
        for node in nodes:
            node.start()
        for node in nodes:
            status = node.wait_ready(180)
            print(f"  {node.name} {status['role']:8} ready   {node.url}")
        for node in (d0, d1):
            node.wait("its prefiller", lambda s: any(p["state"] == "up" for p in s["peers"]))
        ok = True
        for name, question in QUESTIONS.items():
            node = {"d0": d0, "d1": d1}[name]
            print(f"\n{name} ← {question}\n{name} → ", end="")
            text, request_id, client = chat(node, question, show=True)
            show_times(node, p0, request_id, client)
            oracle, _, _ = chat(b0, question, show=False)
            same = text == oracle
            ok &= same
            print("   the same answer as the node that does both" if same else f"   NOT the answer of the node that does both: {oracle!r}")
        if args.keep:
            print(how_to_go_on(nodes, run_dir))
            return 0 if ok else 1
        codes = {node.name: node.stop() for node in (d0, d1, b0, p0)}
        ok &= all(code == 0 for code in codes.values())
        print(f"\n· stopped: {codes}" + ("" if ok else f"   (logs in {run_dir})"))
        return 0 if ok else 1
    finally:
        if not (args.keep and ok):
            for node in nodes:
                node.kill()
            if ok:
                shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
