"""The document of `pdd plan transfer`, pdd.plan_transfer/1: what `dry_run` finds of one prompt between two layouts."""

from __future__ import annotations

import msgspec


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One end."""

    tp: int
    dp: int  # groups of tp ranks, each with the whole KV of its own requests
    page_size: int  # tokens
    copies: int  # ranks that hold the same head
    heads_per_rank: int
    page_bytes: int  # of one layer of one rank
    dtype: str


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """Why the two would refuse each other."""

    field: str
    source: str
    destination: str


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank writes to another, of one layer."""

    source_rank: int
    destination_rank: int  # of the group that has the request
    heads: str  # of the model, as in 0-3
    units: int
    nbytes: int
    writes_adjacent: int
    writes_scattered: int


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """Of all pairs together."""

    units: int
    nbytes: int
    writes_adjacent: int
    writes_scattered: int


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Of one kind of network with pages of one kind."""

    network: str
    pages: str  # adjacent, scattered
    bytes_per_write: float  # mean
    needs_bytes: int
    saturates: bool
    writes_per_second: int  # that one NIC can do
    layer_seconds: float
    request_seconds: float
    exposed_seconds: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`pdd plan transfer`. Of one request; a group of the decoder is as good as any other."""

    schema: str = "pdd.plan_transfer/1"
    family: str
    num_layers: int
    num_kv_heads: int
    tiles: int
    head_dim: int
    source: Side
    destination: Side
    refused: tuple[Refused, ...]
    prompt_tokens: int
    moved_tokens: int  # the last one is left to the decoder
    skip_tokens: int
    unit_tokens: int
    pairs: tuple[Pair, ...]
    layer: Amount
    request: Amount
    rank_flops: float
    rank_bits_per_second: float
    chunk_tokens: int
    layer_compute_seconds: float  # mean
    request_compute_seconds: float
    verdicts: tuple[Verdict, ...]
