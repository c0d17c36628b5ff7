"""NVLink and xGMI in hwloc's XML: matrices of bandwidth (MB/s) between objects that are named by their gp_index."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pdd.topology import names
from pdd.topology.types import GpuLink
from pdd.topology.xml_tree import Element

_MATRICES = ("NVLinkBandwidth", "XGMIBandwidth", "XeLinkBandwidth")
_MAX_OBJECTS = 1024
_MAX_MBPS = 10**9  # a petabyte a second; what claims more is of unknown speed


def read(root: Element, gpus: Collection[str]) -> tuple[GpuLink, ...]:
    """Links that start at a GPU. `gpus`: their PCI addresses."""
    at = dict(_addresses(root))
    links = set()
    for matrix in root.all("distances2", "distances2hetero"):
        if matrix.get("name") not in _MATRICES:
            continue
        objects = [index.rpartition(":")[2] for index in _values(matrix, "indexes")]
        values = _values(matrix, "u64values")
        if len(objects) > _MAX_OBJECTS or len(values) != len(objects) ** 2:
            continue
        for position, value in enumerate(values):
            source, target = (at.get(objects[each]) for each in divmod(position, len(objects)))
            if source is not None and source in gpus and source != target and value.isdigit() and value.strip("0"):
                speed = names.number(value, 10, _MAX_MBPS)
                kind = "cpu" if target is None else "gpu" if target in gpus else "switch"
                links.add(GpuLink(source, target or "cpu", kind, None, speed and speed * 1_000_000))
    return tuple(sorted(links, key=lambda link: (names.pci_order(link.gpu), link.target)))


def _addresses(root: Element) -> Iterator[tuple[str, str]]:
    """gp_index → PCI address, of PCI devices and of what they show as."""
    waiting: list[tuple[Element, str | None]] = [(root, None)]
    while waiting:
        element, around = waiting.pop()
        if element.get("type") == "PCIDev":
            around = names.pci_address(element.get("pci_busid")) or around
        if around is not None:
            yield element.get("gp_index"), around
        waiting += [(child, around) for child in element.children if child.tag == "object"]


def _values(matrix: Element, tag: str) -> list[str]:
    return [word for child in matrix.children if child.tag == tag for word in "".join(child.text).split()]
