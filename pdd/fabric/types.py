"""What the native fabric says, as types: capabilities, counters, events. Loads nothing native.

`engine.py` makes them of what nanobind returns; tests and simulations make them themselves. A field that native code
drops or whose type it changes is an error there, where it is read, not somewhere in a document.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import msgspec


class Nic(msgspec.Struct, frozen=True, kw_only=True):
    """What one NIC (a libfabric domain) really offers; it was opened to be sure."""

    provider: str  # as libfabric names it
    kind: str  # efa, verbs, tcp, shm
    wire: str  # what two ends must have in common
    fabric: str
    domain: str
    address: str  # "" where it has none to show
    library_version: str
    library_path: str
    imm_bytes: int
    addressing: Literal["offset", "virtual"]
    app_keys: bool
    local_mr: bool
    progress: str
    tx_size: int
    inject: int  # bytes
    iov_limit: int
    rma_iov_limit: int
    write_segments: int  # pieces that one write may be made of
    max_message: int  # bytes
    wait_fd: bool
    hmem: bool
    dmabuf: bool
    gpu_path: Literal["", "dmabuf", "hmem", "staged"]  # how GPU memory is reached; "": it is not asked for
    gpu_path_why: str  # why not better
    fence: Literal["endpoint", "none"]  # endpoint: closing one stops every write through it
    group: int = 0  # rail group of its fabric


class Caps(Nic, frozen=True, kw_only=True):
    """Of a fabric: those of its first NIC, and all of them."""

    nics: tuple[Nic, ...]


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one fabric; zeros where there is none. All but the last group are monotonic."""

    writes: int = 0
    bytes: int = 0
    units: int = 0
    units_received: int = 0
    completions: int = 0
    errors: int = 0
    stale_units: int = 0  # arrived for a key that is not in use
    merged: int = 0
    again: int = 0  # a NIC took nothing for now
    wakeups: int = 0
    nic_writes: tuple[int, ...] = ()

    active_transfers: int = 0
    inflight_writes: int = 0
    inflight_bytes: int = 0
    armed_plans: int = 0
    keys: int = 0
    endpoints: int = 0
    regions: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class TransferEnd:
    """What became of a transfer's units, and what it cost."""

    ok: int  # completed here, which proves nothing about arrival
    failed: int  # did not land and will not
    unknown: int  # may have landed, or may yet land until the peer fences
    error: str = ""  # the first reason
    writes: int = 0
    bytes: int = 0
    busy_seconds: float = 0.0
    exposed_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class ImmReached:
    """A key has counted what it was armed for."""

    key: int
    arrived: int


@dataclasses.dataclass(frozen=True, slots=True)
class ImmOverrun:
    """A key has counted more than that: the peer broke the protocol."""

    key: int
    arrived: int


@dataclasses.dataclass(frozen=True, slots=True)
class TransferDone:
    """Every write of a transfer is terminal. Once per transfer."""

    transfer: int
    end: TransferEnd


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointFailed:
    """Nothing is posted through it again; or, after `close_endpoint`, it would not close: no fence."""

    endpoint: int
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointClosed:
    """The fence: nothing lands through it any more."""

    endpoint: int


@dataclasses.dataclass(frozen=True, slots=True)
class FlightLayer:
    """What is remembered of one layer of an armed plan. Times in seconds of the monotonic clock; None: not yet."""

    layer: int
    ready: float | None  # the layer counter was seen to say so
    first_post: float | None
    last_post: float | None
    last_end: float | None  # of a write, however it ended
    posted: int  # units, those that the provider refused included
    ok: int
    failed: int
    unknown: int
    nics: tuple[int, ...]  # that it was posted on, numbered as in Caps.nics; -1: the way to peers on this host
    failed_nics: tuple[int, ...]
    in_flight: tuple[tuple[int, int], ...]  # (NIC, units) of writes that have not ended


@dataclasses.dataclass(frozen=True, slots=True)
class FlightPlan:
    """The writes that one step made sendable from one region here to one of the peer's, layer by layer."""

    transfer: int
    key: int
    src_region: int
    dst_region: int  # position in the peer's list
    first_value: int  # of the layer counter, when layer 0 is ready
    num_layers: int
    units: int  # of a layer
    armed: float
    layers: tuple[FlightLayer, ...]  # those not overwritten yet


@dataclasses.dataclass(frozen=True, slots=True)
class Arrivals:
    """When the units of a key came. Seconds of the monotonic clock; None: none."""

    expected: int  # 0: it was never armed
    units_per_mark: int
    first: float | None
    last: float | None
    marks: tuple[float | None, ...]  # mark i: the last arrival that raised the count to at most (i + 1) * units_per_mark


Event = ImmReached | ImmOverrun | TransferDone | EndpointFailed | EndpointClosed
