"""What each key does to the view. Pure: a view and a key in, another view and perhaps an effect out.

An effect is what a view cannot do: quit, change the interval, copy, change a node. Names of keys are Textual's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pdd.tui.scene import TABS, Ask, Scene, View
from pdd.tui.table import Column, Row, index_of

HELP = (
    "1-5, tab         overview, transfers, requests, topology, logs",
    "j k, arrows      down and up; PgDn PgUp a page; g G, Home End first and last",
    "enter            detail of the row; of several nodes: that one alone; esc goes back",
    "w                waterfall of the request's transfer: layer by chunk",
    "/                filter: a regular expression, or column~expression; ! before it turns it round",
    "s, < >           sort by the next column, the one before, the one after",
    "r                the other way round",
    "e                problems only",
    "a                all findings",
    "space            pause: data keeps arriving, the age is shown; in a replay it stops",
    "+ -              faster or slower pictures, 0.25 s to 10 s; in a replay its speed",
    "u                rates in bits or bytes",
    "y                copy the id of the row",
    "C D              with --admin: cancel the request, drain the node; its name must be typed",
    "?, F1            this page",
    "q, F10, ctrl+c   quit",
)
_STEPS = {"j": 1, "down": 1, "k": -1, "up": -1, "pagedown": 10, "pageup": -10, "g": -10**9, "home": -10**9,
          "G": 10**9, "end": 10**9}


@dataclasses.dataclass(frozen=True, slots=True)
class Effect:
    """Something for the app to do."""

    kind: str  # quit, pause, faster, slower, copy, cancel, drain
    text: str = ""
    node: str = ""


Outcome = tuple[View, Effect | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """What is on the screen when a key is pressed."""

    scene: Scene
    rows: Sequence[Row]  # as they are shown; none where there is no table
    columns: Sequence[Column]
    newest_last: bool
    height: int  # of the screen's body

    @property
    def row(self) -> Row | None:
        return self.rows[index_of(self.rows, self.scene.view.table.cursor, self.newest_last)] if self.rows else None


def press(context: Context, key: str, character: str | None) -> Outcome:
    view = dataclasses.replace(context.scene.view, notice="")
    if key in ("ctrl+c", "ctrl+q", "f10"):
        return view, Effect("quit")
    if view.typing is not None:
        return _type_filter(view, view.typing, key, character), None
    if view.ask is not None:
        return _answer(view, view.ask, key, character)
    if character is not None and character.isdigit() and 1 <= int(character) <= len(TABS):
        return _at_tab(view, TABS[int(character) - 1]), None
    if key in _STEPS or character in _STEPS:
        return _move(context, view, _STEPS.get(key) or _STEPS[character or ""]), None
    for name in (key, character):
        if name in _ACTIONS:
            return _ACTIONS[name](context, view)
    return view, None


# -- text that is typed ------------------------------------------------------------------------------------------------
def _typed(text: str, key: str, character: str | None) -> str:
    if key == "backspace":
        return text[:-1]
    if key == "ctrl+u":
        return ""
    return text + character if character is not None and character.isprintable() else text


def _type_filter(view: View, text: str, key: str, character: str | None) -> View:
    """The rows follow every letter."""
    if key == "escape":
        return dataclasses.replace(view.with_table(filter=""), typing=None)
    if key == "enter":
        return dataclasses.replace(view, typing=None)
    text = _typed(text, key, character)
    return dataclasses.replace(view.with_table(filter=text), typing=text)


def _answer(view: View, ask: Ask, key: str, character: str | None) -> Outcome:
    closed = dataclasses.replace(view, ask=None)
    if key == "escape":
        return closed, None
    if key == "enter":
        if ask.typed != ask.name:
            return dataclasses.replace(closed, notice=f"nothing is done: that was not {ask.name}"), None
        return closed, Effect(ask.what, ask.name, ask.node)
    return dataclasses.replace(view, ask=dataclasses.replace(ask, typed=_typed(ask.typed, key, character))), None


# -- where one is ------------------------------------------------------------------------------------------------------
def _at_tab(view: View, tab: str) -> View:
    return dataclasses.replace(view, tab=tab, drawer=False, findings=False, waterfall="", help=False, scroll=0)


def _next_tab(step: int) -> Callable[[Context, View], Outcome]:
    def action(context: Context, view: View) -> Outcome:
        return _at_tab(view, TABS[(TABS.index(view.tab) + step) % len(TABS)]), None

    return action


def _is_text(view: View) -> bool:
    """Lines are on the screen, no table."""
    return view.help or view.findings or view.drawer or bool(view.waterfall) or view.tab == "topology"


def _move(context: Context, view: View, step: int) -> View:
    if abs(step) == 10:
        step = step // 10 * max(context.height - 3, 1)
    if _is_text(view) or not context.rows:
        return dataclasses.replace(view, scroll=min(max(view.scroll + step, 0), 10_000))
    at = index_of(context.rows, view.table.cursor, context.newest_last)
    last = len(context.rows) - 1
    at = min(max(at + step, 0), last)
    follows = context.newest_last and at == last
    return view.with_table(cursor=None if follows else context.rows[at].id)


def _enter(context: Context, view: View) -> Outcome:
    if view.tab == "overview" and context.scene.many and context.row is not None:
        return dataclasses.replace(view, focus=context.row.node.label, scroll=0), None
    return dataclasses.replace(view, drawer=not view.drawer, scroll=0), None


def _back(context: Context, view: View) -> Outcome:
    """One thing at a time: page, drawer, filter, problems, focus."""
    if view.help or view.findings or view.waterfall:
        return dataclasses.replace(view, help=False, findings=False, waterfall="", scroll=0), None
    if view.drawer:
        return dataclasses.replace(view, drawer=False, scroll=0), None
    if view.table.filter:
        return view.with_table(filter=""), None
    if view.problems:
        return dataclasses.replace(view, problems=False), None
    return dataclasses.replace(view, focus="", scroll=0), None


def _toggle(name: str) -> Callable[[Context, View], Outcome]:
    def action(context: Context, view: View) -> Outcome:
        changed: dict[str, Any] = {name: not getattr(view, name), "scroll": 0}
        return dataclasses.replace(view, **changed), None

    return action


def _waterfall(context: Context, view: View) -> Outcome:
    row = context.row
    if view.waterfall:
        return dataclasses.replace(view, waterfall=""), None
    if view.tab == "requests" and row is not None:
        return dataclasses.replace(view, waterfall=row.data["id"]), None
    newest = [name for node in context.scene.shown for name in node.waterfalls]
    return dataclasses.replace(view, waterfall=newest[-1] if newest else "any request"), None


# -- how rows stand ----------------------------------------------------------------------------------------------------
def _filter(start: str) -> Callable[[Context, View], Outcome]:
    def action(context: Context, view: View) -> Outcome:
        if not context.columns:
            return dataclasses.replace(view, notice="this screen has no rows to filter"), None
        text = start or view.table.filter
        return dataclasses.replace(view.with_table(filter=text), typing=text, drawer=False), None

    return action


def _sort(step: int) -> Callable[[Context, View], Outcome]:
    def action(context: Context, view: View) -> Outcome:
        keys = ["", *(column.key for column in context.columns if column.order is not None)]
        if len(keys) == 1:
            return dataclasses.replace(view, notice="this screen has no rows to sort"), None
        at = keys.index(view.table.sort) if view.table.sort in keys else 0
        return view.with_table(sort=keys[(at + step) % len(keys)]), None

    return action


def _reverse(context: Context, view: View) -> Outcome:
    return view.with_table(reverse=not view.table.reverse), None


# -- effects -----------------------------------------------------------------------------------------------------------
def _effect(kind: str) -> Callable[[Context, View], Outcome]:
    return lambda context, view: (view, Effect(kind))


def _copy(context: Context, view: View) -> Outcome:
    if context.row is None:
        return dataclasses.replace(view, notice="there is no row to copy from"), None
    data = context.row.data
    text = str(data.get("id") or data.get("peer") or data.get("message") or data.get("name") or context.row.id)
    return dataclasses.replace(view, notice=f"copied {text}"), Effect("copy", text)


def _ask(what: str) -> Callable[[Context, View], Outcome]:
    def action(context: Context, view: View) -> Outcome:
        if not view.admin:
            return dataclasses.replace(view, notice=f"to {what} something, start `pdd top --admin`"), None
        if what == "cancel":
            if view.tab != "requests" or context.row is None:
                return dataclasses.replace(view, notice="choose a request on its screen first"), None
            row = context.row
            return dataclasses.replace(view, ask=Ask(what, row.node.label, row.data["id"])), None
        node = context.row.node if context.row is not None else context.scene.shown[0]
        return dataclasses.replace(view, ask=Ask(what, node.label, node.name)), None

    return action


_ACTIONS: dict[str | None, Callable[[Context, View], Outcome]] = {
    "q": _effect("quit"), "tab": _next_tab(1), "shift+tab": _next_tab(-1), "enter": _enter, "escape": _back,
    "?": _toggle("help"), "f1": _toggle("help"), "a": _toggle("findings"), "e": _toggle("problems"), "u": _toggle("bits"),
    "w": _waterfall, "/": _filter(""), "!": _filter("!"), "s": _sort(1), ">": _sort(1), "<": _sort(-1), "r": _reverse,
    "space": _effect("pause"), "+": _effect("faster"), "=": _effect("faster"), "-": _effect("slower"), "y": _copy,
    "C": _ask("cancel"), "D": _ask("drain"),
}
