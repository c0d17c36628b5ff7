"""What `pdd check` judges: observations of a machine and of the settings of one node, as frozen data. None: not known.

Gatherers make them (gather.py), checks.py judges them, and neither knows the other: a test writes the facts down.
"""

from __future__ import annotations

import dataclasses

from pdd.config_sources import Problem
from pdd.findings import Finding
from pdd.topology.types import Topology


@dataclasses.dataclass(frozen=True, slots=True)
class Limit:
    """Of this process. -1: none."""

    soft: int
    hard: int


@dataclasses.dataclass(frozen=True, slots=True)
class HugePages:
    transparent: str = ""  # always, madvise, never
    shared: str = ""  # the same of memory that processes share, as KV is
    total: int = 0  # reserved ones
    free: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Driver:
    nvidia: str = ""  # version of the loaded driver
    modules: frozenset[str] = frozenset()  # loaded ones, of those that matter here
    nodes: frozenset[str] = frozenset()  # below /dev: nvidia0, infiniband/uverbs0


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A libfabric that was found."""

    path: str
    version: str
    why_not: str = ""  # it is not the one in use


@dataclasses.dataclass(frozen=True, slots=True)
class Library:
    path: str = ""
    version: str = ""
    error: str = ""  # why there is none
    candidates: tuple[Candidate, ...] = ()
    offers: tuple[tuple[str, str, str], ...] | None = None  # (provider, domain, address) of each NIC; None: it was not asked
    why_nothing: str = ""  # as libfabric has it, when there are no offers


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    pid: int
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Port:
    key: str  # the setting that names it
    address: str
    error: str = ""  # why it cannot be bound
    in_use: bool = False
    holder: Process | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RunDir:
    """RUN_DIR/NAME, where the control sockets lie."""

    path: str
    error: str = ""  # why a node of this user could not use it
    running: Process | None = None  # the node that has it
    stale: bool = False  # sockets of one that died lie there, which harms nothing


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Bytes."""

    free: int | None = None
    weights: int | None = None
    kv: int | None = None  # of the pool that the settings ask for; an upper bound where they ask for a share
    error: str = ""  # why the model cannot be sized


@dataclasses.dataclass(frozen=True, slots=True)
class Credential:
    key: str
    path: str
    mode: int | None  # None: it is not there, or not for this process to see
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Disk:
    what: str
    path: str
    free_bytes: int
    free_inodes: int  # -1: the file system has no such limit
    writable: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Clock:
    now: float  # seconds since 1970
    not_before: float  # this program is that old
    synchronised: bool | None = None
    why_unknown: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    topology: Topology
    findings: tuple[Finding, ...]
    role: str
    clock: Clock
    problems: tuple[Problem, ...] | None = None  # of the settings; None: there are none to look at
    settings: str = ""  # where they come from
    memlock: Limit | None = None
    open_files: Limit | None = None
    files_needed: int = 0  # open files without which a node with these settings does not start
    huge: HugePages = HugePages()
    driver: Driver = Driver()
    library: Library = Library()
    provider: str = "auto"  # that the settings ask for
    required: str = ""
    ports: tuple[Port, ...] = ()
    run_dir: RunDir | None = None
    model: str = ""  # the folder
    memory: Memory = Memory()
    credentials: tuple[Credential, ...] = ()
    disks: tuple[Disk, ...] = ()

    @property
    def is_rdma(self) -> bool:
        """Whether KV is to travel over NICs that need it locked: by what libfabric offers, else by what there is."""
        if self.provider == "tcp":
            return False
        if self.library.offers is not None:
            return any(provider != "tcp" for provider, _, _ in self.library.offers)
        return any(nic.usable for nic in self.topology.rdma_nics)
