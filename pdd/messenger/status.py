"""Frozen snapshots of the messenger, for `status`, `peers`, `transfers` and `requests`. Plain data; ages in seconds."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from pdd.messenger.handshake import FieldDiff


@dataclasses.dataclass(frozen=True, slots=True)
class PeerStatus:
    """One peer, as this node sees it."""

    name: str  # as the peer calls itself, else its address
    address: str
    state: str  # connecting, up, suspect, incompatible, auth, down; of a decoder also closing
    age_seconds: float  # of that state
    last_error: str = ""
    epoch: int | None = None
    version: str = ""
    via: str = ""  # what carries KV: the fabric provider of this node's side, or "local"
    rtt_seconds: float | None = None
    draining: bool = False
    queued_tokens: int = 0
    running: int = 0
    free_pages: int = 0
    outstanding: int = 0  # attempts (decoder) or jobs (prefiller) of this peer in hand
    outstanding_tokens: int = 0
    diff: tuple[FieldDiff, ...] = ()  # fields that do not fit, when incompatible
    num_connects: int = 0  # links that came up in this node's life
    fence_error: str = ""  # why an ended link of it is not fenced and its pages stay quarantined; "" in good order


@dataclasses.dataclass(frozen=True, slots=True)
class AttemptStatus:
    attempt: int
    request_id: str
    state: str
    age_seconds: float  # of that state
    peer: str
    key: int | None
    num_tokens: int
    num_pages: int
    arrived_units: int  # now
    expected_units: int  # of all layers
    why: str
    fence_error: str = ""  # why its pages cannot be given back; "" in good order


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderCounters:
    """Monotonic."""

    attempts: int = 0
    whole: int = 0
    released: int = 0
    quarantined: int = 0
    retries: int = 0
    local_fallbacks: int = 0
    failed: int = 0  # requests given an error
    cancels: int = 0
    stalls: int = 0  # attempts given up for lack of progress
    overruns: int = 0
    fences: int = 0  # links this side ended because the fate of a write was unknown
    tokens: int = 0  # whose KV came whole
    bytes: int = 0  # of the units that attempts counted, whole or not, which are over


@dataclasses.dataclass(frozen=True, slots=True)
class JobStatus:
    request_id: str  # in this node's engine
    client_id: str  # the request's, on the decoder
    peer: str  # the decoder
    attempt: int
    state: str
    age_seconds: float  # of that state
    num_tokens: int
    computed_tokens: int  # of steps that have ended
    why: str
    received: float = 0.0  # by the node's clock; the two below too
    started: float | None = None
    computed: float | None = None
    transfer: int | None = None  # of the fabric
    units: int = 0  # when whole
    peer_tp: int = 1  # ranks of an engine of the decoder


@dataclasses.dataclass(frozen=True, slots=True)
class AttemptDone:
    """One try at the KV of a request is over, on the decoder. Times are of the node's clock."""

    request_id: str
    attempt: int
    peer: str  # "" when nobody was asked
    whole: bool
    why: str
    reason: str  # "" when whole; else one of metrics.FAILURE_REASONS
    asked: float | None
    finished: float
    units: int  # counted
    bytes: int  # that those stand for, and
    pages: int  # of this node
    via: str = ""  # what carried them
    key: int | None = None
    expected_units: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class JobDone:
    """One prefill for a decoder is over, on the prefiller. Times are of the node's clock."""

    request_id: str  # the decoder's
    attempt: int
    peer: str
    whole: bool
    reason: str  # "" when whole; else refused, failed, cancelled, peer_lost
    error: str  # "" when whole
    received: float
    started: float | None  # source pages pinned
    computed: float | None  # the last chunk's step ended
    finished: float
    num_tokens: int
    units: int  # written
    writes: int
    bytes: int
    busy_seconds: float  # with writes queued or in flight
    exposed_seconds: float  # of it, after the last layer
    pages: int  # of this node whose KV was written in all layers, or as good as that
    via: str = ""  # what carried them
    job_id: str = ""  # of this node's engine
    transfer: int | None = None  # of the fabric
    expected_units: int = 0  # when whole
    failed_units: int = 0
    unknown_units: int = 0
    computed_tokens: int = 0
    peer_tp: int = 1  # ranks of an engine of the decoder


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillerCounters:
    """Monotonic."""

    jobs: int = 0
    whole: int = 0
    refused: int = 0  # those that never became a job, too
    cancelled: int = 0
    failed: int = 0
    peer_lost: int = 0
    units_ok: int = 0
    units_failed: int = 0
    units_unknown: int = 0
    tombstones: int = 0


C = TypeVar("C", DecoderCounters, PrefillerCounters)


def added(counters: C, **amounts: int) -> C:
    """New counters with `amounts` more; whoever read the old ones keeps a consistent copy."""
    return dataclasses.replace(counters, **{name: getattr(counters, name) + n for name, n in amounts.items()})
