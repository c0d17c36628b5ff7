"""The node's documents: what `status`, `requests`, `peers`, `transfers` and `/metrics` say, put together from snapshots.

Every owner publishes frozen copies; this module reads them and nothing else. It is the control server's StatusSource.
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import TYPE_CHECKING, Any

import msgspec

from pdd import metrics
from pdd.control import schema
from pdd.daemon.ledger import Entry
from pdd.errors import RequestCancelled
from pdd.messenger.status import PeerStatus
from pdd.topology import report, sysfs

if TYPE_CHECKING:
    from pdd.daemon.node import Node

PAGE_STATES = ("free", "cached", "reserved", "running", "sending", "quarantined")


class Documents:
    """`pdd.control.schema.StatusSource` of a node. Owner: the main loop; each call returns at once."""

    def __init__(self, node: Node) -> None:
        self._node = node

    # -- pdd.status/1 -----------------------------------------------------------------------------------------------
    def status(self) -> schema.Status:
        node, config = self._node, self._node.config
        snapshot = node.snapshot
        state, reasons = node.state()
        document = schema.Status(
            name=config.node.name, role=config.node.role, state=state, epoch=schema.epoch_text(node.epoch),
            boot_id=node.boot_id, version=node.version, model=node.model_name, pid=os.getpid(), api=config.api.listen,
            peer_listen=config.peers.listen or None, reasons=reasons, phase=node.phase.name,
            progress=node.phase.progress, uptime_seconds=time.monotonic() - node.started_at,
            max_batch_size=config.engine.max_batch_size, page_size=config.kv.page_size, peers=self._peers(),
            transfers=self._totals(), latency=self._latency(), fabric=node.fabric_info(), findings=node.findings(),
        )
        if snapshot is None:
            return document
        states, totals = snapshot.states, snapshot.totals
        return msgspec.structs.replace(
            document, running=states["running"] + states["ready"], waiting=states["waiting"],
            waiting_for_kv=states["wait_kv"], batch_size=snapshot.batch_size, pages=self._pages(),
            engine=schema.EngineHealth(
                heartbeat_age_seconds=node.engine_stall_seconds(), steps=totals.steps, preemptions=totals.preemptions,
                prompt_tokens=totals.prompt_tokens, generated_tokens=totals.generated_tokens,
                num_layers=node.num_layers, step_seconds=totals.step_seconds, overhead_seconds=totals.overhead_seconds,
            ),
        )

    def _pages(self) -> schema.Pages:
        snapshot = self._node.snapshot
        if snapshot is None:
            return schema.Pages()
        counts = snapshot.pages
        return schema.Pages(total=counts.total, **{state: getattr(counts, state) for state in PAGE_STATES})

    def _totals(self) -> schema.Transfers:
        node = self._node
        stats = node.fabric_stats()
        page_bytes = node.kv_page_bytes
        received = int(stats.get("units_received", 0))
        return schema.Transfers(
            writes=int(stats.get("writes", 0)), bytes=int(stats.get("bytes", 0)), units=int(stats.get("units", 0)),
            active=node.num_attempts + node.num_jobs, failed=node.num_failed_transfers, units_received=received,
            bytes_received=received * page_bytes, stale_units=int(stats.get("stale_units", 0)),
        )

    def _latency(self) -> schema.Latency:
        observed = self._node.metrics
        share = metrics.percentile
        kv = observed.kv_transfer.labels("in", self._node.provider or "tcp")
        return schema.Latency(
            ttft_p50_seconds=share(observed.time_to_first_token, 0.5),
            ttft_p99_seconds=share(observed.time_to_first_token, 0.99),
            itl_p50_seconds=share(observed.inter_token_latency, 0.5),
            itl_p99_seconds=share(observed.inter_token_latency, 0.99),
            kv_wait_p50_seconds=share(kv, 0.5), kv_wait_p99_seconds=share(kv, 0.99),
        )

    # -- peers and transfers ----------------------------------------------------------------------------------------
    def _peers(self) -> tuple[schema.Peer, ...]:
        node = self._node
        found: list[schema.Peer] = []
        if node.decoder is not None:
            found += [_peer(status, "prefill") for status in node.decoder.peer_status()]
        if node.prefiller is not None:
            found += [_peer(status, "decode") for status in node.prefiller.peer_status()]
        return tuple(found)

    def peers(self) -> schema.Peers:
        return schema.Peers(peers=self._peers())

    def transfers(self) -> schema.TransferList:
        rows = tuple(
            schema.Transfer(
                peer=flow.peer, direction=flow.direction, via=self._node.provider, writes=flow.writes,
                bytes=flow.bytes, units=flow.units, failed=flow.failed,
            )
            for flow in self._node.flows()
        )  # fmt: skip
        return schema.TransferList(totals=self._totals(), transfers=rows)

    # -- requests ---------------------------------------------------------------------------------------------------
    def requests(self) -> schema.Requests:
        snapshot = self._node.snapshot
        if snapshot is None:
            return schema.Requests(requests=())
        now = time.monotonic()
        notes = {entry.request_id: entry for entry in self._node.ledger.live()}
        needs = {} if self._node.decoder is None else {a.request_id: a for a in self._node.decoder.attempts()}
        rows = []
        counts = dict.fromkeys((*snapshot.states, "abandoned", "quarantined"), 0)
        for row in snapshot.requests:
            counts[row.state] += 1
            entry, attempt = notes.get(row.request_id), needs.get(row.request_id)
            rows.append(schema.Request(
                id=row.request_id, kind=row.kind, state=row.state, age_seconds=now - row.arrived,
                state_age_seconds=now - row.state_since, prompt_tokens=row.prompt_tokens,
                output_tokens=row.output_tokens, peer=attempt.peer if attempt else entry.peer if entry else None,
                attempt=attempt.attempt if attempt else None, why=attempt.why or None if attempt else None,
                pages=schema.PageNeed(have=row.computed_tokens // self._node.config.kv.page_size, need=row.pages),
            ))  # fmt: skip
        return schema.Requests(counts=counts, requests=tuple(rows))

    def request(self, request_id: str) -> schema.Request | None:
        """A live request, or one of the latest finished ones."""
        entry = self._node.ledger.find(request_id)
        if entry is not None:
            return _detail(entry, self._node.provider, max(1, self._node.num_layers))
        return next((r for r in self.requests().requests or () if r.id == request_id), None)

    def cancel(self, request_id: str) -> bool:
        return self._node.cancel(request_id, RequestCancelled("an operator ended this request on the node"))

    # -- the rest ---------------------------------------------------------------------------------------------------
    def topology(self) -> dict[str, Any]:
        return report.document(sysfs.read())

    def metrics_text(self) -> str:
        return self._node.metrics.text()

    def drain(self, timeout: float | None) -> None:
        self._node.drain(timeout)

    def resume(self) -> None:
        self._node.resume()

    # -- /metrics ---------------------------------------------------------------------------------------------------
    def metrics_snapshot(self) -> metrics.Snapshot:
        node, engine = self._node, self._node.snapshot
        totals = self._totals()
        traffic = metrics.Snapshot(
            writes=totals.writes, bytes=totals.bytes, units=totals.units, units_received=totals.units_received,
            stale_units=totals.stale_units, transfer_failures=totals.failed, transfers_active=totals.active,
            attempts_open=node.num_attempts, attempts_expired=node.num_stalled_attempts,
            peers={peer.name: peer.state == "up" for peer in self._peers()},
            links=[metrics.LinkTotals(peer=flow.peer, nic=node.provider, direction=flow.direction, bytes=flow.bytes)
                   for flow in node.flows()],
        )  # fmt: skip
        if engine is None:
            return traffic
        states, counts = engine.states, engine.totals
        return dataclasses.replace(
            traffic, pages={state: getattr(engine.pages, state) for state in PAGE_STATES},
            pages_total=engine.pages.total, running=states["running"] + states["ready"], waiting=states["waiting"],
            waiting_for_kv=states["wait_kv"], batch_size=engine.batch_size, prompt_tokens=counts.prompt_tokens,
            generation_tokens=counts.generated_tokens, preemptions=counts.preemptions, steps=counts.steps,
            engine_heartbeat_age=node.engine_stall_seconds(),
        )  # fmt: skip


def _peer(status: PeerStatus, role: str) -> schema.Peer:
    """A link as documents show it. `role`: of the peer."""
    state = "draining" if status.draining and status.state == "up" else status.state
    error = status.last_error
    if status.diff:
        error = "; ".join(str(diff) for diff in status.diff)
    return schema.Peer(
        name=status.name, role=role, state=state, epoch=None if status.epoch is None else schema.epoch_text(status.epoch),
        via=status.via or None, address=status.address, rtt_seconds=status.rtt_seconds,
        since_seconds=status.age_seconds, error=error or None,
        load=schema.PeerLoad(queued_tokens=status.queued_tokens, running=status.running, free_pages=status.free_pages),
    )  # fmt: skip


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


def _detail(entry: Entry, via: str | None, layers: int) -> schema.Request:
    now = time.monotonic()
    end = entry.finished or now
    prefilled = entry.whole if entry.kind == "generate" else entry.computed
    return schema.Request(
        id=entry.request_id, kind=entry.kind, state=entry.state, age_seconds=end - entry.received,
        state_age_seconds=now - entry.state_since, peer=entry.peer or None, attempt=entry.attempt,
        attempts=entry.attempts, prompt_tokens=entry.prompt_tokens, output_tokens=entry.output_tokens,
        why=entry.error or entry.why or None, reason=entry.reason or None,
        queue_seconds=_between(entry.received, entry.started),
        prefill_seconds=_between(entry.asked if entry.kind == "generate" else entry.started, prefilled),
        exposed_seconds=entry.exposed_seconds, hidden_ratio=entry.hidden_ratio,
        first_token_seconds=_between(entry.received, entry.first_token),
        transfer=schema.RequestTransfer(
            pages=entry.units // layers, units=entry.units, writes=entry.writes or None, bytes=entry.bytes, via=via,
        ) if entry.units else None,
    )  # fmt: skip
