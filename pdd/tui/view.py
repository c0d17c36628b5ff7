"""The picture of `pdd top` as lines of styled text. Pure: the same function draws the live screen, `--once` and the
tests.

Widths are fixed by the size of the window, never by the values, so that a value that changes repaints one line. Every
color stands beside a word or a sign. Not here: what lines are made of (draw.py), Textual,
the terminal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pdd.tui.draw import UNICODE, Glyphs, Line, Span, beside, fit, panel, say, spark, whole, width_of
from pdd.tui.rates import History, known
from pdd.units import show_bytes, show_count, show_duration

MIN_WIDTH, MIN_HEIGHT = 40, 8
PANEL_WIDTH = 80  # below this, plain lines instead of panels
_MIN_PEER_ROWS = 3  # header, one peer, how many more
_SECOND_CHARTS = 9  # spare rows from which on there is a second pair of charts
_PAIR_WIDTH = 18


_STATE_STYLE = {
    **dict.fromkeys(("ready", "up"), "good"),
    **dict.fromkeys(("starting", "loading", "connecting", "draining", "suspect"), "warn"),
    **dict.fromkeys(("not_ready", "stopping", "down", "incompatible"), "bad"),
}

HELP = (
    "q, F10, ctrl+c   quit",
    "space            pause: data keeps arriving, the age is shown",
    "+ -              faster or slower pictures, 0.25 s to 10 s",
    "?, F1            this page",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    """Everything a picture depends on."""

    history: History
    now: float  # same clock as History.updated
    clock: str  # wall clock, as shown
    interval: float
    patience: float = 0.0  # how long the next line may take when a longer interval was asked for before
    lost: str = ""  # why the daemon is not connected; empty: it is
    paused: bool = False
    help: bool = False


def frame(scene: Scene, width: int, height: int, glyphs: Glyphs = UNICODE) -> list[Line]:
    """Exactly `height` lines of exactly `width` cells."""
    if width <= 0 or height <= 0:
        return []
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        lines: list[Line] = [[(f"pdd top needs {MIN_WIDTH}x{MIN_HEIGHT}, this is {width}x{height}", "warn")]]
        return [fit(line, width) for line in (lines + [[]] * height)[:height]]
    status = scene.history.status
    top = [_header(scene, width), *_banner(scene)]
    room = height - len(top) - 1
    body: list[Line]
    if scene.help:
        body = [[], *([(f"  {text}", "")] for text in HELP)]
    elif status is None:
        body = [[], [("  waiting for the first picture", "dim")]]
    else:
        body = _body(scene.history, status, width, room, glyphs)
    lines = [*top, *(body + [[]] * room)[:room], [(" q quit  ? help  space pause  +/- speed", "dim")]]
    return [fit(line, width) for line in lines]


def text(lines: Sequence[Line]) -> str:
    """The picture without styles, for pipes and tests."""
    return "\n".join("".join(part for part, _ in line).rstrip() for line in lines)


def is_stale(scene: Scene) -> bool:
    age = _age(scene)
    expected = max(scene.interval, scene.patience)
    return age is not None and age > max(1.5 * expected, expected + 0.75)


def _age(scene: Scene) -> float | None:
    return None if scene.history.updated is None else max(scene.now - scene.history.updated, 0.0)


# -- parts -------------------------------------------------------------------------------------------------------------
def _header(scene: Scene, width: int) -> Line:
    if scene.paused:
        sign, style = "PAUSED", "warn"
    elif scene.lost:
        sign, style = "LOST", "bad"
    elif is_stale(scene):
        sign, style = "STALE", "bad"
    else:
        sign, style = "live", "good"
    right: Line = [(f"  {scene.interval:g}s  ", "dim"), (sign, style), (f"  {scene.clock} ", "")]
    room = width - width_of(right)
    status = scene.history.status
    left: Line = [(" pdd top  ", "title")]
    if status is not None:
        state = status["state"]
        left += [
            (f"{status['name']} {status['role']} ", ""),
            (state.upper(), _STATE_STYLE.get(state, "")),
        ]
        fields = [status["model"] or "-", f"up {show_duration(status['uptime_seconds'])}"]
        left.append((f"  {whole(fields, room - width_of(left) - 2)}", ""))
    return [*fit(left, room), *right]


def _banner(scene: Scene) -> list[Line]:
    age = _age(scene)
    if scene.lost:
        seen = f"; last seen {show_duration(age)} ago" if age is not None else ""
        return [[(f" ! {scene.lost}{seen}; trying again", "bad")]]
    if scene.paused:
        return [say(f" paused {show_duration(age)} ago; space goes on", "warn")]
    if is_stale(scene):
        return [say(f" ! no answer for {show_duration(age)}", "bad")]
    return []


def picture(scene: Scene, width: int, glyphs: Glyphs = UNICODE) -> list[Line]:
    """For a pipe or a page: as tall as it needs to be, the charts one row high, no keys. It needs a status."""
    assert scene.history.status is not None
    body = _body(scene.history, scene.history.status, width, None, glyphs)
    return [fit(line, width) for line in (_header(scene, width), *_banner(scene), *body)]


def _body(history: History, status: dict[str, Any], width: int, room: int | None, glyphs: Glyphs) -> list[Line]:
    """What stands between header and keys: problems before peers, and the charts take the rows that are left.

    `room`: rows; None: as many as there is to say.
    """
    findings = _findings(status)
    if width < PANEL_WIDTH:
        head = [*_plain(status), *findings]
        return [*head, *_peers(status, None if room is None else room - len(head))]
    numbers = _numbers(status, width, glyphs)
    least = 3 + len(numbers) + len(findings)
    peers = _peers(status, None if room is None else max(room - least, _MIN_PEER_ROWS))
    spare = 0 if room is None else room - least - len(peers)
    second = spare >= _SECOND_CHARTS
    rows = [spare] if not second else [(spare - 3) // 2, (spare - 3) - (spare - 3) // 2]
    charts = _charts(history, status, width, [1 + max(row, 0) for row in rows], glyphs)
    return [*charts[0], *numbers, *(charts[1] if second else ()), *findings, *peers]


def _charts(
    history: History, status: dict[str, Any], width: int, rows: Sequence[int], glyphs: Glyphs
) -> list[list[Line]]:
    """One or two pairs of charts, each as many rows high as `rows` says."""
    half = width // 2
    pairs = [beside(_batch(history, status, half, rows[0], glyphs), _moved(history, status, width - half, rows[0], glyphs))]
    if len(rows) > 1:
        left = _tokens(history, status, half, rows[1], glyphs)
        pairs.append(beside(left, _used(history, status, width - half, rows[1], glyphs)))
    return pairs


def _numbers(status: dict[str, Any], width: int, glyphs: Glyphs) -> list[Line]:
    queue_width, latency_width = 21, 27
    pages_width = width - queue_width - latency_width
    seconds = status["latency"]["window_seconds"]
    middle = beside(
        panel("queue", _queue(status), "", queue_width, glyphs),
        panel(f"last {seconds:.0f}s    p50     p99", _latency(status), "", latency_width, glyphs),
        panel(
            f"pages  {show_count(status['pages']['total'])}",
            _pages(status, pages_width - 4, glyphs),
            "",
            pages_width,
            glyphs,
        ),
    )
    transfers = status["transfers"]
    failed: Span = (f" failed {show_count(transfers['failed'])}", "bad" if transfers["failed"] else "")
    counters = whole(_counters(status["role"], transfers), width - 2 - len(failed[0]))
    return [*middle, [failed, (f"  {counters}", "")]]


def _counters(role: str, transfers: dict[str, Any]) -> list[str]:
    """What went each way, the way that a role is there for last."""
    sent = f"sent {show_bytes(transfers['bytes'])}, {show_count(transfers['units'])} units"
    sent += f" in {show_count(transfers['writes'])} writes"
    received = f"received {show_bytes(transfers['bytes_received'])}, {show_count(transfers['units_received'])} units"
    active = f"active {show_count(transfers['active'])}"
    return [active, sent, received] if role == "decode" else [active, received, sent]


def _batch(history: History, status: dict[str, Any], width: int, rows: int, glyphs: Glyphs) -> list[Line]:
    batch = known(history.batch)
    average, largest = (sum(batch) / len(batch), max(batch)) if batch else (0.0, 0.0)
    now = f"{show_count(status['batch_size'])} / {show_count(status['max_batch_size'])}"
    shares = whole([f"avg {show_count(average)}", f"max {show_count(largest)}"], width - 4 - len(f"batch {now}  "))
    return panel(f"batch {now}  {shares}".rstrip(), _chart(history.batch, width, rows, glyphs), "", width, glyphs)


def _moved(history: History, status: dict[str, Any], width: int, rows: int, glyphs: Glyphs) -> list[Line]:
    rates = status["rates"]["1s"]
    into, out = (show_bytes(rates[f"bytes{way}_per_second"], "B/s") for way in ("_received", ""))
    peak = f"peak {show_bytes(max(known(history.moved), default=0), 'B/s')}"
    title = whole(["KV transfer", f"in {into}", f"out {out}"], width - 4)
    return panel(title, _chart(history.moved, width, rows, glyphs), peak, width, glyphs)


def _tokens(history: History, status: dict[str, Any], width: int, rows: int, glyphs: Glyphs) -> list[Line]:
    rates = status["rates"]["1s"]
    prompt, out = (show_count(rates[f"{kind}_tokens_per_second"]) for kind in ("prompt", "generated"))
    peak = f"peak {show_count(max(known(history.tokens), default=0))}/s"
    title = f"tokens/s  prompt {prompt}  out {out}"
    return panel(title, _chart(history.tokens, width, rows, glyphs), peak, width, glyphs)


def _used(history: History, status: dict[str, Any], width: int, rows: int, glyphs: Glyphs) -> list[Line]:
    used = known(history.used)
    title = f"pages in use  {show_count(used[-1] if used else 0)} of {show_count(status['pages']['total'])}"
    peak = f"peak {show_count(max(used, default=0))}"
    return panel(title, _chart(history.used, width, rows, glyphs), peak, width, glyphs)


def _chart(samples: Sequence[float | None], width: int, rows: int, glyphs: Glyphs) -> list[Line]:
    return [say(row, "good") for row in spark(samples, width - 4, glyphs, rows)]


def _queue(status: dict[str, Any]) -> list[Line]:
    rows = (
        ("running", status["running"]),
        ("waiting", status["waiting"]),
        ("wait kv", status["waiting_for_kv"]),
        ("preempted", status["engine"]["preemptions"]),
        ("steps/s", status["rates"]["1s"]["steps_per_second"]),
    )
    return [say(f"{name:9} {show_count(number, 7):>7}") for name, number in rows]


def _latency(status: dict[str, Any]) -> list[Line]:
    lines = []
    for label, key in (("ttft", "ttft"), ("itl", "itl"), ("kv wait", "kv_wait")):
        p50, p99 = (show_duration(status["latency"][f"{key}_{which}_seconds"]) for which in ("p50", "p99"))
        lines.append(say(f"{label:8}{p50:>7} {p99:>7}"))
    age = status["engine"]["heartbeat_age_seconds"]
    lines.append(say(f"engine  {show_duration(age):>7} ago", "bad" if age is not None and age > 5 else ""))
    fabric = status["fabric"]
    return [*lines, say(f"via     {fabric['provider'] or '-'} {fabric['library_version'] or ''}")]


def _pages(status: dict[str, Any], width: int, glyphs: Glyphs) -> list[Line]:
    pages, rates = status["pages"], status["rates"]["1s"]
    total = max(pages["total"], 1)
    free = pages["free"] + pages["cached"]
    share = f" {(pages['total'] - free) / total:4.0%}"
    cells = max(width - len(share), 1)
    running = round(cells * pages["running"] / total)
    held = round(cells * (pages["total"] - free) / total) - running
    bar = glyphs.used * running + glyphs.held * max(held, 0)
    prompt, out = rates["prompt_tokens_per_second"], rates["generated_tokens_per_second"]
    return [
        say(bar[:cells].ljust(cells, glyphs.free) + share),
        *_page_states(pages, width),
        say("tok/s  " + whole([f"prompt {show_count(prompt)}", f"out {show_count(out)}"], width - len("tok/s  "))),
    ]


def _page_states(pages: dict[str, int], width: int) -> list[Line]:
    """Two states a line, and how many pages are in each, as exact as `width` allows."""
    pairs = (("free", "cached"), ("running", "reserved"), ("sending", "quarantined"))
    exact = max(len(f"{right} {show_count(pages[right])}") for _, right in pairs)
    cells = max(width - 1 - max(exact, width - 1 - _PAIR_WIDTH), (width - 3) // 2)  # of the left column
    lines = []
    for left, right in pairs:
        first = f"{left} {show_count(pages[left], cells - len(left) - 1)}"
        second = f"{right} {show_count(pages[right], width - cells - len(right) - 2)}"
        style = "bad" if right == "quarantined" and pages[right] else ""
        lines.append([(f"{first:<{cells}} ", ""), (second, style)])
    return lines


def _plain(status: dict[str, Any]) -> list[Line]:
    pages, transfers, show = status["pages"], status["transfers"], show_count
    return [
        say(f" batch {show(status['batch_size'])}/{show(status['max_batch_size'])}  running {show(status['running'])}"),
        say(f" waiting {show(status['waiting'])}  wait kv {show(status['waiting_for_kv'])}"),
        say(f" pages free {show(pages['free'])} of {show(pages['total'])}  quarantined {show(pages['quarantined'])}"),
        say(f" failed {show(transfers['failed'])}  {_counters(status['role'], transfers)[-1]}"),
    ]


def _peers(status: dict[str, Any], room: int | None) -> list[Line]:
    """One line per peer, as many as `room` takes; the last one says how many more there are."""
    if not status["peers"]:
        return [say(" no peers", "dim")]
    header = f" {'PEER':14} {'ROLE':8} {'STATE':12} {'VIA':10} {'RTT':>7} {'QUEUED':>7} {'FREE':>7}"
    lines = [say(header, "title")]
    shown = status["peers"]
    if room is not None and len(shown) > room - 1:
        shown = shown[: max(room - 2, 0)]
    for peer in shown:
        load = peer["load"] or {}
        queued, free = (show_count(load[key], 7) if key in load else "-" for key in ("queued_tokens", "free_pages"))
        lines.append(
            [
                (f" {peer['name'][:14]:14} {peer['role'][:8]:8} ", ""),
                (f"{peer['state'][:12]:12} ", _STATE_STYLE.get(peer["state"], "")),
                (f"{(peer['via'] or '-')[:10]:10} {show_duration(peer['rtt_seconds']):>7} ", ""),
                (f"{queued:>7} {free:>7}  ", ""),
                (peer["error"] or "", "bad"),
            ]
        )
    more = len(status["peers"]) - len(shown)
    return [*lines, say(f" and {more} more; `pdd peers` lists all", "dim")] if more else lines


def _findings(status: dict[str, Any]) -> list[Line]:
    return [
        *(say(f" ! {reason}", "warn") for reason in status["reasons"]),
        *(
            say(f" ! {each['id']} {each['message']}", "bad" if each["level"] == "fail" else "warn")
            for each in status["findings"]
        ),
    ]
