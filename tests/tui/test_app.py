"""The real Textual app:

frames from its own compositor, keys, loss and return of a real daemon, and the terminal it leaves.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdd.control.client import Client
from pdd.errors import DaemonNotRunning
from pdd.tui import draw, feed, frame, recording
from pdd.tui.app import PddTop
from pdd.tui.feed import Inbox, News
from pdd.tui.scene import View
from pdd.tui.session import Session
from pdd.tui.sources import SocketSource
from tests.control import fake_daemon
from tests.tui import streams
from tests.tui.frames import PAIR, recorded, scene_of


def screen(app: PddTop) -> str:
    """What the compositor shows, as text (the one place that knows where Textual keeps it)."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0


def make(clock: Clock, labels: tuple[str, ...] = ("",), **options: Any) -> PddTop:
    return PddTop(Session(labels), Inbox(), now=lambda: clock.now, clock=lambda: "12:04:31", **options)


def put(app: PddTop, line: dict[str, Any], label: str = "") -> None:
    app._inbox.put(News(label, line))


async def play(app: PddTop, pilot: Any, clock: Clock, lines: list[dict[str, Any]]) -> None:
    for second, line in enumerate(lines):
        clock.now = float(second)
        put(app, line)
        await pilot.pause()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30)])
async def test_the_screen_is_the_picture(width: int, height: int) -> None:
    clock = Clock()
    app = make(clock)
    async with app.run_test(size=(width, height)) as pilot:
        await play(app, pilot, clock, recorded())
        assert screen(app) == frame.text(frame.frame(scene_of(recorded()), width, height))


async def test_no_color_means_no_color() -> None:
    clock = Clock()
    for color in (True, False):
        app = make(clock, color=color)
        async with app.run_test(size=(80, 24)) as pilot:
            await play(app, pilot, clock, recorded()[:1])
            strips = app.screen._compositor.render_strips()
            shades = {
                segment.style.color for strip in strips for segment in strip if segment.style and segment.text.strip()
            }
            assert (len(shades) > 1) is color


async def test_keys() -> None:
    clock = Clock()
    app = make(clock)
    async with app.run_test(size=(80, 24)) as pilot:
        await play(app, pilot, clock, recorded()[:1])
        await pilot.press("question_mark")
        assert "this page" in screen(app)
        await pilot.press("escape")
        assert "this page" not in screen(app)
        for key, shown in (("plus", ("0.5s", "0.25s", "0.25s")), ("minus", ("0.5s", "1s", "2s", "5s", "10s", "10s"))):
            for interval in shown:
                await pilot.press(key)
                assert f" {interval}  " in screen(app)
        await pilot.press("q")
    assert app.return_code == 0


async def test_pause_keeps_the_picture_and_shows_its_age() -> None:
    clock = Clock()
    app = make(clock)
    lines = recorded()
    async with app.run_test(size=(80, 24)) as pilot:
        await play(app, pilot, clock, lines[:1])
        before = screen(app).splitlines()[2]
        await pilot.press("space")
        for line in lines[1:]:
            put(app, line)
        clock.now = 12.0
        await pilot.pause(0.6)
        assert "PAUSED" in screen(app)
        assert "paused 12.0s ago" in screen(app)
        assert before in screen(app)
        await pilot.press("space")
        assert "PAUSED" not in screen(app)
        assert before not in screen(app)


async def test_a_loss_is_a_banner_and_data_clears_it() -> None:
    clock = Clock()
    app = make(clock)
    async with app.run_test(size=(80, 24)) as pilot:
        await play(app, pilot, clock, recorded()[:2])
        app._inbox.put(News("", error=DaemonNotRunning("no daemon at /x")))
        clock.now = 5.0
        await pilot.pause(0.6)
        assert "LOST" in screen(app)
        assert "last seen 4.0s ago, trying again: no daemon at /x" in screen(app)
        put(app, recorded()[0])
        await pilot.pause()
        assert "LOST" not in screen(app)


async def test_resizes_down_to_nothing_and_back() -> None:
    clock = Clock()
    app = make(clock)
    async with app.run_test(size=(80, 24)) as pilot:
        await play(app, pilot, clock, recorded()[:1])
        for size in ((12, 2), (1, 1), (200, 60), (40, 8), (80, 24)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            assert screen(app) == frame.text(frame.frame(scene_of(recorded()[:1]), *size))


async def test_a_daemon_that_goes_and_comes_back_is_followed_by_itself(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    first = fake_daemon.Running(run_dir, fake_daemon.FakeSource())
    first.start()
    inbox = Inbox()
    feeds = feed.start([SocketSource("d0", Client(run_dir / "d0"))], 0.25, inbox)
    app = PddTop(Session(["d0"]), inbox, 0.25, feeds=feeds)
    async with app.run_test(size=(80, 24)) as pilot:
        await _until(pilot, lambda: "READY" in screen(app))
        first.stop()
        await _until(pilot, lambda: "LOST" in screen(app))
        assert "was READY" in screen(app)  # the last picture stays
        await _until(pilot, lambda: "no daemon at" in screen(app))  # it has asked again
        source = fake_daemon.FakeSource()
        source.state = "draining"
        with fake_daemon.running(run_dir, source):
            await _until(pilot, lambda: "DRAINING" in screen(app) and "LOST" not in screen(app))
            await pilot.press("q")


async def _until(pilot: Any, condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, screen(pilot.app)
        await pilot.pause(0.05)


# -- on a terminal -----------------------------------------------------------------------------------------------------
class Terminal:
    """`pdd top` as a user runs it, on a pseudo terminal."""

    def __init__(self, run_dir: Path, size: tuple[int, int] = (24, 80), words: tuple[str, ...] = (), **env: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self.slave = slave
        self.modes = termios.tcgetattr(slave)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PDD_")}
        clean |= {"TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONUTF8": "1", **env}
        command = [sys.executable, "-m", "pdd.cli", "--run-dir", str(run_dir), "-i", "d0", "top", *words]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=clean, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.output = b""

    def read_until(self, wanted: bytes, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while wanted not in self.output:
            assert time.monotonic() < deadline, self.output[-2000:]
            if select.select([self.master], [], [], 0.1)[0]:
                self.output += os.read(self.master, 65536)

    def finish(self, seconds: float = 20.0) -> int:
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "it does not end"
            if select.select([self.master], [], [], 0.05)[0]:
                self.output += os.read(self.master, 65536)
        while select.select([self.master], [], [], 0.05)[0]:
            self.output += os.read(self.master, 65536)
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.mark.parametrize("how", ["q", "ctrl+c", "SIGTERM", "SIGHUP"])
def test_the_terminal_is_restored(tmp_path: Path, how: str) -> None:
    with fake_daemon.running(tmp_path / "run"):
        terminal = Terminal(tmp_path / "run")
        try:
            terminal.read_until(b"READY")
            if how == "q":
                os.write(terminal.master, b"q")
            elif how == "ctrl+c":
                os.write(terminal.master, b"\x03")
            else:
                os.kill(terminal.process.pid, getattr(signal, how))
            terminal.finish()
            assert termios.tcgetattr(terminal.slave) == terminal.modes
            assert terminal.output.rindex(b"\x1b[?1049l") > terminal.output.rindex(
                b"\x1b[?1049h"
            )  # left the full screen
            assert b"\x1b[?1003l" in terminal.output  # no mouse codes in the shell
            assert b"Traceback" not in terminal.output
        finally:
            terminal.close()


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "vt100"}, {"LANG": "C", "PYTHONUTF8": "0", "LC_ALL": "C"}])
def test_poor_terminals_show_it_too(tmp_path: Path, env: dict[str, str]) -> None:
    with fake_daemon.running(tmp_path / "run"):
        terminal = Terminal(tmp_path / "run", **env)
        try:
            terminal.read_until(b"READY")
            os.write(terminal.master, b"q")
            assert terminal.finish() == 0
            assert b"Traceback" not in terminal.output
        finally:
            terminal.close()


def test_no_color_leaves_the_terminal_its_own_two(tmp_path: Path) -> None:
    shades: dict[str, set[bytes]] = {}
    with fake_daemon.running(tmp_path / "run"):
        for name, env in (("none", {"NO_COLOR": "1"}), ("some", {})):
            terminal = Terminal(tmp_path / "run", **env)
            try:
                terminal.read_until(b"READY")
                os.write(terminal.master, b"q")
                assert terminal.finish() == 0
            finally:
                terminal.close()
            codes = {code for codes in re.findall(rb"\x1b\[([\d;]*)m", terminal.output) for code in codes.split(b";")}
            shades[name] = {code for code in codes if re.fullmatch(rb"[349]\d|10\d", code)}
    assert shades["none"] <= {b"39", b"49"}
    assert b"32" in shades["some"]
    assert shades["some"] <= {b"31", b"32", b"33", b"39", b"49"}  # the terminal's palette and background


async def test_a_bug_ends_it_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*arguments: object) -> list[draw.Line]:
        raise ZeroDivisionError("drawing")

    monkeypatch.setattr(frame, "frame", broken)
    app = make(Clock())
    with pytest.raises(ZeroDivisionError):
        async with app.run_test(size=(80, 24)):
            pass
    assert isinstance(app.crash, ZeroDivisionError)
    assert "locals" not in "".join(capsys.readouterr())


def test_no_daemon_is_an_error_line_not_a_screen(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path / "run")
    try:
        assert terminal.finish() == 3
        assert b"no daemon at" in terminal.output
        assert b"\x1b[?1049h" not in terminal.output
    finally:
        terminal.close()


@pytest.mark.parametrize(("size", "term"), [((0, 0), "xterm"), ((1, 1), "xterm"), ((24, 80), "dumb")])
def test_odd_terminals(tmp_path: Path, size: tuple[int, int], term: str) -> None:
    with fake_daemon.running(tmp_path / "run"):
        terminal = Terminal(tmp_path / "run", size, TERM=term)
        try:
            if term == "dumb":
                assert terminal.finish() == 0
                assert b"no full screen here" in terminal.output
                assert b"READY" in terminal.output
            else:
                terminal.read_until(b"\x1b[?1049h")
                fcntl.ioctl(terminal.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
                os.kill(terminal.process.pid, signal.SIGWINCH)
                terminal.read_until(b"READY")  # it recovers on a resize
                os.write(terminal.master, b"q")
                assert terminal.finish() == 0
        finally:
            terminal.close()


# -- screens and keys --------------------------------------------------------------------------------------------------
async def test_keys_reach_the_view_and_rows_are_filtered_as_one_types() -> None:
    clock = Clock()
    app = make(clock, view=View(admin=True))
    async with app.run_test(size=(120, 40)) as pilot:
        await play(app, pilot, clock, list(streams.lines(3)))
        await pilot.press("2", "j", "enter")
        assert ">prefill-1" in screen(app)
        assert "peer rtt" in screen(app)
        await pilot.press("escape", "slash", *"via", "tilde", *"tcp", "enter")
        assert "prefill-3" in screen(app)
        assert "prefill-1" not in screen(app)
        await pilot.press("escape", "tab", "y")
        assert "copied 000" in screen(app)
        await pilot.press("D", *"node-7", "enter")
        await pilot.pause(0.1)
        assert "a replay changes no node" in screen(app)


async def test_several_nodes_are_drawn_together(tmp_path: Path) -> None:
    with fake_daemon.running(tmp_path / "run"), fake_daemon.running(tmp_path / "run", fake_daemon.FakeSource("p0")) as other:
        inbox = Inbox()
        followed = [SocketSource(name, Client(tmp_path / "run" / name)) for name in ("d0", "p0")]
        app = PddTop(Session(["d0", "p0"]), inbox, 0.25, feeds=feed.start(followed, 0.25, inbox), sources=followed,
                     view=View(admin=True))
        async with app.run_test(size=(120, 40)) as pilot:
            await _until(pilot, lambda: "2 READY" in screen(app))
            await pilot.press("5")
            await _until(pilot, lambda: screen(app).count("peer is silent") == 2)
            await pilot.press("1", "j", "D", *"p0", "enter")
            await _until(pilot, lambda: "p0 drains" in screen(app))
            assert other.source.state == "drained"
            other.stop()
            await _until(pilot, lambda: "p0: " in screen(app) and "1 LOST" in screen(app))
            await pilot.press("q")


async def test_a_recording_plays_stops_and_changes_speed() -> None:
    inbox = Inbox()
    labels = recording.labels(PAIR)
    player = recording.Player(PAIR, inbox)
    app = PddTop(Session(labels), inbox, player=player)
    async with app.run_test(size=(120, 40)) as pilot:
        await _until(pilot, lambda: "3 nodes" in screen(app) and "REPLAY" in screen(app))
        await pilot.press("space")
        assert player.paused
        assert "PAUSED" in screen(app)
        await pilot.press("space", *["plus"] * 5)
        assert player.speed == 60.0
        await _until(pilot, lambda: "the end at 60x" in screen(app))
        assert "LOST" not in screen(app)


def test_a_recording_on_a_terminal_needs_no_daemon(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path / "run", words=("--replay", str(PAIR), "--tab", "transfers"))
    try:
        terminal.read_until(b"REPLAY")
        os.write(terminal.master, b"q")
        assert terminal.finish() == 0
    finally:
        terminal.close()
