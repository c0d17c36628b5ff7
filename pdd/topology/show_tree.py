"""The pdd.topology/1 document as a tree: devices under their switch and NUMA node, findings last. Pure text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from pdd.topology.names import short_model
from pdd.topology.types import RDMA_KINDS


def tree(doc: dict[str, Any], *, ascii_only: bool = False, width: int = 0) -> str:
    """`width`: of the screen in columns, 0: endless."""
    rdma = sum(nic["kind"] in RDMA_KINDS for nic in doc["nics"])
    title = (
        f"{doc['host']}  {len(doc['numa'])} NUMA  {len(doc['gpus'])} GPU  {rdma} RDMA NIC  "
        f"{len(doc['nics']) - rdma} other NIC  source={'+'.join(doc['source'])}"
    )
    lines = _wrapped(title, width, "  ")
    nodes = [(node["node"], f"numa{node['node']} cpus {node['cpus'] or 'none'}") for node in doc["numa"]]
    known = {index for index, _ in nodes}
    strangers = sorted({each["numa"] for each in [*doc["gpus"], *doc["nics"]]} - known - {None})
    titles = [*nodes, *((index, f"numa{index} not described") for index in strangers)]
    for index, title in [*titles, (None, "NUMA node not known" if nodes else "no NUMA node known")]:
        groups = list(_groups(doc, index, "==" if ascii_only else "══"))
        if groups or index is not None:
            lines += _wrapped(title, width, "  ")
            lines += _branches(groups, ascii_only, width)
    lines += [line for text in _links(doc) for line in _wrapped(text, width, "  ")]
    for rail in doc["rails"]:
        if rail["gpu"] is None and not doc["placement"]:
            nics = ", ".join(rail["nics"]) or "no RDMA NIC"
            lines += _wrapped(f"CPU rank: {nics}, cpus {rail['worker_cpus']} ({rail['why']})", width, "  ")
    for group in doc["placement"] or ():
        lines += _wrapped(_placed(group), width, "  ")
    for finding in doc["findings"]:
        lines += _wrapped(f"! {finding['message']}  [{finding['id']}]", width, "  ")
    return "\n".join(lines)


def _placed(group: dict[str, Any]) -> str:
    """What a node's parts use, and why."""
    who = "CPU ranks" if group["device"] is None else f"GPU{group['device']}"
    nics = ", ".join(group["bind"] or group["nics"]) or "libfabric's choice"
    nodes = sorted({place["numa"] for place in group["places"] if place["numa"] is not None})
    where = f"on {', '.join(f'numa{node}' for node in nodes)}" if nodes else "anywhere"
    return f"node: {who} use {nics}, {group['threads']} threads {where} ({'; '.join(group['why'])})"


def _groups(doc: dict[str, Any], node: int | None, line: str) -> Iterator[tuple[str, list[str]]]:
    """(switch or "", its rows) of one NUMA node; devices that share no switch come last, one group each."""
    rails = {rail["gpu"]: rail for rail in doc["rails"]}
    rows: dict[str, list[str]] = {}
    alone: list[str] = []
    texts = [(gpu, _gpu_row(gpu, rails[gpu["index"]], doc, line)) for gpu in doc["gpus"]]
    texts += [(nic, _nic_row(nic)) for nic in doc["nics"]]
    for device, text in texts:
        if device["numa"] == node:
            (rows.setdefault(device["switch"], []) if device["switch"] else alone).append(text)
    yield from ((f"switch {switch}", group) for switch, group in rows.items())
    yield from (("", [row]) for row in alone)


def _branches(groups: list[tuple[str, list[str]]], ascii_only: bool, width: int) -> list[str]:
    branch, last, bar = ("|- ", "`- ", "|  ") if ascii_only else ("├ ", "└ ", "│ ")
    empty = " " * len(bar)
    lines = []
    for place, (switch, rows) in enumerate(groups):
        final = place == len(groups) - 1
        sign, below = (last, empty) if final else (branch, bar)
        if not switch:
            lines += _wrapped(f" {sign}{rows[0]}", width, f" {below}    ")
            continue
        lines.append(f" {sign}{switch}")
        for number, row in enumerate(rows):
            end = number == len(rows) - 1
            lines += _wrapped(f" {below}{last if end else branch}{row}", width, f" {below}{empty if end else bar}    ")
    return lines


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    """Lines of at most `width` columns; the second and later ones begin with `indent`. Only single blanks break, so
    that what stands between two of them stays a column."""
    if not width or len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False, replace_whitespace=False,
                         drop_whitespace=True) or [text]


def _gpu_row(gpu: dict[str, Any], rail: dict[str, Any], doc: dict[str, Any], line: str) -> str:
    what = short_model(gpu["model"]) if gpu["model"] else gpu["vendor"] if gpu["vendor"] != "unknown" else ""
    words = [f"GPU{gpu['index']}", what, gpu["pci"], (gpu["uuid"] or "")[:12]]
    row = " ".join(word for word in words if word)
    if not rail["nics"]:
        return f"{row}  no RDMA NIC" if not any(nic["kind"] in RDMA_KINDS for nic in doc["nics"]) else f"{row}  no usable NIC"
    return f"{row}  {line}{rail['path']}{line} {', '.join(rail['nics'])}"


def _nic_row(nic: dict[str, Any]) -> str:
    name = f"{nic['rdma']}/{nic['netdev']}" if nic["rdma"] and nic["netdev"] else nic["name"]
    rate = nic["rate_bits_per_second"]
    words = [name, nic["kind"], f"{rate / 1e9:g}G" if rate else "", nic["state"] if nic["state"] != "unknown" else "state ?"]
    words += [nic["pci"] if nic["pci"] and nic["pci"] != name else ""]
    if nic["gid"] is not None and nic["kind"] == "roce":
        words.append(f"gid{nic['gid_index']} {nic['gid']}")
    if not nic["usable"] and nic["state"] in ("active", "unknown"):
        words.append("not for this process")
    return " ".join(word for word in words if word)


def _links(doc: dict[str, Any]) -> Iterator[str]:
    """One line for each number of links that GPUs have, over all they are linked to."""
    names = {gpu["pci"]: f"GPU{gpu['index']}" for gpu in doc["gpus"]}
    words: dict[str, list[str]] = {}
    for address, name in names.items():
        mine = [link for link in doc["links"] if link["gpu"] == address]
        if not mine:
            continue
        counts = [link["count"] for link in mine]
        speeds = [link["bytes_per_second"] for link in mine]
        kinds = {link["target_kind"] for link in mine}
        text = "linked"
        if None not in counts:
            text = f"{sum(counts)} links"
        elif None not in speeds:
            text = f"{sum(speeds) / 1e9:g} GB/s"
        to = " and ".join({"switch": "GPU switches", "gpu": "other GPUs", "cpu": "the CPU"}[kind] for kind in sorted(kinds))
        words.setdefault(f"{text} to {to}", []).append(name)
    yield from (f"NVLink: {', '.join(who)}: {what}" for what, who in words.items())
