"""events, logs: what a node says as it happens, for pipes, for other machines and for people."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

from pdd.commands.common import Globals, paint, print_json
from pdd.errors import UsageError
from pdd.units import format_duration

_LEVELS = ("debug", "info", "warning", "error", "critical")
_LEVEL_COLORS = {"debug": "dim", "warning": "yellow", "error": "red", "critical": "red"}
_SILENCE_SECONDS = 60.0


def events(options: Globals, topics: Sequence[str], interval: float | None) -> None:
    """The lines of /v1/events, one JSON object a line, until the daemon stops. `pdd top --host` reads these."""
    from pdd.tui.sources import SocketSource

    client = options.client()
    source = SocketSource("", client, tuple(topics) or None)
    for line in source.lines(1.0 if interval is None else interval):
        print_json(line)


def logs(options: Globals, follow: bool, level: str, grep: str | None, since: int) -> None:
    """The kept log records, the newest last; with `follow` the later ones too."""
    if level not in _LEVELS:
        raise UsageError(f'--level: "{level}" is none of {", ".join(_LEVELS)}')
    try:
        pattern = re.compile(grep or "")
    except re.error as error:
        raise UsageError(f"--grep: {error}") from None

    def wanted(record: dict[str, Any]) -> bool:
        below = record["level"] in _LEVELS and _LEVELS.index(record["level"]) < _LEVELS.index(level)
        return not below and bool(pattern.search(_text(record)))

    client = options.client()
    if not follow:
        document = client.get(f"/v1/logs?since={since}", private=True)
        _print(options, document, filter(wanted, document["records"]))
        return
    url = f"/v1/events?topics=logs&interval={format_duration(0.5)}&since={since}"
    boot = ""
    for line in client.stream(url, private=True, idle_timeout=_SILENCE_SECONDS):
        boot = line.get("boot_id", boot)
        if line["type"] == "logs":
            document = {"schema": "pdd.logs/1", "boot_id": boot, "missed": line["missed"]}
            _print(options, document, filter(wanted, line["records"]))


def _print(options: Globals, document: dict[str, Any], records: Iterable[dict[str, Any]]) -> None:
    if options.json:
        print_json({**document, "records": list(records)})
        return
    if document["missed"]:
        print(paint(options, f"({document['missed']} records are not kept any more)", "dim"))
    for record in records:
        print(paint(options, _text(record), _LEVEL_COLORS.get(record["level"])), flush=True)


def _text(record: dict[str, Any]) -> str:
    """As the daemon's own log has it."""
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["ts"]))
    facts = "".join(f" {name}={value}" for name, value in record["fields"].items())
    trace = f"\n{record['trace'].rstrip()}" if record["trace"] else ""
    millis = int(record["ts"] % 1 * 1000)
    return f"{clock}.{millis:03d} {record['level'].upper()} {record['component']}: {record['message']}{facts}{trace}"
