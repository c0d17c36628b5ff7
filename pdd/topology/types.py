"""What a machine has, as frozen data: NUMA nodes, GPUs, NICs and the PCI bridges above them.

None means unknown; nothing is invented. PCI devices carry the bridges above them, outermost first, so that nearness
is a pure function of two devices (paths.py). Readers make it: sysfs.py, hwloc.py, nccl.py.
"""

from __future__ import annotations

import dataclasses
import enum

RDMA_KINDS = ("efa", "ib", "roce", "iwarp", "cxi")
MAX_LINKS = 1024  # NVLinks between two devices; more are not believed
MAX_NODES = 1024  # NUMA nodes of one machine; readers stop at one more


class PathClass(enum.Enum):
    """How two PCI devices reach each other, nearest first; the words of `nvidia-smi topo -m`."""

    PIX = "PIX"  # through one PCI switch
    PXB = "PXB"  # through several bridges, below one root port
    PHB = "PHB"  # through the host bridge of one root bus
    NODE = "NODE"  # other root bus, same NUMA node
    SYS = "SYS"  # other NUMA node, or nobody knows


@dataclasses.dataclass(frozen=True, slots=True)
class PciDevice:
    address: str  # 0000:18:00.0; "" for a device that is on no PCI bus
    root: str  # root bus: pci0000:00; "" when not known
    bridges: tuple[str, ...]  # above the device, outermost first
    numa: int | None
    package: int | None = None  # socket, where the NUMA node alone does not tell
    class_id: int | None = None  # 0x0302
    vendor_id: int | None = None
    device_id: int | None = None
    whole_switches: bool = False  # each bridge is a whole switch (NCCL files), not one port of it
    iommu_group: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class NumaNode:
    index: int
    cpus: tuple[int, ...]  # that are online and not reserved; none: memory only
    package: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    index: int  # in the order of PCI addresses, among those that this process can use
    vendor: str  # nvidia, amd, unknown
    pci: PciDevice
    model: str | None = None
    uuid: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Nic:
    name: str  # the RDMA name where there is one, else the netdev, else the PCI address
    rdma: str | None
    netdev: str | None
    kind: str  # one of RDMA_KINDS, ethernet, wifi
    state: str  # active, down, init (link up, not configured yet), unknown
    rate_bits_per_second: int | None
    pci: PciDevice | None  # None: nothing is known about its place
    gid: str | None = None
    gid_index: int | None = None
    physical_function: str | None = None  # PCI address of the card that this virtual function is part of
    reachable: bool = True  # False: this process has no device node for it
    offered: bool = True  # False: libfabric was asked, and has nothing that drives it

    @property
    def is_rdma(self) -> bool:
        return self.kind in RDMA_KINDS

    @property
    def usable(self) -> bool:
        """Whether it can carry data now, as far as is known."""
        return self.state in ("active", "unknown") and self.reachable and self.offered


@dataclasses.dataclass(frozen=True, slots=True)
class GpuLink:
    """NVLink or xGMI from a GPU to another one, to a switch between GPUs, or to a CPU."""

    gpu: str  # PCI address
    target: str  # PCI address; "cpu"
    target_kind: str  # gpu, switch, cpu
    count: int | None = None
    bytes_per_second: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What the system lets this process do. None: not known."""

    memory_nodes: tuple[int, ...] | None = None  # that it may allocate on
    memlock_bytes: int | None = None  # -1: unlimited
    memory_bytes: int | None = None  # of the machine
    gpu_direct: str | None = None  # how a NIC reads GPU memory: dma-buf, peermem, none


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    host: str
    source: tuple[str, ...]
    cpus: tuple[int, ...]  # that this process may use
    numa: tuple[NumaNode, ...]
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    cores: tuple[tuple[int, ...], ...] = ()  # CPUs that share a core; empty: not known
    links: tuple[GpuLink, ...] = ()
    other_gpus: tuple[Gpu, ...] = ()  # of the machine, not of this process (a container sees some only)
    acs_redirects: frozenset[str] = frozenset()  # bridges that send peer-to-peer traffic up to the CPU
    limits: Limits = Limits()

    @property
    def one_node(self) -> bool:
        """Whether the machine is known to have a single NUMA node with CPUs."""
        return sum(bool(node.cpus) for node in self.numa) == 1

    @property
    def rdma_nics(self) -> tuple[Nic, ...]:
        return tuple(nic for nic in self.nics if nic.is_rdma)

    def node(self, index: int | None) -> NumaNode | None:
        return next((node for node in self.numa if node.index == index), None)

    def package_of(self, device: PciDevice) -> int | None:
        node = self.node(device.numa)
        return device.package if node is None or node.package is None else node.package
