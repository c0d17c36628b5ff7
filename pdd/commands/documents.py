"""The documents that commands print and no daemon answers, for the JSON Schemas in docs/api alone.

The commands build them as plain dictionaries, because `pdd status` must start without msgspec; a test holds the two
together.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pdd.findings import Finding


class Error(msgspec.Struct, frozen=True, kw_only=True):
    """On stderr, with --json."""

    schema: str = "pdd.error/1"
    id: str
    message: str
    hint: str
    docs: str


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    """What a node started from here would have."""

    protocol: str
    libfabric: str | None
    torch: str | None
    cuda: str | None
    driver: str | None


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """Of the client and what is installed with it, and of the daemon where there is one."""

    schema: str = "pdd.version/1"
    client: str
    daemon: str | None
    api: str | None
    name: str | None = None
    boot_id: str | None = None
    protocol: str | None = None  # from here on the daemon's
    libfabric: str | None = None
    torch: str | None = None
    cuda: str | None = None
    driver: str | None = None
    installed: Installed


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    value: Any
    origin: str  # default, FILE:LINE:COLUMN, env VARIABLE, or a flag


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """By section.key."""

    schema: str = "pdd.config/1"
    settings: dict[str, Setting]


class Variables(msgspec.Struct, frozen=True, kw_only=True):
    """Settings as the environment has them."""

    schema: str = "pdd.config_env/1"
    variables: dict[str, str]


class ConfigProblem(msgspec.Struct, frozen=True, kw_only=True):
    file: str | None
    line: int | None
    column: int | None
    key: str  # a list's entry has its number, from 0: peers.static[1]
    message: str
    suggestion: str | None
    level: Literal["error", "warning"] = "error"  # a node starts in spite of a warning
    id: str = "E780"
    hint: str = ""


class ConfigCheck(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "pdd.config_check/1"
    file: str  # empty: the one that serve would read
    problems: tuple[ConfigProblem, ...]


class ModelImport(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "pdd.model_import/1"
    directory: str
    sha256: str


class BundleEntry(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # in the archive
    bytes: int


class BundleLack(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    why: str


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """What `pdd bundle` packed; manifest.json in the archive says the same."""

    schema: str = "pdd.bundle/1"
    path: str
    bytes: int  # of the archive; 0 in the manifest
    client: str  # version of the program that packed it
    redacted: bool
    entries: tuple[BundleEntry, ...]
    missing: tuple[BundleLack, ...]
    redactions: dict[str, int]  # what was hidden, how often


class ModelGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One size of a rank group. All bytes are of one rank, all layers."""

    tp: int
    refused: tuple[str, ...]  # why the model does not divide so; then the rest is 0
    fits: bool  # this machine, all ranks on it
    param_bytes: int  # of the rank that has most
    kv_token_bytes: int
    page_bytes: int
    num_pages: int  # of every rank, the most that fit this machine
    missing_bytes: int  # that the weights need beyond what is free


class ModelCheck(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "pdd.model_check/1"
    model: str  # the folder or the file
    family: str
    parameters: int  # values of the weights that are used
    dtype: str
    num_layers: int
    max_context: int  # tokens
    file_bytes: int | None  # of the weights that are used; null: only config.json is there
    unused_tensors: int  # that stay in the files
    unused_bytes: int
    kv_token_bytes: int  # of the whole model
    page_size: int  # tokens
    page_bytes: int  # of the whole model
    free_bytes: int  # of this machine
    memory_fraction: float  # of what the weights leave, for KV
    fits: bool  # in one of these ways
    groups: tuple[ModelGroup, ...]


class TopologyCheck(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "pdd.topology_check/1"
    findings: tuple[Finding, ...]


class TopologyExport(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "pdd.topology_export/1"
    path: str
    entries: int  # files and links in the archive


class TopologyNuma(msgspec.Struct, frozen=True, kw_only=True):
    node: int
    cpus: str  # a list as the kernel writes it: 0-3,8
    package: int | None


class TopologySwitch(msgspec.Struct, frozen=True, kw_only=True):
    pci: str
    devices: tuple[str, ...]  # PCI addresses


class TopologyGpu(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    vendor: str
    model: str | None
    uuid: str | None
    pci: str
    numa: int | None
    cpus: str | None
    switch: str | None


class TopologyNic(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    rdma: str | None
    netdev: str | None
    kind: str
    state: str
    usable: bool
    rate_bits_per_second: int | None
    gid: str | None
    gid_index: int | None
    pci: str | None
    numa: int | None
    switch: str | None


class TopologyLink(msgspec.Struct, frozen=True, kw_only=True):
    """NVLink or xGMI."""

    gpu: str
    target: str  # a PCI address, or cpu
    target_kind: Literal["gpu", "switch", "cpu"]
    count: int | None
    bytes_per_second: int | None


class TopologyPair(msgspec.Struct, frozen=True, kw_only=True):
    gpu: int
    nic: str
    path: Literal["PIX", "PXB", "PHB", "NODE", "SYS"]
    chosen: bool
    why: str


class TopologyRail(msgspec.Struct, frozen=True, kw_only=True):
    """What one device uses."""

    gpu: int | None  # null: the host's own
    nics: tuple[str, ...]
    path: Literal["PIX", "PXB", "PHB", "NODE", "SYS"] | None
    numa: int | None
    cpus: str
    worker_cpus: str
    why: str


class TopologyPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank runs."""

    rank: int  # of the node, counted through all its engines
    numa: int | None  # where it and its memory are kept; null: nowhere in particular
    cpus: str | None  # null: any
    threads: int


class TopologyPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank group of a node uses."""

    device: int | None  # a GPU's index; null: the CPUs
    ranks: tuple[int, ...]
    provider: str | None  # of libfabric; null: it was not asked
    nics: tuple[str, ...]
    bind: tuple[str, ...]  # names that libfabric is asked for; none: its own choice
    rate_bits_per_second: int | None
    numa: int | None  # where the worker is kept; null: nowhere in particular
    memory: str
    worker_cpus: str | None  # null: any
    rank_cpus: str | None  # of all of them together; null: any
    threads: int  # of each
    places: tuple[TopologyPlace, ...]  # of each rank
    why: tuple[str, ...]


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """What `pdd topology` found. What is not known is null."""

    schema: str = "pdd.topology/1"
    host: str
    source: tuple[str, ...]
    cpus: str
    numa: tuple[TopologyNuma, ...]
    switches: tuple[TopologySwitch, ...]
    gpus: tuple[TopologyGpu, ...]
    nics: tuple[TopologyNic, ...]
    links: tuple[TopologyLink, ...]
    pairs: tuple[TopologyPair, ...]
    rails: tuple[TopologyRail, ...]
    placement: tuple[TopologyPlacement, ...] | None  # null: of a machine that no node runs on
    findings: tuple[Finding, ...]


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of what `pdd top --record` writes."""

    schema: str = "pdd.recording/1"
    started_at: float  # seconds since 1970
    nodes: tuple[str, ...]


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """Each other line: one of pdd.events/1, or why there was none."""

    at: float  # seconds since the beginning
    node: str
    line: dict[str, Any] | None = None
    lost: str | None = None
