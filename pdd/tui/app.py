"""`pdd top` on a full screen: one widget that draws view.frame and repaints the lines that changed.

A feed thread posts what the daemon says as messages; only the app's own thread touches the widget. Nothing here can
change the node. A lost daemon is a banner and the last picture, never an exit.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import signal
import time
from collections.abc import Callable
from typing import Any, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from pdd.control.client import Client
from pdd.tui import draw, view
from pdd.tui.feed import Feed
from pdd.tui.rates import History

INTERVALS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0)  # seconds that + and - step through
_TICK_SECONDS = 0.25  # how often the age of the data is looked at
_STYLES = {"": "", "title": "bold", "good": "green", "warn": "yellow", "bad": "bold red", "dim": "dim"}


@dataclasses.dataclass
class Arrived(Message):
    line: dict[str, Any]


@dataclasses.dataclass
class Lost(Message):
    reason: str


class Picture(Widget):
    """The whole screen as lines; only lines that differ from the last picture are painted."""

    class Resized(Message):
        """Another size: the picture must be drawn for it."""

    DEFAULT_CSS = "Picture { width: 100%; height: 100%; }"

    def __init__(self, color: bool) -> None:
        super().__init__()
        self._lines: list[draw.Line] = []
        self._styles = {name: Style.parse(text) if color else Style.null() for name, text in _STYLES.items()}

    def show(self, lines: list[draw.Line]) -> None:
        changed = [y for y, line in enumerate(lines) if y >= len(self._lines) or line != self._lines[y]]
        self._lines = lines
        if changed:
            self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))

    def on_resize(self) -> None:
        self.post_message(self.Resized())

    def render_line(self, y: int) -> Strip:
        base = self.rich_style  # a strip without a style breaks Textual's filter of colors (NO_COLOR)
        if y >= len(self._lines):
            return Strip.blank(self.size.width, base)
        segments = [Segment(text, base + self._styles[style]) for text, style in self._lines[y]]
        return Strip(segments).adjust_cell_length(self.size.width, base)


class PddTop(App[None]):
    """Args: `clock` is the wall clock as text, `now` the clock of ages; tests give their own."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,f10,ctrl+c,ctrl+q", "quit", priority=True),
        Binding("question_mark,f1", "help"),
        Binding("escape", "close_help"),
        Binding("space", "pause"),
        Binding("plus,equals_sign", "faster"),
        Binding("minus", "slower"),
    ]

    def __init__(
        self,
        client: Client | None,
        interval: float = 1.0,
        *,
        glyphs: draw.Glyphs = draw.UNICODE,
        color: bool = True,
        theme: str = "auto",
        now: Callable[[], float] = time.monotonic,
        clock: Callable[[], str] = lambda: time.strftime("%H:%M:%S"),
    ) -> None:
        super().__init__()
        self.theme = "textual-light" if theme == "light" else "textual-dark"
        self.animation_level = "none"
        self._glyphs = glyphs
        self._now = now
        self._clock = clock
        self._history = History()
        self._scene = view.Scene(self._history, now(), clock(), interval)
        self._picture = Picture(color)
        self._feed: Feed | None = None
        if client is not None:
            self._feed = Feed(client, interval, self._on_line, self._on_loss)

    # Both run on the feed's thread: posting a message is all they may do.
    def _on_line(self, line: dict[str, Any]) -> None:
        self.post_message(Arrived(line))

    def _on_loss(self, reason: str) -> None:
        self.post_message(Lost(reason))

    def compose(self) -> ComposeResult:
        yield self._picture

    def on_mount(self) -> None:
        self.set_interval(_TICK_SECONDS, self._tick)
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self.exit)  # so that the terminal is restored
        if self._feed is not None:
            self._feed.start()

    def on_unmount(self) -> None:
        if self._feed is not None:
            self._feed.stop()

    @property
    def crash(self) -> Exception | None:
        """The bug that ended it, if one did."""
        return self._exception

    def _fatal_error(self) -> None:
        """Textual would print the trace with every local variable; the command says it in a line instead."""
        self._close_messages_no_wait()

    def on_picture_resized(self) -> None:
        self._draw()

    def on_arrived(self, message: Arrived) -> None:
        self._history.apply(message.line, self._now())
        self._change(lost="", patience=self._scene.interval)

    def on_lost(self, message: Lost) -> None:
        self._change(lost=message.reason)

    def _tick(self) -> None:
        """Ages the picture while nothing new is shown."""
        if self._scene.lost or self._scene.paused or view.is_stale(dataclasses.replace(self._scene, now=self._now())):
            self._draw()

    def _change(self, **members: Any) -> None:
        self._scene = dataclasses.replace(self._scene, **members)
        self._draw()

    def _draw(self) -> None:
        self._scene = dataclasses.replace(self._scene, now=self._now(), clock=self._clock())
        size = self._picture.size
        self._picture.show(view.frame(self._scene, size.width, size.height, self._glyphs))

    # -- keys ----------------------------------------------------------------------------------------------------------
    def action_help(self) -> None:
        self._change(help=not self._scene.help)

    def action_close_help(self) -> None:
        self._change(help=False)

    def action_pause(self) -> None:
        """Pictures stay as they are while data goes on arriving in the live history."""
        paused = not self._scene.paused
        self._change(paused=paused, history=copy.deepcopy(self._history) if paused else self._history)

    def action_slower(self) -> None:
        self._set_interval(next((each for each in INTERVALS if each > self._scene.interval), INTERVALS[-1]))

    def action_faster(self) -> None:
        self._set_interval(next((each for each in reversed(INTERVALS) if each < self._scene.interval), INTERVALS[0]))

    def _set_interval(self, interval: float) -> None:
        if self._feed is not None:
            self._feed.interval = interval
        # The line on its way was asked for at the old interval; the one after it comes at the new.
        patience = max(self._scene.patience, self._scene.interval, interval)
        self._change(interval=interval, patience=patience)
