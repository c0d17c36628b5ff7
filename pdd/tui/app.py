"""`pdd top` on a full screen: one widget that draws frame.frame and repaints the lines that changed.

Feeds and a player put news into the inbox; only the app's own thread takes it and touches the widget, at most once a
tick. Keys go through keys.press. Without --admin nothing here can change a node. A lost daemon is a banner and the last
picture, never an exit.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from pdd.errors import ControlError
from pdd.tui import draw, frame, keys
from pdd.tui.feed import Feed, Inbox
from pdd.tui.node import NodeState
from pdd.tui.recording import Player
from pdd.tui.scene import Scene, View
from pdd.tui.session import Session
from pdd.tui.sources import Source
from pdd.units import show_duration

INTERVALS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0)  # seconds that + and - step through
SPEEDS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)  # of a replay
_OWN_THEMES = ("ansi-dark", "textual-ansi")  # the terminal's own colors, by the names of Textual's versions
_TICK_SECONDS = 0.25  # how often the age of the data is looked at
_STYLES = {"": "", "title": "bold", "good": "green", "warn": "yellow", "bad": "bold red", "dim": "dim", "pick": "reverse"}
_COLORLESS = {"title": "bold", "bad": "bold", "pick": "reverse"}


class Arrived(Message):
    """There is news in the inbox."""


@dataclasses.dataclass
class Done(Message):
    """A change that was asked for came to its end."""

    notice: str


class Picture(Widget, can_focus=True):
    """The whole screen as lines; only lines that differ from the last picture are painted."""

    class Resized(Message):
        """Another size: the picture must be drawn for it."""

    DEFAULT_CSS = "Picture { width: 100%; height: 100%; }"

    def __init__(self, color: bool) -> None:
        super().__init__()
        self._lines: list[draw.Line] = []
        styles = _STYLES if color else {name: _COLORLESS.get(name, "") for name in _STYLES}
        self._styles = {name: Style.parse(text) for name, text in styles.items()}

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
    BINDINGS: ClassVar[list[BindingType]] = []

    def __init__(
        self,
        session: Session,
        inbox: Inbox,
        interval: float = 1.0,
        *,
        feeds: Sequence[Feed] = (),
        sources: Sequence[Source] = (),
        player: Player | None = None,
        view: View | None = None,
        glyphs: draw.Glyphs = draw.UNICODE,
        color: bool = True,
        theme: str = "auto",
        now: Callable[[], float] = time.monotonic,
        clock: Callable[[], str] = lambda: time.strftime("%H:%M:%S"),
    ) -> None:
        os.environ.pop("NO_COLOR", None)  # `color` says it; Textual's own answer to it is shades of gray on black
        super().__init__()
        wanted = _OWN_THEMES if theme == "auto" or not color else (f"textual-{theme}",)
        self.theme = next((name for name in wanted if name in self.available_themes), "textual-dark")
        self.animation_level = "none"
        self._session = session
        self._inbox = inbox
        self._feeds = feeds
        self._sources: Mapping[str, Source] = {source.label: source for source in sources}
        self._player = player
        self._glyphs = glyphs
        self._now = now
        self._clock = clock
        self._view = view or View()
        self._interval = interval
        self._patience = interval
        self._paused: tuple[NodeState, ...] | None = None  # states as they were
        self._dirty = True
        self._picture = Picture(color)

    def compose(self) -> ComposeResult:
        yield self._picture

    def on_mount(self) -> None:
        self._picture.focus()
        self.set_interval(_TICK_SECONDS, self._tick)
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self.exit)  # so that the terminal is restored
        self._inbox.on_news = self._wake
        self.post_message(Arrived())
        if self._player is not None:
            self._player.start()

    def _wake(self) -> None:
        """On the threads of feeds and player: posting a message is all they may do."""
        self.post_message(Arrived())

    def on_unmount(self) -> None:
        self._inbox.on_news = None
        for feed in self._feeds:
            feed.stop()
        if self._player is not None:
            self._player.stop()
        self._session.close()

    @property
    def crash(self) -> Exception | None:
        """The bug that ended it, if one did."""
        return self._exception

    def _fatal_error(self) -> None:
        """Textual would print the trace with every local variable; the command says it in a line instead."""
        self._close_messages_no_wait()

    # -- news ----------------------------------------------------------------------------------------------------------
    def on_picture_resized(self) -> None:
        self._draw()

    def on_arrived(self) -> None:
        """One node is drawn at once; of several, what comes within a tick is drawn together."""
        found = self._inbox.take()
        self._session.take(found, self._now())
        if any(news.line is not None for news in found):
            self._patience = self._interval
        self._dirty = self._dirty or bool(found)
        if len(self._session.nodes) == 1 and self._dirty and not self._replaying_fast:
            self._draw()

    @property
    def _replaying_fast(self) -> bool:
        return self._player is not None and self._player.speed > 1

    def _tick(self) -> None:
        """Draws what came, and ages the picture while nothing new is shown."""
        scene = self._scene()
        if self._dirty or self._view.paused or any(node.lost or scene.is_stale(node) for node in scene.shown):
            self._draw()

    def on_done(self, message: Done) -> None:
        self._view = dataclasses.replace(self._view, notice=message.notice)
        self._draw()

    # -- picture -------------------------------------------------------------------------------------------------------
    def _scene(self) -> Scene:
        nodes = self._paused if self._paused is not None else tuple(self._session.nodes.values())
        return Scene(nodes, self._now(), self._clock(), self._interval, self._patience, self._view, self._replay_note())

    def _replay_note(self) -> str:
        if self._player is None:
            return ""
        return f"{'the end' if self._player.ended else show_duration(self._player.at)} at {self._player.speed:g}x"

    def _draw(self) -> None:
        self._dirty = False
        size = self._picture.size
        self._picture.show(frame.frame(self._scene(), size.width, size.height, self._glyphs))

    # -- keys ----------------------------------------------------------------------------------------------------------
    async def on_event(self, event: events.Event) -> None:
        """All keys are ours, before Textual's own bindings."""
        if isinstance(event, events.Key):
            self._press(event.key, event.character)
            return
        await super().on_event(event)

    def _press(self, key: str, character: str | None) -> None:
        scene = self._scene()
        found = frame.listing(scene, self._glyphs)
        context = keys.Context(
            scene, found.selected(scene) if found else (), found.columns if found else (),
            bool(found and found.newest_last), self._picture.size.height - 3,
        )
        self._view, effect = keys.press(context, key, character)
        if effect is not None:
            self._do(effect)
        self._draw()

    def _do(self, effect: keys.Effect) -> None:
        if effect.kind == "quit":
            self.exit()
        elif effect.kind == "pause":
            self._pause()
        elif effect.kind in ("faster", "slower"):
            self._set_pace(effect.kind == "faster")
        elif effect.kind == "copy":
            self.copy_to_clipboard(effect.text)
        else:
            self.run_worker(self._act(effect), exit_on_error=False)

    def _pause(self) -> None:
        """Pictures stay as they are while data goes on arriving in the live states; a player stops."""
        paused = not self._view.paused
        self._view = dataclasses.replace(self._view, paused=paused)
        self._paused = tuple(node.frozen() for node in self._session.nodes.values()) if paused else None
        if self._player is not None:
            self._player.paused = paused

    def _set_pace(self, faster: bool) -> None:
        if self._player is not None:
            self._player.speed = _next(SPEEDS, self._player.speed, up=faster)
            return
        before, self._interval = self._interval, _next(INTERVALS, self._interval, up=not faster)
        for feed in self._feeds:
            feed.interval = self._interval
        # The line on its way was asked for at the old interval; the one after it comes at the new.
        self._patience = max(self._patience, before, self._interval)

    async def _act(self, effect: keys.Effect) -> None:
        source = self._sources.get(effect.node) or next(iter(self._sources.values()), None)
        if source is None:
            self.post_message(Done("a replay changes no node"))
            return
        try:
            notice = await asyncio.to_thread(source.act, effect.kind, effect.text)
        except ControlError as error:
            notice = f"! {error.message} [{error.id}]"
        self.post_message(Done(notice))


def _next(steps: Sequence[float], now: float, *, up: bool) -> float:
    if up:
        return next((each for each in steps if each > now), steps[-1])
    return next((each for each in reversed(steps) if each < now), steps[0])


def run(app: PddTop) -> None:
    """Raises the bug that ended it, if one did."""
    app.run()
    if app.crash is not None:
        raise app.crash
