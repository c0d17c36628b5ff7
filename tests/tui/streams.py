"""Event streams as a busy node would send them: deterministic, of any length, with as many rows as one wants."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pdd.topology import report, sysfs
from tests.topology import machines

BEGAN = 1_800_000_000.0  # seconds since 1970
LONG_NAME = "prefill-rack17-node-04.cluster-west.example.internal"
_STATES = ("running", "running", "running", "wait_kv", "waiting")


def topology() -> dict[str, Any]:
    """Of a DGX H100 with one NIC down."""
    with tempfile.TemporaryDirectory() as directory:
        tree = machines.dgx_h100(Path(directory))
        document = report.document(sysfs.read(tree.root))
    document["nics"][2] |= {"state": "down", "usable": False}
    return {**document, "host": "node-7"}


def status(second: int, name: str, num_peers: int) -> dict[str, Any]:
    batch = 30 + round(20 * math.sin(second / 7))
    rate = max(38.2e9 * math.sin(second / 11), 0.0)
    peers = [
        {"name": peer_name(place), "role": "prefill", "state": "suspect" if place == 5 else "up", "via": "verbs",
         "load": {"queued_tokens": 512 * place, "running": 1, "free_pages": 4000 - place}, "rtt_seconds": 4e-5 * (place + 1),
         "error": "silent for 1.2 s" if place == 5 else None}
        for place in range(num_peers)
    ]
    rates = {"bytes_per_second": 0.0, "bytes_received_per_second": rate, "writes_per_second": 0.0,
             "generated_tokens_per_second": 60.0 * batch, "prompt_tokens_per_second": 410.0, "steps_per_second": 61.0}
    return {
        "schema": "pdd.status/1", "name": name, "role": "decode", "state": "ready", "epoch": "5eed", "boot_id": "boot-1",
        "version": "0.1.0", "model": "llama-8b", "reasons": [], "uptime_seconds": 11520.0 + second, "running": batch,
        "waiting": 3, "waiting_for_kv": 2, "batch_size": batch, "max_batch_size": 64, "page_size": 16,
        "pages": {"total": 65536, "free": 65536 - 1000 * batch - 500, "cached": 0, "reserved": 500, "running": 1000 * batch,
                  "sending": 0, "quarantined": 0},
        "transfers": {"writes": 0, "bytes": 0, "units": 0, "active": 0, "attempts": 2, "prefills": 0, "failed": 1,
                      "units_received": 640 * second, "bytes_received": int(12e9 * second), "stale_units": 0},
        "peers": peers, "rates": {"1s": rates, "10s": rates},
        "latency": {"window_seconds": 60.0, "ttft_p50_seconds": 0.142, "ttft_p99_seconds": 0.391, "itl_p50_seconds": 0.0112,
                    "itl_p99_seconds": 0.0248, "kv_wait_p50_seconds": 0.0041, "kv_wait_p99_seconds": 0.019},
        "engine": {"heartbeat_age_seconds": 0.008, "steps": 61 * second, "preemptions": 0},
        "fabric": {"provider": "verbs", "library_version": "2.5.1", "domains": ["mlx5_0"], "line_rate_bytes_per_second": 5e10},
        "findings": [{"id": "T012", "level": "warn", "message": "mlx5_6 is down: GPU6 uses mlx5_5 over SYS"}],
    }


def with_groups(line: dict[str, Any], groups: int) -> dict[str, Any]:
    """A line as a node of so many engines would say it."""
    docs = dict(line.get("docs", {}))
    if status := docs.get("status"):
        pages = {state: number // groups for state, number in status["pages"].items()}
        rows = [
            {"index": index, "ranks": 1, "running": status["running"] // groups + index, "waiting": 3 * (index == 1),
             "waiting_for_kv": 1, "batch_size": status["batch_size"] // groups, "queued_prefill_tokens": 0, "pages": pages,
             "steps": 30, "heartbeat_age_seconds": 0.0}
            for index in range(groups)
        ]
        docs["status"] = {**status, "groups": rows}
    if requests := docs.get("requests"):
        rows = [{**row, "group": place % groups} for place, row in enumerate(requests["requests"])]
        docs["requests"] = {**requests, "requests": rows}
    return {**line, "docs": docs} if docs else line


def peer_name(place: int) -> str:
    return LONG_NAME if place == 2 else f"prefill-{place}"


def transfers(second: int, num_peers: int) -> dict[str, Any]:
    rows = [
        {"peer": peer_name(place), "direction": "in", "via": "tcp" if place == 3 else "verbs", "nic": f"mlx5_{place % 8}",
         "state": "suspect" if place == 5 else "up", "writes": 0, "inflight": place % 4, "failed": 2 if place == 3 else 0,
         "bytes": int((1 + math.sin(second / (3 + place)) / 2) * 1e9) + int(2e9 * second), "units": 812 * second,
         "p50_seconds": 0.0019 * (place + 1), "p99_seconds": 0.0048 * (place + 1)}
        for place in range(num_peers)
    ]
    return {"schema": "pdd.transfers/1", "totals": {}, "transfers": rows}


def requests(second: int, number: int) -> dict[str, Any]:
    rows = [_request(second, place) for place in range(number)]
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["state"]] = counts.get(row["state"], 0) + 1
    return {"schema": "pdd.requests/1", "counts": counts, "requests": rows}


def _request(second: int, place: int) -> dict[str, Any]:
    state = _STATES[place % len(_STATES)]
    age = (place * 7 + second) % 60 + 0.4
    remote = state == "wait_kv" or place % 2 == 0
    have = 563 if state == "running" else 44
    return {
        "id": f"{place:04x}81f3aa90c2de77b1{second % 4:02x}", "state": state, "age_seconds": age, "state_age_seconds": age / 2,
        "peer": peer_name(place % 4) if remote else None, "prompt_tokens": 400 + 71 * place,
        "output_tokens": int(age * 30) if state == "running" else 0, "pages": {"have": have, "need": 563},
        "why": {"running": None, "wait_kv": f"{563 - have} pages of 563 from {peer_name(place % 4)}", "waiting": "a slot"}[state],
        "kind": "generate", "attempts": 1 if remote and state != "waiting" else 0,
        "queue_seconds": None if state == "waiting" else 0.1 * age,
        "prefill_seconds": 0.2 * age if state == "running" and remote else None,
        "first_token_seconds": 0.35 * age if state == "running" else None,
    }


def waterfall(num_layers: int = 16, num_chunks: int = 3) -> dict[str, Any]:
    cells = [
        {"chunk": chunk, "layer": layer, "compute_begin_seconds": begin, "compute_end_seconds": begin + 0.001,
         "armed_seconds": chunk * num_layers * 0.001, "posted_seconds": begin + 0.0012, "landed_seconds": begin + 0.0061}
        for chunk in range(num_chunks) for layer in range(num_layers)
        for begin in [(chunk * num_layers + layer) * 0.001]
    ]
    return {"schema": "pdd.waterfall/1", "id": "000081f3aa90c2de77b100", "peer": "prefill-0", "direction": "in", "tokens": 1536,
            "bytes": 23_600_000, "seconds": 0.0531, "exposed_seconds": 0.0051, "hidden_ratio": 0.89, "cells": cells}


def records(second: int, name: str) -> list[dict[str, Any]]:
    plain = {"seq": 2 * second + 1, "ts": BEGAN + second, "level": "info", "component": "engine.loop", "fields": {"batch": 41},
             "message": f"step {second} of {name}", "trace": None}
    bad = {"seq": 2 * second + 2, "ts": BEGAN + second + 0.5, "level": "error" if second % 7 == 6 else "warning",
           "component": "messenger.link", "fields": {"peer": LONG_NAME}, "message": "the peer is silent",
           "trace": "Traceback (most recent call last):\n  File \"x.py\", line 1\nPeerLost: gone" if second % 7 == 6 else None}
    return [plain, bad] if second % 3 == 0 else [plain]


def lines(
    seconds: int, *, name: str = "node-7", num_requests: int = 12, num_peers: int = 4, with_logs: bool = True,
    machine: dict[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """The stream of `seconds` seconds at one line of documents a second, and the log's."""
    seq = 0
    for second in range(seconds):
        docs = {"status": status(second, name, num_peers), "transfers": transfers(second, num_peers),
                "requests": requests(second, num_requests)}
        head = {"ts": BEGAN + second, "ts_mono": 100.0 + second}
        if second == 0:
            extra = {"topology": machine, "waterfall": waterfall()} if machine else {}
            yield {"type": "snapshot", "seq": seq, **head, "boot_id": "boot-1", "docs": {**docs, **extra}}
        else:
            yield {"type": "delta", "seq": seq, **head, "docs": docs}
        if with_logs:
            seq += 1
            yield {"type": "logs", "seq": seq, **head, "missed": 0, "records": records(second, name)}
        seq += 1
