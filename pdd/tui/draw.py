"""Lines of styled text and what they are made of: cuts, boxes, charts. Pure; every character is one cell wide.

Text of others (names, messages) passes through `fit`, which shows what is not one printable cell wide as "?".
`Glyphs` holds what differs between Unicode and `--ascii`.
"""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Sequence

Span = tuple[str, str]  # text, style: "", title, good, warn, bad, dim, pick (the selected row)
Line = list[Span]


@dataclasses.dataclass(frozen=True, slots=True)
class Glyphs:
    spark: str
    corners: str  # top left, top right, bottom left, bottom right
    horizontal: str
    vertical: str
    used: str
    held: str
    free: str
    phases: str  # of a request: queued, prefill, kv, decode
    up: str  # sorted from the smallest
    down: str
    more: str  # the text was cut
    is_ascii: bool = False


UNICODE = Glyphs(" ▁▂▃▄▅▆▇█", "┌┐└┘", "─", "│", "█", "▒", "░", "░▒▓█", "▲", "▼", "…")
ASCII = Glyphs(" .:-=+*%#", "++++", "-", "|", "#", "=", ".", ".:=#", "^", "v", "~", is_ascii=True)


def say(text: str, style: str = "") -> Line:
    return [(text, style)]


def clean(text: str, glyphs: Glyphs = UNICODE) -> str:
    """`text` in characters of one cell each."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if _one_cell(char, glyphs.is_ascii) else "?" for char in text)


def _one_cell(char: str, only_ascii: bool) -> bool:
    if char.isascii() or only_ascii:
        return char.isascii() and char.isprintable()
    return char.isprintable() and not unicodedata.combining(char) and unicodedata.east_asian_width(char) not in "WF"


def fit(line: Line, width: int, glyphs: Glyphs = UNICODE) -> Line:
    """`line` cut or padded to `width` cells."""
    cut: Line = []
    room = width
    for part, style in line:
        part = clean(part, glyphs)[:room]
        cut.append((part, style))
        room -= len(part)
    return [*cut, (" " * room, "")] if room else cut


def short(text: str, width: int, glyphs: Glyphs) -> str:
    """`text` cut to `width`; a sign at its end where something is missing."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + glyphs.more


def whole(fields: Sequence[str], room: int) -> str:
    """The fields two cells apart, as many of the last ones as fit into `room`; a number is shown whole or not at all."""
    for first in range(len(fields)):
        if len(shown := "  ".join(fields[first:])) <= room:
            return shown
    return ""


def width_of(line: Line) -> int:
    return sum(len(part) for part, _ in line)


def spark(samples: Sequence[float | None], width: int, glyphs: Glyphs, rows: int = 1) -> list[str]:
    """A chart of `rows` lines, the uppermost first: the newest samples at the right end, scaled to the largest shown.

    A zero is the lowest mark, a gap is a blank.
    """
    shown = list(samples)[-width:] if width > 0 else []
    largest = max((sample for sample in shown if sample is not None), default=0.0)
    levels = len(glyphs.spark) - 1  # of one line
    scale = (rows * levels - 1) / largest if largest else 0.0
    heights = [0 if sample is None else 1 + round(sample * scale) for sample in shown]
    lines = []
    for floor in range((rows - 1) * levels, -1, -levels):
        marks = "".join(glyphs.spark[min(max(height - floor, 0), levels)] for height in heights)
        lines.append(marks.rjust(max(width, 0)))
    return lines


def panel(title: str, lines: Sequence[Line], foot: str, width: int, glyphs: Glyphs) -> list[Line]:
    """A box of exactly `width` cells with a title in its upper and a note in its lower edge."""
    inner = width - 4
    title, foot = title[:inner], foot[:inner]
    left_top, right_top, left_bottom, right_bottom = tuple(glyphs.corners)
    edge = glyphs.horizontal
    return [
        [(f"{left_top} ", "dim"), (title, "title"), (" " + edge * (inner - len(title)) + right_top, "dim")],
        *([(f"{glyphs.vertical} ", "dim"), *fit(line, inner, glyphs), (f" {glyphs.vertical}", "dim")] for line in lines),
        [
            (f"{left_bottom} {foot} " if foot else left_bottom + edge * 2, "dim"),
            (edge * (inner - len(foot)) + right_bottom, "dim"),
        ],
    ]


def beside(*panels: list[Line]) -> list[Line]:
    """Panels of one height next to each other."""
    return [[span for line in rows for span in line] for rows in zip(*panels, strict=True)]
