"""Log set-up of a process: where lines go, how they look, and that equal lines do not flood.

Three forms on stderr: text for people, `<N>` priorities for the journal, one JSON object per line. Facts go along as
`logger.info("peer is up", extra=fields(peer="p0", via="tcp"))` and come out as `peer=p0 via=tcp` or as JSON members.
Prompts and secrets are never logged; a secret is a SecretStr, which shows stars.

Equal lines (same logger, level and text) come at most once in `EQUAL_LINES_SECONDS`; the next one says how many were
left out.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from pdd.units import counted

EQUAL_LINES_SECONDS = 1.0
_MAX_REMEMBERED = 1024
# Of sd-daemon(3).
_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


def fields(**values: Any) -> dict[str, Any]:
    """The `extra=` of a log call: named facts beside the message."""
    return {"pdd_fields": values}


def setup(level: str = "info", form: str = "auto", stream: TextIO | None = None) -> None:
    """Makes the root logger write to `stream` (stderr). `form`: auto, text, journal, json. Replaces earlier handlers."""
    stream = sys.stderr if stream is None else stream
    if form == "auto":
        form = "journal" if is_journal(stream) else "text"
    handler = logging.StreamHandler(stream)
    handler.setFormatter({"text": TextFormatter, "journal": JournalFormatter, "json": JsonFormatter}[form]())
    handler.addFilter(EqualLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    set_level(level)


def set_level(level: str) -> None:
    """Of all that is logged from now on, in the form that `setup` chose."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    # These write a line per connection; ours say what matters.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def is_journal(stream: TextIO) -> bool:
    """Whether `stream` is the very pipe that systemd connected to the journal ($JOURNAL_STREAM is DEVICE:INODE)."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return (device, inode) == (str(status.st_dev), str(status.st_ino))


class EqualLines(logging.Filter):
    """Lets one of several equal lines through per period. Bounded memory: the oldest half is forgotten when full."""

    def __init__(self, seconds: float = EQUAL_LINES_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._seconds = seconds
        self._clock = clock
        self._seen: dict[tuple[str, int, str], tuple[float, int]] = {}  # line → (when let through, left out since)

    def filter(self, record: logging.LogRecord) -> bool:
        key = (record.name, record.levelno, record.getMessage())
        now = self._clock()
        when, left_out = self._seen.get(key, (-1e9, 0))
        if now - when < self._seconds:
            self._seen[key] = (when, left_out + 1)
            return False
        if len(self._seen) >= _MAX_REMEMBERED:
            for old in list(self._seen)[: _MAX_REMEMBERED // 2]:
                del self._seen[old]
        self._seen.pop(key, None)  # to the end of the dict: it is ordered by the last time let through
        self._seen[key] = (now, 0)
        record.pdd_left_out = left_out
        return True


def message(record: logging.LogRecord) -> str:
    """The text of a line, with how many equal ones were left out."""
    left_out = getattr(record, "pdd_left_out", 0)
    return record.getMessage() + (f" (and {counted(left_out, 'equal line')})" if left_out else "")


def component(record: logging.LogRecord) -> str:
    """The part of pdd that wrote it."""
    return record.name.removeprefix("pdd.") or "pdd"


def facts(record: logging.LogRecord) -> dict[str, Any]:
    """What `fields` put beside the message."""
    found: dict[str, Any] = getattr(record, "pdd_fields", {})
    return found


class TextFormatter(logging.Formatter):
    """2026-11-30 12:04:29.123 WARNING messenger: peer is silent peer=p0"""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        return f"{clock}.{int(record.msecs):03d} {record.levelname} {self._body(record)}"

    def _body(self, record: logging.LogRecord) -> str:
        pairs = "".join(f" {key}={value}" for key, value in facts(record).items())
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        return f"{component(record)}: {message(record)}{pairs}{trace}"


class JournalFormatter(TextFormatter):
    """<4>messenger: peer is silent peer=p0

    The journal has its own clock. Every line of a trace carries the priority.
    """

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{_PRIORITY.get(record.levelno, 6)}>"
        return "\n".join(prefix + line for line in self._body(record).splitlines())


class JsonFormatter(logging.Formatter):
    """{"ts": …, "level": "warning", "component": "messenger", "message": "peer is silent", "peer": "p0"}"""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "component": component(record),
            "message": message(record),
            **facts(record),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)
