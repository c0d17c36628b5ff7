"""The screen of the log: the nodes' latest records, the newest last. Pure."""

from __future__ import annotations

import time
from typing import Any

from pdd.tui.draw import Span
from pdd.tui.listing import Listing, of_node
from pdd.tui.scene import Scene
from pdd.tui.table import Column, Row

LEVELS = ("debug", "info", "warning", "error", "critical")
_WORD = {"warning": "WARN", "critical": "CRIT"}
_STYLE = {"debug": "dim", "warning": "warn", "error": "bad", "critical": "bad"}


def listing(scene: Scene) -> Listing:
    """It follows the newest record while the cursor is nowhere."""
    found = [(record, node) for node in scene.shown for record in node.records]
    if scene.many:
        found.sort(key=lambda each: each[0]["ts"])
    rows = tuple(
        Row(f"{node.label}|{node.boot if record['seq'] else ''}|{record['seq']}|{record['ts']}", record, node,
            is_problem(record))
        for record, node in found
    )
    return Listing(_columns(scene), rows, _why_empty(scene), newest_last=True)


def is_problem(record: dict[str, Any]) -> bool:
    return record["level"] not in ("debug", "info")


def message(record: dict[str, Any]) -> str:
    facts = "".join(f" {name}={value}" for name, value in (record.get("fields") or {}).items())
    return f"{record['message']}{facts}" + ("  (enter: trace)" if record.get("trace") else "")


def _columns(scene: Scene) -> tuple[Column, ...]:
    def level(row: Row, cells: int) -> Span:
        name = row.data["level"]
        return _WORD.get(name, name.upper()), _STYLE.get(name, "")

    def said(row: Row, cells: int) -> Span:
        return message(row.data), _STYLE.get(row.data["level"], "")

    return (
        Column("TIME", 12, lambda row, cells: (clock(row.data["ts"]), "dim"), lambda row: row.data["ts"]),
        *of_node(scene),
        Column("LEVEL", 5, level, lambda row: LEVELS.index(row.data["level"]) if row.data["level"] in LEVELS else None),
        Column("FROM", 14, lambda row, cells: (row.data["component"], ""), lambda row: row.data["component"], rank=1, grows=12),
        Column("MESSAGE", 20, said, lambda row: row.data["message"], grows=200),
    )


def clock(seconds: float) -> str:
    """The time of day here, of an instant since 1970."""
    return time.strftime("%H:%M:%S", time.localtime(seconds)) + f".{int(seconds % 1 * 1000):03d}"


def _why_empty(scene: Scene) -> str:
    if not any(node.docs for node in scene.shown):
        return "waiting for the first picture"
    return "no record: the log is on control.sock, for the daemon's owner and group; `journalctl -u pdd@NAME` has it too"
