"""Every form in which `pdd topology` shows a topology. Pure text."""

from __future__ import annotations

import json
from typing import Any

from pdd.topology import report
from pdd.topology.paths import path_class
from pdd.topology.show_dot import dot
from pdd.topology.show_matrix import matrix
from pdd.topology.show_nccl import nccl_xml
from pdd.topology.show_tree import tree
from pdd.topology.types import Topology

FORMATS = ("tree", "matrix", "json", "nccl-xml", "dot")


def show(topology: Topology, form: str, *, document: dict[str, Any] | None = None, ascii_only: bool = False,
         width: int = 0) -> str:
    """`form`: one of FORMATS. `document`: of the topology, None: make it. `width`: columns of the screen, 0: endless."""
    if form == "nccl-xml":
        return nccl_xml(topology)
    document = report.document(topology) if document is None else document
    if form == "json":
        return json.dumps(document, ensure_ascii=False)
    if form == "dot":
        return dot(document)
    if form == "tree":
        return tree(document, ascii_only=ascii_only, width=width)

    def between(one: int, other: int) -> str:
        gpus = topology.gpus
        return path_class(gpus[one].pci, gpus[other].pci, one_node=topology.one_node).value

    return matrix(document, between, width=width)
