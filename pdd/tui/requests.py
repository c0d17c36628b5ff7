"""The screen of requests: each with its age, drawn by where the time went. Pure.

The bar of a request is as long as the logarithm of its age says, against the oldest that is shown; its marks are the parts
of that age: queued, prefill, kv (waiting for a prefiller's KV, or sending it), decode. A decoder cannot tell a
prefiller's computing from the transfer; what it waits for a remote prompt is kv.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pdd.tui.draw import Glyphs, Span
from pdd.tui.listing import Listing, field, of_node, rows_of, state
from pdd.tui.scene import Scene
from pdd.tui.table import Column, Row
from pdd.units import show_count, show_duration

PHASES = ("queued", "prefill", "kv", "decode")
SLOW_SECONDS = 5.0  # in a state that should be short; then it is a problem
_BAR = 14


def listing(scene: Scene, glyphs: Glyphs) -> Listing:
    found = sorted(rows_of(scene, "requests", "requests"), key=lambda each: -each[1]["age_seconds"])
    rows = tuple(
        Row(f"{node.label}|{row['id']}|{row['attempt'] if row['kind'] == 'attempt' else ''}", row, node, is_problem(row))
        for node, row in found
    )
    oldest = max((row.data["age_seconds"] for row in rows), default=0.0)
    return Listing(_columns(scene, glyphs, oldest), rows, _why_empty(scene))


def is_problem(row: dict[str, Any]) -> bool:
    waited = row["state_age_seconds"] if row["state_age_seconds"] is not None else row["age_seconds"]
    return (
        row["state"] in ("abandoned", "quarantined") or row["attempts"] > 1
        or (row["state"] in ("waiting", "wait_kv", "sending") and waited > SLOW_SECONDS)
    )


def parts(row: dict[str, Any]) -> tuple[float, float, float, float]:
    """Seconds of the request's age by PHASES. They add up to its age."""
    age, state_ = row["age_seconds"], row["state"]
    queued = min(row["queue_seconds"] if row["queue_seconds"] is not None else age, age)
    if row["queue_seconds"] is None and state_ not in ("waiting", "queued"):
        queued = 0.0  # not told
    rest = age - queued
    if row["kind"] == "prefill":
        computing = rest if row["prefill_seconds"] is None else min(row["prefill_seconds"], rest)
        return queued, computing, rest - computing, 0.0
    if row["kind"] == "attempt":
        return queued, 0.0, rest, 0.0
    if state_ == "wait_kv" or row["attempts"]:
        waiting = rest if state_ == "wait_kv" or row["prefill_seconds"] is None else min(row["prefill_seconds"], rest)
        return queued, 0.0, waiting, rest - waiting
    if row["output_tokens"] == 0:
        return queued, rest, 0.0, 0.0
    first = row["first_token_seconds"]
    computing = min(max((first if first is not None else queued) - queued, 0.0), rest)
    return queued, computing, 0.0, rest - computing


def bar(row: dict[str, Any], oldest: float, width: int, glyphs: Glyphs) -> str:
    """Marks of the phases, at least one; every phase that took a tenth of the age has one."""
    age = row["age_seconds"]
    length = width if oldest <= 0 else max(round(width * math.log1p(10 * age) / math.log1p(10 * oldest)), 1)
    if age <= 0:
        return glyphs.phases[0]
    return "".join(mark * cells for mark, cells in zip(glyphs.phases, shares(parts(row), length), strict=True))


def shares(seconds: Sequence[float], length: int) -> list[int]:
    """`length` cells, divided as `seconds` are; rounding errors go to the largest."""
    total = sum(seconds) or 1.0
    cells = [max(round(length * each / total), 1 if each >= total / 10 else 0) for each in seconds]
    largest = max(range(len(cells)), key=lambda place: cells[place])
    cells[largest] += length - sum(cells)
    return [max(each, 0) for each in cells]


def _columns(scene: Scene, glyphs: Glyphs, oldest: float) -> tuple[Column, ...]:
    def drawn(row: Row, cells: int) -> Span:
        return bar(row.data, oldest, min(cells, 60), glyphs), ""

    def pages(row: Row, cells: int) -> Span:
        found = row.data["pages"]
        return (f"{show_count(found['have'], 5)}/{show_count(found['need'], 5)}" if found else "-"), ""

    def age(row: Row, cells: int) -> Span:
        return show_duration(row.data["age_seconds"]), "warn" if row.problem else ""

    grouped = any(len((node.status or {}).get("groups", ())) > 1 for node in scene.shown)
    return (
        *of_node(scene),
        field("ID", 12, "id", grows=16),
        *([field("GRP", 3, "group", right=True, rank=5)] if grouped else []),
        Column("AGE", 6, age, lambda row: row.data["age_seconds"], right=True),
        Column("BAR", _BAR, drawn, rank=3, grows=26),
        state(),
        field("PEER", 8, "peer", rank=1, grows=16),
        field("IN", 6, "prompt_tokens", lambda n: show_count(n, 6), right=True),
        field("OUT", 5, "output_tokens", lambda n: show_count(n, 5), right=True),
        Column("PAGES", 9, pages, lambda row: (row.data["pages"] or {}).get("have"), right=True, rank=4),
        field("TTFT", 6, "first_token_seconds", show_duration, right=True, rank=6),
        field("TRY", 3, "attempts", right=True, rank=7),
        field("WHY", 6, "why", rank=2, grows=60),
    )


def legend(glyphs: Glyphs) -> str:
    return "bar: " + "  ".join(f"{mark} {name}" for mark, name in zip(glyphs.phases, PHASES, strict=True))


def counts(scene: Scene) -> dict[str, int]:
    """Requests by state, of all shown nodes; only states that some are in."""
    found: dict[str, int] = {}
    for node in scene.shown:
        for name, number in (node.docs.get("requests", {}).get("counts") or {}).items():
            found[name] = found.get(name, 0) + number
    return {name: number for name, number in found.items() if number}


def _why_empty(scene: Scene) -> str:
    documents = [node.docs["requests"] for node in scene.shown if "requests" in node.docs]
    if not documents:
        return "waiting for the first picture"
    if all(document["requests"] is None for document in documents):
        return "only their counts are shown here: requests are on control.sock, for the owner and the group of the daemon"
    return "no live request"
