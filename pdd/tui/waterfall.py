"""The waterfall of one transfer: layer by chunk, when each was computed, armed, posted and landed, on one axis of time. Pure.

A row is a layer of a chunk (neighbouring layers together where there is no room for all), a column is a slice of time. What
of the transfer lies under compute of any layer is hidden; what is left when the last layer is computed is exposed, and
is drawn with a mark of its own. It draws a pdd.waterfall/1 document (pdd.control.schema.Waterfall) and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pdd.tui.draw import Glyphs, Line, Span, say
from pdd.units import show_bytes, show_duration

_HEAD = 14


@dataclasses.dataclass(frozen=True, slots=True)
class Band:
    """One row: seconds since the beginning of the transfer; None: not known, or not yet."""

    label: str
    computing: tuple[float, float] | None
    armed: float | None
    posted: float | None
    landed: float | None


def lines(document: dict[str, Any] | None, wanted: str, width: int, height: int, glyphs: Glyphs) -> list[Line]:
    """Exactly as much as fits into `height` lines."""
    if document is None or not document.get("cells"):
        return [
            [],
            say(f"  no record of the transfer of {wanted or 'any request'}", "warn"),
            [],
            say("  The waterfall is drawn from what a node records of its latest transfers; this node has sent", "dim"),
            say("  none for this request: it records none, it prefilled the prompt itself, or it is too long ago.", "dim"),
        ][:height]
    marks = _marks(glyphs)
    room = max(height - 4, 1)
    rows = bands(document["cells"], room)
    end = max(document.get("seconds") or 0.0, *(_last(band) for band in rows), 1e-9)
    computed = max((band.computing[1] for band in rows if band.computing), default=0.0)
    cells = max(width - _HEAD - 2, 1)
    drawn: list[Line] = [_title(document), say(f" {'chunk layers':{_HEAD - 1}}" + _axis(end, cells), "title")]
    drawn += [[(f" {band.label:{_HEAD - 1}}", ""), *_bar(band, end, computed, cells, marks)] for band in rows]
    drawn.append(say(" " + "  ".join(f"{marks[name]} {name}" for name in marks), "dim"))
    drawn.append(_sums(document, computed, end))
    return drawn[:height]


def bands(cells: Sequence[dict[str, Any]], room: int) -> list[Band]:
    """At most about `room` bands: chunk by chunk, layers in order, as many layers in one as it takes."""
    chunks: dict[int, list[dict[str, Any]]] = {}
    for cell in sorted(cells, key=lambda each: (each["chunk"], each["layer"])):
        chunks.setdefault(cell["chunk"], []).append(cell)
    per_chunk = max(room // len(chunks), 1)
    found = []
    for chunk, layers in chunks.items():
        together = -(-len(layers) // per_chunk)
        for start in range(0, len(layers), together):
            found.append(_together(chunk, layers[start : start + together]))
    return found[:room]


def _together(chunk: int, cells: Sequence[dict[str, Any]]) -> Band:
    """From the first that is computed to the last that has landed."""
    def of(name: str) -> list[float]:
        return [cell[name] for cell in cells if cell.get(name) is not None]

    begins, ends = of("compute_begin_seconds"), of("compute_end_seconds")
    armed, posted, landed = of("armed_seconds"), of("posted_seconds"), of("landed_seconds")
    first, last = cells[0]["layer"], cells[-1]["layer"]
    return Band(
        f"{chunk:>5} " + (f"{first}" if first == last else f"{first}-{last}"),
        (min(begins), max(ends)) if begins and ends else None,
        min(armed, default=None), min(posted, default=None),
        max(landed) if len(landed) == len(cells) else None,
    )


def _marks(glyphs: Glyphs) -> dict[str, str]:
    marks = ("-", "#", ".", "=", "!", "*") if glyphs.is_ascii else ("┄", "█", "·", "▒", "▓", "◆")
    return dict(zip(("armed", "compute", "waits", "on its way, hidden", "exposed", "landed"), marks, strict=True))


def _bar(band: Band, end: float, computed: float, cells: int, marks: dict[str, str]) -> list[Span]:
    """One span a run of equal marks. Later marks lie over earlier ones."""
    row = [" "] * cells

    def at(seconds: float) -> int:
        return min(int(seconds / end * cells), cells - 1)

    def paint(begin: float | None, stop: float | None, mark: str) -> None:
        if begin is not None and stop is not None and stop >= begin:
            row[at(begin) : at(stop) + 1] = mark * (at(stop) + 1 - at(begin))

    until = band.landed if band.landed is not None else end
    paint(band.armed, band.computing[0] if band.computing else band.posted, marks["armed"])
    if band.computing:
        paint(band.computing[1], band.posted, marks["waits"])
        paint(*band.computing, marks["compute"])
    if band.posted is not None:
        paint(band.posted, min(until, computed), marks["on its way, hidden"])
        if until > computed:
            paint(max(band.posted, computed), until, marks["exposed"])
    if band.landed is not None:
        row[at(band.landed)] = marks["landed"]
    return _runs("".join(row), {marks["compute"]: "good", marks["exposed"]: "bad", marks["armed"]: "dim"})


def _runs(text: str, styles: dict[str, str]) -> list[Span]:
    spans: list[Span] = []
    for char in text:
        style = styles.get(char, "")
        if spans and spans[-1][1] == style:
            spans[-1] = (spans[-1][0] + char, style)
        else:
            spans.append((char, style))
    return spans


def _axis(end: float, cells: int) -> str:
    """Times at the quarters."""
    row = [" "] * (cells + 8)
    for quarter in range(4):
        text = f"|{show_duration(end * quarter / 4)}"
        row[cells * quarter // 4 : cells * quarter // 4 + len(text)] = text
    return "".join(row)[:cells]


def _last(band: Band) -> float:
    known = [each for each in (band.armed, band.posted, band.landed, *(band.computing or ())) if each is not None]
    return max(known, default=0.0)


def _title(document: dict[str, Any]) -> Line:
    where = f"  {document.get('direction') or ''} {document.get('peer') or ''}".rstrip()
    tokens = f"  {document['tokens']} tokens" if document.get("tokens") else ""
    size = f"  {show_bytes(document['bytes'])}" if document.get("bytes") else ""
    return [(f" {document.get('id') or '?'}", "title"), (f"{where}{tokens}{size}", "")]


def _sums(document: dict[str, Any], computed: float, end: float) -> Line:
    exposed = document.get("exposed_seconds")
    exposed = max(end - computed, 0.0) if exposed is None else exposed
    hidden = document.get("hidden_ratio")
    share = f"  hidden {hidden:.0%} of the transfer" if hidden is not None else ""
    style = "warn" if exposed > 0.1 * end else "good"
    return [(f" compute until {show_duration(computed)}  whole at {show_duration(end)}  ", ""),
            (f"exposed {show_duration(exposed)}", style), (share, "")]
