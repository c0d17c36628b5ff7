"""top: the full screen where there is one, else pictures or NDJSON on stdout.

Textual is imported for the full screen only.
"""

from __future__ import annotations

import os
import shutil
import sys
import time

from pdd.commands.common import Globals, configured, note, print_json
from pdd.errors import UsageError
from pdd.tui import draw, view
from pdd.tui.rates import History
from pdd.units import parse_duration

_MIN_SECONDS, _MAX_SECONDS = 0.25, 10.0


def top(options: Globals, once: bool, count: int | None, interval: float | None, ascii_only: bool) -> None:
    seconds = interval or _configured_interval(options)
    if not _MIN_SECONDS <= seconds <= _MAX_SECONDS:
        raise UsageError(f"--interval must be {_MIN_SECONDS:g}s to {_MAX_SECONDS:g}s")
    ascii_only = ascii_only or configured(options.config, "top.ascii") == "true" or not _is_unicode()
    glyphs = draw.ASCII if ascii_only else draw.UNICODE
    screen = sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if once or count or options.json or not screen:
        if not (once or count or options.json):
            note(options, "pdd: no full screen here (no terminal, or TERM=dumb): one picture")
        endless = options.json and sys.stdout.isatty() and not once
        _pictures(options, count or (None if endless else 1), seconds, glyphs)
        return
    client = options.client()
    client.get("/v1/status")  # a daemon that is not there is an error line, not an empty screen
    from pdd.tui.app import PddTop

    color = options.color == "always" or (options.color == "auto" and not os.environ.get("NO_COLOR"))
    theme = configured(options.config, "top.theme") or "auto"
    screen_app = PddTop(client, seconds, glyphs=glyphs, color=color, theme=theme)
    screen_app.run()
    if screen_app.crash is not None:
        raise screen_app.crash


def _pictures(options: Globals, count: int | None, interval: float, glyphs: draw.Glyphs) -> None:
    """`count` pictures (None: until interrupted)."""
    history = History()
    client = options.client()
    width = shutil.get_terminal_size((100, 30)).columns
    shown = 0
    while count is None or shown < count:
        if shown:
            time.sleep(interval)
        status = client.get("/v1/status")
        shown += 1
        if options.json:
            print_json(status)
            continue
        now = time.monotonic()
        history.apply(
            {"type": "delta" if history.status else "snapshot", "docs": {"status": status}, "ts_mono": now}, now
        )
        scene = view.Scene(history, now, time.strftime("%H:%M:%S"), interval)
        print(view.text(view.picture(scene, max(width, view.MIN_WIDTH), glyphs)), flush=True)


def _configured_interval(options: Globals) -> float:
    try:
        return parse_duration(configured(options.config, "top.interval") or "1s")
    except ValueError:
        return 1.0


def _is_unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
