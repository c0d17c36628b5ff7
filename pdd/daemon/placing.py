"""Asks what the pure placement needs, config and libfabric, and logs what it chose. Called once in a node's life."""

from __future__ import annotations

import logging

from pdd.config import Config
from pdd.topology import cpus
from pdd.topology.domains import Offer
from pdd.topology.placement import Placement, RankGroup, Wanted, plan_placement
from pdd.topology.types import Topology

_log = logging.getLogger("pdd.placement")


def wanted(config: Config, source: str = "") -> Wanted:
    """`source`: the address that peers reach this node by; "": any, or not known."""
    return Wanted(
        devices=(None,) * config.engine.num_ranks, together=config.engine.tp, bind=config.fabric.bind,
        require=config.fabric.require, threads=config.engine.threads, source=source,
    )


def place(topology: Topology, config: Config, source: str) -> Placement:
    """The placement for a node with a fabric. Takes a moment where libfabric must be asked: each NIC is opened once."""
    offers = _offers(config) if _worth_asking(topology) else None
    placement = plan_placement(topology, wanted(config, source), offers)
    for group in placement.groups:
        _log.info("%s", describe(group))
    return placement


def _worth_asking(topology: Topology) -> bool:
    """Whether there is anything to choose: RDMA NICs, or NUMA nodes that NICs may be near to."""
    return bool(topology.rdma_nics) or sum(bool(node.cpus) for node in topology.numa) > 1


def _offers(config: Config) -> tuple[Offer, ...]:
    """What libfabric has, best provider first; empty when it has nothing, which opening the fabric will explain."""
    from pdd.fabric import _native

    try:
        found = _native.probe(config.fabric.library, config.fabric.provider)
    except _native.FabricError as error:
        _log.warning("libfabric offers nothing: %s", error)
        return ()
    return tuple(Offer(nic["kind"], nic["domain"], nic["address"]) for nic in found)


def describe(group: RankGroup) -> str:
    """One line for the log."""
    who = "the ranks on CPUs" if group.device is None else f"GPU{group.device}"
    nics = ", ".join(group.nics) or "no NIC in particular"
    where = "anywhere" if group.numa is None else f"on NUMA node {group.numa}, worker on CPUs {cpus.as_list(group.worker_cpus)}"
    return f"{who}: {nics}, {where} ({'; '.join(group.why)})"
