"""What documents read of a node, from the snapshots of its parts. Each answer is of one moment and comes at once.

A part that is not there yet, or that the role does not need, reads as empty. Nothing here changes anything.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from pdd.api.service import Health
from pdd.control import schema
from pdd.daemon.flows import IN, OUT, Flow, Names
from pdd.engine.rank_protocol import RankReady
from pdd.engine.snapshot import EngineSnapshot, joined
from pdd.fabric.types import Stats
from pdd.findings import Finding, finding
from pdd.messenger.fencing import FenceStatus
from pdd.messenger.status import AttemptStatus, DecoderCounters, JobStatus, PeerStatus, PrefillerCounters
from pdd.units import counted

if TYPE_CHECKING:
    from pdd.daemon.node import Node


def left(num_requests: int, num_prefills: int) -> str:
    """Open work in words: "2 requests, 1 prefill for decoders"; what there is none of is left out."""
    requests = [counted(num_requests, "request")] if num_requests or not num_prefills else []
    prefills = [f"{counted(num_prefills, 'prefill')} for decoders"] if num_prefills else []
    return ", ".join([*requests, *prefills])


@dataclasses.dataclass(frozen=True, slots=True)
class GroupView:
    """What documents read of one engine."""

    index: int
    snapshot: EngineSnapshot | None  # None: it does not run yet
    turn_age: float  # seconds that the turn in hand has run; 0: nothing to do
    ranks: tuple[RankReady, ...]


class NodeView:
    """Owner: the main loop."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._callers = Names()  # decoders that were ever linked, as labels

    # -- state ------------------------------------------------------------------------------------------------------
    def state(self) -> tuple[str, tuple[str, ...]]:
        """The word for `pdd status`, and why the node is not ready."""
        node, reasons = self._node, self._reasons()
        if node.phase.name != "serve":
            return ("starting" if node.phase.name == "bind" else "loading"), reasons
        if node.drain.active:
            return ("draining" if any(node.drain.open_work()) else "drained"), reasons
        return ("ready" if not reasons else "not_ready"), reasons

    def _reasons(self) -> tuple[str, ...]:
        """Why new work is not taken, or not served, now."""
        node = self._node
        if node.phase.name != "serve":
            progress = "" if node.phase.progress is None else f" {node.phase.progress:.0%}"
            return (f"starting: {node.phase.name}{progress}",)
        if node.drain.active:
            if not any(node.drain.open_work()):
                return ("drained: new work is refused until `pdd resume`",)
            return (f"draining, left: {left(*node.drain.open_work())}",)
        if node.decoder is None or node.config.scheduler.local_prefill_fallback or node.decoder.peers.usable_links():
            return ()
        return (f"no prefiller: {node.decoder.peers.explain()}",)

    def summary(self) -> str:
        """One line for systemd and the log."""
        state, reasons = self.state()
        word = f"{self._node.config.node.role} {state}"
        return (
            f"{word} ({'; '.join(reasons)})" if reasons
            else f"{word}, {self._node.model_name} at {self._node.config.api.listen}"
        )

    def health(self) -> Health:
        live = not self._node.failed.done() and self.turn_age() < self._node.config.engine.step_timeout
        return Health(live=live, reasons=self._reasons())

    # -- engine and ranks ---------------------------------------------------------------------------------------------
    def groups(self) -> tuple[GroupView, ...]:
        """Every engine of this node; none before it loads."""
        return tuple(
            GroupView(group.index, group.snapshot, group.turn_age, tuple(rank.ready for rank in group.ranks))
            for group in self._node.groups
        )

    @property
    def snapshot(self) -> EngineSnapshot | None:
        """Of all engines together; None before they run."""
        snapshots = [group.snapshot for group in self._node.groups if group.snapshot is not None]
        return joined(snapshots) if snapshots else None

    def turn_age(self) -> float:
        """Of the engine whose turn in hand has been running for longest; 0 while none has anything to do."""
        return max((group.turn_age for group in self._node.groups), default=0.0)

    @property
    def num_layers(self) -> int:
        return next((rank.ready.num_layers for group in self._node.groups for rank in group.ranks), 0)

    # -- messenger ----------------------------------------------------------------------------------------------------
    def dialled(self) -> tuple[PeerStatus, ...]:
        """The prefillers of this decoder."""
        return () if self._node.decoder is None else self._node.decoder.peer_status()

    def callers(self) -> tuple[PeerStatus, ...]:
        """The decoders of this prefiller, as far as their links are up."""
        return () if self._node.prefiller is None else self._node.prefiller.peer_status()

    def peers_up(self) -> dict[str, bool]:
        """Whether each peer takes work, by the address that is dialled or by the name of who called, which are bounded."""
        up = {status.address: status.state == "up" and not status.draining for status in self.dialled()}
        now = {self._callers.label(status.name) for status in self.callers() if status.state == "up"}
        return {**up, **{name: name in now for name in (*self._callers.all(), *now)}}

    def attempts(self) -> tuple[AttemptStatus, ...]:
        return () if self._node.decoder is None else self._node.decoder.attempts()

    def jobs(self) -> tuple[JobStatus, ...]:
        return () if self._node.prefiller is None else self._node.prefiller.jobs()

    @property
    def num_attempts(self) -> int:
        return 0 if self._node.decoder is None else self._node.decoder.num_open

    @property
    def num_jobs(self) -> int:
        return 0 if self._node.prefiller is None else self._node.prefiller.num_jobs

    @property
    def bytes_received(self) -> int:
        """Bytes of KV that were counted here."""
        return 0 if self._node.decoder is None else self._node.decoder.bytes_received

    @property
    def attempt_counts(self) -> DecoderCounters:
        return DecoderCounters() if self._node.decoder is None else self._node.decoder.counters

    @property
    def prefill_counts(self) -> PrefillerCounters:
        return PrefillerCounters() if self._node.prefiller is None else self._node.prefiller.counters

    def failures(self) -> dict[str, int]:
        """Attempts of this decoder and prefills for decoders that did not complete, by why."""
        found, prefills = dict(self._node.meter.failures), self.prefill_counts
        for reason in ("refused", "cancelled", "failed", "peer_lost"):
            found[reason] = found.get(reason, 0) + getattr(prefills, reason)
        return found

    def fences(self) -> schema.Fences:
        """Of all links and engines."""
        now, engine = time.monotonic(), self.snapshot
        links = FenceStatus() if self._node.fabric is None else self._node.fabric.fencing.status(now)
        since = None if engine is None else engine.quarantined_since
        return schema.Fences(
            pending=links.pending, oldest_seconds=links.oldest_seconds, overdue=links.overdue, alarms=links.alarms,
            oldest_quarantine_seconds=None if since is None else now - since,
            integrity_failures=0 if engine is None else engine.totals.integrity_failures,
        )

    # -- fabric -------------------------------------------------------------------------------------------------------
    @property
    def provider(self) -> str:
        return "" if self._node.fabric is None else self._node.fabric.provider

    def fabric_stats(self) -> Stats:
        return Stats() if self._node.fabric is None else self._node.fabric.stats()

    def fabric_info(self) -> schema.FabricInfo:
        return schema.FabricInfo() if self._node.fabric is None else self._node.fabric.info()

    def findings(self) -> tuple[Finding, ...]:
        """Of the running node, and warnings of the machine; what is but good to know of that is in the topology's
        document."""
        node = self._node
        machine = () if node.placement is None else node.placement.findings
        return (
            *(() if node.fabric is None else node.fabric.findings()),
            *(finding("T023", f"{group.name} rank {rank.ready.rank}: {each}".lstrip())
              for group in node.groups for rank in group.ranks for each in rank.ready.warnings),
            *(each for each in machine if each.level != "info"),
        )

    @property
    def nics(self) -> str:
        """The NICs of this node's fabric in one word."""
        return "+".join(self.fabric_info().domains)

    def nic_utilization(self) -> dict[str, float]:
        """Share of the line rate that was used in the last second, of the busier direction. Empty: no rate is known."""
        rate = self.fabric_info().line_rate_bytes_per_second
        if rate is None:
            return {}
        now = self._node.rates().one_second
        return {self.nics: max(now.bytes_per_second, now.bytes_received_per_second) / rate}

    def flows(self) -> list[Flow]:
        """Of every peer that is linked now, or with which anything was ever exchanged."""
        flows = self._node.meter.flows
        for status, direction in (*((s, IN) for s in self.dialled()), *((s, OUT) for s in self.callers())):
            if status.state in ("up", "suspect"):  # else it has no name yet
                flows.of(status.name, direction, status.via)
        return flows.all()
