"""The overview of several nodes: one row each. Pure. Enter shows one of them alone."""

from __future__ import annotations

from typing import Any

from pdd.tui.draw import Glyphs, Span, spark
from pdd.tui.listing import STATE_STYLE, Listing, field
from pdd.tui.node import NodeState
from pdd.tui.scene import Scene
from pdd.tui.table import Column, Row
from pdd.units import show_count, show_duration


def listing(scene: Scene, glyphs: Glyphs) -> Listing:
    rows = tuple(Row(node.label, _data(scene, node), node, _is_problem(scene, node)) for node in scene.shown)
    return Listing(_columns(scene, glyphs), rows, "no node")


def word(scene: Scene, node: NodeState) -> str:
    """The state of a node, or why that cannot be told."""
    if node.lost:
        return "lost"
    if node.status is None:
        return "asked"
    return "stale" if scene.is_stale(node) else str(node.status["state"])


def _is_problem(scene: Scene, node: NodeState) -> bool:
    status = node.status
    return word(scene, node) not in ("ready", "asked") or bool(status and (status["reasons"] or status["findings"]))


def _data(scene: Scene, node: NodeState) -> dict[str, Any]:
    status = node.status or {}
    data: dict[str, Any] = {"name": node.name, "state": word(scene, node), "age": scene.age(node)}
    if not status:
        return {**data, "why": node.lost}
    pages, rates = status["pages"], status["rates"]["1s"]
    peers = status["peers"]
    up = sum(peer["state"] == "up" for peer in peers)
    why = [node.lost, *status["reasons"], *(peer["error"] or "" for peer in peers), *(f["message"] for f in status["findings"])]
    return {
        **data, "role": status["role"], "batch": status["batch_size"], "running": status["running"],
        "waiting": status["waiting"], "wait_kv": status["waiting_for_kv"],
        "kv": (pages["total"] - pages["free"] - pages["cached"]) / pages["total"] if pages["total"] else None,
        "in": rates["bytes_received_per_second"], "out": rates["bytes_per_second"], "peers": up / len(peers) if peers else None,
        "up": f"{up}/{len(peers)}" + ("!" if up < len(peers) else ""),
        "failed": status["transfers"]["failed"], "ttft": status["latency"]["ttft_p50_seconds"],
        "tokens": rates["generated_tokens_per_second"], "uptime": status["uptime_seconds"],
        "why": next((text for text in why if text), ""),
    }


def _columns(scene: Scene, glyphs: Glyphs) -> tuple[Column, ...]:
    def state(row: Row, cells: int) -> Span:
        name = row.data["state"]
        return name.upper(), STATE_STYLE.get(name, "")

    def age(row: Row, cells: int) -> Span:
        """Of what is shown, once it is older than it should be."""
        old = row.data["state"] in ("lost", "stale")
        return (show_duration(row.data["age"]), "bad") if old else ("now" if row.data["age"] is not None else "-", "dim")

    def linked(row: Row, cells: int) -> Span:
        text = row.data.get("up", "-")
        return text, "bad" if text.endswith("!") else ""

    def batches(row: Row, cells: int) -> Span:
        return spark(row.node.batch, min(cells, 24), glyphs)[0], "good"

    def count(number: float) -> str:
        return show_count(number, 6)

    return (
        field("NODE", 10, "name", grows=20),
        field("ROLE", 7, "role", rank=5),
        Column("STATE", 9, state, lambda row: row.data["state"]),
        field("UP", 6, "uptime", show_duration, right=True, rank=10),
        Column("AGE", 6, age, lambda row: row.data["age"], right=True, rank=4),
        field("BATCH", 5, "batch", count, right=True),
        Column("TREND", 8, batches, rank=7, grows=16),
        field("WAIT", 5, "waiting", count, right=True),
        field("WAITKV", 6, "wait_kv", count, right=True, rank=6),
        field("KV", 4, "kv", lambda share: f"{share:.0%}", right=True),
        field("TTFT", 6, "ttft", show_duration, right=True, rank=9),
        field("TOK/S", 6, "tokens", count, right=True, rank=8),
        field("IN", 9, "in", scene.view.rate, right=True, rank=2),
        field("OUT", 9, "out", scene.view.rate, right=True, rank=3),
        Column("PEERS", 6, linked, lambda row: row.data.get("peers"), right=True, rank=1),
        field("FAIL", 5, "failed", count, right=True),
        field("WHY", 6, "why", rank=11, grows=60),
    )
