"""What an operator should know about a machine's topology. Pure.

The ids are stable, and listed in pdd-errors(7). A finding says what is so and what to do; what is not known is no finding, but
for places: without them pairing is a guess, and that is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pdd.findings import Finding, finding
from pdd.topology import cpus
from pdd.topology.pairing import Plan, RailGroup
from pdd.topology.paths import common_bridges, distance, place_known
from pdd.topology.types import Gpu, Nic, PathClass, PciDevice, Topology
from pdd.units import show_bytes


def find(topology: Topology, plan: Plan) -> tuple[Finding, ...]:
    rails = {rail.gpu: rail for rail in plan.rails}
    return (
        *_nics(topology),
        *_paths(topology, rails),
        *_places(topology),
        *_cpus(topology, plan),
        *_limits(topology),
        *_peer_to_peer(topology, rails),
    )


# -- NICs and how far they are -----------------------------------------------------------------------------------------
def _nics(topology: Topology) -> Iterator[Finding]:
    rdma = topology.rdma_nics
    if not rdma:
        yield finding("T010", "no RDMA NIC: KV to and from other hosts travels over tcp")
    for nic in rdma:
        if not nic.reachable:
            message = f"{nic.name} has no device node here: it is not used; give this process /dev/infiniband"
            yield finding("T012", message, nic=nic.name)
        elif nic.state == "init":
            message = f"{nic.name} has a link but is not configured (no subnet manager?): it is not used"
            yield finding("T012", message, nic=nic.name)
        elif nic.state == "down":
            yield finding("T012", f"{nic.name} is down: it is not used", nic=nic.name)
        elif not nic.offered:
            message = f"libfabric offers no {nic.name}: it is not used; has its interface an address (verbs needs one)?"
            yield finding("T017", message, nic=nic.name)
    if topology.other_gpus:
        count = len(topology.other_gpus)
        message = f"{count} more GPU{'s' * (count > 1)} of this machine {'are' if count > 1 else 'is'} not for this process"
        yield finding("T018", message)


def _paths(topology: Topology, rails: dict[int | None, RailGroup]) -> Iterator[Finding]:
    nics = {nic.name: nic for nic in topology.rdma_nics}
    for gpu in topology.gpus:
        rail = rails[gpu.index]
        if not rail.nics:
            if nics:
                yield finding("T011", f"GPU{gpu.index} has no usable RDMA NIC: its KV travels over tcp", gpu=gpu.index)
            continue
        used = nics[rail.nics[0]]
        reach = distance(topology, gpu.pci, used.pci)
        lost = [nic.name for nic in nics.values() if not nic.usable and distance(topology, gpu.pci, nic.pci) < reach]
        path = rail.path.value if rail.path else "SYS"
        if lost:
            message = f"GPU{gpu.index} falls back to {used.name} over {path}: {', '.join(lost)} would be nearer"
            yield finding("T013", message, gpu=gpu.index, nic=used.name)
        elif rail.path is PathClass.SYS and place_known(topology, gpu.pci) and place_known(topology, used.pci):
            message = f"GPU{gpu.index} has no NIC on its NUMA node: {used.name} is far, over {path}"
            yield finding("T014", message, gpu=gpu.index, nic=used.name)
    counts = Counter(len(rails[gpu.index].nics) for gpu in topology.gpus)
    usual = max(counts, key=lambda number: (counts[number], number), default=0)
    for gpu in topology.gpus:
        have = len(rails[gpu.index].nics)
        if 0 < have < usual:
            message = f"GPU{gpu.index} has {have} NIC{'s' * (have > 1)} where others have {usual}: it is the slowest"
            yield finding("T016", message, gpu=gpu.index)


def _places(topology: Topology) -> Iterator[Finding]:
    lost = [f"GPU{gpu.index}" for gpu in topology.gpus if not place_known(topology, gpu.pci)]
    lost += [nic.name for nic in topology.rdma_nics if not place_known(topology, nic.pci)]
    if lost:
        shown = ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
        message = f"no NUMA node is known of {shown}: what is near is unknown (a virtual machine, or the firmware is silent)"
        yield finding("T015", message)


# -- CPUs and memory ---------------------------------------------------------------------------------------------------
def _cpus(topology: Topology, plan: Plan) -> Iterator[Finding]:
    hidden = sorted({cpu for node in topology.numa for cpu in node.cpus} - set(topology.cpus))
    if hidden:
        message = f"{len(hidden)} CPU{'s' * (len(hidden) > 1)} of this machine are not for this process (cpuset)"
        yield finding("T020", f"{message}: {cpus.as_list(hidden)}")
    allowed = set(topology.cpus)
    told = set()
    for rail in plan.rails:
        node = topology.node(rail.numa)
        who = "this node" if rail.gpu is None else f"GPU{rail.gpu}"
        if node is not None and node.cpus and not allowed.intersection(node.cpus):
            message = f"{who}: all CPUs of NUMA node {node.index} are hidden by the cpuset: its worker runs far from its NIC"
            yield finding("T021", message, gpu=rail.gpu)
        memory = topology.limits.memory_nodes
        if memory is not None and rail.numa is not None and rail.numa not in memory and rail.numa not in told:
            told.add(rail.numa)
            message = f"memory of NUMA node {rail.numa} is not for this process (cpuset): KV lies elsewhere"
            yield finding("T022", message, gpu=rail.gpu)


def _limits(topology: Topology) -> Iterator[Finding]:
    limits = topology.limits
    locked, memory = limits.memlock_bytes, limits.memory_bytes
    if topology.rdma_nics and locked is not None and locked >= 0 and (memory is None or locked < memory):
        message = f"this process may lock {show_bytes(locked)} of memory, and a NIC needs all of the KV memory locked"
        yield finding("T030", f"{message}: LimitMEMLOCK=infinity in the unit, `ulimit -l unlimited` in a shell")
    if limits.gpu_direct == "none" and topology.gpus and topology.rdma_nics:
        message = "NICs cannot read GPU memory: no dma-buf (open kernel modules, Linux 5.12) and no nvidia_peermem"
        yield finding("T031", f"{message}: KV is staged through host memory")


def _peer_to_peer(topology: Topology, rails: dict[int | None, RailGroup]) -> Iterator[Finding]:
    nics = {nic.name: nic for nic in topology.rdma_nics}
    for gpu in topology.gpus:
        for name in rails[gpu.index].nics:
            why = _detour(topology, gpu, nics[name])
            if why:
                message = f"what GPU{gpu.index} and {name} exchange goes through the CPU, not their switch: {why}"
                yield finding("T032", f"{message}; turn ACS off for them", gpu=gpu.index, nic=name)
                break


def _detour(topology: Topology, gpu: Gpu, nic: Nic) -> str:
    """Why traffic between two devices of one switch leaves it; "" when nothing says so."""
    one, other = gpu.pci, nic.pci
    common = 0 if other is None else common_bridges(one, other)
    if other is None or common == 0 or not _have_switch(one, other, common):
        return ""
    between = {*one.bridges[common:], *other.bridges[common:]} & topology.acs_redirects
    if between:
        return f"ACS is on in {', '.join(sorted(between))}"
    if one.iommu_group and other.iommu_group and one.iommu_group != other.iommu_group:
        return f"they are in different IOMMU groups ({one.iommu_group}, {other.iommu_group}), as ACS makes them"
    return ""


def _have_switch(one: PciDevice, other: PciDevice, common: int) -> bool:
    return len(one.bridges) > common and len(other.bridges) > common
