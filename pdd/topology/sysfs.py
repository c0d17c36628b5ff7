"""Reads what a machine has from sysfs and a little of /proc, below any root, so that a copied tree reads like the
machine it came from.

One odd device costs a null, never the whole picture: every file may be missing or empty. No driver library is asked;
what NVIDIA's driver knows of its GPUs is in /proc/driver/nvidia.
"""

from __future__ import annotations

from pathlib import Path

from pdd.topology import cpus, names, sysfs_limits, sysfs_nics
from pdd.topology.files import Directory, Tree
from pdd.topology.sysfs_pci import PciBus
from pdd.topology.types import MAX_NODES, Gpu, NumaNode, Topology

_MOST_SIBLINGS = 64  # of a core; real ones have 1 to 16 threads


def read(root: Path = Path("/"), host: str | None = None) -> Topology:
    """The topology below `root`, which holds `sys/`."""
    return read_tree(Tree(Directory(root)), host or ("" if root == Path("/") else root.name))


def read_tree(tree: Tree, host: str = "") -> Topology:
    """`host`: the name of the machine when the tree does not tell."""
    numa = _numa_nodes(tree)
    bus = PciBus(tree, numa)
    gpus, others = _gpus(tree, bus)
    listed = tuple(sorted({cpu for node in numa for cpu in node.cpus} or _online(tree)))
    allowed = sysfs_limits.allowed_cpus(tree)
    return Topology(
        host=names.clean(tree.text("proc/sys/kernel/hostname")) or names.clean(host) or "unknown",
        source=("sysfs",),
        cpus=listed if allowed is None else tuple(sorted(set(allowed).intersection(listed))) or allowed,
        numa=numa,
        gpus=gpus,
        nics=sysfs_nics.read(tree, bus),
        cores=_cores(tree, listed),
        other_gpus=others,
        acs_redirects=bus.acs_redirects(),
        limits=sysfs_limits.read(tree),
    )


# -- CPUs --------------------------------------------------------------------------------------------------------------
def _online(tree: Tree) -> set[int]:
    """CPUs that are online, by their common file, else each by its own (CPU 0 often has none: it is always online)."""
    online = cpus.parse_list(tree.text("sys/devices/system/cpu/online"))
    if online:
        return set(online)
    return {cpu for cpu in _cpu_entries(tree) if tree.text(f"sys/devices/system/cpu/cpu{cpu}/online") != "0"}


def _cpu_entries(tree: Tree, directory: str = "sys/devices/system/cpu") -> list[int]:
    found = [names.index(name[3:]) for name in tree.names(directory) if name.startswith("cpu")]
    return sorted(cpu for cpu in found if cpu is not None)


def _numa_nodes(tree: Tree) -> tuple[NumaNode, ...]:
    """A CPU is of one node: of the first that names it."""
    top = "sys/devices/system/node"
    online = _online(tree)
    found: list[NumaNode] = []
    taken: set[int] = set()
    for name in tree.names(top):
        index = names.index(name[4:]) if name.startswith("node") else None
        if index is not None and len(found) <= MAX_NODES:
            listed = (
                cpus.parse_list(tree.text(f"{top}/{name}/cpulist"))
                or cpus.parse_mask(tree.text(f"{top}/{name}/cpumap"))
                or tuple(_cpu_entries(tree, f"{top}/{name}"))
            )
            usable = tuple(cpu for cpu in listed if (cpu in online or not online) and cpu not in taken)
            taken.update(usable)
            found.append(NumaNode(index, usable, _package(tree, usable)))
    return tuple(sorted(found, key=lambda node: node.index))


def _package(tree: Tree, members: tuple[int, ...]) -> int | None:
    """The socket of a node's CPUs; None when they are of several, or nobody knows."""
    text = {tree.text(f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id") for cpu in members}
    only = text.pop() if len(text) == 1 else ""
    return names.index(only)


def _cores(tree: Tree, online: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    known = set(online)
    found = set()
    for cpu in online:
        top = f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = cpus.parse_list(tree.text(f"{top}/thread_siblings_list") or tree.text(f"{top}/core_cpus_list"))
        if cpu not in siblings or len(siblings) > _MOST_SIBLINGS:
            return ()
        found.add(tuple(each for each in siblings if each in known))
    return tuple(sorted(found))


# -- GPUs --------------------------------------------------------------------------------------------------------------
def _gpus(tree: Tree, bus: PciBus) -> tuple[tuple[Gpu, ...], tuple[Gpu, ...]]:
    """(those that this process can use, the machine's other ones).

    A container sees all of the machine's PCI devices, but NVIDIA's driver shows it only its own GPUs; CUDA counts those.
    """
    driver = "proc/driver/nvidia/gpus"
    shown = {names.pci_address(name): name for name in tree.names(driver)}
    mine: list[Gpu] = []
    others: list[Gpu] = []
    for address in bus.addresses():
        device = bus.device(address)
        vendor = names.gpu_vendor(device.class_id, device.vendor_id)
        if vendor is None:
            continue
        facts = _fields(tree.text(f"{driver}/{shown[address]}/information")) if address in shown else {}
        model, uuid = facts.get("Model"), facts.get("GPU UUID")
        if vendor == "amd":
            model = tree.text(f"{bus.path(address)}/product_name")
            unique = tree.text(f"{bus.path(address)}/unique_id")
            uuid = f"GPU-{unique}" if unique else None
        gpu = Gpu(0, vendor, device, names.clean(model or "") or None, names.clean(uuid or "") or None)
        hidden = vendor == "nvidia" and bool(shown) and address not in shown
        (others if hidden else mine).append(gpu)
    return _numbered(mine), tuple(others)


def _numbered(gpus: list[Gpu]) -> tuple[Gpu, ...]:
    return tuple(Gpu(index, gpu.vendor, gpu.pci, gpu.model, gpu.uuid) for index, gpu in enumerate(gpus))


def _fields(text: str) -> dict[str, str]:
    """ "Model: \t NVIDIA H100" and so on, a line each."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
