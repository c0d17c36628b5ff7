"""The overview of one node: charts, queue, latencies, pages, problems, peers. Pure.

Problems stand before peers, and the charts take the rows that are left. Widths are fixed by the size of the window, never
by the values, so that a value that changes repaints one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdd.tui.draw import Glyphs, Line, Span, beside, panel, say, short, spark, whole
from pdd.tui.listing import STATE_STYLE
from pdd.tui.node import NodeState, known
from pdd.tui.scene import View
from pdd.units import show_bytes, show_count, show_duration

PANEL_WIDTH = 80  # below this, plain lines instead of panels
_MIN_PEER_ROWS = 3  # header, one peer, how many more
_MOST_FINDINGS = 3  # the others are behind a key
_MOST_GROUPS = 8
_SECOND_CHARTS = 9  # spare rows from which on there is a second pair of charts
_PAIR_WIDTH = 18


def body(node: NodeState, view: View, width: int, room: int | None, glyphs: Glyphs) -> list[Line]:
    """`room`: rows; None: as many as there is to say, the charts one row high."""
    status = node.status
    assert status is not None
    found = problems(node)
    if room is not None and len(found) > _MOST_FINDINGS:
        more = len(found) - _MOST_FINDINGS + 1
        found = [*found[: _MOST_FINDINGS - 1], say(f" ! and {more} more: press a", "warn")]
    if width < PANEL_WIDTH:
        head = [*_plain(status), *_groups(status), *found]
        return [*head, *_peers(status, None if room is None else room - len(head), width, glyphs)]
    numbers = [*_numbers(status, width, glyphs), *_groups(status)]
    least = 3 + len(numbers) + len(found)
    peers = _peers(status, None if room is None else max(room - least, _MIN_PEER_ROWS), width, glyphs)
    spare = 0 if room is None else room - least - len(peers)
    second = spare >= _SECOND_CHARTS
    rows = [spare] if not second else [(spare - 3) // 2, (spare - 3) - (spare - 3) // 2]
    charts = _charts(node, status, view, width, [1 + max(row, 0) for row in rows], glyphs)
    return [*charts[0], *numbers, *(charts[1] if second else ()), *found, *peers]


def problems(node: NodeState) -> list[Line]:
    """Why the node is not ready, then what it found."""
    status = node.status or {"reasons": (), "findings": ()}
    return [
        *(say(f" ! {reason}", "warn") for reason in status["reasons"]),
        *(
            say(f" ! {each['id']} {each['message']}", "bad" if each["level"] in ("fail", "error") else "warn")
            for each in status["findings"]
        ),
    ]


def peer_problems(node: NodeState) -> list[Line]:
    """Of peers that are not up."""
    peers = (node.status or {}).get("peers", ())
    return [
        say(f" ! peer {peer['name']} is {peer['state']}" + (f": {peer['error']}" if peer["error"] else ""), "bad")
        for peer in peers if peer["state"] != "up"
    ]


def _charts(
    node: NodeState, status: dict[str, Any], view: View, width: int, rows: Sequence[int], glyphs: Glyphs
) -> list[list[Line]]:
    """One or two pairs of charts, each as many rows high as `rows` says."""
    half = width // 2
    right = _moved(node, status, view, width - half, rows[0], glyphs)
    pairs = [beside(_batch(node, status, half, rows[0], glyphs), right)]
    if len(rows) > 1:
        left = _tokens(node, status, half, rows[1], glyphs)
        pairs.append(beside(left, _used(node, status, width - half, rows[1], glyphs)))
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


def _groups(status: dict[str, Any]) -> list[Line]:
    """One line for each engine of a node that has several."""
    groups = status["groups"]
    if len(groups) < 2:
        return []
    lines = []
    for group in groups[:_MOST_GROUPS]:
        pages = group["pages"]
        used = (pages["total"] - pages["free"] - pages["cached"]) / max(pages["total"], 1)
        counts = "  ".join(
            f"{name} {show_count(group[key], 5):>5}"
            for name, key in (("running", "running"), ("waiting", "waiting"), ("wait kv", "waiting_for_kv"))
        )
        lines.append(say(f" group {group['index']}  {counts}  kv {used:4.0%}"))
    more = len(groups) - len(lines)
    return [*lines, say(f" and {more} more; `pdd status` lists all", "dim")] if more else lines


def _counters(role: str, transfers: dict[str, Any]) -> list[str]:
    """What went each way, the way that a role is there for last."""
    sent = f"sent {show_bytes(transfers['bytes'])}, {show_count(transfers['units'])} units"
    sent += f" in {show_count(transfers['writes'])} writes"
    received = f"received {show_bytes(transfers['bytes_received'])}, {show_count(transfers['units_received'])} units"
    active = f"active {show_count(transfers['active'])}"
    return [active, sent, received] if role == "decode" else [active, received, sent]


def _batch(node: NodeState, status: dict[str, Any], width: int, rows: int, glyphs: Glyphs) -> list[Line]:
    batch = known(node.batch)
    average, largest = (sum(batch) / len(batch), max(batch)) if batch else (0.0, 0.0)
    now = f"{show_count(status['batch_size'])} / {show_count(status['max_batch_size'])}"
    shares = whole([f"avg {show_count(average)}", f"max {show_count(largest)}"], width - 4 - len(f"batch {now}  "))
    return panel(f"batch {now}  {shares}".rstrip(), _chart(node.batch, width, rows, glyphs), "", width, glyphs)


def _moved(
    node: NodeState, status: dict[str, Any], view: View, width: int, rows: int, glyphs: Glyphs
) -> list[Line]:
    rates = status["rates"]["1s"]
    into, out = (view.rate(rates[f"bytes{way}_per_second"]) for way in ("_received", ""))
    peak = f"peak {view.rate(max(known(node.moved), default=0))}"
    title = whole(["KV transfer", f"in {into}", f"out {out}"], width - 4)
    return panel(title, _chart(node.moved, width, rows, glyphs), peak, width, glyphs)


def _tokens(node: NodeState, status: dict[str, Any], width: int, rows: int, glyphs: Glyphs) -> list[Line]:
    rates = status["rates"]["1s"]
    prompt, out = (show_count(rates[f"{kind}_tokens_per_second"]) for kind in ("prompt", "generated"))
    peak = f"peak {show_count(max(known(node.tokens), default=0))}/s"
    title = f"tokens/s  prompt {prompt}  out {out}"
    return panel(title, _chart(node.tokens, width, rows, glyphs), peak, width, glyphs)


def _used(node: NodeState, status: dict[str, Any], width: int, rows: int, glyphs: Glyphs) -> list[Line]:
    used = known(node.used)
    title = f"pages in use  {show_count(used[-1] if used else 0)} of {show_count(status['pages']['total'])}"
    peak = f"peak {show_count(max(used, default=0))}"
    return panel(title, _chart(node.used, width, rows, glyphs), peak, width, glyphs)


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


def _peers(status: dict[str, Any], room: int | None, width: int, glyphs: Glyphs) -> list[Line]:
    """One line per peer, as many as `room` takes, those that are not up first; the last line says how many more there are."""
    if not status["peers"]:
        return [say(" no peers", "dim")]
    name_width = 14 if width < 120 else 32
    header = f" {'PEER':{name_width}} {'ROLE':8} {'STATE':12} {'VIA':10} {'RTT':>7} {'QUEUED':>7} {'FREE':>7}"
    lines = [say(header, "title")]
    shown = status["peers"]
    if room is not None and len(shown) > room - 1:
        shown = sorted(shown, key=lambda peer: peer["state"] == "up")[: max(room - 2, 0)]
    for peer in shown:
        load = peer["load"] or {}
        queued, free = (show_count(load[key], 7) if key in load else "-" for key in ("queued_tokens", "free_pages"))
        name = short(peer["name"], name_width, glyphs)
        head: Line = [
            (f" {name:{name_width}} {peer['role'][:8]:8} ", ""),
            (f"{peer['state'][:12]:12} ", STATE_STYLE.get(peer["state"], "")),
        ]
        numbers = f"{(peer['via'] or '-')[:10]:10} {show_duration(peer['rtt_seconds']):>7} {queued:>7} {free:>7}  "
        room_left = width - sum(len(text) for text, _ in head)
        error = peer["error"] or ""
        if error and peer["rtt_seconds"] is None and not load:  # of a peer that is not linked there are no numbers
            lines.append([*head, (short(error, room_left, glyphs), "bad")])
        else:
            lines.append([*head, (numbers, ""), (short(error, max(room_left - len(numbers), 0), glyphs), "bad")])
    more = len(status["peers"]) - len(shown)
    return [*lines, say(f" and {more} more; `pdd peers` lists all", "dim")] if more else lines
