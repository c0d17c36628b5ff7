"""What one node said until now: its documents, its charts, its log. Pure: lines and a clock value in, numbers out.

`NodeState.apply` merges a line of /v1/events into the documents and keeps the last samples of batch size, transfer rate,
tokens, pages in use, and the rate of every row of the transfers. Rates of the node are the daemon's own, of the last
second; a sample of the transfer chart is at least the mean since the one before it, so that no burst between two
pictures is missed. A daemon that was lost or restarted leaves a gap; its log of before stays.

Documents are completed with what this version of the schema knows, so that an older daemon's lack of a member and a
newer one's surplus are both no trouble. All memory is bounded.
"""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import msgspec

from pdd.control import schema

KEPT_SAMPLES = 240
KEPT_RECORDS = 2000
KEPT_WATERFALLS = 64
TREND_SAMPLES = 40
_WINDOW_SECONDS = 1.0  # of the daemon's shortest rate

Samples = deque[float | None]  # None is a gap


def _members(document: Any) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(document)
    return built


_ROWS = {
    "peers": _members(schema.Peer(name="?", role="?", state="unknown")),
    "transfers": _members(schema.Transfer(peer="?", direction="?")),
    "groups": _members(schema.EngineGroup(index=0)),
    "requests": _members(schema.Request(id="?", state="unknown", age_seconds=0.0)),
    "findings": {"id": "?", "level": "warn", "message": ""},
}
_DOCUMENTS = {
    "status": _members(schema.Status(name="?", role="?", state="unknown", epoch="", boot_id="", version="")),
    "transfers": _members(schema.TransferList()),
    "requests": _members(schema.Requests()),
    "topology": {name: [] for name in ("numa", "gpus", "nics", "pairs", "rails", "findings", "links", "source")},
}


def complete(topic: str, document: dict[str, Any]) -> dict[str, Any]:
    """The document with every member that this version reads."""
    made = _over(_DOCUMENTS.get(topic, {}), document)
    for name, row in _ROWS.items():
        if topic != "topology" and isinstance(made.get(name), list):
            made[name] = [{**row, **each} for each in made[name]]
    return made


def _over(default: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """`given` over `default`, in dictionaries that are members too; null where a number of parts belongs is no member."""
    made = {**default, **given}
    for name, value in default.items():
        if isinstance(value, dict) and value:
            made[name] = _over(value, given.get(name) or {})
    return made


class NodeState:
    """Owner: whoever feeds it (the app's main thread)."""

    def __init__(self, label: str = "") -> None:
        self.label = label  # what the operator called it
        self.docs: dict[str, dict[str, Any]] = {}
        self.records: deque[dict[str, Any]] = deque(maxlen=KEPT_RECORDS)  # of the log, the oldest first
        self.waterfalls: dict[str, dict[str, Any]] = {}  # request id → pdd.waterfall/1, the oldest first
        self.batch: Samples = deque(maxlen=KEPT_SAMPLES)
        self.moved: Samples = deque(maxlen=KEPT_SAMPLES)  # bytes per second, in and out together
        self.tokens: Samples = deque(maxlen=KEPT_SAMPLES)  # per second, prompt and output together
        self.used: Samples = deque(maxlen=KEPT_SAMPLES)  # pages that cannot be handed out
        self.trends: dict[tuple[str, ...], Samples] = {}  # row of the transfers → bytes per second
        self.updated: float | None = None  # the caller's clock at the last line
        self.lost = ""  # why it is not connected; empty: it is
        self.boot = ""
        self._told: dict[str, dict[str, Any]] = {}  # documents as the daemon says them
        self._counted: tuple[float, int] | None = None  # clock, and bytes moved until then
        self._row_bytes: dict[tuple[str, ...], int] = {}
        self._row_clock: float | None = None
        self._last_record = 0

    @property
    def status(self) -> dict[str, Any] | None:
        return self.docs.get("status")

    @property
    def name(self) -> str:
        return self.label or (self.status["name"] if self.status else "?")

    def told(self, topic: str) -> dict[str, Any]:
        """A document as the daemon says it; {} if it did not."""
        return self._told.get(topic, {})

    def frozen(self) -> NodeState:
        """A copy that later lines do not change. Documents are replaced, never changed, so they are shared."""
        copied = copy.copy(self)
        copied.docs = dict(self.docs)
        copied.waterfalls = dict(self.waterfalls)
        copied.trends = {row: samples.copy() for row, samples in self.trends.items()}
        for name in ("records", "batch", "moved", "tokens", "used"):
            setattr(copied, name, getattr(self, name).copy())
        return copied

    def lose(self, reason: str) -> None:
        self.lost = reason

    def apply(self, line: dict[str, Any], now: float) -> None:
        """Takes one line. Lines of an unknown type only prove that the daemon lives."""
        was_lost, self.lost = bool(self.lost), ""
        self.updated = now
        kind = line.get("type")
        if kind == "logs":
            self._log(line)
        if kind not in ("snapshot", "delta"):
            return
        if kind == "snapshot":
            self._begin(line, was_lost)
        for topic, changes in line["docs"].items():
            self._told[topic] = {**self._told.get(topic, {}), **changes}
            self.docs[topic] = complete(topic, self._told[topic])
        if "waterfall" in line["docs"]:
            self._keep_waterfall(self._told["waterfall"])
        if self.status is not None:
            self._sample(self.status, now)
        self._sample_rows(line.get("ts_mono", now))

    # -- parts of a line -----------------------------------------------------------------------------------------------
    def _begin(self, line: dict[str, Any], was_lost: bool) -> None:
        boot = line.get("boot_id") or line["docs"].get("status", {}).get("boot_id") or self.boot
        restarted = bool(self.boot) and boot != self.boot
        if self.docs and (restarted or was_lost):
            for samples in (self.batch, self.moved, self.tokens, self.used, *self.trends.values()):
                samples.append(None)
        if restarted:
            self._last_record = 0
            self.records.append(_restart_note(line))
        if restarted or was_lost or self._counted is None:
            self._counted, self._row_clock, self._row_bytes = None, None, {}
        self.boot = boot
        self._told = {}

    def _sample(self, status: dict[str, Any], now: float) -> None:
        self.batch.append(status["batch_size"])
        rates, totals = status["rates"]["1s"], status["transfers"]
        moved = totals["bytes_received"] + totals["bytes"]
        rate = rates["bytes_received_per_second"] + rates["bytes_per_second"]
        if self._counted is None:
            self._counted = now, moved
        elif now - self._counted[0] >= _WINDOW_SECONDS:
            rate = max(rate, (moved - self._counted[1]) / (now - self._counted[0]))
            self._counted = now, moved
        self.moved.append(rate)
        self.tokens.append(rates["prompt_tokens_per_second"] + rates["generated_tokens_per_second"])
        pages = status["pages"]
        self.used.append(pages["total"] - pages["free"] - pages["cached"])

    def _sample_rows(self, clock: float) -> None:
        rows = {row_key(row): row["bytes"] for row in self.docs.get("transfers", {}).get("transfers", ())}
        seconds = None if self._row_clock is None else max(clock - self._row_clock, 1e-3)
        trends = {}
        for key, nbytes in rows.items():
            trend = trends[key] = self.trends.get(key) or deque(maxlen=TREND_SAMPLES)
            if seconds is not None and key in self._row_bytes:
                trend.append(max(nbytes - self._row_bytes[key], 0) / seconds)
        self.trends, self._row_bytes, self._row_clock = trends, rows, clock

    def _log(self, line: dict[str, Any]) -> None:
        """Records that were sent before, as after a lost connection, are left out."""
        for record in line.get("records", ()):
            if record["seq"] > self._last_record:
                self._last_record = record["seq"]
                self.records.append(record)

    def _keep_waterfall(self, drawn: dict[str, Any]) -> None:
        name = str(drawn.get("id") or "")
        if not name:  # none has ended yet
            return
        self.waterfalls.pop(name, None)
        self.waterfalls[name] = drawn
        while len(self.waterfalls) > KEPT_WATERFALLS:
            self.waterfalls.pop(next(iter(self.waterfalls)))


def row_key(row: dict[str, Any]) -> tuple[str, ...]:
    """What tells two rows of the transfers apart."""
    return row["peer"], row["direction"], row["nic"] or "", row["via"] or ""


def _restart_note(line: dict[str, Any]) -> dict[str, Any]:
    return {"seq": 0, "ts": line.get("ts", 0.0), "level": "warning", "component": "pdd top",
            "message": "the daemon was started anew", "fields": {}, "trace": None}


def known(samples: Samples) -> list[float]:
    return [sample for sample in samples if sample is not None]
