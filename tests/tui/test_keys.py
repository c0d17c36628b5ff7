"""What keys do, without a terminal: a view and a key in, a view and an effect out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pdd.tui import frame
from pdd.tui.keys import Context, Effect, press
from pdd.tui.scene import TABS, Scene, View
from tests.tui import streams
from tests.tui.frames import node_of, scene

FIRST = "000781f3aa90c2de77b100"  # the oldest request


class Operator:
    """Presses keys on one scene."""

    def __init__(self, *nodes: Any, **view: Any) -> None:
        self.scene: Scene = scene(*(nodes or (node_of(streams.lines(9)),)), view=View(**view))
        self.effects: list[Effect] = []

    @property
    def view(self) -> View:
        return self.scene.view

    def press(self, *keys: str) -> Operator:
        for key in keys:
            found = frame.listing(self.scene)
            context = Context(self.scene, found.selected(self.scene) if found else (), found.columns if found else (),
                              bool(found and found.newest_last), 20)
            view, effect = press(context, key, key if len(key) == 1 else None)
            self.scene = dataclasses.replace(self.scene, view=view)
            self.effects += [effect] if effect else []
        return self

    def type(self, text: str) -> Operator:
        return self.press(*text)

    @property
    def text(self) -> str:
        return frame.text(frame.frame(self.scene, 120, 40))

    @property
    def picked(self) -> str:
        return next(line for line in self.text.splitlines() if line.startswith(">"))


def test_digits_and_tab_choose_the_screen() -> None:
    operator = Operator()
    for number, tab in enumerate(TABS, 1):
        assert operator.press(str(number)).view.tab == tab
    assert operator.press("tab").view.tab == "overview"
    assert operator.press("shift+tab").view.tab == "logs"
    assert operator.press("9").view.tab == "logs"


def test_the_cursor_stays_on_its_row_when_rows_move() -> None:
    operator = Operator(tab="transfers").press("j", "down")
    assert "prefill-r" in operator.picked
    operator.press("r")
    assert "prefill-r" in operator.picked
    assert "prefill-3" in operator.press("g").picked
    assert "prefill-0" in operator.press("G").picked
    assert "prefill-3" in operator.press("pageup").picked


def test_a_log_is_followed_until_one_moves_up_and_again_from_its_end() -> None:
    node = node_of(streams.lines(9))
    operator = Operator(node, tab="logs")
    assert "step 8" in operator.picked
    operator.press("k")
    assert "step 7" in operator.picked
    for line in streams.lines(10):
        node.apply(line, 0.0)
    assert "step 7" in operator.picked
    assert "silent" in operator.press("G").picked
    node.records.append({**streams.records(0, "x")[0], "seq": 99, "message": "later"})
    assert "later" in operator.picked


def test_a_filter_follows_every_letter_and_escape_drops_it() -> None:
    operator = Operator(tab="transfers").press("/").type("peer~-3")
    assert operator.view.typing == "peer~-3"
    assert "prefill-0" not in operator.text
    operator.press("q")  # is a letter here
    assert operator.effects == []
    operator.press("backspace", "enter")
    assert operator.view.typing is None
    assert "filter peer~-3" in operator.text
    assert "prefill-0" in operator.press("escape").text
    operator.press("!").type("tcp")
    assert "prefill-3" not in operator.press("enter").text
    assert operator.press("/", "ctrl+u").view.table.filter == ""


def test_sorting_goes_through_the_columns() -> None:
    operator = Operator(tab="transfers")
    seen = [operator.press("s").view.table.sort for _ in range(4)]
    assert seen == ["peer", "dir", "nic", "via"]
    assert operator.press("<").view.table.sort == "nic"
    assert "NIC▲" in operator.text
    assert "NIC▼" in operator.press("r").text


def test_one_thing_at_a_time_is_left() -> None:
    nodes = [node_of(streams.lines(3, name=name), name) for name in ("d0", "d1")]
    operator = Operator(*nodes).press("j", "enter")
    assert operator.view.focus == "d1"
    assert "only d1 (esc: all)" in operator.text
    operator.press("2", "e", "/").type("tcp").press("enter", "enter", "?")
    for member in ("help", "drawer"):
        assert getattr(operator.view, member)
        assert not getattr(operator.press("escape").view, member)
    assert operator.press("escape").view.table.filter == ""
    assert not operator.press("escape").view.problems
    assert operator.press("escape").view.focus == ""
    assert "2 nodes" in operator.text


def test_the_screens_behind_keys() -> None:
    operator = Operator()
    assert "T012" in operator.press("a").text
    assert "this page" in operator.press("a", "f1").text
    assert "no record of the transfer of any request" in operator.press("escape", "w").text
    operator.press("w", "3", "w")
    assert "no record of the transfer of 0" in operator.text
    assert "b/s" in operator.press("2", "u").text
    assert "page size" in operator.press("1", "enter").text
    assert operator.press("j", "j").view.scroll == 2
    assert "more lines" in operator.text


def test_effects() -> None:
    operator = Operator(tab="requests").press("space", "+", "-", "y", "q", "f10", "ctrl+c")
    assert [effect.kind for effect in operator.effects] == ["pause", "faster", "slower", "copy", "quit", "quit", "quit"]
    assert operator.effects[3].text == FIRST


@pytest.mark.parametrize("key", ["C", "D"])
def test_nothing_changes_a_node_without_admin(key: str) -> None:
    operator = Operator(tab="requests").press(key).type(FIRST).press("enter")
    assert operator.view.ask is None
    assert [effect.kind for effect in operator.effects if effect.kind in ("cancel", "drain")] == []
    assert "pdd top --admin" in Operator(tab="requests").press(key).text


def test_admin_asks_for_the_name() -> None:
    operator = Operator(tab="requests", admin=True).press("C").type("wrong").press("enter")
    assert operator.effects == []
    assert "nothing is done" in operator.text
    operator.press("C").type(FIRST).press("enter")
    assert operator.effects == [Effect("cancel", FIRST, "")]
    operator = Operator(admin=True).press("D").type("node-7")
    assert "drain on" in operator.text
    assert operator.press("escape").view.ask is None
    operator.press("D").type("node-7").press("enter")
    assert operator.effects == [Effect("drain", "node-7", "")]


def test_no_key_crashes_anywhere() -> None:
    keys = [*"123456789jkgG/!sr<>eauwyCD?+- ", "tab", "enter", "escape", "pagedown", "home", "f1", "up", "f7", "space"]
    empty = node_of([])
    for nodes in ((empty,), (node_of(streams.lines(2)),), (empty, node_of(streams.lines(2), "d1"))):
        for admin in (False, True):
            for tab in TABS:
                for key in keys:
                    operator = Operator(*nodes, tab=tab, admin=admin).press(key)
                    assert operator.text
                    assert operator.press("enter", key).text
