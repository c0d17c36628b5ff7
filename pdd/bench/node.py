"""One end of a benchmark: a fabric of its own, one endpoint, and one pool of shared memory.

It is what a serving node has, without model and ranks: the memory is a memfd that is registered as a rank's KV is, writes
go through plans and the watcher, arrivals are counted by immediates.
"""

from __future__ import annotations

import dataclasses
import os
import select
import time
import zlib
from typing import Any

import numpy as np

from pdd import memfd
from pdd.bench.cells import Pages
from pdd.errors import FabricFailure, LimitError
from pdd.fabric import _native
from pdd.fabric.engine import Fabric
from pdd.fabric.types import Event
from pdd.topology import machine
from pdd.topology.domains import line_rate, nic_of
from pdd.topology.placement import Wanted, plan_placement


@dataclasses.dataclass(frozen=True, slots=True)
class FabricOptions:
    """As [fabric] of the settings file has them."""

    provider: str = "auto"
    library: str = ""
    nics: tuple[str, ...] = ()  # address or domain name each; empty: chosen
    source: str = ""  # local address, where the provider names NICs by one and `nics` is empty
    idle: str = "auto"


class BenchNode:
    """Owner: one thread. Close it."""

    def __init__(self, options: FabricOptions, memory_bytes: int) -> None:
        """Raises FabricFailure: nothing fits the options. LimitError: so much memory cannot be had or registered."""
        topology = machine.read()
        [place] = plan_placement(topology, Wanted(bind=options.nics)).groups
        try:
            self.fabric = Fabric(
                provider=options.provider, library=options.library, source=options.source,
                idle=options.idle, groups=[(list(options.nics), list(place.worker_cpus))],
            )
        except _native.FabricError as error:
            raise FabricFailure(str(error), hint="`pdd topology` shows the NICs; install the extra [fabric] or "
                                "Debian's libfabric1 where there is no libfabric.") from None
        try:
            self._take_memory(memory_bytes)
            self.endpoint = self.fabric.open_endpoint()
        except BaseException:
            self.fabric.close()
            raise
        caps = self.fabric.read_caps()
        self.provider, self.library_version = caps.provider, caps.library_version
        self.nics = tuple(nic.address or nic.domain for nic in caps.nics)
        self.line_rate = line_rate([nic_of(topology, nic.domain) for nic in caps.nics])

    def _take_memory(self, nbytes: int) -> None:
        fd = memfd.sealed("pdd-bench", nbytes)
        try:
            self._memory = _native.MappedMemory(fd, nbytes, populate=True)
            self._region = self.fabric.register(self._memory.address, nbytes, fd)
        except (OSError, MemoryError, _native.FabricError, RuntimeError) as error:
            raise LimitError(f"{nbytes >> 20} MiB of memory cannot be registered: {error}",
                             hint="Measure smaller pages or fewer of them, or raise `ulimit -l`.") from None
        finally:
            os.close(fd)
        self.view = self._memory.view()

    def describe(self, *, with_memory: bool) -> bytes:
        return self.fabric.describe(self.endpoint, [self._region] if with_memory else [])

    def connect(self, descriptor: bytes) -> None:
        """Raises FabricFailure when the two ends do not fit."""
        try:
            self.fabric.connect(self.endpoint, descriptor)
        except _native.FabricError as error:
            raise FabricFailure(str(error), hint="Give both ends the same --provider and NICs that reach each "
                                "other.") from None

    def plan(self, page_bytes: int, sources: Pages, targets: Pages) -> _native.WritePlan:
        """Entry i writes page sources[i] to the other end's page targets[i]; one unit each."""
        return _native.WritePlan(
            src_region=self._region, dst_region=0, src_offset=sources * page_bytes, dst_offset=targets * page_bytes,
            nbytes=np.full(len(sources), page_bytes, dtype=np.int64), units=np.ones(len(sources), dtype=np.int64),
            src_layer_stride=0, dst_layer_stride=0, num_layers=1,
        )

    def wait(self, timeout: float) -> list[Event]:
        """Events of the fabric; none when `timeout` seconds passed."""
        select.select([self.fabric.fileno()], [], [], timeout)
        return self.fabric.read_events()

    # -- contents
    def fill(self) -> None:
        """Bytes that no two lives of a node share."""
        self.view[:] = np.frombuffer(np.random.default_rng().bytes(len(self.view)), dtype=np.uint8)

    def clear(self, nbytes: int) -> None:
        self.view[:nbytes] = 0

    def checksums(self, page_bytes: int, pages: Pages) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """CRC-32 of each of these pages."""
        whole = self.view.data
        return np.fromiter((zlib.crc32(whole[at : at + page_bytes]) for at in (pages * page_bytes).tolist()),
                           dtype=np.uint32, count=len(pages))

    def close(self) -> None:
        self.fabric.close()


class Cost:
    """Processor time of this process since it was made, all threads."""

    def __init__(self) -> None:
        self._cpu, self._begin = self._used(), time.perf_counter()

    @staticmethod
    def _used() -> float:
        times = os.times()
        return times.user + times.system

    def so_far(self) -> tuple[float, float]:
        """(seconds of a core, seconds passed)."""
        return self._used() - self._cpu, time.perf_counter() - self._begin
