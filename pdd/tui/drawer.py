"""The detail drawer: everything that is known of one row, one member a line. Pure."""

from __future__ import annotations

import time
from typing import Any

from pdd.tui import logs, requests
from pdd.tui.draw import Line, fit, say
from pdd.tui.node import NodeState
from pdd.tui.table import Row
from pdd.units import show_bytes, show_count, show_duration

_LABEL = 18


def of_row(tab: str, row: Row) -> list[Line]:
    if tab == "logs":
        return _record(row.data)
    if tab == "overview":
        return of_node(row.node)
    name = row.data.get("id") or row.data.get("peer") or row.id
    made: list[Line] = [[(f" {name}", "title"), (f"  on {row.node.name}", "dim")]]
    if tab == "requests":
        spent = zip(requests.PHASES, requests.parts(row.data), strict=True)
        made.append(say(" " + "  ".join(f"{phase} {show_duration(seconds)}" for phase, seconds in spent if seconds)))
    if tab == "transfers":
        made += _peer(row)
    return [*made, [], *_members(row.data)]


def of_node(node: NodeState) -> list[Line]:
    """The whole status, section by section."""
    status = node.status or {}
    plain = {name: value for name, value in status.items() if not isinstance(value, dict | list | tuple)}
    made: list[Line] = [[(f" {node.name}", "title")], [], *_members(plain)]
    for name, value in status.items():
        if isinstance(value, dict) and name != "rates":
            made += [[], [(f" {name}", "title")], *_members(value)]
    for window, rates in (status.get("rates") or {}).items():
        made += [[], [(f" rates of {window}", "title")], *_members(rates)]
    for name in ("ranks", "groups"):
        for number, each in enumerate(status.get(name) or ()):
            if isinstance(each, dict):
                made += [[], [(f" {name} {number}", "title")], *_members(each)]
    return made


def wrapped(lines: list[Line], width: int, indent: int = _LABEL + 2) -> list[Line]:
    """Long lines go on below, under their value."""
    made: list[Line] = []
    for line in lines:
        whole = "".join(part for part, _ in line)
        if len(whole) <= width:
            made.append(line)
            continue
        style = line[-1][1]
        made.append(fit(line, width))
        rest, step = whole[width:], max(width - indent, 10)
        made += [say(" " * indent + rest[at : at + step], style) for at in range(0, len(rest), step)]
    return made


def _peer(row: Row) -> list[Line]:
    """What the node says of the peer itself."""
    peers = (row.node.status or {}).get("peers") or ()
    found = next((peer for peer in peers if peer["name"] == row.data["peer"]), None)
    if found is None:
        return [say(" no link to it now", "dim")]
    return [[], *_members({f"peer {name}": value for name, value in found.items() if name != "load"}),
            *_members({f"peer {name}": value for name, value in (found["load"] or {}).items()})]


def _record(record: dict[str, Any]) -> list[Line]:
    day = time.strftime("%Y-%m-%d ", time.localtime(record["ts"]))
    head = f" {day}{logs.clock(record['ts'])} {record['level'].upper()} {record['component']}"
    made: list[Line] = [say(head, "title"), [], say(f" {record['message']}"), []]
    made += _members(record.get("fields") or {})
    made += [say(f" {line}", "dim") for line in (record.get("trace") or "").splitlines()]
    return made


def _members(data: dict[str, Any]) -> list[Line]:
    return [say(f" {name.removesuffix('_seconds').replace('_', ' '):{_LABEL}} {shown(name, value)}")
            for name, value in data.items() if name != "schema"]


def shown(name: str, value: Any) -> str:
    """A member for people: with its unit; "-" where it is not known."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return "  ".join(f"{key} {shown(key, each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(shown(name, each) for each in value) or "none"
    if isinstance(value, int | float):
        if name.endswith(("bytes_per_second", "rate")):
            return show_bytes(value, "B/s")
        if name.endswith("_seconds") or name.endswith("seconds_left"):
            return show_duration(value)
        if name.endswith(("_ratio", "progress", "line")):
            return f"{value:.0%}"
        if name == "bytes" or name.endswith("_bytes") or name.startswith("bytes_"):
            return show_bytes(value)
        return show_count(value) if name not in ("pid", "attempt", "rank") else str(value)
    return str(value)
