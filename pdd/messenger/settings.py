"""What a node's operator may set about its links and prefills. All times in seconds."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class LinkSettings:
    """`dead_after` must exceed `suspect_after`, and that one two heartbeats."""

    heartbeat: float = 0.5
    suspect_after: float = 1.5
    dead_after: float = 5.0
    connect_timeout: float = 5.0  # of a dial, of a handshake, and of waiting for a prefiller that went away but may be there


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderSettings:
    prefill_stall_timeout: float = 30.0  # without any progress of an attempt
    max_attempts: int = 3  # per request, failed ones
    local_fallback: bool = False  # whether this node may prefill what no prefiller could


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillLimits:
    max_jobs_per_link: int = 1024
