"""The node's documents: what `status`, `requests`, `peers`, `transfers` and `/metrics` say, put together from snapshots.

Every owner publishes frozen copies; this module reads them and nothing else. It is the control server's StatusSource.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from pdd import config_load, installed, log_ring, metrics
from pdd.control import schema, schema_check, stories
from pdd.daemon import explain, flight, peer_calls, request_ids, request_rows, self_check, stacks
from pdd.daemon.latency import WINDOW_SECONDS
from pdd.daemon.ledger import Entry
from pdd.daemon.view import GroupView
from pdd.engine.snapshot import EngineSnapshot
from pdd.errors import AccessDenied, AmbiguousRequest, NoSuchRequest, RequestCancelled
from pdd.kv.pool import PageCounts
from pdd.messenger import versions
from pdd.messenger.status import PeerStatus
from pdd.messenger.way import LOCAL
from pdd.metrics import PAGE_STATES
from pdd.topology import report
from pdd.topology.placement import Placement

if TYPE_CHECKING:
    from pdd.daemon.node import Node


class Documents:
    """`pdd.control.source.StatusSource` of a node. Owner: the main loop, but for `topology`."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._view = node.view
        self._placement: Placement | None = None  # of which `_topology` tells
        self._topology: dict[str, Any] = {}

    def version(self) -> schema.Version:
        node, fabric = self._node, self._node.fabric
        torch, cuda = installed.torch_and_cuda()
        return schema.Version(
            daemon=node.version, name=node.config.node.name, boot_id=node.boot_id, protocol=versions.OURS.short,
            libfabric=f"{fabric.caps.library_version} ({fabric.caps.library_path})" if fabric else None,
            torch=torch, cuda=cuda, driver=installed.driver(),
        )

    # -- pdd.status/1 -----------------------------------------------------------------------------------------------
    def status(self) -> schema.Status:
        node, view, config = self._node, self._view, self._node.config
        snapshot = view.snapshot
        state, reasons = view.state()
        document = schema.Status(
            name=config.node.name, role=config.node.role, state=state, epoch=schema.epoch_text(node.epoch),
            boot_id=node.boot_id, version=node.version, model=node.model_name, pid=os.getpid(), api=config.api.listen,
            peer_listen=config.peers.listen or None, reasons=reasons, phase=node.phase.name,
            progress=node.phase.progress, drain_seconds_left=node.drain.seconds_left,
            uptime_seconds=time.monotonic() - node.started_at, max_batch_size=config.engine.max_batch_size * config.engine.dp,
            page_size=config.kv.page_size, peers=self._peers(), transfers=self._totals(), latency=self._latency(),
            fabric=view.fabric_info(), fences=view.fences(), findings=view.findings(), groups=self._groups(),
            ranks=self._ranks(),
        )
        if snapshot is None:
            return document
        states, totals, counts = snapshot.states, snapshot.totals, snapshot.pages
        return msgspec.structs.replace(
            document, running=states["running"] + states["ready"], waiting=states["waiting"],
            waiting_for_kv=states["wait_kv"], batch_size=snapshot.batch_size,
            pages=_pages(counts),
            engine=schema.EngineHealth(
                heartbeat_age_seconds=view.turn_age(), steps=totals.steps, preemptions=totals.preemptions,
                prompt_tokens=self._prompt_tokens(snapshot), generated_tokens=totals.generated_tokens,
                cached_tokens=node.meter.cached_tokens, num_layers=view.num_layers,
                step_seconds=totals.step_seconds, overhead_seconds=totals.overhead_seconds,
            ),
        )

    def _prompt_tokens(self, snapshot: EngineSnapshot) -> int:
        """Of the requests that clients had taken; a prefiller has no clients, and counts what it computes."""
        prefills = self._node.config.node.role == "prefill"
        return snapshot.totals.prompt_tokens if prefills else self._node.ledger.prompt_tokens

    def _ranks(self) -> tuple[schema.Rank, ...]:
        return tuple(
            schema.Rank(
                group=group.index, rank=rank.rank, pid=rank.pid, attention=rank.attention, threads=rank.threads,
                dtype=rank.dtype, param_bytes=rank.param_bytes, kv_bytes=rank.kv_bytes,
                load_seconds=rank.load_seconds,
            )
            for group in self._view.groups() for rank in group.ranks
        )

    def _groups(self) -> tuple[schema.EngineGroup, ...]:
        return tuple(_group(group) for group in self._view.groups())

    def _totals(self) -> schema.Transfers:
        view = self._view
        stats = view.fabric_stats()
        return schema.Transfers(
            writes=stats.writes, bytes=stats.bytes, units=stats.units, active=stats.active_transfers,
            attempts=view.num_attempts, prefills=view.num_jobs,
            failed=sum(count for reason, count in view.failures().items() if reason != "cancelled"),
            units_received=stats.units_received, bytes_received=view.bytes_received, stale_units=stats.stale_units,
        )

    def _latency(self) -> schema.Latency:
        lately = self._node.latencies
        ttft, itl, kv_wait = (
            window.percentiles(0.5, 0.99) for window in (lately.first_token, lately.between_tokens, lately.kv_wait)
        )
        return schema.Latency(
            window_seconds=WINDOW_SECONDS, ttft_p50_seconds=ttft[0], ttft_p99_seconds=ttft[1],
            itl_p50_seconds=itl[0], itl_p99_seconds=itl[1], kv_wait_p50_seconds=kv_wait[0],
            kv_wait_p99_seconds=kv_wait[1],
        )

    # -- peers and transfers ----------------------------------------------------------------------------------------
    def _peers(self) -> tuple[schema.Peer, ...]:
        dialled = [_peer(status, "prefill") for status in self._view.dialled()]
        return (*dialled, *(_peer(status, "decode") for status in self._view.callers()))

    def peers(self) -> schema.Peers:
        return schema.Peers(peers=self._peers())

    def transfers(self) -> schema.TransferList:
        view = self._view
        names = self._node.meter.flows.names
        states = {names.label(peer.name): peer.state for peer in self._peers()}
        inflight = collections.Counter(
            [(names.label(item.peer), item.direction) for item in request_rows.in_flight(view.attempts(), view.jobs())]
        )
        rows = tuple(
            schema.Transfer(
                peer=flow.peer, direction=flow.direction, via=flow.via or None,
                nic=(view.nics or None) if flow.via != LOCAL else None,
                state=states.get(flow.peer, "down"), writes=flow.writes, bytes=flow.bytes, units=flow.units,
                inflight=inflight[flow.peer, flow.direction], failed=flow.failed, p50_seconds=flow.seconds(0.5),
                p99_seconds=flow.seconds(0.99),
            )
            for flow in view.flows()
        )
        return schema.TransferList(totals=self._totals(), transfers=rows)

    # -- requests ---------------------------------------------------------------------------------------------------
    def requests(self) -> schema.Requests:
        """Live ones. Who asks for many requests is shown no prompt."""
        rows = self._rows()
        counts = dict.fromkeys((*(() if self._view.snapshot is None else self._view.snapshot.states),
                                "abandoned", "quarantined"), 0)
        for row in rows:
            counts[row.state] = counts.get(row.state, 0) + 1
        return schema.Requests(counts=counts, requests=tuple(msgspec.structs.replace(r, prompt=None) for r in rows))

    async def explain(self, wanted: str) -> stories.Explain:
        return await explain.explain(self._node, self.request(wanted).id)

    def waterfall(self) -> schema.Waterfall:
        fabric = self._node.fabric
        return self._node.waterfalls.latest(None if fabric is None else fabric.flight)

    async def flight(self, why: str = "it was asked for") -> stories.Flight:
        node = self._node
        sources = flight.Sources(
            name=node.config.node.name, role=node.config.node.role, boot_id=node.boot_id, version=node.version,
            history=node.history, requests=lambda: self.requests().requests or (),
            plans=None if node.fabric is None else node.fabric.flight, with_stacks=node.config.debug.allow_stacks,
        )
        return await flight.document(sources, why)

    def request(self, wanted: str) -> schema.Request:
        rows, ended = self._rows(), self._node.ledger.finished()
        try:
            found = request_ids.of_one(wanted, {**_names(ended), **{row.id: row.client_request_id for row in rows}})
        except NoSuchRequest:
            raise self._unknown(wanted, len(rows)) from None
        if len(found) > 1:
            raise AmbiguousRequest(
                f"{wanted} has {len(found)} choices: {request_ids.listed(found)}", hint="Name one of them."
            )
        [request_id] = found
        live = [row for row in rows if row.id == request_id]
        if live:  # a request before the pages that an earlier attempt of it still holds
            return next((row for row in live if row.kind != "attempt"), live[0])
        return request_rows.finished(ended[request_id], self._context())

    def _unknown(self, wanted: str, num_live: int) -> NoSuchRequest:
        ledger = self._node.ledger
        ended = ledger.finished()
        oldest = next((entry.finished for entry in ended.values() if entry.finished is not None), None)
        return request_ids.unknown(
            wanted, live=num_live, ended=len(ended), forgotten=ledger.num_forgotten,
            oldest_seconds=None if oldest is None else time.monotonic() - oldest, dumps=str(self._node.dumps.folder),
        )

    def _rows(self) -> list[schema.Request]:
        snapshot = self._view.snapshot
        if snapshot is None:
            return []
        return request_rows.live(
            snapshot.requests, self._node.ledger.live(), self._view.attempts(), self._view.jobs(), self._context()
        )

    def _context(self) -> request_rows.Context:
        return request_rows.Context(
            now=time.monotonic(), page_size=self._node.config.kv.page_size,
        )

    def cancel(self, wanted: str) -> schema.Cancelled:
        live = {row.id: row.client_request_id for row in self._rows()}
        try:
            found = request_ids.of_one(wanted, live)
        except NoSuchRequest:
            try:
                ended = request_ids.of_one(wanted, _names(self._node.ledger.finished()))
            except NoSuchRequest:
                raise self._unknown(wanted, len(live)) from None
            return schema.Cancelled(ids=tuple(ended), cancelled=False)
        reason = RequestCancelled("an operator ended this request on the node")
        hit = [each for each in found if self._node.cancel(each, reason)]
        return schema.Cancelled(ids=tuple(hit or found), cancelled=bool(hit))

    # -- the rest ---------------------------------------------------------------------------------------------------
    def topology(self) -> dict[str, Any]:
        placement = self._node.placement
        assert placement is not None  # made before the control sockets are bound
        if placement is not self._placement:  # event streams ask every second, and it changes once in a node's life
            self._placement, self._topology = placement, report.document(placement.topology, placement)
        return self._topology

    def config(self) -> dict[str, Any]:
        return config_load.explained(self._node.config, self._node.origins)

    def logs(self, since: int) -> schema.Logs:
        ring = log_ring.attached()
        kept, missed = ring.since(since) if ring is not None else ((), 0)
        records = tuple(
            schema.LogRecord(seq=each.seq, ts=each.ts, level=each.level, component=each.component, message=each.message,
                             fields=each.fields, trace=each.trace)
            for each in kept
        )
        return schema.Logs(boot_id=self._node.boot_id, missed=missed, records=records)

    def metrics_text(self) -> str:
        return self._node.metrics.text()

    async def reload(self, dry_run: bool) -> schema_check.Reload:
        return await self._node.reloader.reload(dry_run=dry_run)

    async def ping(self, peer: str, count: int) -> schema_check.Ping:
        return await peer_calls.ping(self._met(), peer, count)

    async def compare(self, peer: str) -> schema_check.Comparison:
        return await peer_calls.compare(self._met(), peer)

    async def check(self) -> schema_check.CheckReport:
        node = self._node
        return await self_check.report(node.config, node.placement, node.fabric, self._view.dialled())

    def _met(self) -> peer_calls.Met:
        node = self._node
        return peer_calls.Met(
            node.link_context, () if node.decoder is None else node.decoder.peers.peers,
            () if node.prefiller is None else node.prefiller.listener.links,
        )

    def stacks(self) -> schema.Stacks:
        if not self._node.config.debug.allow_stacks:
            raise AccessDenied("stacks are not told: debug.allow_stacks is false", hint="Set it, then `pdd reload`.")
        return stacks.document()

    def drain(self, timeout: float | None) -> None:
        self._node.drain.begin(timeout)

    def resume(self) -> None:
        self._node.drain.end()

    # -- /metrics ---------------------------------------------------------------------------------------------------
    def metrics_snapshot(self) -> metrics.Snapshot:
        view, engine = self._view, self._view.snapshot
        totals, tries, prefills = self._totals(), view.attempt_counts, view.prefill_counts
        fences = view.fences()
        traffic = metrics.Snapshot(
            writes=totals.writes, bytes=totals.bytes, units=totals.units, units_received=totals.units_received,
            stale_units=totals.stale_units, transfers_active=totals.active, sets_failed=prefills.failed + prefills.peer_lost,
            failures=view.failures(),
            fallbacks={"prefiller": tries.retries, "local": tries.local_fallbacks, "error": tries.failed},
            attempts=tries.attempts, attempts_open=totals.attempts, attempts_expired=tries.stalls,
            cancels=tries.cancels, fences=tries.fences, prefills=prefills.jobs, peers=view.peers_up(),
            links=[metrics.LinkTotals(peer=flow.peer, nic=view.nics, direction=flow.direction, bytes=flow.bytes)
                   for flow in view.flows()],
            nic_utilization=view.nic_utilization(), fences_pending=fences.pending,
            fence_age=fences.oldest_seconds or 0.0, fence_alarms=fences.alarms,
            quarantine_age=fences.oldest_quarantine_seconds or 0.0, integrity_failures=fences.integrity_failures,
        )
        if engine is None:
            return traffic
        states, counts = engine.states, engine.totals
        return dataclasses.replace(
            traffic, pages={state: getattr(engine.pages, state) for state in PAGE_STATES},
            pages_total=engine.pages.total, running=states["running"] + states["ready"], waiting=states["waiting"],
            waiting_for_kv=states["wait_kv"], batch_size=engine.batch_size, prompt_tokens=self._prompt_tokens(engine),
            generation_tokens=counts.generated_tokens, preemptions=counts.preemptions, steps=counts.steps,
            engine_heartbeat_age=view.turn_age(), groups=[_group_totals(group) for group in view.groups()],
        )


def _names(entries: Mapping[str, Entry]) -> dict[str, str | None]:
    return {request_id: entry.given_id for request_id, entry in entries.items()}


def _pages(counts: PageCounts) -> schema.Pages:
    return schema.Pages(total=counts.total, **{state: getattr(counts, state) for state in PAGE_STATES})


def _group(group: GroupView) -> schema.EngineGroup:
    document = schema.EngineGroup(index=group.index, ranks=len(group.ranks), heartbeat_age_seconds=group.turn_age)
    now = group.snapshot
    if now is None:
        return document
    return msgspec.structs.replace(
        document, running=now.states["running"] + now.states["ready"], waiting=now.states["waiting"],
        waiting_for_kv=now.states["wait_kv"], batch_size=now.batch_size,
        queued_prefill_tokens=now.queued_prefill_tokens, pages=_pages(now.pages), steps=now.totals.steps,
    )


def _group_totals(group: GroupView) -> metrics.GroupTotals:
    now = group.snapshot
    if now is None:
        return metrics.GroupTotals()
    return metrics.GroupTotals(
        pages={state: getattr(now.pages, state) for state in PAGE_STATES}, running=now.states["running"] + now.states["ready"],
        waiting=now.states["waiting"], waiting_for_kv=now.states["wait_kv"], steps=now.totals.steps,
    )


def _peer(status: PeerStatus, role: str) -> schema.Peer:
    """A link as documents show it. `role`: of the peer."""
    state = "draining" if status.draining and status.state == "up" else status.state
    load = None  # a decoder says nothing of its load
    if role == "prefill" and status.state in ("up", "suspect"):
        load = schema.PeerLoad(queued_tokens=status.queued_tokens, running=status.running, free_pages=status.free_pages)
    error = status.last_error
    if status.diff:
        error = "; ".join(str(diff) for diff in status.diff)
    return schema.Peer(
        name=status.name, role=role, state=state, epoch=None if status.epoch is None else schema.epoch_text(status.epoch),
        via=status.via or None, address=status.address, rtt_seconds=status.rtt_seconds,
        since_seconds=status.age_seconds, error=error or None,
        load=load,
    )
