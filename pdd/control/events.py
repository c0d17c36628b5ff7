"""The event stream of /v1/events: a snapshot of the documents asked for, then what changed, as NDJSON.

    {"type":"snapshot","seq":0,"ts":…,"ts_mono":…,"boot_id":"…","docs":{"status":{…}}}
    {"type":"delta","seq":1,"ts":…,"ts_mono":…,"docs":{"status":{"running":3,"pages":{…}}}}     changed members only
    {"type":"logs","seq":2,…,"missed":0,"records":[…]}                                          of the topic logs
    {"type":"heartbeat","seq":3,…}                                                              nothing changed
    {"type":"stopping","seq":4,…}                                                               the last line

A client merges a delta member by member; log records it appends. Nothing is queued for a client: each line is the
difference between what that client was last sent and now, made when the client can take it. A slow reader therefore
gets fewer, larger deltas and costs no memory; of the log it is told how many records it missed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec

from pdd.control import schema, schema_events

HEARTBEAT_SECONDS = 10.0
MIN_INTERVAL, MAX_INTERVAL = 0.1, 60.0

Documents = Mapping[str, Callable[[], Any]]  # topic → how to get its document
GetLogs = Callable[[int], schema.Logs]  # the records after a number


class Bell:
    """Wakes all streams at once: on a change of state that should not wait for the interval, and for the stop."""

    def __init__(self) -> None:
        self.stopping = False
        self._event = asyncio.Event()

    def ring(self) -> None:
        self._event.set()
        self._event = asyncio.Event()  # those who wait hold the old one

    def stop(self) -> None:
        self.stopping = True
        self.ring()

    async def wait(self, seconds: float) -> None:
        """Returns when it rings, or after `seconds`."""
        try:
            await asyncio.wait_for(self._event.wait(), seconds)
        except TimeoutError:
            return


async def stream(
    documents: Documents, bell: Bell, boot_id: str, interval: float, logs: GetLogs | None = None, since: int = 0
) -> AsyncIterator[bytes]:
    """The lines for one client, until the bell's stop. `logs`: where it wants log records, those after `since`."""
    seq, last_record = 0, since

    def line(kind: type[schema_events.EventLine], **members: Any) -> bytes:
        nonlocal seq
        made = kind(seq=seq, ts=time.time(), ts_mono=time.monotonic(), **members)
        seq += 1
        return msgspec.json.encode(made) + b"\n"

    def new_records() -> bytes | None:
        nonlocal last_record
        if logs is None:
            return None
        found = logs(last_record)
        if not found.records:
            return None
        last_record = found.records[-1].seq
        return line(schema_events.LogsLine, missed=found.missed, records=found.records)

    sent = _members(documents)
    yield line(schema_events.SnapshotLine, boot_id=boot_id, docs=sent)
    if (written := new_records()) is not None:
        yield written
    last_line = time.monotonic()
    while not bell.stopping:
        await bell.wait(interval)
        if bell.stopping:
            break
        now = _members(documents)
        changed = {
            topic: {name: value for name, value in document.items() if sent[topic].get(name) != value}
            for topic, document in now.items()
        }
        changed = {topic: members for topic, members in changed.items() if members}
        sent = now
        written = new_records()
        if written is not None:
            yield written
        if changed:
            yield line(schema_events.DeltaLine, docs=changed)
        elif written is None:
            if time.monotonic() - last_line < HEARTBEAT_SECONDS - interval:
                continue
            yield line(schema_events.HeartbeatLine)
        last_line = time.monotonic()
    yield line(schema_events.StoppingLine)


def _members(documents: Documents) -> dict[str, dict[str, Any]]:
    return {topic: msgspec.to_builtins(get()) for topic, get in documents.items()}
