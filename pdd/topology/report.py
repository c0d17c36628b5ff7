"""A topology, what is chosen on it and what was found, as the pdd.topology/1 document. Pure data."""

from __future__ import annotations

import dataclasses
from typing import Any

from pdd.findings import finding
from pdd.topology import cpus
from pdd.topology.findings import find
from pdd.topology.pairing import plan, unusable
from pdd.topology.placement import Placement, RankGroup
from pdd.topology.switches import switch_of
from pdd.topology.types import Gpu, Nic, Topology


def document(topology: Topology, placement: Placement | None = None) -> dict[str, Any]:
    """pdd.topology/1. What is not known is null. `placement`: of a node on this machine, which knows what libfabric
    offers; the topology is then read as that says."""
    topology = topology if placement is None else placement.topology
    made = plan(topology)
    switches = switch_of(topology)
    paths: dict[int, list[dict[str, Any]]] = {}
    for pair in made.pairs:
        row = {"gpu": pair.gpu, "nic": pair.nic, "path": pair.path.value, "chosen": pair.chosen, "why": pair.why}
        paths.setdefault(pair.gpu, []).append(row)
    return {
        "schema": "pdd.topology/1",
        "host": topology.host,
        "source": list(topology.source),
        "cpus": cpus.as_list(topology.cpus),
        "numa": [
            {"node": node.index, "cpus": cpus.as_list(node.cpus), "package": node.package} for node in topology.numa
        ],
        "switches": [
            {"pci": switch, "devices": [address for address, at in switches.items() if at == switch]}
            for switch in dict.fromkeys(switches.values())
        ],
        "gpus": [_gpu(topology, gpu, switches) for gpu in topology.gpus],
        "nics": [_nic(nic, switches) for nic in topology.nics],
        "links": [
            {
                "gpu": link.gpu,
                "target": link.target,
                "target_kind": link.target_kind,
                "count": link.count,
                "bytes_per_second": link.bytes_per_second,
            }
            for link in topology.links
        ],
        "pairs": [row for rows in paths.values() for row in rows],
        "rails": [
            {
                "gpu": rail.gpu,
                "nics": list(rail.nics),
                "path": rail.path.value if rail.path else None,
                "numa": rail.numa,
                "cpus": cpus.as_list(rail.cpus),
                "worker_cpus": cpus.as_list(rail.worker_cpus),
                "why": rail.why,
            }
            for rail in made.rails
        ],
        "placement": None if placement is None else placement_rows(placement),
        "findings": [dataclasses.asdict(each) for each in find(topology, made)],
    }


def placement_rows(placement: Placement) -> list[dict[str, Any]]:
    """What each rank group of a node uses."""
    return [
        {
            "device": group.device,
            "ranks": list(group.ranks),
            "provider": placement.provider or None,
            "nics": list(group.nics),
            "bind": list(group.bind),
            "rate_bits_per_second": group.rate_bits_per_second,
            "numa": group.numa,
            "memory": _memory(group),
            "worker_cpus": cpus.as_list(group.worker_cpus) or None,
            "rank_cpus": cpus.as_list(sorted({cpu for place in group.places for cpu in place.cpus})) or None,
            "threads": max(place.threads for place in group.places),
            "places": [
                {"rank": rank, "numa": place.numa, "cpus": cpus.as_list(place.cpus) or None, "threads": place.threads}
                for rank, place in zip(group.ranks, group.places, strict=True)
            ],
            "why": list(group.why),
        }
        for group in placement.groups
    ]


def _memory(group: RankGroup) -> str:
    nodes = sorted({place.numa for place in group.places if place.numa is not None})
    if not nodes:
        return "anywhere"
    if len(nodes) == 1:
        return f"preferred on NUMA node {nodes[0]}"
    return f"each rank's on its own of NUMA nodes {cpus.as_list(nodes)}"


def stale(topology: Topology, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Findings on what a running node chose (placement_rows), as the machine is now."""
    now = {nic.name: nic for nic in topology.nics}
    found = []
    for name in dict.fromkeys(name for row in rows for name in row["nics"]):
        nic = now.get(name)
        if nic is None or not nic.usable:
            state = "gone" if nic is None else unusable(nic)
            message = f"the running node uses {name}, which is {state} now: restart the node once it has drained"
            found.append(dataclasses.asdict(finding("T024", message, nic=name)))
    return found


def _gpu(topology: Topology, gpu: Gpu, switches: dict[str, str]) -> dict[str, Any]:
    node = topology.node(gpu.pci.numa)
    near = cpus.as_list(node.cpus) if node else ""
    return {
        "index": gpu.index,
        "vendor": gpu.vendor,
        "model": gpu.model,
        "uuid": gpu.uuid,
        "pci": gpu.pci.address,
        "numa": gpu.pci.numa,
        "cpus": near or None,
        "switch": switches.get(gpu.pci.address),
    }


def _nic(nic: Nic, switches: dict[str, str]) -> dict[str, Any]:
    address = nic.pci.address if nic.pci else ""
    return {
        "name": nic.name,
        "rdma": nic.rdma,
        "netdev": nic.netdev,
        "kind": nic.kind,
        "state": nic.state,
        "usable": nic.usable,
        "rate_bits_per_second": nic.rate_bits_per_second,
        "gid": nic.gid,
        "gid_index": nic.gid_index,
        "pci": address or None,
        "numa": nic.pci.numa if nic.pci else None,
        "switch": switches.get(address),
    }
