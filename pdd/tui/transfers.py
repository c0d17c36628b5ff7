"""The screen of transfers: what goes over each link and NIC, each way, now and lately. Pure.

Rates are made here from the daemon's totals, by its own clock. Parts of a line are shown where the fabric's line rate is
known.
"""

from __future__ import annotations

from typing import Any

from pdd.tui.draw import Glyphs, Line, Span, spark
from pdd.tui.listing import Listing, field, of_node, rows_of, state
from pdd.tui.node import NodeState, row_key
from pdd.tui.scene import Scene
from pdd.tui.table import Column, Row
from pdd.units import show_bytes, show_count, show_duration

_TREND_WIDTH = 8


def listing(scene: Scene, glyphs: Glyphs) -> Listing:
    rows = []
    for node, row in rows_of(scene, "transfers", "transfers"):
        data = {**row, "rate": rate_of(node, row), "line": _share(node, row)}
        bad = bool(row["failed"]) or row["state"] not in (None, "up")
        rows.append(Row("|".join((node.label, *row_key(row))), data, node, bad))
    return Listing(_columns(scene, glyphs), tuple(rows), _why_empty(scene))


def sums(scene: Scene) -> Line:
    """Of all shown nodes."""
    statuses = [node.status for node in scene.shown if node.status]
    into = sum(status["rates"]["1s"]["bytes_received_per_second"] for status in statuses)
    out = sum(status["rates"]["1s"]["bytes_per_second"] for status in statuses)
    failed = sum(status["transfers"]["failed"] for status in statuses)
    open_ = sum(status["transfers"]["attempts"] + status["transfers"]["prefills"] for status in statuses)
    stale = sum(status["transfers"]["stale_units"] for status in statuses)
    return [(f" in {scene.view.rate(into)}  out {scene.view.rate(out)}  in flight {show_count(open_)}  ", "dim"),
            (f"failed {show_count(failed)}", "bad" if failed else "dim"), (f"  stale units {show_count(stale)}", "dim")]


def rate_of(node: NodeState, row: dict[str, Any]) -> float | None:
    trend = node.trends.get(row_key(row))
    return trend[-1] if trend else None


def _share(node: NodeState, row: dict[str, Any]) -> float | None:
    """Of the line rate of the fabric, which is that of the whole row: its NICs carry it together."""
    line = (node.docs.get("status", {}).get("fabric") or {}).get("line_rate_bytes_per_second")
    rate = rate_of(node, row)
    return rate / line if line and rate is not None and row["nic"] else None


def _columns(scene: Scene, glyphs: Glyphs) -> tuple[Column, ...]:
    def trend(row: Row, cells: int) -> Span:
        samples = row.node.trends.get(row_key(row.data)) or ()
        return spark(samples, min(cells, 40), glyphs)[0], "good"

    def via(row: Row, cells: int) -> Span:
        """A sign where a link fell behind what the node's fabric can do."""
        best = ((row.node.status or {}).get("fabric") or {}).get("provider")
        fell = row.data["via"] == "tcp" and best in ("efa", "verbs")
        return f"{row.data['via'] or '-'}{'!' if fell else ''}", "warn" if fell else ""

    def failed(row: Row, cells: int) -> Span:
        return show_count(row.data["failed"], 5), "bad" if row.data["failed"] else ""

    return (
        *of_node(scene),
        field("PEER", 10, "peer", grows=24),
        field("DIR", 3, "direction"),
        field("NIC", 8, "nic", rank=2, grows=16),
        Column("VIA", 6, via, lambda row: row.data["via"] or "", rank=1),
        state(8),
        field("RATE", 9, "rate", scene.view.rate, right=True),
        field("%LINE", 5, "line", lambda share: f"{share:.0%}", right=True, rank=6),
        field("MOVED", 8, "bytes", show_bytes, right=True, rank=4),
        field("WRITES", 6, "writes", lambda n: show_count(n, 6), right=True, rank=9),
        field("UNITS", 6, "units", lambda n: show_count(n, 6), right=True, rank=10),
        field("INFLT", 5, "inflight", lambda n: show_count(n, 5), right=True),
        field("P50", 6, "p50_seconds", show_duration, right=True, rank=5),
        field("P99", 6, "p99_seconds", show_duration, right=True),
        Column("FAIL", 5, failed, lambda row: row.data["failed"], right=True),
        Column("TREND", _TREND_WIDTH, trend, rank=7, grows=32),
    )


def _why_empty(scene: Scene) -> str:
    if not any(node.docs for node in scene.shown):
        return "waiting for the first picture"
    if not any((node.status or {}).get("peers") for node in scene.shown):
        return "nothing was moved, and there is no peer: a decoder dials those of --peer, a prefiller waits for decoders"
    return "nothing was moved yet"
