"""What the system lets a process do, from /proc and /sys: its CPUs, its memory nodes, memory it may lock, and how a
NIC may read GPU memory."""

from __future__ import annotations

import re

from pdd.topology import cpus
from pdd.topology.files import Tree
from pdd.topology.types import Limits

_DMA_BUF_KERNEL = (5, 12)  # the first with ibv_reg_dmabuf_mr


def allowed_cpus(tree: Tree) -> tuple[int, ...] | None:
    return cpus.parse_list(_status(tree).get("Cpus_allowed_list", "")) or None


def read(tree: Tree) -> Limits:
    total = re.search(r"^MemTotal:\s+(\d{1,15}) kB", tree.text("proc/meminfo"), re.M)
    nodes = cpus.parse_list(_status(tree).get("Mems_allowed_list", ""))
    return Limits(
        memory_nodes=nodes or None,
        memlock_bytes=_memlock(tree.text("proc/self/limits")),
        memory_bytes=int(total.group(1)) * 1024 if total else None,
        gpu_direct=_gpu_direct(tree),
    )


def _status(tree: Tree) -> dict[str, str]:
    pairs = (line.partition(":") for line in tree.text("proc/self/status").splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _memlock(limits: str) -> int | None:
    """The soft limit in bytes; -1: none."""
    found = re.search(r"^Max locked memory\s+(unlimited|\d{1,19})\s", limits, re.M)
    if found is None:
        return None
    return -1 if found.group(1) == "unlimited" else int(found.group(1))


def _gpu_direct(tree: Tree) -> str | None:
    """For NVIDIA GPUs. dma-buf needs the open kernel modules and a new enough kernel; else a module must bridge the two
    drivers. None where the driver is not there to tell."""
    version = tree.text("proc/driver/nvidia/version")
    if not version:
        return None
    kernel = re.match(r"(\d{1,4})\.(\d{1,4})", tree.text("proc/sys/kernel/osrelease"))
    if kernel is None:
        return None
    if "Open Kernel Module" in version and (int(kernel.group(1)), int(kernel.group(2))) >= _DMA_BUF_KERNEL:
        return "dma-buf"
    peer = any(tree.is_dir(f"sys/module/{name}") for name in ("nvidia_peermem", "nv_peer_mem"))
    return "peermem" if peer else "none"
