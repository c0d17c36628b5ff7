"""Which NICs and CPUs each GPU uses, and why. Pure: a function of the topology alone, so that what a daemon does on a
machine can be told from a file that describes it.

The nearest usable RDMA NICs are candidates. Among equally near ones the machine's main family wins (a lone management or
storage card does not), and a card's own function before the virtual ones cut from it. Candidates are then shared out
fairly (sharing.py). The worker runs on the CPUs of its first NIC's NUMA node; GPUs of one node split its cores.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from pdd.topology.paths import distance, path_class, place_known
from pdd.topology.sharing import share_out
from pdd.topology.types import Gpu, Nic, PathClass, PciDevice, Topology

MAX_HOST_NICS = 4  # of a rank on CPUs: more than its cores copy for, and each NIC costs the worker a look per peer
_NOWHERE = PciDevice("", "", (), None)


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    gpu: int
    nic: str
    path: PathClass
    chosen: bool
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class RailGroup:
    """What one rank uses: a device, its NICs, the CPUs of the worker that drives them."""

    gpu: int | None  # None: the CPU rank of a machine without GPUs
    nics: tuple[str, ...]
    path: PathClass | None  # of the first NIC
    numa: int | None  # where memory and worker belong; None: not known
    cpus: tuple[int, ...]  # of that node, as far as this process may use them
    worker_cpus: tuple[int, ...]  # this rail's share of them
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    pairs: tuple[Pair, ...]
    rails: tuple[RailGroup, ...]


def plan(topology: Topology) -> Plan:
    gpus = [*topology.gpus, *topology.other_gpus]  # neighbours in other containers want their share too
    nics = topology.rdma_nics
    candidates = {position: _candidates(topology, gpu, nics) for position, gpu in enumerate(gpus)}
    given = share_out(candidates)
    users: dict[int, list[int]] = {}
    for position, mine in given.items():
        for index in mine:
            users.setdefault(index, []).append(position)
    pairs, rails = [], []
    for position, gpu in enumerate(topology.gpus):
        for index, nic in enumerate(nics):
            why = _why(topology, gpus, nics, candidates[position], given[position], users, position, index)
            path = path_class(gpu.pci, nic.pci, one_node=topology.one_node)
            pairs.append(Pair(gpu.index, nic.name, path, index in given[position], why))
        rails.append(_rail(topology, gpu, [nics[index] for index in given[position]]))
    if not gpus:
        rails.append(host_rail_group(topology))
    return Plan(tuple(pairs), _split_cores(topology, rails))


# -- NICs --------------------------------------------------------------------------------------------------------------
def _candidates(topology: Topology, gpu: Gpu, nics: tuple[Nic, ...]) -> list[int]:
    """Positions of the NICs that are equally good for this GPU, and better than all others."""
    usable = [index for index, nic in enumerate(nics) if nic.usable]
    if not usable:
        return []
    far = {index: distance(topology, gpu.pci, nics[index].pci) for index in usable}
    nearest = [index for index in usable if far[index] == min(far.values())]
    cards = {pci.address for index in nearest if (pci := nics[index].pci) is not None}
    whole = [index for index in nearest if nics[index].physical_function not in cards]
    weights = _families(nics)
    best = max(weights[_family(nics[index])] for index in whole)
    return [index for index in whole if weights[_family(nics[index])] == best]


def _family(nic: Nic) -> tuple[str, int | None, int | None]:
    pci = nic.pci or _NOWHERE
    return nic.kind, pci.vendor_id, pci.device_id


def _families(nics: tuple[Nic, ...]) -> Counter[tuple[str, int | None, int | None]]:
    """How much each family of NICs can move: bits per second, or how many there are when no rate is known."""
    known = any(nic.rate_bits_per_second for nic in nics)
    weights: Counter[tuple[str, int | None, int | None]] = Counter()
    for nic in nics:
        weights[_family(nic)] += (nic.rate_bits_per_second or 0) if known else 1
    return weights


def _why(topology: Topology, gpus: list[Gpu], nics: tuple[Nic, ...], candidates: list[int], given: tuple[int, ...],
         users: dict[int, list[int]], position: int, index: int) -> str:
    nic, gpu = nics[index], gpus[position]
    if index in given:
        if not (place_known(topology, gpu.pci) and place_known(topology, nic.pci)) and _far(topology, gpu, nic):
            return "nothing tells which NIC is near: shared out evenly"
        nearer = [other for other in nics
                  if not other.usable and distance(topology, gpu.pci, other.pci) < distance(topology, gpu.pci, nic.pci)]
        others = [gpus[each] for each in users[index] if each != position]
        parts = ["the nearest usable" if nearer else "the nearest"]
        if len(candidates) > 1:
            parts.append(f"one of {len(candidates)} as near, shared out evenly")
        if others:
            parts.append(f"shared with {', '.join(gpu_name(topology, other) for other in others)}")
        return "; ".join(parts)
    if not nic.usable:
        return unusable(nic)
    if index in candidates:
        holders = [gpu_name(topology, gpus[each]) for each in users.get(index, [])]
        return f"as near, given to {', '.join(holders)}" if holders else "as near, spare: there are too few for all GPUs"
    best = nics[candidates[0]]
    if distance(topology, gpu.pci, nic.pci) == distance(topology, gpu.pci, best.pci):
        if nic.physical_function is not None and nic.physical_function == getattr(best.pci, "address", None):
            return f"a virtual function of {best.name}"
        return f"as near, but not of the machine's main kind of NIC ({best.name})"
    return f"{best.name} is nearer"


def unusable(nic: Nic) -> str:
    """Why a NIC carries nothing, in a word or two."""
    if not nic.reachable:
        return "no device node for this process"
    return nic.state if nic.offered else "not offered by libfabric"


def _far(topology: Topology, gpu: Gpu, nic: Nic) -> bool:
    return path_class(gpu.pci, nic.pci, one_node=topology.one_node) is PathClass.SYS


def gpu_name(topology: Topology, gpu: Gpu) -> str:
    return f"GPU{gpu.index}" if gpu in topology.gpus else f"the GPU {gpu.pci.address} of others"


# -- CPUs --------------------------------------------------------------------------------------------------------------
def _rail(topology: Topology, gpu: Gpu, nics: list[Nic]) -> RailGroup:
    path = path_class(gpu.pci, nics[0].pci, one_node=topology.one_node) if nics else None
    at, whose = gpu.pci.numa, f"GPU{gpu.index}"
    if nics and nics[0].pci is not None and nics[0].pci.numa is not None:
        at, whose = nics[0].pci.numa, nics[0].name
    numa, near, why = near_cpus(topology, at, whose)
    return RailGroup(gpu.index, tuple(nic.name for nic in nics), path, numa, near, near, why)


def _main_family(nics: list[Nic]) -> list[Nic]:
    weights = _families(tuple(nics))
    best = max(weights.values(), default=0)
    return [nic for nic in nics if weights[_family(nic)] == best]


def host_rail_group(topology: Topology) -> RailGroup:
    """Of a rank that computes on CPUs, with KV in host memory: next to the NICs of the node that has most of them; else
    where this process may run first."""
    usable = _main_family([nic for nic in topology.rdma_nics if nic.usable])
    weight: Counter[int] = Counter()
    for nic in usable:
        if nic.pci is not None and nic.pci.numa is not None:
            weight[nic.pci.numa] += nic.rate_bits_per_second or 1
    if weight:
        at = max(sorted(weight), key=weight.__getitem__)
        nics = tuple(nic.name for nic in usable if nic.pci is not None and nic.pci.numa == at)[:MAX_HOST_NICS]
        numa, near, why = near_cpus(topology, at, nics[0])
        return RailGroup(None, nics, None, numa, near, near, why)
    first = topology.cpus[:1]
    home = next((node.index for node in topology.numa if first and first[0] in node.cpus), None)
    numa, near, why = near_cpus(topology, home, "the first CPU of this process")
    return RailGroup(None, tuple(nic.name for nic in usable)[:MAX_HOST_NICS], None, numa, near, near, why)


def near_cpus(topology: Topology, at: int | None, whose: str) -> tuple[int | None, tuple[int, ...], str]:
    """(node, its CPUs that this process may use, why). All CPUs where the near ones are not known, or not allowed."""
    if at is None and topology.one_node:
        only = next(node for node in topology.numa if node.cpus)
        return only.index, topology.cpus, "the only NUMA node"
    if at is None:
        return None, topology.cpus, "all CPUs: nothing tells which are near"
    node = topology.node(at)
    near = tuple(cpu for cpu in node.cpus if cpu in set(topology.cpus)) if node else ()
    if near:
        return at, near, f"NUMA node {at} of {whose}"
    why = "has no CPU" if node is None or not node.cpus else "has no CPU that this process may use"
    return at, topology.cpus, f"all CPUs: NUMA node {at} of {whose} {why}"


def _split_cores(topology: Topology, rails: list[RailGroup]) -> tuple[RailGroup, ...]:
    """Each rail's worker gets whole cores of its own, as long as there is one for each; the same CPUs are shared where
    nobody knows which of them share a core."""
    sharing = Counter(rail.cpus for rail in rails)
    seen: Counter[tuple[int, ...]] = Counter()
    done = []
    for rail in rails:
        place, of = seen[rail.cpus], sharing[rail.cpus]
        seen[rail.cpus] += 1
        mine = set(rail.cpus)
        cores = [core for core in topology.cores if mine.intersection(core)]
        if of > 1 and len(cores) >= of:
            share = cores[place * len(cores) // of : (place + 1) * len(cores) // of]
            own = mine.intersection(cpu for core in share for cpu in core)
            rail = dataclasses.replace(rail, worker_cpus=tuple(sorted(own)))
        done.append(rail)
    return tuple(done)
