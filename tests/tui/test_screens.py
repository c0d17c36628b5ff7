"""Every screen as text at four sizes, in ASCII, and in the states that an operator meets at night."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdd.control import schema
from pdd.tui import draw, frame, requests, waterfall
from pdd.tui.node import KEPT_RECORDS, KEPT_WATERFALLS, NodeState
from pdd.tui.scene import TABS, Scene, TableChoice, View
from tests.tui import streams
from tests.tui.frames import check_frame, node_of, pair, scene, scene_of

SIZES = [(80, 24), (120, 40), (160, 48), (200, 60)]
MACHINE = streams.topology()
BUSY = list(streams.lines(45, machine=MACHINE))


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def text(shown: Scene, width: int = 120, height: int = 40, glyphs: draw.Glyphs = draw.UNICODE) -> str:
    lines = frame.frame(shown, width, height, glyphs)
    assert [draw.width_of(line) for line in lines] == [width] * height
    return frame.text(lines)


def busy(**view: Any) -> Scene:
    return scene_of(BUSY, view=View(**view))


def grouped(view: View, groups: int = 2) -> Scene:
    return scene_of((streams.with_groups(line, groups) for line in BUSY), view=view)


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("tab", TABS)
def test_a_busy_node(tab: str, width: int, height: int) -> None:
    check_frame(f"busy-{tab}-{width}x{height}", text(busy(tab=tab), width, height))


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("tab", TABS)
def test_the_recorded_pair(tab: str, width: int, height: int) -> None:
    check_frame(f"pair-{tab}-{width}x{height}", text(pair(View(tab=tab)), width, height))


@pytest.mark.parametrize("tab", TABS)
def test_in_ascii(tab: str) -> None:
    shown = text(busy(tab=tab), 80, 24, draw.ASCII)
    assert shown.isascii()
    check_frame(f"ascii-{tab}-80x24", shown)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 48)])
def test_the_waterfall(width: int, height: int) -> None:
    shown = text(busy(tab="requests", waterfall=streams.waterfall()["id"]), width, height)
    assert "exposed 5.1ms" in shown
    assert "hidden 89% of the transfer" in shown
    check_frame(f"waterfall-{width}x{height}", shown)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_recorded_waterfall(width: int, height: int) -> None:
    """Of a real prefiller: 1,300 tokens in steps of 512, 30 layers."""
    document = json.loads((Path(__file__).parent / "waterfall.json").read_text())
    assert {cell["chunk"] for cell in document["cells"]} == {0, 1, 2}
    line = {"type": "delta", "docs": {"waterfall": document}}
    shown = text(scene_of([*streams.lines(2), {**line, "ts": 0.0, "ts_mono": 102.0}], view=View(
        tab="requests", waterfall=document["id"])), width, height)
    assert f"{document['tokens']} tokens" in shown
    assert "hidden" in shown
    check_frame(f"recorded-waterfall-{width}x{height}", shown)


# -- what is missing ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tab", TABS)
def test_nothing_yet(tab: str) -> None:
    assert "waiting for the first picture" in text(Scene((NodeState(),), 0.0, "", 1.0, view=View(tab=tab)))


def test_an_idle_node_says_why_its_screens_are_empty() -> None:
    idle = {"status": streams.status(0, "d0", 0), "transfers": streams.transfers(0, 0), "requests": streams.requests(0, 0)}
    line = {"type": "snapshot", "ts": 0.0, "ts_mono": 0.0, "boot_id": "b", "docs": idle}
    for tab, said in (("overview", "no peers"), ("transfers", "nothing was moved, and there is no peer"),
                      ("requests", "no live request"), ("topology", "does not say its topology"), ("logs", "control.sock")):
        assert said in text(scene_of([line], view=View(tab=tab)), 120, 40)


def test_the_public_socket_shows_counts_and_says_what_it_does_not() -> None:
    document = {**streams.requests(0, 3), "requests": None}
    line = {"type": "snapshot", "ts": 0.0, "ts_mono": 0.0, "boot_id": "b",
            "docs": {"status": streams.status(0, "d0", 1), "requests": document}}
    shown = text(scene_of([line], view=View(tab="requests")))
    assert "only their counts are shown here" in shown
    assert "running 3" in shown


def test_a_daemon_that_knows_less_or_more_is_shown() -> None:
    """Members that are missing have their defaults; those that are new do no harm."""
    for status in ({}, {"name": "d0", "peers": [{"name": "p0"}], "pages": None, "groups": [{"rank": 0}], "novel": {"x": 1}}):
        docs = {"status": status, "transfers": {"transfers": [{"peer": "p0", "bytes": 7}]},
                "requests": {"requests": [{"id": "r", "odd": [1]}]}, "topology": {"host": "h"}, "more": {"a": 1}}
        node = node_of([{"type": "snapshot", "ts": 0.0, "ts_mono": 0.0, "docs": docs}, {"type": "news", "ts_mono": 0.0}])
        for tab in TABS:
            for drawer in (False, True):
                text(scene(node, view=View(tab=tab, drawer=drawer)), 80, 24)


def test_no_record_of_a_transfer_is_said() -> None:
    shown = text(busy(tab="requests", waterfall="r-1"))
    assert "no record of the transfer of r-1" in shown


# -- trouble -----------------------------------------------------------------------------------------------------------
def test_a_lost_node_among_several_is_named_and_its_age_is_shown() -> None:
    nodes = [node_of(streams.lines(20, name=name), name) for name in ("d0", "d1", "d2")]
    nodes[1].lose("the daemon at /run/pdd/d1/control.sock went away")
    shown = text(scene(*nodes, age=1.0))
    assert "3 nodes  2 READY 1 LOST" in shown
    assert "! d1: last seen 1.0s ago, trying again: the daemon at /run/pdd/d1/control.sock went away" in shown
    assert "T012 mlx5_6 is down: GPU6 uses mlx5_5 over SYS  (d0, d1, d2)" in shown  # said once
    rows = frame.frame(scene(*nodes, age=1.0), 120, 40)
    assert all(style in ("dim", "bad") for part, style in rows[5] if part.strip())  # what it said last is dim
    check_frame("nodes-lost-120x40", shown)


def test_many_lost_nodes_leave_room_for_the_screen() -> None:
    nodes = [node_of(streams.lines(2, name=f"d{i}", num_requests=1), f"d{i}") for i in range(30)]
    for node in nodes:
        node.lose("gone")
    shown = text(scene(*nodes), 80, 24)
    assert "and 28 more nodes do not answer" in shown
    assert shown.count("LOST") >= 15


def test_128_rows_and_long_names_fit() -> None:
    node = node_of(streams.lines(5, num_requests=128, num_peers=128, machine=MACHINE))
    for width, height in SIZES:
        for tab in TABS:
            text(scene(node, view=View(tab=tab)), width, height)
        assert "1-" in text(scene(node, view=View(tab="requests")), width, height)
    assert "1-35 of 128" in text(scene(node, view=View(tab="transfers")), 120, 40)
    assert streams.LONG_NAME[:30] not in text(scene(node, view=View(tab="transfers")), 80, 24)
    at_200 = text(scene(node, view=View(tab="transfers")), 200, 60)
    assert "prefill-rack17-node-0" in at_200


def test_hostile_text_stays_one_cell_a_character() -> None:
    node = node_of(BUSY)
    for name in ("p\x1b[31m\n", "名前" * 20, "e\u0301" * 9, "\u202e abc"):
        node.docs["transfers"]["transfers"][0] |= {"peer": name}
        node.records.append({**streams.records(0, "x")[0], "seq": 99, "message": name})
        for tab in ("transfers", "logs"):
            shown = text(scene(node, view=View(tab=tab, drawer=True)), 130, 30)
            assert "\x1b" not in shown
            assert "\u202e" not in shown
            assert "名" not in shown


def test_a_prefiller_shows_what_it_computes_for_whom() -> None:
    rows = [{"id": "a1", "kind": "prefill", "state": "sending", "age_seconds": 2.0, "state_age_seconds": 0.5, "peer": "d0",
             "prompt_tokens": 900, "queue_seconds": 0.5, "prefill_seconds": 1.0, "output_tokens": 0}]
    docs = {"status": {**streams.status(0, "p0", 1), "role": "prefill"}, "requests": {"counts": {"sending": 1}, "requests": rows}}
    shown = text(scene_of([{"type": "snapshot", "ts": 0.0, "ts_mono": 0.0, "boot_id": "b", "docs": docs}], view=View(tab="requests")))
    assert "░░" in shown
    assert "▒▒" in shown
    assert "▓▓" in shown
    assert "sending" in shown


# -- parts -------------------------------------------------------------------------------------------------------------
def request(**members: Any) -> dict[str, Any]:
    return msgspec.to_builtins(schema.Request(**{"id": "r", "state": "running", "age_seconds": 10.0, **members}))


@pytest.mark.parametrize(
    ("members", "parts"),
    [
        ({"state": "waiting"}, (10, 0, 0, 0)),
        ({"state": "wait_kv", "queue_seconds": 2.0}, (2, 0, 8, 0)),
        ({"attempts": 1, "queue_seconds": 1.0, "prefill_seconds": 3.0, "output_tokens": 5}, (1, 0, 3, 6)),
        ({"queue_seconds": 1.0, "first_token_seconds": 4.0, "output_tokens": 5}, (1, 3, 0, 6)),
        ({"queue_seconds": 1.0}, (1, 9, 0, 0)),
        ({"kind": "prefill", "state": "sending", "queue_seconds": 1.0, "prefill_seconds": 4.0}, (1, 4, 5, 0)),
        ({"kind": "attempt", "state": "quarantined"}, (0, 0, 10, 0)),
        ({"queue_seconds": 99.0}, (10, 0, 0, 0)),
    ],
)
def test_the_parts_of_an_age_add_up(members: dict[str, Any], parts: tuple[float, ...]) -> None:
    found = requests.parts(request(**members))
    assert found == parts
    assert sum(found) == 10.0


def test_every_phase_that_matters_has_a_mark_and_the_bar_its_length() -> None:
    for seconds in ((1, 1, 1, 97), (0, 0, 0, 0), (5, 0, 0, 0), (11, 11, 11, 67), (25, 25, 25, 25)):
        cells = requests.shares(seconds, 8)
        assert sum(cells) == 8
        assert all(cell > 0 for cell, each in zip(cells, seconds, strict=True) if each >= 10)
    assert len(requests.bar(request(age_seconds=60.0), 60.0, 14, draw.UNICODE)) == 14
    assert 1 <= len(requests.bar(request(age_seconds=0.001), 600.0, 14, draw.UNICODE)) < 4


def test_the_waterfall_is_its_schema_and_tells_hidden_from_exposed() -> None:
    document = streams.waterfall()
    assert json.loads(msgspec.json.encode(msgspec.convert(document, schema.Waterfall))) == document
    lines = waterfall.lines(document, document["id"], 120, 60, draw.ASCII)
    rows = frame.text(lines).splitlines()
    assert "!" not in rows[2]  # the first layer is hidden whole
    assert "!" in rows[-3]  # the last one is not
    few = waterfall.bands(document["cells"], 6)
    assert [band.label.split()[1] for band in few] == ["0-7", "8-15"] * 3


def test_a_waterfall_of_what_is_not_over_is_drawn() -> None:
    cells = [{"chunk": 0, "layer": 0, "armed_seconds": 0.0}, {"chunk": 0, "layer": 1, "posted_seconds": 0.1}]
    assert waterfall.lines({"id": "r", "cells": cells}, "r", 80, 20, draw.UNICODE)


# -- tables ------------------------------------------------------------------------------------------------------------
def rows(shown: Scene) -> list[str]:
    found = frame.listing(shown)
    assert found is not None
    return [row.data.get("id") or row.data.get("peer") or row.data["message"] for row in found.selected(shown)]


def table(tab: str, **choice: Any) -> View:
    return View(tab=tab, tables={tab: TableChoice(**choice)})


@pytest.mark.parametrize(
    ("wanted", "peers"),
    [
        ("", [0, 1, 2, 3]), ("prefill-[01]$", []), ("peer~prefill-[01]$", [0, 1]), ("!peer~prefill-[01]$", [2, 3]),
        ("TCP", [3]), ("via~verbs", [0, 1, 2]), ("[", []), ("nosuch~x", []),
    ],
)
def test_filters(wanted: str, peers: list[int]) -> None:
    found = rows(dataclasses.replace(busy(), view=table("transfers", filter=wanted)))
    assert found == [streams.peer_name(place) for place in peers]


def test_sorting_puts_what_is_not_known_last() -> None:
    node = node_of(BUSY)
    node.docs["transfers"]["transfers"][1]["p99_seconds"] = None
    for reverse, order in ((False, [0, 2, 3, 1]), (True, [3, 2, 0, 1])):
        found = rows(scene(node, view=table("transfers", sort="p99", reverse=reverse)))
        assert found == [streams.peer_name(place) for place in order]


def test_problems_only() -> None:
    assert rows(busy(tab="transfers", problems=True)) == ["prefill-3"]
    assert set(rows(busy(tab="logs", problems=True))) == {"the peer is silent"}
    assert "nothing passes the filter (e: all rows)" in text(
        dataclasses.replace(busy(), view=dataclasses.replace(table("logs", filter="xyzzy"), problems=True)))


@pytest.mark.parametrize(("tab", "width", "height"), [("overview", 120, 40), ("overview", 80, 24), ("requests", 160, 48)])
def test_a_node_of_several_engines_shows_each(tab: str, width: int, height: int) -> None:
    check_frame(f"groups-{tab}-{width}x{height}", text(grouped(View(tab=tab)), width, height))


def test_of_many_engines_the_first_are_shown() -> None:
    shown = text(grouped(View(tab="overview"), groups=20), 120, 40)
    assert " group 7 " in shown
    assert " group 8 " not in shown
    assert " and 12 more; `pdd status` lists all" in shown
    assert " group 7 " in text(grouped(View(tab="overview"), groups=64), 80, 24)


def test_a_drawer_stands_beside_where_there_is_room() -> None:
    wide = text(busy(tab="transfers", drawer=True), 160, 48).splitlines()
    assert any(">prefill-0" in line and "│" in line for line in wide)
    assert "peer rtt" in "\n".join(wide)
    narrow = text(busy(tab="transfers", drawer=True), 80, 24)
    assert ">prefill-0" not in narrow
    assert "peer rtt" in narrow
    check_frame("drawer-requests-160x48", text(busy(tab="requests", drawer=True), 160, 48))


def test_a_trace_is_in_the_drawer_of_its_record() -> None:
    view = View(tab="logs", drawer=True, tables={"logs": TableChoice(filter="level~error")})
    assert "PeerLost: gone" in text(dataclasses.replace(busy(), view=view))


# -- memory ------------------------------------------------------------------------------------------------------------
def test_what_is_kept_is_bounded() -> None:
    node = NodeState()
    for line in streams.lines(3000, num_requests=1, num_peers=3):
        node.apply(line, line["ts_mono"])
    for number in range(200):
        node.apply({"type": "delta", "docs": {"waterfall": {"id": str(number)}}}, 0.0)
    assert len(node.records) == KEPT_RECORDS
    assert len(node.waterfalls) == KEPT_WATERFALLS
    assert len(node.trends) == 3
    assert max(len(samples) for samples in node.trends.values()) <= 40


def test_a_waterfall_is_told_by_what_changed_of_it() -> None:
    node = NodeState()
    head = {"ts": 5.0, "ts_mono": 0.0}
    node.apply({"type": "snapshot", **head, "boot_id": "b", "docs": {"waterfall": {"id": "", "peer": None, "cells": []}}}, 0.0)
    assert node.waterfalls == {}
    node.apply({"type": "delta", **head, "docs": {"waterfall": {"id": "r1", "peer": "p0", "cells": [1]}}}, 1.0)
    node.apply({"type": "delta", **head, "docs": {"waterfall": {"id": "r2", "cells": [2]}}}, 2.0)
    assert node.waterfalls == {"r1": {"id": "r1", "peer": "p0", "cells": [1]}, "r2": {"id": "r2", "peer": "p0", "cells": [2]}}


def test_records_that_come_again_are_kept_once_and_a_restart_is_noted() -> None:
    node = NodeState()
    def snapshot(boot: str) -> dict[str, Any]:
        return {"type": "snapshot", "ts": 5.0, "ts_mono": 0.0, "boot_id": boot, "docs": {"status": streams.status(0, "d0", 0)}}

    said = {"type": "logs", "missed": 0, "records": streams.records(0, "d0")}
    for line in (snapshot("a"), said, said, snapshot("a"), said):
        node.apply(line, 0.0)
    assert len(node.records) == 2
    for line in (snapshot("b"), said):
        node.apply(line, 0.0)
    assert [record["message"] for record in node.records][2] == "the daemon was started anew"
    assert len(node.records) == 5


def test_a_frozen_node_stays_as_it_is() -> None:
    node = node_of(BUSY[:10])
    frozen = node.frozen()
    before = text(scene(frozen, view=View(tab="transfers")))
    for line in BUSY[10:]:
        node.apply(line, 0.0)
    assert text(Scene((frozen,), 4.0, "12:04:31", 1.0, view=View(tab="transfers"))) == before
    assert len(frozen.records) < len(node.records)
