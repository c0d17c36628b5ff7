"""The pdd.topology/1 document as the matrix of `nvidia-smi topo -m`: how each GPU reaches the others and every RDMA NIC.
Pure text.

A star marks the NICs that are chosen. NV# is a number of NVLinks; NV alone where it is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdd.topology.types import RDMA_KINDS

_LEGEND = (
    ("*", "chosen"),
    ("X", "the same device"),
    ("PIX", "one PCI switch"),
    ("PXB", "several PCI bridges"),
    ("PHB", "the host bridge"),
    ("NODE", "other host bridges of one NUMA node"),
    ("SYS", "other NUMA nodes, or not known"),
    ("NV#", "# NVLinks"),
)


def matrix(doc: dict[str, Any], gpu_paths: Callable[[int, int], str], *, width: int = 0) -> str:
    """`gpu_paths`: the word for two GPUs. `width`: of the screen, 0: endless; columns that do not fit go below."""
    nics = [nic for nic in doc["nics"] if nic["kind"] in RDMA_KINDS]
    cells = {(pair["gpu"], pair["nic"]): f"{pair['path']}{'*' if pair['chosen'] else ''}" for pair in doc["pairs"]}
    links = _linked(doc)
    columns: list[tuple[str, list[str]]] = []
    for one in doc["gpus"]:
        words = []
        for other in doc["gpus"]:
            pair = frozenset((one["index"], other["index"]))
            words.append("X" if len(pair) == 1 else links.get(pair) or gpu_paths(other["index"], one["index"]))
        columns.append((f"GPU{one['index']}", words))
    for place, nic in enumerate(nics):
        columns.append((f"NIC{place}", [cells[gpu["index"], nic["name"]] for gpu in doc["gpus"]]))
    columns.append(("NUMA", ["?" if gpu["numa"] is None else str(gpu["numa"]) for gpu in doc["gpus"]]))
    columns.append(("CPUs", [gpu["cpus"] or "?" for gpu in doc["gpus"]]))
    first = ["", *(f"GPU{gpu['index']}" for gpu in doc["gpus"])]
    lines = [] if doc["gpus"] else ["no GPU"]
    for block in _blocks(first, columns if doc["gpus"] else [], width):
        lines += [*block, ""]
    lines += [_nic_line(place, nic) for place, nic in enumerate(nics)] or ["no RDMA NIC"]
    used = {word.rstrip("*") for _, words in columns for word in words}
    used |= {"*"} if any(pair["chosen"] for pair in doc["pairs"]) else set()
    shown = [f"{word} {text}" for word, text in _LEGEND
             if word in used or (word == "NV#" and any(each.startswith("NV") for each in used))]
    if doc["gpus"]:
        lines += ["", *_filled(shown, width)]
    return "\n".join(lines)


def _blocks(first: list[str], columns: list[tuple[str, list[str]]], width: int) -> list[list[str]]:
    """Tables of as many columns as fit, each beginning with `first`."""
    left = max((len(word) for word in first), default=0)
    blocks: list[list[str]] = []
    room = 0
    for title, words in columns:
        wide = max(len(title), *(len(word) for word in words))
        if not blocks or (width and room + 2 + wide > width):
            blocks.append([word.ljust(left) for word in first])
            room = left
        blocks[-1] = [f"{line}  {word.ljust(wide)}" for line, word in zip(blocks[-1], [title, *words], strict=True)]
        room += 2 + wide
    return [[line.rstrip() for line in block] for block in blocks]


def _filled(words: list[str], width: int) -> list[str]:
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + 2 + len(word) > (width or 100):
            lines.append("")
        lines[-1] += f"{'  ' if lines[-1] else ''}{word}"
    return lines


def _nic_line(place: int, nic: dict[str, Any]) -> str:
    netdev = f" {nic['netdev']}" if nic["netdev"] and nic["netdev"] != nic["name"] else ""
    return f"NIC{place}: {nic['name']}{netdev} {nic['kind']}" + ("" if nic["usable"] else f" ({nic['state']}, not used)")


def _linked(doc: dict[str, Any]) -> dict[frozenset[int], str]:
    """NV# of each two GPUs that reach each other by NVLink: directly, or over switches that both have links to."""
    index = {gpu["pci"]: gpu["index"] for gpu in doc["gpus"]}
    found: dict[frozenset[int], str] = {}
    switched: dict[int, int | None] = {}
    for link in doc["links"]:
        mine, other = index.get(link["gpu"]), index.get(link["target"])
        if mine is None:
            continue
        if link["target_kind"] == "gpu" and other is not None and other != mine:
            found[frozenset((mine, other))] = f"NV{link['count'] or ''}"
        elif link["target_kind"] == "switch":
            before = switched.get(mine, 0)
            switched[mine] = None if before is None or link["count"] is None else before + link["count"]
    for one, mine in switched.items():
        for other, theirs in switched.items():
            if one != other:
                count = "" if mine is None or theirs is None else str(min(mine, theirs))
                found.setdefault(frozenset((one, other)), f"NV{count}")
    return found
