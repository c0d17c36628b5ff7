"""Which NIC each GPU uses, and why. Pure: a function of the topology alone.

The nearest active RDMA NIC wins; among equals the one with the fewest GPUs so far, then the lowest name. A NIC that
is down is never chosen, and that it would have been nearer is a finding.
"""

from __future__ import annotations

from collections import Counter

from pdd.topology.types import Finding, Nic, Pair, PathClass, PciDevice, Topology

_ORDER = list(PathClass)


def path_class(one: PciDevice, other: PciDevice | None) -> PathClass:
    """How `one` reaches `other`. SYS when the place of either is unknown."""
    if other is None:
        return PathClass.SYS
    if one.root and one.root == other.root:
        common = 0
        for a, b in zip(one.bridges, other.bridges, strict=False):
            if a != b:
                break
            common += 1
        if common == 0:
            return PathClass.PHB
        # A switch is an upstream bridge with downstream bridges below it: one between the common one and each device.
        deepest = max(len(one.bridges), len(other.bridges)) - common
        return PathClass.PIX if deepest <= 1 else PathClass.PXB
    if one.numa is not None and one.numa == other.numa:
        return PathClass.NODE
    return PathClass.SYS


def pair(topology: Topology) -> tuple[tuple[Pair, ...], tuple[Finding, ...]]:
    """Every GPU against every RDMA NIC, with the chosen one marked, and what an operator should know."""
    rdma = [nic for nic in topology.nics if nic.rdma]
    pairs: list[Pair] = []
    findings = [
        Finding("T012", "warn", f"{nic.name} is {nic.state}: it is not used") for nic in rdma if nic.state == "down"
    ]
    load: Counter[str] = Counter()
    for gpu in topology.gpus:
        paths = {nic.name: path_class(gpu.pci, nic.pci) for nic in rdma}

        def rank(nic: Nic, paths: dict[str, PathClass] = paths) -> tuple[int, int, str]:
            return _ORDER.index(paths[nic.name]), load[nic.name], nic.name

        usable = sorted((nic for nic in rdma if nic.state != "down"), key=rank)
        chosen = usable[0] if usable else None
        if chosen is not None:
            load[chosen.name] += 1
            nearer = [nic.name for nic in rdma if _ORDER.index(paths[nic.name]) < _ORDER.index(paths[chosen.name])]
            if nearer:
                used = f"GPU{gpu.index} uses {chosen.name} over {paths[chosen.name].value}"
                findings.append(Finding("T013", "warn", f"{used}: {', '.join(nearer)} would be nearer"))
        for nic in rdma:
            is_chosen = nic is chosen
            why = "nearest active" if is_chosen else "down" if nic.state == "down" else "another is as near or nearer"
            pairs.append(Pair(gpu.index, nic.name, paths[nic.name], is_chosen, why))
    hidden = {cpu for node in topology.numa for cpu in node.cpus} - set(topology.cpus)
    if hidden:
        findings.append(
            Finding("T020", "info", f"{len(hidden)} CPUs of this machine are not for this process (cpuset)")
        )
    return tuple(pairs), tuple(findings)
