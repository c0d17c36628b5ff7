"""top: the full screen where there is one, else pictures or NDJSON on stdout.

Textual is imported for the full screen only.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pdd.commands.common import Globals, configured, note, print_json
from pdd.errors import ControlError, UsageError
from pdd.tui import draw, frame, recording, sources
from pdd.tui.feed import Feed, Inbox, News, start
from pdd.tui.scene import TABS, Scene, TableChoice, View
from pdd.tui.session import Session
from pdd.units import parse_duration

_MIN_SECONDS, _MAX_SECONDS = 0.25, 10.0
_FIRST_SECONDS = 2.0  # for the first picture of nodes here; a slower one is drawn when it comes
_FIRST_SSH_SECONDS = 15.0


@dataclasses.dataclass(frozen=True, slots=True)
class TopOptions:
    """The options of the command."""

    once: bool = False
    count: int | None = None
    interval: float | None = None
    ascii: bool = False
    tab: str = "overview"
    filter: str = ""
    record: Path | None = None
    replay: Path | None = None
    hosts: Sequence[str] = ()
    admin: bool = False


def top(options: Globals, wanted: TopOptions) -> None:
    seconds = wanted.interval or _configured_interval(options)
    if not _MIN_SECONDS <= seconds <= _MAX_SECONDS:
        raise UsageError(f"--interval must be {_MIN_SECONDS:g}s to {_MAX_SECONDS:g}s")
    if wanted.tab not in TABS:
        raise UsageError(f'--tab: "{wanted.tab}" is none of {", ".join(TABS)}')
    if wanted.replay is not None and (wanted.record or wanted.hosts or options.sockets):
        raise UsageError("--replay shows a recording: it goes with no --record, --host or --socket")
    screen = sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    printed = wanted.once or wanted.count or options.json or not screen
    if printed and not (wanted.once or wanted.count or options.json):
        note(options, "pdd: no full screen here (no terminal, or TERM=dumb): one picture")
    tables = {wanted.tab: TableChoice(filter=wanted.filter)} if wanted.filter else {}
    view = View(tab=wanted.tab, tables=tables, admin=wanted.admin)
    if wanted.replay is not None:
        _replay(options, wanted, wanted.replay, seconds, view, bool(printed))
        return
    followed = sources.distinct(_sources(options, wanted.hosts))
    inbox = Inbox()
    feeds = start(followed, seconds, inbox)
    first = _first_news(inbox, feeds, _FIRST_SSH_SECONDS if wanted.hosts else (options.timeout or _FIRST_SECONDS))
    labels = [source.label for source in followed]
    recorder = recording.Recorder(wanted.record, labels) if wanted.record else None
    session = Session(labels, recorder)
    session.take(first, time.monotonic())
    if printed:
        endless = options.json and sys.stdout.isatty() and not wanted.once
        count = wanted.count or (None if endless else 1)
        _print(options, session, inbox, view, count, seconds, _glyphs(options, wanted))
        session.close()
        return
    from pdd.tui.app import PddTop, run

    run(PddTop(session, inbox, seconds, feeds=feeds, sources=followed, view=view, glyphs=_glyphs(options, wanted),
               color=_color(options), theme=configured(options.config, "top.theme") or "auto"))


def _sources(options: Globals, hosts: Sequence[str]) -> list[sources.Source]:
    """Those that were named, else all instances of this machine that answer."""
    directories: list[Path] = []
    if options.instances or not (options.sockets or hosts):
        directories = options.instance_dirs()
    local = sources.local_sources(directories, options.sockets, options.timeout or _FIRST_SECONDS)
    return [*local, *(sources.SshSource(url) for url in hosts)]


def _first_news(inbox: Inbox, feeds: Sequence[Feed], patience: float) -> list[News]:
    """What came until every node has said something, or the patience is over.

    A daemon that is not there is an error line, not an empty screen.

    Raises:
        ControlError: of the first node, if none answered.
    """
    found: list[News] = []
    heard: dict[str, ControlError | None] = {}
    deadline = time.monotonic() + patience + 0.5
    while len(heard) < len(feeds) and time.monotonic() < deadline:
        for news in inbox.wait(deadline - time.monotonic()):
            found.append(news)
            if heard.get(news.label) is not None or news.label not in heard:
                heard[news.label] = news.error
    found += _rest_of_the_snapshot(inbox)
    errors = [error for error in heard.values() if error is not None]
    if errors and len(errors) == len(feeds):
        raise errors[0]
    return found


def _rest_of_the_snapshot(inbox: Inbox) -> list[News]:
    """The log comes in a line of its own right behind it."""
    return inbox.wait(0.1)


def _print(options: Globals, session: Session, inbox: Inbox, view: View, count: int | None, interval: float,
           glyphs: draw.Glyphs) -> None:
    """`count` pictures (None: until interrupted)."""
    shown = 0
    while count is None or shown < count:
        if shown:
            deadline = time.monotonic() + interval
            while (left := deadline - time.monotonic()) > 0:
                session.take(inbox.wait(left), time.monotonic())
        shown += 1
        _print_one(options, session, view, interval, glyphs)


def _print_one(options: Globals, session: Session, view: View, interval: float, glyphs: draw.Glyphs, replay: str = "") -> None:
    if options.json:
        for node in session.nodes.values():
            if node.told("status") and not node.lost:
                print_json(node.told("status"))
        return
    clock = time.strftime("%H:%M:%S")
    scene = Scene(tuple(session.nodes.values()), time.monotonic(), clock, interval, view=view, replay=replay)
    width = shutil.get_terminal_size((100, 30)).columns
    print(frame.text(frame.picture(scene, max(width, frame.MIN_WIDTH), glyphs)), flush=True)


def _replay(options: Globals, wanted: TopOptions, path: Path, interval: float, view: View, printed: bool) -> None:
    """On the screen as it went; printed: as it ended, or with --json every status of it."""
    labels = recording.labels(path)
    if not labels:
        raise UsageError(
            f"--replay: {path} holds no moment", hint="`pdd top --record` and `pdd events` write what can be played."
        )
    session = Session(labels)
    if printed:
        for moment in recording.read(path):
            session.take([moment.news], time.monotonic())
            if options.json and moment.line is not None and "status" in moment.line.get("docs", {}) and not wanted.once:
                print_json(session.nodes[moment.label].told("status"))
        if not options.json or wanted.once:
            _print_one(options, session, view, interval, _glyphs(options, wanted), "the end")
        return
    from pdd.tui.app import PddTop, run

    inbox = Inbox()
    run(PddTop(session, inbox, interval, player=recording.Player(path, inbox), view=view, glyphs=_glyphs(options, wanted),
               color=_color(options), theme=configured(options.config, "top.theme") or "auto"))


def _color(options: Globals) -> bool:
    return options.color == "always" or (options.color == "auto" and not os.environ.get("NO_COLOR"))


def _glyphs(options: Globals, wanted: TopOptions) -> draw.Glyphs:
    ascii_only = wanted.ascii or configured(options.config, "top.ascii") == "true" or not _is_unicode()
    return draw.ASCII if ascii_only else draw.UNICODE


def _configured_interval(options: Globals) -> float:
    try:
        return parse_duration(configured(options.config, "top.interval") or "1s")
    except ValueError:
        return 1.0


def _is_unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
