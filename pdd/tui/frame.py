"""The picture of `pdd top` as lines of styled text. Pure: the same function draws the live screen, `--once` and the tests.

From the top: header, tabs, banners (a lost or silent node, a pause), the chosen screen, the line of keys. Every color stands
beside a word or a sign. Not here: what lines are made of (draw.py), Textual, the terminal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pdd.tui import drawer, logs, nodes, overview, requests, table, topology_text, transfers, waterfall
from pdd.tui.draw import UNICODE, Glyphs, Line, fit, say, short, whole, width_of
from pdd.tui.keys import HELP
from pdd.tui.listing import STATE_STYLE, Listing
from pdd.tui.node import NodeState
from pdd.tui.scene import TABS, Scene
from pdd.units import show_duration

MIN_WIDTH, MIN_HEIGHT = 40, 8
_DRAWER_BESIDE = 120  # cells from which on a drawer stands beside the table
_MOST_BANNERS = 3
_MOST_NAMES = 4
_KEYS = {
    "overview": ("space pause", "+/- speed", "a findings", "enter detail", "1-5 screens"),
    "nodes": ("enter one node", "a findings", "s sort", "/ filter", "e problems", "space pause"),
    "transfers": ("enter detail", "/ filter", "s sort", "r reverse", "e problems", "w waterfall", "u bits"),
    "requests": ("enter detail", "/ filter", "s sort", "r reverse", "e problems", "w waterfall", "y copy"),
    "topology": ("j k scroll", "space pause"),
    "logs": ("enter detail", "/ filter", "e problems", "j k scroll", "G follow", "y copy"),
}


def frame(scene: Scene, width: int, height: int, glyphs: Glyphs = UNICODE) -> list[Line]:
    """Exactly `height` lines of exactly `width` cells."""
    if width <= 0 or height <= 0:
        return []
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        lines: list[Line] = [[(f"pdd top needs {MIN_WIDTH}x{MIN_HEIGHT}, this is {width}x{height}", "warn")]]
        return [fit(line, width, glyphs) for line in (lines + [[]] * height)[:height]]
    top = [_header(scene, width, glyphs), _tabs(scene, width), *_banners(scene)]
    room = height - len(top) - 1
    body = _body(scene, width, room, glyphs)
    lines = [*top, *(body + [[]] * room)[:room], _footer(scene, width)]
    return [fit(line, width, glyphs) for line in lines]


def picture(scene: Scene, width: int, glyphs: Glyphs = UNICODE) -> list[Line]:
    """For a pipe or a page: as tall as it needs to be, no tabs, no keys."""
    body = _body(scene, width, None, glyphs)
    return [fit(line, width, glyphs) for line in (_header(scene, width, glyphs), *_banners(scene), *body)]


def text(lines: Sequence[Line]) -> str:
    """The picture without styles, for pipes and tests."""
    return "\n".join("".join(part for part, _ in line).rstrip() for line in lines)


def listing(scene: Scene, glyphs: Glyphs = UNICODE) -> Listing | None:
    """The table of the chosen screen; None where it is not one."""
    tab = scene.view.tab
    if tab == "transfers":
        return transfers.listing(scene, glyphs)
    if tab == "requests":
        return requests.listing(scene, glyphs)
    if tab == "logs":
        return logs.listing(scene)
    return nodes.listing(scene, glyphs) if tab == "overview" and scene.many else None


# -- around the screen -------------------------------------------------------------------------------------------------
def _header(scene: Scene, width: int, glyphs: Glyphs) -> Line:
    if scene.view.paused:
        sign, style = "PAUSED", "warn"
    elif scene.replay:
        sign, style = "REPLAY", "warn"
    elif any(node.lost for node in scene.shown):
        sign, style = "LOST", "bad"
    elif any(scene.is_stale(node) for node in scene.shown):
        sign, style = "STALE", "bad"
    else:
        sign, style = "live", "good"
    right: Line = [(f"  {scene.interval:g}s  ", "dim"), (sign, style), (f"  {scene.clock} ", "")]
    room = width - width_of(right)
    left: Line = [(" pdd top  ", "title")]
    left += _of_all(scene) if scene.many else _of_one(scene, scene.shown[0], room - width_of(left), glyphs)
    return [*fit(left, room, glyphs), *right]


def _of_all(scene: Scene) -> Line:
    """How many nodes are in each state."""
    words = [nodes.word(scene, node) for node in scene.shown]
    line = say(f"{len(words)} nodes ")
    for word in dict.fromkeys(words):
        line.append((f" {words.count(word)} {word.upper()}", STATE_STYLE.get(word, "")))
    return line


def _of_one(scene: Scene, node: NodeState, room: int, glyphs: Glyphs) -> Line:
    status = node.status
    if status is None:
        return say(node.label)
    state = status["state"]
    shown = (f"was {state.upper()}", "dim") if scene.is_old(node) else (state.upper(), STATE_STYLE.get(state, ""))
    line: Line = [(f"{short(node.name, max(room // 3, 8), glyphs)} {status['role']} ", ""), shown]
    if status["phase"] and state in ("starting", "loading"):
        done = "" if status["progress"] is None else f" {status['progress']:.0%}"
        line.append((f" {status['phase']}{done}", "warn"))
    if status["drain_seconds_left"] is not None:
        line.append((f" {show_duration(status['drain_seconds_left'])} left", "warn"))
    fields = [status["model"] or "-", f"up {show_duration(status['uptime_seconds'])}"]
    line.append((f"  {whole(fields, room - width_of(line) - 2)}", ""))
    return line


def _tabs(scene: Scene, width: int) -> Line:
    view = scene.view
    line: Line = [(" ", "")]
    for number, name in enumerate(TABS, 1):
        chosen = name == view.tab
        title = f"{number} {name.capitalize()}"
        line.append((f"[{title}]" if chosen else f" {title} ", "title" if chosen else "dim"))
    notes = []
    if view.focus and len(scene.nodes) > 1:
        notes.append(f"only {view.focus} (esc: all)")
    if view.problems:
        notes.append("problems only")
    if view.table.sort:
        notes.append(f"by {view.table.sort}{' down' if view.table.reverse else ''}")
    elif view.table.reverse:
        notes.append("reversed")
    if view.table.filter:
        notes.append(f"filter {view.table.filter}")
    if scene.replay:
        notes.append(scene.replay)
    shown = "  ".join(notes)
    room = width - width_of(line)
    return [*line, (f"  {shown} "[:room].rjust(room), "warn")] if shown else line


def _banners(scene: Scene) -> list[Line]:
    """One line for each node that does not answer; of many only some."""
    if scene.view.paused:
        ages = [age for node in scene.shown if (age := scene.age(node)) is not None]
        return [say(f" paused {show_duration(min(ages, default=0.0))} ago; space goes on", "warn")]
    found: list[Line] = []
    for node in scene.shown:
        age = scene.age(node)
        who = f"{node.name}: " if scene.many else ""
        if node.lost:
            seen = f"last seen {show_duration(age)} ago" if age is not None else "not seen yet"
            found.append([(f" ! {who}{seen}, trying again: {node.lost}", "bad")])
        elif scene.is_stale(node) and not scene.replay:
            found.append(say(f" ! {who}no answer for {show_duration(age)}", "bad"))
    if len(found) > _MOST_BANNERS:
        found[_MOST_BANNERS - 1 :] = [say(f" ! and {len(found) - _MOST_BANNERS + 1} more nodes do not answer", "bad")]
    return found


def _footer(scene: Scene, width: int) -> Line:
    view = scene.view
    if view.typing is not None:
        return [(" filter: ", "title"), (view.typing, ""), ("_", "title"), ("   enter keeps it, esc drops it", "dim")]
    if view.ask is not None:
        ask = view.ask
        return [(f" {ask.what} on {ask.node}: type {ask.name} and enter, or esc: ", "bad"), (ask.typed, ""), ("_", "title")]
    if view.notice:
        return say(f" {view.notice}", "warn")
    if view.waterfall or view.drawer or view.help or view.findings:
        return say(" esc back  j k scroll  q quit  ? help", "dim")
    hints = _KEYS["nodes" if view.tab == "overview" and scene.many else view.tab]
    if view.admin:
        hints = ("C cancel" if view.tab == "requests" else "D drain", *hints)
    line = " q quit  ? help"
    for hint in hints:  # whole ones
        if len(line) + 2 + len(hint) > width:
            break
        line += f"  {hint}"
    return say(line, "dim")


# -- the screen --------------------------------------------------------------------------------------------------------
def _body(scene: Scene, width: int, room: int | None, glyphs: Glyphs) -> list[Line]:
    view = scene.view
    if view.help:
        return _scrolled([[], *(say(f"  {line}") for line in HELP)], view.scroll, room)
    if not any(node.docs for node in scene.shown) and not scene.many:
        return [[], say("  waiting for the first picture", "dim")]
    if view.findings:
        return _scrolled(drawer.wrapped(_all_findings(scene), width, 8), view.scroll, room)
    if view.waterfall:
        found = next((n.waterfalls[view.waterfall] for n in scene.shown if view.waterfall in n.waterfalls), None)
        return waterfall.lines(found, view.waterfall, width, room or 40, glyphs)
    found_table = listing(scene, glyphs)
    if found_table is not None:
        return _table(scene, found_table, width, room, glyphs)
    if view.tab == "topology":
        return _scrolled(drawer.wrapped(topology_text.lines(scene, width), width, 8), view.scroll, room)
    node = scene.shown[0]
    if view.drawer:
        return _scrolled(drawer.wrapped(drawer.of_node(node), width), view.scroll, room)
    if node.status is None:
        return [[], say("  the node says no status", "dim")]
    body = overview.body(node, view, width, room, glyphs)
    if scene.is_old(node):
        return [[(part, style if style == "bad" else "dim") for part, style in line] for line in body]
    return body


def _table(scene: Scene, found: Listing, width: int, room: int | None, glyphs: Glyphs) -> list[Line]:
    view = scene.view
    rows = [dataclasses.replace(row, old=scene.is_old(row.node)) for row in found.selected(scene)]
    empty = found.empty if not found.rows else "nothing passes the filter" + (" (e: all rows)" if view.problems else "")
    head: list[Line] = []
    if view.tab == "requests":
        counts = "  ".join(f"{name} {number}" for name, number in requests.counts(scene).items())
        head = [say(f" {requests.legend(glyphs)}   {counts}", "dim")]
    elif view.tab == "transfers":
        head = [transfers.sums(scene)]
    if room is not None:
        room -= len(head)
    if view.drawer and rows:
        row = rows[table.index_of(rows, view.table.cursor, found.newest_last)]
        detail = drawer.of_row(view.tab, row)
        if width < _DRAWER_BESIDE or room is None:
            return _scrolled(drawer.wrapped(detail, width), view.scroll, room)
        right = min(width // 2, 90)
        left = table.draw(rows, found.columns, view.table, width - right, room, glyphs, empty, found.newest_last)
        side = _scrolled(drawer.wrapped(detail, right - 3), view.scroll, room)
        side += [[] for _ in range(room - len(side))]
        edge = (f"{glyphs.vertical} ", "dim")
        return [*head, *([*fit(a, width - right, glyphs), edge, *b] for a, b in zip(left, side, strict=True))]
    drawn = table.draw(rows, found.columns, view.table, width, room, glyphs, empty, found.newest_last)
    if view.tab == "overview":
        drawn = _with_findings(scene, drawn, len(rows), room)
    return [*head, *drawn]


def _with_findings(scene: Scene, drawn: list[Line], num_rows: int, room: int | None) -> list[Line]:
    """Below the rows of several nodes, what they found, where there is room."""
    lines = [line for line in _all_findings(scene) if line]
    if room is None:
        return [*drawn, *lines]
    spare = room - num_rows - 2
    return [*drawn[: num_rows + 1], [], *lines[:spare]] if spare > 0 and num_rows else drawn


def _all_findings(scene: Scene) -> list[Line]:
    """What several nodes say alike is said once, with their names."""
    who: dict[str, list[str]] = {}
    lines: dict[str, Line] = {}
    for node in scene.shown:
        for line in (*overview.problems(node), *overview.peer_problems(node)):
            lines[line[0][0]] = line
            who.setdefault(line[0][0], []).append(node.name)
    made: list[Line] = []
    for said, line in lines.items():
        names = ", ".join(who[said][:_MOST_NAMES]) + (", ..." if len(who[said]) > _MOST_NAMES else "")
        made.append([*line, (f"  ({names})", "dim")] if scene.many else line)
    return made or [[], say("  nothing was found: no finding, and no reason not to be ready", "good")]


def _scrolled(lines: list[Line], scroll: int, room: int | None) -> list[Line]:
    if room is None or len(lines) <= room:
        return lines
    first = max(min(scroll, len(lines) - room + 1), 0)
    shown = lines[first : first + room - 1]
    below = len(lines) - first - len(shown)
    return [*shown, say(f" -- {below} more lines: j k" if below else " -- the end", "dim")]
