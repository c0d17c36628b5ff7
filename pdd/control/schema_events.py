"""The lines of /v1/events: what `pdd events` prints and `pdd top` reads, records and plays back.

A stream begins with one snapshot and goes on with what has changed. `pdd/control/events.py` writes it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdd.control.schema import LogRecord


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    seq: int  # of this stream, without gaps
    ts: float  # seconds since 1970
    ts_mono: float  # the daemon's monotonic clock, seconds


class SnapshotLine(_Line, frozen=True, kw_only=True, tag_field="type", tag="snapshot"):
    """The first line: every document asked for."""

    boot_id: str
    docs: dict[str, dict[str, Any]]  # topic → document


class DeltaLine(_Line, frozen=True, kw_only=True, tag_field="type", tag="delta"):
    """The members that changed since the line before, to be put in place of what they were."""

    docs: dict[str, dict[str, Any]]


class HeartbeatLine(_Line, frozen=True, kw_only=True, tag_field="type", tag="heartbeat"):
    """Nothing changed for a while."""


class LogsLine(_Line, frozen=True, kw_only=True, tag_field="type", tag="logs"):
    """Of the topic logs: what was logged since the line of this type before it."""

    missed: int  # records in between that were not kept
    records: tuple[LogRecord, ...]


class StoppingLine(_Line, frozen=True, kw_only=True, tag_field="type", tag="stopping"):
    """The last line: the daemon stops."""


EventLine = SnapshotLine | DeltaLine | LogsLine | HeartbeatLine | StoppingLine
