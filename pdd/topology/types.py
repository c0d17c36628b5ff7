"""What a machine has, as frozen data: NUMA nodes, GPUs, NICs, and which NIC is near which GPU.

None means unknown; nothing is invented. PCI devices carry the bridges above them, outermost first, so that nearness
is a pure function of two devices (pairing.py).
"""

from __future__ import annotations

import dataclasses
import enum


class PathClass(enum.Enum):
    """How two PCI devices reach each other, nearest first; the words of `nvidia-smi topo -m`."""

    PIX = "PIX"  # through one PCI switch
    PXB = "PXB"  # through several bridges, below one root port
    PHB = "PHB"  # through the host bridge of one root bus
    NODE = "NODE"  # other root bus, same NUMA node
    SYS = "SYS"  # other NUMA node, or nobody knows


@dataclasses.dataclass(frozen=True, slots=True)
class PciDevice:
    address: str  # 0000:18:00.0
    root: str  # root bus: pci0000:00
    bridges: tuple[str, ...]  # above the device, outermost first
    numa: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class NumaNode:
    index: int
    cpus: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    index: int  # in the order of PCI addresses
    vendor: str  # nvidia, amd
    pci: PciDevice


@dataclasses.dataclass(frozen=True, slots=True)
class Nic:
    name: str  # the RDMA name where there is one, else the netdev
    rdma: str | None
    netdev: str | None
    kind: str  # efa, ib, roce, ethernet
    state: str  # active, down, unknown
    rate_bits_per_second: int | None
    pci: PciDevice | None  # None: not a PCI device


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    gpu: int
    nic: str
    path: PathClass
    chosen: bool
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Something an operator should know; `id` is stable."""

    id: str
    level: str  # info, warn, fail
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    host: str
    source: tuple[str, ...]
    cpus: tuple[int, ...]  # that this process may use
    numa: tuple[NumaNode, ...]
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
