"""How near two PCI devices are to each other. Pure.

The words are those of `nvidia-smi topo -m`. The deepest bridge above both devices decides: a switch is an upstream
port with downstream ports below it, so devices of one switch have at most one bridge each between it and them.
"""

from __future__ import annotations

from pdd.topology.types import PathClass, PciDevice, Topology

ORDER = {path: position for position, path in enumerate(PathClass)}


def common_bridges(one: PciDevice, other: PciDevice) -> int:
    """How many bridges are above both; 0 when they are on different root buses, or on none."""
    if not one.root or one.root != other.root:
        return 0
    for depth, (a, b) in enumerate(zip(one.bridges, other.bridges, strict=False)):
        if a != b:
            return depth
    return min(len(one.bridges), len(other.bridges))


def path_class(one: PciDevice, other: PciDevice | None, *, one_node: bool = False) -> PathClass:
    """How `one` reaches `other`. SYS when the place of either is unknown, unless the machine has but one NUMA node."""
    if other is None:
        return PathClass.NODE if one_node else PathClass.SYS
    common = common_bridges(one, other)
    if common:
        deepest = max(len(one.bridges), len(other.bridges)) - common
        return PathClass.PIX if deepest <= (0 if one.whole_switches else 1) else PathClass.PXB
    if one.root and one.root == other.root:
        return PathClass.PHB
    if one_node or (one.numa is not None and one.numa == other.numa):
        return PathClass.NODE
    return PathClass.SYS


def distance(topology: Topology, one: PciDevice, other: PciDevice | None) -> tuple[int, int]:
    """Orders paths, nearest first: the class, then within it bridges on the way (PXB), another bus (PHB: a file may not
    tell root buses apart, but what shares a bus shares all) or another socket (NODE, SYS)."""
    path = path_class(one, other, one_node=topology.one_node)
    if other is None:
        return ORDER[path], 1
    if path is PathClass.PXB:
        return ORDER[path], len(one.bridges) + len(other.bridges) - 2 * common_bridges(one, other)
    if path is PathClass.PHB:
        return ORDER[path], int(one.address.rpartition(":")[0] != other.address.rpartition(":")[0])
    if path in (PathClass.NODE, PathClass.SYS):
        socket = topology.package_of(one)
        return ORDER[path], int(socket is None or socket != topology.package_of(other))
    return ORDER[path], 0


def place_known(topology: Topology, device: PciDevice | None) -> bool:
    """Whether anything says where a device is: a NUMA node, or that there is only one."""
    return topology.one_node or (device is not None and device.numa is not None)
