"""Tables that are sorted, filtered and walked through. Pure: rows and a choice in, lines out.

Columns have fixed widths, so that a value that changes repaints one line. Where there is no room for all, those of the
highest rank go first; what is left over widens the columns that may grow, in proportion. The row of the cursor is kept in
the middle.

A filter is a regular expression, searched in the whole row or, as `column~expression`, in one column; a leading `!` turns it
round. One that does not compile is taken as plain text.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from pdd.tui.draw import Glyphs, Line, Span, clean, short
from pdd.tui.node import NodeState
from pdd.tui.scene import TableChoice


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    id: str  # stays the same while the row moves
    data: dict[str, Any]
    node: NodeState
    problem: bool = False
    old: bool = False  # its node is lost or silent: it is drawn dim


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    title: str
    width: int
    cell: Callable[[Row, int], Span]  # and the width it has
    order: Callable[[Row], Any] | None = None  # what it is sorted by; None: it is not
    right: bool = False
    rank: int = 0
    grows: int = 0  # cells that it may gain

    @property
    def key(self) -> str:
        return self.title.lower().strip("% ")


def text_of(column: Column, row: Row) -> str:
    return column.cell(row, 1000)[0]


def matches(text: str, columns: Sequence[Column]) -> Callable[[Row], bool]:
    """Whether a row passes the filter."""
    inverse = text.startswith("!")
    text = text.removeprefix("!")
    name, tilde, rest = text.partition("~")
    chosen = [column for column in columns if tilde and column.key == name.strip().lower()]
    wanted = rest if chosen else text
    try:
        pattern = re.compile(wanted, re.IGNORECASE)
    except re.error:
        pattern = re.compile(re.escape(wanted), re.IGNORECASE)

    def passes(row: Row) -> bool:
        hay = "  ".join(text_of(column, row).strip() for column in chosen or columns)
        return bool(pattern.search(hay)) is not inverse

    return passes if wanted else lambda row: True


def select(rows: Sequence[Row], columns: Sequence[Column], choice: TableChoice, problems: bool = False) -> list[Row]:
    """The rows to be shown, in their order."""
    passes = matches(choice.filter, columns)
    found = [row for row in rows if (row.problem or not problems) and passes(row)]
    column = next((each for each in columns if each.key == choice.sort and each.order is not None), None)
    if column is None or column.order is None:
        return found[::-1] if choice.reverse else found
    order = column.order
    known = [row for row in found if order(row) is not None]
    unknown = [row for row in found if order(row) is None]  # last, whichever way
    return [*sorted(known, key=order, reverse=choice.reverse), *unknown]


def draw(
    rows: Sequence[Row], columns: Sequence[Column], choice: TableChoice, width: int, height: int | None, glyphs: Glyphs,
    empty: str = "nothing", newest_last: bool = False,
) -> list[Line]:
    """Header and rows: exactly `height` lines, or as many as there are (None)."""
    fitting = _fitting(columns, width - 1)
    lines: list[Line] = [_header(fitting, choice, width, glyphs)]
    if not rows:
        lines.append([(f" {empty}", "dim")])
    room = len(rows) if height is None else max(height - 1, 0)
    at = index_of(rows, choice.cursor, newest_last)
    first = max(min(at - room // 2, len(rows) - room), 0)
    for place, row in enumerate(rows[first : first + room], first):
        lines.append(_row(row, fitting, glyphs, place == at and height is not None))
    above, below = first, len(rows) - first - room
    if height is not None and (above > 0 or below > 0):
        note = f" {first + 1}-{min(first + room, len(rows))} of {len(rows)} "
        cut = width - len(note)
        header = lines[0][0][0].ljust(cut)[:cut]
        lines[0] = [(header, "title"), (note, "dim")]
    return lines if height is None else (lines + [[] for _ in range(height)])[:height]


def index_of(rows: Sequence[Row], cursor: str | None, newest_last: bool = False) -> int:
    """Where the cursor is; a row that is gone leaves it at the beginning, in a log at the end."""
    rest = len(rows) - 1 if newest_last else 0
    return next((place for place, row in enumerate(rows) if row.id == cursor), max(rest, 0))


def _fitting(columns: Sequence[Column], room: int) -> list[tuple[Column, int]]:
    chosen = list(columns)
    while len(chosen) > 1 and sum(column.width + 1 for column in chosen) > room:
        worst = max(chosen, key=lambda column: column.rank)
        if worst.rank == 0:
            break
        chosen.remove(worst)
    spare = max(room - sum(column.width + 1 for column in chosen), 0)
    wanted = max(sum(column.grows for column in chosen), 1)
    return [(column, column.width + min(column.grows, spare * column.grows // wanted)) for column in chosen]


def _header(fitting: Sequence[tuple[Column, int]], choice: TableChoice, width: int, glyphs: Glyphs) -> Line:
    parts = []
    for column, cells in fitting:
        sign = (glyphs.down if choice.reverse else glyphs.up) if column.key == choice.sort else ""
        title = (column.title + sign)[:cells] if not sign else column.title[: cells - 1] + sign
        parts.append(title.rjust(cells) if column.right else title.ljust(cells))
    return [((" " + " ".join(parts))[:width].ljust(width), "title")]


def _row(row: Row, fitting: Sequence[tuple[Column, int]], glyphs: Glyphs, picked: bool) -> Line:
    line: Line = [(">" if picked else " ", "pick" if picked else "")]
    for column, cells in fitting:
        text, style = column.cell(row, cells)
        text = short(clean(text, glyphs), cells, glyphs)
        style = "dim" if row.old and style != "bad" else style
        text = text.rjust(cells) if column.right else text.ljust(cells)
        line += [(text, "pick" if picked else style), (" ", "pick" if picked else "")]
    return line
