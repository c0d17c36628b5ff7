"""The ranks' KV memory on the fabric: maps and registers it, watches their layer counter, and says what is in use.

The daemon maps what the ranks made (a memfd, or memory of a GPU, by SCM_RIGHTS); the same bytes are read and written by NICs
and ranks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdd.config import Config
from pdd.control import schema
from pdd.daemon.flight import FlightReader
from pdd.daemon.reach import choose_source, mixed_families
from pdd.engine.executor import RankInfo
from pdd.errors import ConfigError, FabricFailure, LimitError
from pdd.fabric import _native
from pdd.fabric.engine import Fabric
from pdd.fabric.types import Caps, Stats
from pdd.findings import Finding, finding
from pdd.messenger import versions, wire
from pdd.messenger.events import FabricEvents
from pdd.messenger.fencing import Fencing
from pdd.messenger.handshake import LocalNode
from pdd.messenger.link import LinkContext, PeerLink
from pdd.messenger.planner import ShardPlanner, compare
from pdd.messenger.settings import LinkSettings
from pdd.states import Recorder
from pdd.topology.domains import RDMA_PROVIDERS, line_rate, nic_of
from pdd.topology.placement import Placement

_log = logging.getLogger("pdd.fabric")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class KvFabric:
    """Opened before anything is loaded, so that a missing NIC is told at once; `take_memory` once the ranks are ready.

    Both may take seconds and belong on a thread; all else is for the main loop. Owns mappings and fabric.
    """

    def __init__(self, config: Config, placement: Placement, towards: dict[str, str], device: str = "") -> None:
        """towards: by peer, the address of this node that it is reached from (reach.py).
        device: the GPU that the ranks' KV is in (PCI address or cuda:N); "" for host memory.

        Raises FabricFailure or ConfigError: nothing fits what the config asks for.
        """
        self._ranks: Sequence[RankInfo] = ()  # of engine 0, then of engine 1, ...
        self._num_engines = 1
        self._memory: list[_native.MappedMemory | _native.DeviceMemory] = []
        self._placement = placement
        wanted = config.fabric
        # What peers of this host share is files; GPU memory goes over the fabric.
        self._host = boot_id() if wanted.local == "auto" and not wanted.require and not device else ""
        try:
            self.fabric = Fabric(
                provider=wanted.provider, library=wanted.library, source=choose_source(towards), require=wanted.require,
                window_ops=wanted.window_ops, window_bytes=wanted.window_bytes, idle=wanted.idle,
                groups=[(list(group.bind), list(group.worker_cpus)) for group in placement.groups],
                local=bool(self._host), device=device, flight_bytes=config.debug.flight_memory // 2,
            )
            gpu = _native.gpu(device) if device else None
        except _native.FabricError as error:
            hint = f"fabric.require = {wanted.require} allows nothing else" if wanted.require else (
                "install the extra [fabric] or Debian's libfabric1, or set fabric.library"
            )
            raise FabricFailure(str(error), hint=hint) from None
        self.caps = self.fabric.read_caps()
        self.provider = self.caps.kind
        assert self.caps.fence == "endpoint"  # the config admits no provider that cannot fence
        if self.provider == "tcp" and not wanted.bind and (mixed := mixed_families(towards)):
            self.fabric.close()
            raise ConfigError(mixed, hint="give all prefillers addresses of one family, or set fabric.bind to an "
                              "address of this node that all of them reach")
        self.events = FabricEvents(self.fabric)
        self.flight = FlightReader(self.fabric, self.caps)
        self.fencing: Fencing[PeerLink] = Fencing()
        for warning in self.fabric.warnings:
            _log.warning("%s [T023]", warning)
        _log.info(
            "%s over %s, libfabric %s (%s); %s", self.caps.provider,
            ", ".join(nic.address or nic.domain for nic in self.caps.nics), self.caps.library_version,
            self.caps.library_path,
            "memory to peers on this host" if self._host else "to peers on this host, too",
        )
        if gpu is not None:
            _log.info("%s", gpu_path_text(gpu, self.caps))

    def take_memory(self, ranks: Sequence[RankInfo], num_engines: int = 1) -> None:
        """Maps and registers the KV memory of all ranks, those of a rail group together, and watches the layer counter of
        the first engine: the only one of a node that prefills for others.

        Raises:
            LimitError: the memory cannot be registered, or a page is larger than what the fabric takes as one write.
            FabricFailure: memory of a GPU cannot be mapped here.
        """
        self._ranks, self._num_engines = ranks, num_engines
        largest, most = max(rank.ready.layout.page_bytes for rank in ranks), self.caps.max_message
        if largest > most:
            raise LimitError(
                f"a page of KV takes {largest} bytes of a layer; {self.provider} takes at most {most} as one write",
                hint="lower kv.page_size, on all nodes alike",
            )
        self._memory = [map_memory(rank) for rank in ranks]
        try:
            rail_group_of = {rank: rail_group for rail_group, each in enumerate(self._placement.groups) for rank in each.ranks}
            self.regions = tuple(
                self.fabric.register(memory.address, memory.nbytes, group=rail_group_of[number],
                                     fd=rank.kv_fd if rank.ready.kv_kind == "memfd" else -1)
                for number, (memory, rank) in enumerate(zip(self._memory, ranks, strict=True))
            )
        except _native.FabricError as error:
            raise LimitError(
                f"the KV pool cannot be registered: {error}",
                hint="raise the locked-memory limit: LimitMEMLOCK=infinity in the unit, `ulimit -l unlimited` in a shell",
            ) from None
        assert ranks[0].counter_fd is not None  # rank 0 has the counter
        self._counter = _native.Counter(ranks[0].counter_fd)
        self.watch: int = self.fabric.watch(self._counter)
        self.planner = ShardPlanner(self.regions, _native.WritePlan)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self.events.attach(loop)

    def detach(self) -> None:
        """The loop hears no more of it: before `close`, which frees the descriptor's number for others."""
        self.events.detach()

    def close(self) -> None:
        """Closes the fabric, then unmaps. Bounded by the native close."""
        self.flight.close()
        self.fabric.close()
        self._memory.clear()

    def link_context(
        self, config: Config, epoch: int, version: str, token: bytes | None, recorder: Recorder
    ) -> LinkContext:
        """What every link of this node shares."""
        rank, peers = self._ranks[0].ready, config.peers
        geometry = wire.Geometry(
            model=rank.fingerprint, dtype=rank.dtype, num_layers=rank.num_layers, num_kv_heads=rank.total_kv_heads,
            head_dim=rank.head_dim, page_size=rank.page_size, tp=len(self._ranks) // self._num_engines,
            num_pages=rank.num_pages, vocab_size=rank.vocab_size, tiles=rank.tiles, groups=self._num_engines,
        )
        node = LocalNode(
            name=config.node.name, role=config.node.role, epoch=epoch, version=version, provider=self.provider,
            geometry=geometry, regions=self.regions, token=token,
            max_tokens=min(rank.max_context, rank.num_pages * rank.page_size) if peers.listen else 0,
            host=self._host, versions=versions.of_decoder(self._num_engines),
        )
        settings = LinkSettings(
            heartbeat=peers.heartbeat, suspect_after=peers.suspect_after, dead_after=peers.dead_after,
            connect_timeout=peers.connect_timeout,
        )
        return LinkContext(
            node=node, fabric=self.fabric, events=self.events, settings=settings, compare=compare, clock=time.monotonic,
            recorder=recorder, fencing=self.fencing,
        )

    # -- documents ----------------------------------------------------------------------------------------------------
    @property
    def may_be_local(self) -> bool:
        """Whether KV of peers on this host goes through memory."""
        return bool(self._host)

    def stats(self) -> Stats:
        return self.fabric.read_stats()

    def info(self) -> schema.FabricInfo:
        topology = self._placement.topology
        nics = [nic_of(topology, nic.domain) for nic in self.caps.nics]
        return schema.FabricInfo(
            provider=self.provider, library=self.caps.library_path, library_version=self.caps.library_version,
            domains=tuple(nic.domain for nic in self.caps.nics),
            nics=tuple(
                schema.FabricNic(
                    domain=caps.domain, address=caps.address or None, nic=None if nic is None else nic.name,
                    rate_bits_per_second=None if nic is None else nic.rate_bits_per_second,
                )
                for caps, nic in zip(self.caps.nics, nics, strict=True)
            ),
            line_rate_bytes_per_second=line_rate(nics),
        )

    def findings(self) -> tuple[Finding, ...]:
        refused = tuple(finding("T023", warning) for warning in self.fabric.warnings)
        return (*self._provider_findings(), *refused)

    def _provider_findings(self) -> tuple[Finding, ...]:
        if self.provider in RDMA_PROVIDERS:
            return ()
        devices = self._placement.topology.rdma_nics
        how = f"KV{' to and from other hosts' if self._host else ''} travels over {self.provider}"
        if not devices:
            return (finding("F010", f"{how}: this host has no RDMA NIC"),)
        message = (
            f"{how} though this host has {', '.join(nic.name for nic in devices)}: libfabric "
            f"{self.caps.library_version} ({self.caps.library_path}) offers no provider for it; set fabric.library to "
            "one that does, and fabric.require so that nothing less is used"
        )
        return (finding("F011", message),)


def boot_id() -> str:
    """Of the kernel that this process runs on; "" where there is none to read."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def map_memory(rank: RankInfo) -> _native.MappedMemory | _native.DeviceMemory:
    """The rank's KV memory, whatever kind it is."""
    ready = rank.ready
    if ready.kv_kind != "cuda":
        return _native.MappedMemory(rank.kv_fd, ready.kv_bytes)
    try:
        return _native.DeviceMemory.import_fd(ready.kv_device, rank.kv_fd, ready.kv_bytes)
    except _native.FabricError as error:
        raise FabricFailure(f"the KV memory of rank {ready.rank} cannot be mapped: {error}",
                            hint="the daemon must see the ranks' GPUs: look at CUDA_VISIBLE_DEVICES and DeviceAllow") from None


_PATHS = {
    "dmabuf": "NICs read and write its memory (dma-buf)",
    "hmem": "NICs read and write its memory (peer memory)",
    "staged": "KV is copied through host memory",
}


def gpu_path_text(gpu: dict[str, Any], caps: Caps) -> str:
    """How KV gets between the GPU and the wire, and why in no better way, for the log."""
    why = f": {caps.gpu_path_why}" if caps.gpu_path_why else ""
    return f"GPU {gpu['pci_address']} ({gpu['model']}, CUDA {gpu['driver']}): {_PATHS[caps.gpu_path]}{why}"
