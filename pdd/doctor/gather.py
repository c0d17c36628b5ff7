"""Makes the facts: reads /proc, /sys and the places that the settings name, below a root that a test may replace.

It changes nothing: a port is bound for a moment without listening, a NIC is opened as a start would and closed again. What
cannot be read is not known, and what cannot be asked says why.
"""

from __future__ import annotations

import dataclasses
import errno
import importlib
import os
import re
import socket
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pdd import open_files
from pdd.address import parse_address
from pdd.config import Config
from pdd.config_credentials import credential_path
from pdd.config_sources import Problem
from pdd.control import paths
from pdd.doctor import clock, holders
from pdd.doctor.facts import (
    Candidate,
    Credential,
    Disk,
    Driver,
    Facts,
    HugePages,
    Library,
    Limit,
    Memory,
    Port,
    Process,
    RunDir,
)
from pdd.engine.machine import free_memory
from pdd.errors import ModelError
from pdd.model.config import load_config
from pdd.model.fit import group_fit
from pdd.model.folder import check_folder
from pdd.topology import machine, sysfs
from pdd.topology.files import Directory, Tree
from pdd.topology.placement import Placement, Wanted, plan_placement
from pdd.topology.types import Topology

_MODULES = ("nvidia", "nvidia_uvm", "nvidia_peermem", "nv_peer_mem", "ib_uverbs", "rdma_ucm", "mlx5_ib", "efa", "gdrdrv")
_DIRECTORIES = (("state", "STATE_DIRECTORY", "/var/lib/pdd"), ("logs", "LOGS_DIRECTORY", "/var/log/pdd"),
                ("caches", "CACHE_DIRECTORY", "/var/cache/pdd"), ("temporary files", "TMPDIR", "/tmp"))


def gather(
    config: Config, problems: Sequence[Problem] | None, settings: str, *, root: Path = Path("/"),
    library: Library | None = None, placement: Placement | None = None,
) -> Facts:
    """May take a second: libfabric opens each NIC once.

    Args:
        problems: of the settings; None where there are no settings, and `config` is only defaults.
        settings: what the settings are called for people.
        root: of /proc and /sys.
        library: of a running node, which is not asked again; or one that no chosen check looks at.
        placement: of a running node.
    """
    tree = Tree(Directory(root))
    topology = machine.read() if root == Path("/") else sysfs.read(root)
    placed = placement or plan_placement(topology, Wanted(bind=config.fabric.bind))
    limits = tree.text("proc/self/limits")
    return Facts(
        topology=topology, findings=placed.findings, role=config.node.role, clock=clock.read(root),
        problems=None if problems is None else tuple(problems), settings=settings,
        memlock=_limit(limits, "Max locked memory"), open_files=_limit(limits, "Max open files"),
        files_needed=open_files.needed(config),
        huge=_huge_pages(tree), driver=_driver(tree, topology),
        library=library or ask_library(config.fabric.library, config.fabric.provider),
        provider=config.fabric.provider, required=config.fabric.require,
        ports=tuple(_ports(config, root)) if problems is not None else (),
        run_dir=_run_dir(config, root) if problems is not None else None,
        model=config.model.path, memory=_memory(config, root), credentials=tuple(_credentials(config)),
        disks=tuple(_disks()),
    )


# -- the machine -------------------------------------------------------------------------------------------------------
def _limit(limits: str, name: str) -> Limit | None:
    found = re.search(rf"^{name}\s+(unlimited|\d{{1,20}})\s+(unlimited|\d{{1,20}})\s", limits, re.M)
    if found is None:
        return None
    soft, hard = (-1 if word == "unlimited" else int(word) for word in found.groups())
    return Limit(soft, hard)


def _huge_pages(tree: Tree) -> HugePages:
    def chosen(name: str) -> str:
        found = re.search(r"\[(\w+)\]", tree.text(f"sys/kernel/mm/transparent_hugepage/{name}"))
        return found[1] if found else ""

    meminfo = dict(re.findall(r"^(HugePages_\w+):\s+(\d{1,12})", tree.text("proc/meminfo"), re.M))
    return HugePages(chosen("enabled"), chosen("shmem_enabled"), int(meminfo.get("HugePages_Total", 0)),
                     int(meminfo.get("HugePages_Free", 0)))


def _driver(tree: Tree, topology: Topology) -> Driver:
    version = re.search(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", tree.text("proc/driver/nvidia/version"))
    names = [f"nvidia{gpu.index}" for gpu in topology.gpus] + ["nvidiactl", "nvidia-uvm", "infiniband/rdma_cm"]
    nodes = [*names, *(f"infiniband/{name}" for name in tree.names("dev/infiniband"))]
    return Driver(
        nvidia=version[1] if version else "",
        modules=frozenset(name for name in _MODULES if tree.is_dir(f"sys/module/{name}")),
        nodes=frozenset(name for name in nodes if tree.has_node(f"dev/{name}")),
    )


def ask_library(path: str, provider: str) -> Library:
    """What libfabric is here and offers; `path`, `provider`: of the settings. Opens each NIC once."""
    try:
        native: Any = importlib.import_module("pdd.fabric._native")
    except ImportError as error:
        return Library(error=f"pdd's native core cannot be loaded: {error}")
    try:
        found = native.library(path)
    except native.FabricError as error:
        return Library(error=_one_line(error))
    known = Library(found["path"], found["version"], candidates=tuple(
        Candidate(each["path"], each["version"], each["why_not"]) for each in found["candidates"]
    ))
    try:
        nics = native.probe(path, provider)
    except native.FabricError as error:
        return dataclasses.replace(known, offers=(), why_nothing=_one_line(error))
    return dataclasses.replace(known, offers=tuple((nic["kind"], nic["domain"], nic["address"]) for nic in nics))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _disks() -> Iterator[Disk]:
    for what, variable, usual in _DIRECTORIES:
        path = Path(os.environ.get(variable, "").partition(":")[0] or usual)
        if not path.is_dir():
            continue
        found = os.statvfs(path)
        inodes = found.f_favail if found.f_files else -1
        yield Disk(what, str(path), found.f_bavail * found.f_frsize, inodes, os.access(path, os.W_OK))


# -- what the settings name --------------------------------------------------------------------------------------------
def _ports(config: Config, root: Path) -> Iterator[Port]:
    for key, text in (("api.listen", config.api.listen), ("peers.listen", config.peers.listen)):
        if not text:
            continue
        address = parse_address(text, listen=True)
        if address.port == 0:
            continue
        error, taken = _why_not_bound(address.host, address.port)
        yield Port(key, text, error, taken, holders.of_port(address.port, root) if taken else None)


def _why_not_bound(host: str, port: int) -> tuple[str, bool]:
    """(why it cannot be bound, whether somebody has it)."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        return error.strerror or str(error), error.errno == errno.EADDRINUSE
    return "", False


def _run_dir(config: Config, root: Path) -> RunDir:
    base = Path(config.control.dir) if config.control.dir else paths.default_run_dir()
    at = base / config.node.name
    sockets = [at / paths.STATUS, at / paths.CONTROL]
    if paths.answers(at):
        pid = _text(at / "lock").strip()
        return RunDir(str(at), running=Process(int(pid), holders.name_of(int(pid), root)) if pid.isdigit() else Process(0, ""))
    nearest = next((each for each in (at, *at.parents) if each.exists()), Path("/"))
    error = "" if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} cannot be written by this user"
    return RunDir(str(at), error=error, stale=any(each.exists() for each in sockets))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _memory(config: Config, root: Path) -> Memory:
    try:
        free: int | None = free_memory(root)
    except (OSError, KeyError, ValueError):
        free = None
    if not config.model.path:
        return Memory(free)
    folder, tp, page_size = Path(config.model.path), config.engine.tp, config.kv.page_size
    try:
        model = load_config(folder)
        check_folder(folder)
    except (ModelError, OSError) as error:
        return Memory(free, error=str(error))
    dtype = model.dtype if config.model.dtype == "auto" else config.model.dtype
    fit = group_fit(model, tp, dtype=dtype, page_size=page_size, free_bytes=(free or 0) // config.engine.dp,
                    fraction=config.kv.memory_fraction)
    if fit.refused:
        return Memory(free, error="; ".join(fit.refused))
    one = model.kv_shape(dtype).layout_over(tp, page_size, 1)
    most = config.engine.max_batch_size * one.num_pages_for(config.model.max_context or model.max_position)
    pages = config.kv.num_pages or (most if free is None else min(most, max(1, fit.num_pages)))
    return Memory(free, weights=fit.param_bytes * config.engine.num_ranks,
                  kv=pages * fit.page_bytes * config.engine.num_ranks)


def _credentials(config: Config) -> Iterator[Credential]:
    for key, name in (("peers.token_credential", config.peers.token_credential),
                      ("api.api_keys_credential", config.api.api_keys_credential)):
        if not name:
            continue
        path = credential_path(name)
        try:
            yield Credential(key, str(path), stat.S_IMODE(path.stat().st_mode))
        except OSError as error:
            by_systemd = "/" not in name and "CREDENTIALS_DIRECTORY" not in os.environ
            why = "a credential of systemd, which only the unit sees" if by_systemd else error.strerror or str(error)
            yield Credential(key, str(path), None, why)
