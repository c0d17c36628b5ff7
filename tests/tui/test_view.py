"""The picture of `pdd top` as text, from recorded events: no terminal, no Textual."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from pdd.metrics import PAGE_STATES
from pdd.tui import draw, frame
from pdd.tui.node import NodeState
from pdd.tui.scene import Scene
from tests.tui.frames import check_frame, recorded, scene_of

SIZES = [(80, 24), (100, 30), (160, 48), (200, 60), (50, 12)]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_frame_at_each_size(width: int, height: int) -> None:
    lines = frame.frame(scene_of(recorded()), width, height)
    assert [sum(len(text) for text, _ in line) for line in lines] == [width] * height
    check_frame(f"view-{width}x{height}", frame.text(lines))


def test_ascii_frame() -> None:
    text = frame.text(frame.frame(scene_of(recorded()), 80, 24, draw.ASCII))
    assert text.isascii()
    check_frame("view-ascii-80x24", text)


def test_a_lost_daemon_is_a_banner_over_the_last_picture() -> None:
    scene = scene_of(recorded(), age=7.0)
    scene.nodes[0].lose("the daemon stopped")
    text = frame.text(frame.frame(scene, 80, 24))
    assert "LOST" in text
    assert "last seen 7.0s ago, trying again: the daemon stopped" in text
    assert "decode" in text  # the last picture stays


def test_old_data_is_called_stale() -> None:
    assert "STALE" not in frame.text(frame.frame(scene_of(recorded(), age=1.0), 80, 24))
    stale = frame.text(frame.frame(scene_of(recorded(), age=1.9), 80, 24))
    assert "STALE" in stale
    assert "no answer for 1.9s" in stale


def test_data_asked_for_at_a_longer_interval_is_not_stale_at_a_shorter_one() -> None:
    scene = dataclasses.replace(scene_of(recorded(), age=5.0), interval=0.5)
    assert scene.is_stale(scene.nodes[0])
    assert not dataclasses.replace(scene, patience=10.0).is_stale(scene.nodes[0])


@pytest.mark.parametrize("width", range(80, 101))
def test_a_number_is_shown_whole_or_not_at_all(width: int) -> None:
    lines = recorded()
    status = lines[0]["docs"]["status"]
    status |= {"name": "decoder-with-a-long-name", "uptime_seconds": 11520.0, "batch_size": 1024}
    status |= {"max_batch_size": 2048}
    for way in ("bytes_per_second", "bytes_received_per_second"):
        status["rates"]["1s"][way] = 38.2e9
    text = frame.text(frame.frame(scene_of(lines[:1]), width, 24))
    for label, number in (("up", r"3h12m\s"), ("in", "38.2 GB/s"), ("out", "38.2 GB/s")):
        assert re.search(f" {label} {number}", text), text
    assert not re.search(r"max (?!1 024 )", text), text
    assert "SmolLM2" not in text or "SmolLM2-135M-Instruct " in text


PAGES = {"total": 6_000_021, "free": 1_234_567, "cached": 999_999, "reserved": 123_456, "running": 3_100_000,
         "sending": 541_999, "quarantined": 0}


@pytest.mark.parametrize("width", range(80, 121))
@pytest.mark.parametrize("quarantined", [0, 7, 1234, 2_000_000])
def test_page_counts_are_never_cut(width: int, quarantined: int) -> None:
    lines = recorded()
    lines[0]["docs"]["status"] |= {"pages": {**PAGES, "quarantined": quarantined}, "running": 1_234_567}
    text = frame.text(frame.frame(scene_of(lines[:1]), width, 24))
    panel = "\n".join(row.rsplit("││", 1)[-1].rsplit("┐┌", 1)[-1] for row in text.splitlines())
    assert " pages  6 000 021 ─" in panel
    for state in PAGE_STATES:
        shown = re.search(rf"{state} +([0-9. ]*[0-9])([kMG]?)(  |$| [a-z│])", panel, re.M)
        number = quarantined if state == "quarantined" else PAGES[state]
        assert shown, (state, panel)
        value = float(shown[1].replace(" ", "")) * {"": 1, "k": 1e3, "M": 1e6}[shown[2]]
        assert value == number or (shown[2] and value == pytest.approx(number, rel=0.2)), (state, panel)
    assert "running     1.23M " in text


@pytest.mark.parametrize("width", range(80, 121))
def test_page_counts_of_a_small_pool_are_exact(width: int) -> None:
    lines = recorded()
    pages = {"total": 99_999, "free": 60_000, "cached": 1000, "reserved": 500, "running": 38_000, "sending": 490, "quarantined": 9}
    lines[0]["docs"]["status"] |= {"pages": pages}
    text = frame.text(frame.frame(scene_of(lines[:1]), width, 24))
    for shown in ("free 60 000 ", "cached 1 000 ", "reserved 500 ", "sending 490 ", "quarantined 9 "):
        assert shown in text
    assert re.search("running 38( 000|k|.0k) ", text)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 40), (120, 40), (160, 48), (200, 60)])
def test_the_charts_take_the_rows_that_are_left(width: int, height: int) -> None:
    rows = frame.text(frame.frame(scene_of(recorded()), width, height)).splitlines()
    blank = [row for row in rows if not row.strip()]
    assert (len(rows), blank) == (height, [])


def test_problems_are_not_pushed_out_by_many_peers() -> None:
    lines = recorded()
    status = lines[0]["docs"]["status"]
    status |= {"peers": status["peers"][:1] * 128, "reasons": ["no prefiller is up"]}
    for width, height in ((80, 24), (60, 24), (160, 48)):
        text = frame.text(frame.frame(scene_of(lines[:1]), width, height))
        assert "! no prefiller is up" in text
        listed = text.count(status["peers"][0]["name"][:14])
        assert f"and {128 - listed} more; `pdd peers` lists all" in text


@pytest.mark.parametrize("num_peers", [0, 1, 2, 3, 12])
@pytest.mark.parametrize("width", [60, 100])
def test_a_picture_for_a_pipe_is_as_tall_as_it_needs_to_be(num_peers: int, width: int) -> None:
    lines = recorded()
    status = lines[0]["docs"]["status"]
    status |= {"peers": status["peers"][:1] * num_peers}
    rows = frame.text(frame.picture(scene_of(lines[:1]), width)).splitlines()
    assert all(row.strip() for row in rows)
    assert sum(row.startswith(" p0 ") for row in rows) == num_peers
    assert ("no peers" in rows[-1]) == (num_peers == 0)
    assert len(rows) == (13 if width == 100 else 6) + bool(num_peers) + max(num_peers, 1)


@pytest.mark.parametrize("state", ["down", "up"])
def test_why_a_peer_is_not_there_is_whole_or_marked_as_cut(state: str) -> None:
    lines = recorded()
    status = lines[0]["docs"]["status"]
    peer = {**status["peers"][0], "state": state, "error": "cannot connect: Connection refused, and more of that"}
    peer |= {"load": None, "rtt_seconds": None} if state == "down" else {}
    status |= {"peers": [peer]}
    row = next(row for row in frame.text(frame.frame(scene_of(lines[:1]), 80, 24)).splitlines() if row.startswith(" p0 "))
    assert ("cannot connect: Connection refused" in row) == (state == "down")
    assert row.endswith("…")
    assert len(row) <= 80


def test_nothing_yet() -> None:
    assert "waiting for the first picture" in frame.text(frame.frame(Scene((NodeState(),), 0.0, "", 1.0), 80, 24))


@pytest.mark.parametrize(
    ("width", "height"), [(0, 0), (1, 1), (12, 2), (39, 30), (80, 7), (80, 8), (40, 8), (77, 24), (78, 9)]
)
def test_no_size_crashes(width: int, height: int) -> None:
    for shown in (recorded(), []):
        lines = frame.frame(scene_of(shown), width, height)
        assert len(lines) == (height if width else 0)
        assert all(sum(len(text) for text, _ in line) == width for line in lines)


def test_many_peers_and_hostile_names_stay_inside_the_window() -> None:
    lines = recorded()
    status = lines[0]["docs"]["status"]
    peer = {**status["peers"][0], "name": "p\x1b[31m\n" * 20, "error": "x" * 500}
    status["peers"] = [peer] * 128
    drawn = frame.frame(scene_of(lines[:1]), 80, 24)
    assert len(drawn) == 24
    text = frame.text(drawn)
    assert "\x1b" not in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_every_color_stands_beside_a_sign() -> None:
    """A state that is bad reads as bad without its style."""
    lines = recorded()
    lines[0]["docs"]["status"] |= {"state": "not_ready", "reasons": ["no prefiller is up"]}
    text = frame.text(frame.frame(scene_of(lines[:1]), 80, 24))
    assert "NOT_READY" in text
    assert "! no prefiller is up" in text


# -- sparklines --------------------------------------------------------------------------------------------------------
def test_spark_scales_to_the_largest_and_shows_gaps() -> None:
    assert draw.spark([0, 4, 8], 3, draw.UNICODE) in (["▁▄█"], ["▁▅█"])
    assert draw.spark([1, None, 1], 5, draw.UNICODE) == ["  █ █"]
    assert draw.spark([0, 0], 2, draw.UNICODE) == ["▁▁"]
    assert draw.spark([5], 0, draw.UNICODE) == [""]


def test_a_chart_of_several_rows_stands_on_the_lowest() -> None:
    assert draw.spark([0, None, 5, 8], 6, draw.UNICODE, 2) == ["    ▂█", "  ▁ ██"]
    assert draw.spark([0, 0], 2, draw.UNICODE, 3) == ["  ", "  ", "▁▁"]
    assert draw.spark([1, 2], 2, draw.ASCII, 2) == [".#", "##"]


# -- node -----------------------------------------------------------------------------------------------------------
def test_bytes_between_two_samples_are_in_the_peak() -> None:
    """The daemon's rate is of the last second; a picture may come every ten."""
    node = NodeState()
    status = recorded()[0]["docs"]["status"]
    rates = {**status["rates"]["1s"], "bytes_per_second": 3.0, "bytes_received_per_second": 4.0}
    node.apply({"type": "snapshot", "docs": {"status": {**status, "rates": {"1s": rates, "10s": rates}}}}, 0.0)
    sent = {**status["transfers"], "bytes": 600, "bytes_received": 400}
    node.apply({"type": "delta", "docs": {"status": {"transfers": sent}}}, 0.5)  # within the second of the rate
    node.apply({"type": "delta", "docs": {"status": {"batch_size": 1}}}, 10.0)
    node.apply({"type": "delta", "docs": {"status": {"batch_size": 2}}}, 20.0)
    assert list(node.moved) == [7.0, 7.0, 100.0, 7.0]


def test_deltas_merge_member_by_member() -> None:
    node = NodeState()
    lines = recorded()
    for line in lines:
        node.apply(line, 1.0)
    assert node.status is not None
    assert node.status["epoch"] == lines[0]["docs"]["status"]["epoch"]
    assert node.status["batch_size"] == lines[-1]["docs"]["status"]["batch_size"]
    assert len(node.moved) == len(lines)


def test_a_restart_leaves_a_gap() -> None:
    node = NodeState()
    first, second = recorded()[0], recorded()[0]
    node.apply(first, 1.0)
    second["boot_id"] = "another"
    node.apply(second, 2.0)
    assert list(node.batch)[1] is None
    assert list(node.moved)[1] is None
    heartbeat = {"type": "heartbeat", "seq": 1}
    node.apply(heartbeat, 9.0)
    assert node.updated == 9.0


def test_the_recording_is_what_the_schema_says() -> None:
    import msgspec

    from pdd.control.schema import Status

    msgspec.convert(recorded()[0]["docs"]["status"], Status)
    assert Path(__file__).with_name("events.ndjson").stat().st_size < 100_000
