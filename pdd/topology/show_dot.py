"""The pdd.topology/1 document as a graph for Graphviz's dot. Pure text.

NUMA nodes are boxes with switches, GPUs and RDMA NICs in them; a bold edge is a pair that is used, labelled with its
path.
"""

from __future__ import annotations

import json
from typing import Any

from pdd.topology.names import short_model
from pdd.topology.types import RDMA_KINDS


def dot(doc: dict[str, Any]) -> str:
    nics = [nic for nic in doc["nics"] if nic["kind"] in RDMA_KINDS]
    ids = {nic["name"]: f"nic{place}" for place, nic in enumerate(nics)}
    lines = ["graph topology {", f"  label={_quoted(doc['host'])};", "  node [shape=box];"]
    places = [node["node"] for node in doc["numa"]]
    places += [*sorted({each["numa"] for each in [*doc["gpus"], *nics]} - {*places, None}), None]
    switches = {each["switch"]: each["numa"] for each in [*doc["gpus"], *nics] if each["switch"]}
    for place in places:
        inside = [f'switch_{_name(switch)} [shape=ellipse, label={_quoted(f"switch {switch}")}];'
                  for switch, at in switches.items() if at == place]
        inside += [f"gpu{gpu['index']} [label={_quoted(_gpu(gpu))}];" for gpu in doc["gpus"] if gpu["numa"] == place]
        inside += [f"{ids[nic['name']]} [label={_quoted(_nic(nic))}{'' if nic['usable'] else ', style=dashed'}];"
                   for nic in nics if nic["numa"] == place]
        if place is None and not inside:
            continue
        title = "NUMA node not known" if place is None else _node(doc, place)
        name = "unknown" if place is None else f"numa{place}"
        lines += [f"  subgraph cluster_{name} {{", f"    label={_quoted(title)};", *(f"    {line}" for line in inside), "  }"]
    for each, name in [*((gpu, f"gpu{gpu['index']}") for gpu in doc["gpus"]), *((nic, ids[nic["name"]]) for nic in nics)]:
        if each["switch"]:
            lines.append(f"  switch_{_name(each['switch'])} -- {name};")
    for pair in doc["pairs"]:
        if pair["chosen"]:
            label = f'[style=bold, constraint=false, label="{pair["path"]}"]'
            lines.append(f"  gpu{pair['gpu']} -- {ids[pair['nic']]} {label};")
    return "\n".join([*lines, "}"])


def _name(address: str) -> str:
    return "".join(char if char.isalnum() else "_" for char in address)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _node(doc: dict[str, Any], place: int) -> str:
    node = next((node for node in doc["numa"] if node["node"] == place), None)
    return f"numa{place}" + (f" cpus {node['cpus'] or 'none'}" if node else "")


def _gpu(gpu: dict[str, Any]) -> str:
    return f"GPU{gpu['index']} {short_model(gpu['model']) if gpu['model'] else gpu['vendor']}\n{gpu['pci']}"


def _nic(nic: dict[str, Any]) -> str:
    rate = nic["rate_bits_per_second"]
    return f"{nic['name']} {nic['kind']}{f' {rate / 1e9:g}G' if rate else ''}\n{nic['pci'] or ''}"
