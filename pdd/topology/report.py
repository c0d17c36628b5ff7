"""A topology as the pdd.topology/1 document and as a tree for people. Pure text and data."""

from __future__ import annotations

from typing import Any

from pdd.topology.pairing import pair
from pdd.topology.types import Topology


def document(topology: Topology) -> dict[str, Any]:
    """pdd.topology/1."""
    pairs, findings = pair(topology)
    return {
        "schema": "pdd.topology/1",
        "host": topology.host,
        "source": list(topology.source),
        "cpus": cpu_ranges(topology.cpus),
        "numa": [{"node": node.index, "cpus": cpu_ranges(node.cpus)} for node in topology.numa],
        "gpus": [
            {"index": gpu.index, "vendor": gpu.vendor, "pci": gpu.pci.address, "numa": gpu.pci.numa}
            for gpu in topology.gpus
        ],
        "nics": [
            {
                "name": nic.name,
                "rdma": nic.rdma,
                "netdev": nic.netdev,
                "kind": nic.kind,
                "state": nic.state,
                "rate_bits_per_second": nic.rate_bits_per_second,
                "pci": nic.pci.address if nic.pci else None,
                "numa": nic.pci.numa if nic.pci else None,
            }
            for nic in topology.nics
        ],
        "pairs": [
            {"gpu": each.gpu, "nic": each.nic, "path": each.path.value, "chosen": each.chosen, "why": each.why}
            for each in pairs
        ],
        "findings": [{"id": each.id, "level": each.level, "message": each.message} for each in findings],
    }


def tree(doc: dict[str, Any], *, ascii_only: bool = False) -> str:
    """The document as `pdd topology` shows it: devices under their NUMA node, findings last."""
    branch, last = ("|-", "`-") if ascii_only else ("├", "└")
    rdma = sum(1 for nic in doc["nics"] if nic["rdma"])
    lines = [
        f"{doc['host']}  {len(doc['numa'])} NUMA  {len(doc['gpus'])} GPU  {rdma} RDMA NIC  "
        f"{len(doc['nics']) - rdma} other NIC  source={'+'.join(doc['source'])}"
    ]
    nodes = [(node["node"], f"numa{node['node']} cpus {node['cpus'] or 'none'}") for node in doc["numa"]]
    chosen = {each["gpu"]: each for each in doc["pairs"] if each["chosen"]}
    for index, title in [*nodes, (None, "NUMA node not known" if nodes else "no NUMA node known")]:
        rows = [f"GPU{gpu['index']} {gpu['vendor']} {gpu['pci']}{_link(chosen.get(gpu['index']))}"
                for gpu in doc["gpus"] if gpu["numa"] == index]  # fmt: skip
        rows += [_nic_row(nic) for nic in doc["nics"] if nic["numa"] == index]
        if rows or index is not None:
            signs = [branch] * (len(rows) - 1) + [last]
            lines += [title, *(f" {sign} {row}" for sign, row in zip(signs, rows, strict=False))]
    lines += [f"! {finding['message']}  [{finding['id']}]" for finding in doc["findings"]]
    return "\n".join(lines)


def _link(chosen: dict[str, Any] | None) -> str:
    return f"  =={chosen['path']}== {chosen['nic']}" if chosen else "  no RDMA NIC"


def _nic_row(nic: dict[str, Any]) -> str:
    name = f"{nic['rdma']}/{nic['netdev']}" if nic["rdma"] and nic["netdev"] else nic["name"]
    rate = nic["rate_bits_per_second"]
    speed = f" {rate / 1e9:g}G" if rate else ""
    return f"{name} {nic['kind']}{speed} {nic['state']} {nic['pci'] or ''}".rstrip()


def cpu_ranges(cpus: tuple[int, ...]) -> str:
    """ "0-2,8" of (0, 1, 2, 8)."""
    parts: list[list[int]] = []
    for cpu in cpus:
        if parts and cpu == parts[-1][1] + 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
