"""status, requests, peers, transfers, version: ask and print."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

from pdd.commands.common import Globals, note, paint, paint_state, print_json, table
from pdd.commands.machine import topology as topology  # one of the plain commands
from pdd.errors import EXIT_CHECK, EXIT_OK, DaemonNotRunning, RefusedInState, TimedOut, UsageError
from pdd.units import counted, show_bytes, show_duration
from pdd.version import VERSION

_POLL_SECONDS = 0.1
_PING_SECONDS = 10.0  # one at most
_COMPARE_SECONDS = 10.0
_PARTS = ("protocol", "libfabric", "torch", "cuda", "driver")  # what `pdd version` tells beside client and daemon
_STARTING = ("starting", "loading")
_NAMES = {"attempt": "attempt id", "attempts": "attempts so far"}  # of members that people would take for one another
_NO_WAY_BACK = {"ready": ("drained", "stopping"), "drained": ("stopping",)}  # states that a wait does not outlive


# -- status ------------------------------------------------------------------------------------------------------------
def status(options: Globals, wait: str | None = None, watch: bool = False) -> None:
    if wait:
        document = _wait(options, wait)
    elif watch:
        _watch(options)
        return
    else:
        document = options.client().get("/v1/status")
    _print_status(options, document)


def _print_status(options: Globals, document: dict[str, Any]) -> None:
    if options.json:
        print_json(document)
        return
    print(status_line(options, document), flush=True)
    for line in _groups(document):
        print(line)
    for finding in document["findings"]:
        if finding["level"] == "info" and not options.verbose:  # nothing to do about it; `pdd top` shows it, too
            continue
        print(f"! {finding['message']}  [{finding['id']}]")
    for alarm in _alarms(document):
        print(f"! {alarm}")


def _alarms(doc: dict[str, Any]) -> list[str]:
    """What keeps pages back, or makes the books of the pool doubtful. A daemon of before says nothing of it."""
    fences, lines = doc.get("fences") or {}, []
    if fences.get("overdue"):
        pages = f"{counted(doc['pages']['quarantined'], 'page')} in quarantine"
        lines.append(
            f"{counted(fences['overdue'], 'link')} not fenced, the oldest for {show_duration(fences['oldest_seconds'])}, "
            f"{pages}: the log says why; a restart frees them"
        )
    if fences.get("integrity_failures"):
        lines.append(f"the books of the page pool were wrong {fences['integrity_failures']} times: restart this node")
    return lines


def status_line(options: Globals, doc: dict[str, Any]) -> str:
    """d0 decode ready  3h12m  running 41/64  waiting 3  wait kv 2  kv 71%  in 38.2 GB/s  peers 4/4  failed 0

    After the state: how far a start is, how long a drain may still take. At the end: why the node is not ready.
    """
    rates = doc["rates"]["10s"]
    into = doc["role"] != "prefill"
    rate = rates["bytes_received_per_second" if into else "bytes_per_second"]
    up = sum(peer["state"] == "up" for peer in doc["peers"])
    starting = doc["state"] in _STARTING  # its reasons say no more than its phase does
    phase = f" {doc['phase']}" if starting and doc["phase"] else ""
    if phase and doc["progress"] is not None:
        phase += f" {doc['progress']:.0%}"
    left = doc["drain_seconds_left"]
    drain = "" if left is None else f" {show_duration(left)} left"
    return "  ".join(
        [
            f"{doc['name']} {doc['role']} {paint_state(options, doc['state'])}{phase}{drain}",
            show_duration(doc["uptime_seconds"]),
            *([f"tp {tp}"] if (tp := _tp(doc)) > 1 else []),
            f"running {doc['running']}/{doc['max_batch_size']}",
            f"waiting {doc['waiting']}",
            f"wait kv {doc['waiting_for_kv']}",
            f"kv {_used(doc['pages']):.0%}",
            f"{'in' if into else 'out'} {show_bytes(rate, 'B/s')}{_share(rate, doc)}",
            f"peers {up}/{len(doc['peers'])}",
            f"failed {doc['transfers']['failed']}",
            *([f"({'; '.join(doc['reasons'])})"] if doc["reasons"] and not (starting and phase) else []),
        ]
    )


def _tp(doc: dict[str, Any]) -> int:
    """Ranks of each engine; 0 before they are loaded."""
    return len(doc.get("ranks") or ()) // max(1, len(doc.get("groups") or ()))


def _groups(doc: dict[str, Any]) -> list[str]:
    """Each engine of a node that has several. A daemon of before says nothing of them."""
    groups = doc.get("groups") or ()
    if len(groups) < 2:
        return []
    places = doc["max_batch_size"] // len(groups)
    return [
        "  ".join(
            [
                f"  group {group['index']}",
                f"running {group['running']}/{places}",
                f"waiting {group['waiting']}",
                f"wait kv {group['waiting_for_kv']}",
                f"kv {_used(group['pages']):.0%}",
            ]
        )
        for group in groups
    ]


def _used(pages: dict[str, int]) -> float:
    """Share of the pool that cannot be handed out now."""
    return (pages["total"] - pages["free"] - pages["cached"]) / pages["total"] if pages["total"] else 0.0


def _share(rate: float, doc: dict[str, Any]) -> str:
    """Of the line rate; nothing where that is not known, or nothing moves."""
    line = doc["fabric"].get("line_rate_bytes_per_second")
    return f" ({rate / line:.0%} of line)" if line and rate else ""


def _wait(options: Globals, wanted: str) -> dict[str, Any]:
    """Asks until the state is reached. A daemon that is not there yet is waited for; one that left is drained."""
    deadline = None if options.timeout is None else time.monotonic() + options.timeout
    client = options.client()
    client.timeout = 2.0
    last: dict[str, Any] | None = None
    while True:
        try:
            last = client.get("/v1/status")
            if last["state"] == wanted:
                return last
            if last["state"] in _NO_WAY_BACK[wanted]:
                raise RefusedInState(f"the node is {last['state']}: it will not be {wanted}")
        except DaemonNotRunning:
            if wanted == "drained":
                if last is None:
                    raise
                note(options, "the daemon ended")
                return {**last, "state": "drained"}
        except TimedOut:
            if deadline is None:
                raise
        if deadline is not None and time.monotonic() >= deadline:
            why = "no daemon answers" if last is None else f"it is {last['state']}"
            unit = f"pdd@{options.instance or 'NAME'}"
            absent = f"`systemctl status {unit}` and `journalctl -u {unit}` say why it does not start"
            hint = "; ".join(last["reasons"]) if last else absent
            raise TimedOut(f"not {wanted} within {options.timeout:g} s: {why}", hint=hint)
        time.sleep(_POLL_SECONDS)


def _watch(options: Globals) -> None:
    document: dict[str, Any] = {}
    for line in options.client().stream("/v1/events?topics=status"):
        if line["type"] in ("snapshot", "delta"):
            document |= line["docs"].get("status", {})
            if options.json:
                print_json(document)
            else:
                print(status_line(options, document), flush=True)


# -- tables ------------------------------------------------------------------------------------------------------------
def requests(options: Globals) -> None:
    document = options.client().get("/v1/requests", private=True)
    if options.json:
        print_json(document)
        return
    grouped = any(row.get("group") for row in document["requests"] or ())  # else there is one, or all are in the first
    rows = [
        [
            row["id"],
            *([row["group"]] if grouped else []),
            show_duration(row["age_seconds"]),
            row["state"],
            row["peer"],
            row["prompt_tokens"],
            row["output_tokens"],
            f"{row['pages']['have']}/{row['pages']['need']}" if row["pages"] else None,
            row["why"] or "",
        ]
        for row in document["requests"] or ()
    ]
    print(table(rows, ["ID", *(["GROUP"] if grouped else []), "AGE", "STATE", "PEER", "IN", "OUT", "PAGES", "WHY"]))


def request(options: Globals, request_id: str) -> None:
    document = options.client().get(f"/v1/requests/{quote(request_id, safe='')}", private=True)
    if options.json:
        print_json(document)
        return
    over = document["state"] == "finished"
    for name, value in document.items():
        if value is None or name == "schema":
            continue
        if over and name == "age_seconds":
            print(f"{'took':17} {show_duration(value)}")
        elif over and name == "state_age_seconds":
            print(f"{'finished':17} {show_duration(value)} ago")
        elif not (over and name == "state"):
            print(f"{_NAMES.get(name, name.removesuffix('_seconds').replace('_', ' ')):17} {_shown(name, value)}")


def _shown(name: str, value: Any) -> str:
    """A member of a request for people: times and sizes with units, nothing in brackets."""
    if name == "pages":
        return f"{value['have']}/{value['need']}"
    if name == "transfer":
        written = "" if value["writes"] is None else f" in {counted(value['writes'], 'write')}"
        via = f" via {value['via']}" if value["via"] else ""
        moved = f"{counted(value['pages'], 'page')}, {counted(value['units'], 'unit')}"
        return f"{moved}, {show_bytes(value['bytes'])}{written}{via}"
    if name == "prompt":
        return " ".join(map(str, value))
    if name.endswith("_seconds"):
        return show_duration(value)
    return f"{value:.0%}" if name.endswith("_ratio") else str(value)


def cancel(options: Globals, request_id: str) -> None:
    document = options.client().delete(f"/v1/requests/{quote(request_id, safe='')}")
    if options.json:
        print_json(document)
    else:
        what = "cancelled" if document["cancelled"] else "not live any more: it had ended before"
        note(options, f"{', '.join(document['ids'])} is {what}")


def peers(options: Globals) -> None:
    document = options.client().get("/v1/peers")
    if options.json:
        print_json(document)
        return
    rows = [
        [
            peer["name"],
            peer["role"],
            peer["state"],
            show_duration(peer["rtt_seconds"]),
            peer["via"],
            peer["load"]["queued_tokens"] if peer["load"] else None,
            peer["load"]["free_pages"] if peer["load"] else None,
            peer["address"],
            peer["error"] or "",
        ]
        for peer in document["peers"]
    ]
    print(table(rows, ["NAME", "ROLE", "STATE", "RTT", "VIA", "QUEUED", "FREE", "ADDRESS", "WHY"]))


def ping(options: Globals, peer: str, count: int) -> None:
    path = f"/v1/peers/{quote(peer, safe='')}/ping"
    document = options.client(_PING_SECONDS * count + 2).post(path, {"count": count})
    if options.json:
        print_json(document)
        return
    trips = sorted(document["round_trips_seconds"])
    shown = "  ".join(show_duration(each) for each in document["round_trips_seconds"])
    print(f"{document['peer']} ({document['address']}) via {document['via']}: {shown}; the middle one "
          f"{show_duration(trips[len(trips) // 2])}")


def compare(options: Globals, peer: str) -> int:
    """EXIT_CHECK when the two cannot work together."""
    document = options.client(_COMPARE_SECONDS).get(f"/v1/peers/{quote(peer, safe='')}/compare", private=True)
    if options.json:
        print_json(document)
    else:
        rows = [[row["field"], row["ours"], row["theirs"], "yes" if row["matters"] else "no"] for row in document["fields"]]
        print(table(rows, ["FIELD", "OURS", "THEIRS", "MATTERS"]) if rows else "nothing differs")
        word = "can" if document["compatible"] else "cannot"
        note(options, f"this node and {document['peer']} ({document['address']}) {word} work together")
    return EXIT_OK if document["compatible"] else EXIT_CHECK


def transfers(options: Globals) -> None:
    document = options.client().get("/v1/transfers")
    if options.json:
        print_json(document)
        return
    rows = [
        [
            row["peer"],
            row["direction"],
            row["via"],
            row["nic"],
            row["state"],
            show_bytes(row["bytes"]),
            row["writes"],
            row["units"],
            row["inflight"],
            show_duration(row["p50_seconds"]),
            show_duration(row["p99_seconds"]),
            row["failed"],
        ]
        for row in document["transfers"]
    ]
    header = ["PEER", "DIR", "VIA", "NIC", "STATE", "BYTES", "WRITES", "UNITS", "INFLT", "P50", "P99", "FAILED"]
    print(table(rows, header))


def version(options: Globals) -> None:
    """Client and daemon, and what the daemon runs on; a daemon that is not there, or not chosen, is not an error."""
    daemon: dict[str, Any] = {"daemon": None, "api": None, "name": None, "boot_id": None, **dict.fromkeys(_PARTS)}
    shown = paint(options, "not running", "dim")
    if not options.json:
        print(f"client     {VERSION}", flush=True)  # whatever becomes of the question to the daemon
    try:
        daemon |= options.client().get("/version")
        shown = daemon["daemon"]
    except DaemonNotRunning as error:
        if options.verbose:
            note(options, f"pdd: {error.message}")
    except UsageError as error:
        shown = f"{error.message}; choose one with -i NAME"
    if options.json:
        print_json({**daemon, "schema": "pdd.version/1", "client": VERSION, "installed": _installed()})
        return
    print(f"daemon     {shown}")
    for name, value in ({part: daemon[part] for part in _PARTS} if daemon["daemon"] else _installed()).items():
        print(f"{name:9}  {value or '-'}")


def _installed() -> dict[str, str | None]:
    """What a node started from here would have."""
    import importlib

    from pdd import installed
    from pdd.messenger.versions import OURS

    found: dict[str, str | None] = dict.fromkeys(_PARTS)
    found["protocol"] = OURS.short
    found["torch"], found["cuda"] = installed.torch_and_cuda()
    found["driver"] = installed.driver()
    try:
        native = importlib.import_module("pdd.fabric._native")
    except ImportError:
        return found
    try:
        chosen = native.library()
    except native.FabricError:
        return found
    found["libfabric"] = f"{chosen['version']} ({chosen['path']})"
    return found
