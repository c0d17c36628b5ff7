"""What the screens with a table have in common: columns, all rows, and what to say when there is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pdd.tui.draw import Span
from pdd.tui.scene import Scene
from pdd.tui.table import Column, Row, select

STATE_STYLE = {
    **dict.fromkeys(("ready", "up", "running", "active"), "good"),
    **dict.fromkeys(("starting", "loading", "connecting", "draining", "drained", "suspect", "wait_kv", "waiting"), "warn"),
    **dict.fromkeys(("not_ready", "stopping", "down", "incompatible", "auth"), "bad"),
    **dict.fromkeys(("quarantined", "abandoned", "lost", "stale"), "bad"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    empty: str = "nothing"
    newest_last: bool = False

    def selected(self, scene: Scene) -> list[Row]:
        return select(self.rows, self.columns, scene.view.table, scene.view.problems)


def field(
    title: str, width: int, name: str, show: Callable[[Any], str] = str, *, right: bool = False, rank: int = 0,
    grows: int = 0,
) -> Column:
    """A column of one member of the document; "-" where it is not known."""

    def cell(row: Row, cells: int) -> Span:
        value = row.data.get(name)
        return ("-" if value is None else show(value)), ""

    return Column(title, width, cell, lambda row: row.data.get(name), right, rank, grows)


def state(width: int = 10, name: str = "state", rank: int = 0) -> Column:
    """A state, its color beside its word."""

    def cell(row: Row, cells: int) -> Span:
        word = str(row.data.get(name) or "-")
        return word, STATE_STYLE.get(word, "")

    return Column("STATE", width, cell, lambda row: str(row.data.get(name) or ""), rank=rank)


def of_node(scene: Scene) -> tuple[Column, ...]:
    """Which node a row is of, where there are several."""
    if not scene.many:
        return ()
    return (Column("NODE", 8, lambda row, cells: (row.node.name, ""), lambda row: row.node.name, grows=16),)


def rows_of(scene: Scene, topic: str, member: str) -> Sequence[tuple[Any, dict[str, Any]]]:
    """(node, row) of a member of one document of every shown node."""
    return [(node, row) for node in scene.shown for row in node.docs.get(topic, {}).get(member) or ()]
