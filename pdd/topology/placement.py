"""What a node's parts use: for each rank group the NICs by libfabric's names, CPUs, NUMA node and threads, and why. Pure.

One function of what the machine has, what the config wants and what libfabric offers: the daemon calls it once in its life,
and whoever calls it on the same input, such as `pdd topology` on a recorded machine, is told the same.

A rank group is what one native worker drives: the ranks of one device, and its rail group (pairing.py). Engines on CPUs
are spread over all NUMA nodes, the ranks of each together, so that each has memory of its own near to it; the worker stays
by the NICs. Nothing is pinned where that cannot help: on one NUMA node, or where none is known, CPUs and node are empty
and the system decides. Ranks of one node share its CPUs, and divide its cores into threads.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from pdd.findings import Finding
from pdd.topology.domains import Offer, best_kind, bind_names, mark_offered, nic_named
from pdd.topology.findings import find
from pdd.topology.pairing import RailGroup, host_rail_group, near_cpus, plan
from pdd.topology.types import Nic, Topology


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What the config, and the node's place in the network, say."""

    devices: tuple[int | None, ...] = (None,)  # of each rank, in order: a GPU's index, or the CPUs
    together: int = 1  # neighbouring ranks that compute together: they stay on one NUMA node
    bind: tuple[str, ...] = ()  # fabric.bind: NICs instead of the paired ones, dealt to the groups in order
    require: str = ""  # fabric.require
    threads: int = 0  # engine.threads
    source: str = ""  # the address that peers reach this node by; "": any


@dataclasses.dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank runs."""

    numa: int | None  # where it and its KV memory are kept; None: nowhere in particular
    cpus: tuple[int, ...]  # empty: any
    threads: int  # of its forward pass on CPUs


@dataclasses.dataclass(frozen=True, slots=True)
class RankGroup:
    device: int | None  # a GPU's index; None: the CPUs
    ranks: tuple[int, ...]
    nics: tuple[str, ...]  # as the topology names them
    bind: tuple[str, ...]  # what libfabric is asked for; empty: its own choice
    rate_bits_per_second: int | None  # of all NICs together; None: not known of one
    numa: int | None  # where the worker is kept; None: nowhere in particular
    worker_cpus: tuple[int, ...]  # empty: any
    places: tuple[RankPlace, ...]  # of each of `ranks`
    why: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    topology: Topology  # with what libfabric does not offer marked
    provider: str  # that is expected, as `fabric.provider` names it; "": libfabric was not asked
    groups: tuple[RankGroup, ...]
    findings: tuple[Finding, ...]  # of the topology

    def place(self, rank: int) -> RankPlace:
        """`rank`: of the node, counted through all its engines."""
        return next(group.places[group.ranks.index(rank)] for group in self.groups if rank in group.ranks)


def plan_placement(topology: Topology, wanted: Wanted, offers: Sequence[Offer] | None = None) -> Placement:
    """`offers`: libfabric's NICs, best provider first; None: it was not asked, as there is nothing to choose."""
    known = offers or ()
    kind = best_kind(known, wanted.require)
    topology = mark_offered(topology, known, kind)
    devices = tuple(dict.fromkeys(wanted.devices))
    made = plan(topology)
    rails = {rail.gpu: rail for rail in made.rails}
    groups = []
    for place, device in enumerate(devices):
        rail = rails[device] if device in rails else host_rail_group(topology)
        bound = _dealt(wanted.bind, place, len(devices))
        whys = {pair.nic: pair.why for pair in made.pairs if pair.gpu == device}
        nics, bind, why = _nics(topology, rail, whys, bound, known, kind, wanted.source)
        ranks = tuple(rank for rank, at in enumerate(wanted.devices) if at == device)
        groups.append(_group(topology, _moved(topology, rail, nics), ranks, nics, bind, why, wanted.threads, wanted.together))
    return Placement(topology, kind, tuple(groups), find(topology, made))


def _dealt(bind: tuple[str, ...], place: int, of: int) -> tuple[str, ...]:
    """A group's share of `fabric.bind`, neighbours together; all share the names when there are fewer than groups."""
    if len(bind) < of:
        return bind
    return bind[place * len(bind) // of : (place + 1) * len(bind) // of]


def _nics(topology: Topology, rail: RailGroup, whys: Mapping[str, str], bound: tuple[str, ...], offers: Sequence[Offer],
          kind: str, source: str) -> tuple[tuple[Nic, ...], tuple[str, ...], str]:
    """(NICs, their names for libfabric, why these). `whys`: of the pairing, by NIC."""
    if bound:
        named = [nic_named(topology, name, offers) for name in bound]
        return tuple(nic for nic in named if nic is not None), bound, "fabric.bind names the NICs"
    chosen = tuple(nic for nic in topology.nics if nic.name in rail.nics)
    bind = bind_names(chosen, offers, kind, source)
    if bind:
        used = tuple(nic for nic in chosen if any(nic_named(topology, name, offers) == nic for name in bind))
        return used, bind, _why(used, whys)
    if kind == "tcp" and source:
        nic = nic_named(topology, source, offers)
        return ((nic,) if nic else ()), (), f"peers reach this node by {source}" + (f", which is {nic.name}'s" if nic else "")
    if not chosen:
        return (), (), "no RDMA NIC is usable: libfabric chooses the interface that other hosts reach best"
    if not kind:
        return chosen, (), f"{_why(chosen, whys)}; libfabric was not asked for its names of them"
    return (), (), f"{kind} has no address on {', '.join(nic.name for nic in chosen)} that others reach: it chooses"


def _why(nics: Sequence[Nic], whys: Mapping[str, str]) -> str:
    by_why: dict[str, list[str]] = {}
    for nic in nics:
        by_why.setdefault(whys.get(nic.name, "where this machine has most NICs"), []).append(nic.name)
    return "; ".join(f"{', '.join(names)}: {why}" for why, names in by_why.items())


def _moved(topology: Topology, rail: RailGroup, nics: tuple[Nic, ...]) -> RailGroup:
    """The rail, at the NUMA node of the NICs that are really used."""
    first = next((nic for nic in nics if nic.pci is not None and nic.pci.numa is not None), None)
    if first is None or first.pci is None or first.pci.numa == rail.numa:
        return rail
    numa, near, why = near_cpus(topology, first.pci.numa, first.name)
    return dataclasses.replace(rail, numa=numa, cpus=near, worker_cpus=near, why=why)


def _group(topology: Topology, rail: RailGroup, ranks: tuple[int, ...], nics: tuple[Nic, ...], bind: tuple[str, ...],
           why: str, threads: int, together: int) -> RankGroup:
    pinned = sum(bool(node.cpus) for node in topology.numa) > 1 and rail.numa is not None
    homes = _homes(topology, rail, len(ranks), together) if pinned else [(None, rail.cpus)] * len(ranks)
    sharing = Counter(homes)
    places, wide = [], ""
    for home in homes:
        cores = _num_cores(topology, home[1])
        fits = threads * sharing[home] <= cores
        if pinned and not fits:
            many = f" for each of {sharing[home]} ranks" if sharing[home] > 1 else ""
            wide = f"engine.threads = {threads}{many} is more than the {cores} cores of the node: ranks may run anywhere"
        cpus = home[1] if pinned and fits else ()
        places.append(RankPlace(home[0], cpus, threads or max(1, cores // sharing[home])))
    reasons = [why]
    if pinned:
        reasons.append(rail.why)
        if len(sharing) > 1:
            reasons.append(f"{len(ranks)} ranks over NUMA nodes {', '.join(str(numa) for numa, _ in sharing)}")
    else:
        reasons.append("one NUMA node: nothing is pinned" if topology.one_node else "no NUMA node is known: nothing is pinned")
    rates = [nic.rate_bits_per_second for nic in nics]
    rate = sum(each or 0 for each in rates) if nics and None not in rates else None
    return RankGroup(
        device=rail.gpu, ranks=ranks, nics=tuple(nic.name for nic in nics), bind=bind, rate_bits_per_second=rate,
        numa=rail.numa if pinned else None, worker_cpus=rail.worker_cpus if pinned else (), places=tuple(places),
        why=(*reasons, *([wide] if wide else ())),
    )


def _homes(topology: Topology, rail: RailGroup, num_ranks: int, together: int) -> list[tuple[int | None, tuple[int, ...]]]:
    """(NUMA node, CPUs) of each rank: the rail's for a GPU's, and where all ranks compute together; else those of all nodes
    that this process may run on, the rail's first, neighbours on one node."""
    homes: list[tuple[int | None, tuple[int, ...]]] = [(rail.numa, rail.cpus)]
    num_teams = -(-num_ranks // together)
    if rail.gpu is None and num_teams > 1:
        allowed = set(topology.cpus)
        others = [(node.index, tuple(cpu for cpu in node.cpus if cpu in allowed)) for node in topology.numa]
        homes += [home for home in others if home[1] and home[0] != rail.numa and not set(home[1]) & set(rail.cpus)]
    num_homes = min(len(homes), num_teams)
    return [homes[rank // together * num_homes // num_teams] for rank in range(num_ranks)]


def _num_cores(topology: Topology, cpus: tuple[int, ...]) -> int:
    """Cores that have one of these CPUs; CPUs where it is not known which of them share a core."""
    mine = set(cpus)
    return sum(bool(mine.intersection(core)) for core in topology.cores) or max(1, len(cpus))

