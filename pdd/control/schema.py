"""The documents of the control API: what `pdd status --json` and its like print, and what /v1 answers.

Every document names its schema, `pdd.<name>/1`. Within a version fields are only added; clients ignore what they do
not know. Names carry units (`_seconds`, `_bytes`); unknown is null. Totals are monotonic within one `boot_id`. Epochs
are 16 hex digits, because JSON readers round large integers.
"""

from __future__ import annotations

import msgspec

from pdd.findings import Finding

API_VERSION = "1.0"  # header Pdd-Api; the major is the /v1 of the paths


def epoch_text(epoch: int) -> str:
    """A node's 64-bit epoch as documents show it."""
    return f"{epoch:016x}"


# -- pdd.status/1 ------------------------------------------------------------------------------------------------------
class Pages(msgspec.Struct, frozen=True, kw_only=True):
    """The pool. The parts add up to `total` in every document."""

    total: int = 0
    free: int = 0
    cached: int = 0
    reserved: int = 0  # wait for a prefiller's writes
    running: int = 0
    sending: int = 0  # prefilled here, pinned until every write is terminal
    quarantined: int = 0  # a write may still land


class Transfers(msgspec.Struct, frozen=True, kw_only=True):
    """What this node wrote to others, and what it counted from them."""

    writes: int = 0
    bytes: int = 0
    units: int = 0
    active: int = 0  # transfer sets of this node with writes not yet terminal
    attempts: int = 0  # of a decoder: tries at the KV of a prompt that are not settled
    prefills: int = 0  # of a prefiller: prompts of decoders in hand
    failed: int = 0  # attempts and prefills that did not complete, those left out that were only cancelled
    units_received: int = 0
    bytes_received: int = 0
    stale_units: int = 0  # arrived for a key that is not in use


class Fences(msgspec.Struct, frozen=True, kw_only=True):
    """What holds pages back after links have ended, and whether the books of the pool agree. Healthy: all 0 and null,
    but for milliseconds after a link has ended."""

    pending: int = 0  # links that have ended and are not fenced
    oldest_seconds: float | None = None  # since the first of those ended
    overdue: int = 0  # of those: the log has an alarm
    alarms: int = 0  # links in this life of the daemon that were overdue
    oldest_quarantine_seconds: float | None = None  # of the pages that are quarantined (pages.quarantined)
    integrity_failures: int = 0  # checks of the pool's books that failed, in this life of the daemon


class PeerLoad(msgspec.Struct, frozen=True, kw_only=True):
    queued_tokens: int = 0
    running: int = 0
    free_pages: int = 0


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """One link. A decoder lists its prefillers, a prefiller the decoders connected to it."""

    name: str
    role: str
    state: str  # connecting, up, suspect, down, draining, incompatible, auth
    epoch: str | None = None
    via: str | None = None  # what carries KV: a fabric provider, or "local": memory that both nodes of one host see
    load: PeerLoad | None = None  # of a prefiller that is linked; decoders say nothing of theirs
    address: str | None = None
    rtt_seconds: float | None = None
    since_seconds: float | None = None  # time in this state
    error: str | None = None  # why it is not up


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    bytes_per_second: float = 0.0
    bytes_received_per_second: float = 0.0
    writes_per_second: float = 0.0
    generated_tokens_per_second: float = 0.0
    prompt_tokens_per_second: float = 0.0
    steps_per_second: float = 0.0


class RateWindows(msgspec.Struct, frozen=True, kw_only=True):
    one_second: Rates = msgspec.field(name="1s", default_factory=Rates)
    ten_seconds: Rates = msgspec.field(name="10s", default_factory=Rates)


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Of the last `window_seconds`, exact to 5 %; null where nothing was observed in it. /metrics has the whole life."""

    window_seconds: float = 60.0
    ttft_p50_seconds: float | None = None
    ttft_p99_seconds: float | None = None
    itl_p50_seconds: float | None = None
    itl_p99_seconds: float | None = None
    kv_wait_p50_seconds: float | None = None
    kv_wait_p99_seconds: float | None = None


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    heartbeat_age_seconds: float | None = None  # of the turn in hand; 0 while idle
    num_layers: int = 0
    step_seconds: float = 0.0  # of all forward passes
    overhead_seconds: float = 0.0  # of the engine thread between passes, idle time left out
    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0  # of the requests taken from clients; on a prefiller, those computed
    generated_tokens: int = 0
    cached_tokens: int = 0


class EngineGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of the node: ranks that step together over a page pool of their own. The node's totals are the sums."""

    index: int
    ranks: int = 0  # how many
    running: int = 0
    waiting: int = 0
    waiting_for_kv: int = 0
    batch_size: int = 0
    queued_prefill_tokens: int = 0  # of prompts, still to be computed here
    pages: Pages = Pages()
    steps: int = 0
    heartbeat_age_seconds: float = 0.0  # of the turn in hand; 0 while idle


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank process, as it said when it was ready."""

    group: int = 0  # index of its engine
    rank: int
    pid: int
    attention: str  # the decode kernel in use: native or torch
    threads: int
    dtype: str  # of weights and KV
    param_bytes: int
    kv_bytes: int
    load_seconds: float


class FabricNic(msgspec.Struct, frozen=True, kw_only=True):
    domain: str  # as libfabric calls it
    address: str | None = None
    nic: str | None = None  # as the topology calls it
    rate_bits_per_second: int | None = None


class FabricInfo(msgspec.Struct, frozen=True, kw_only=True):
    provider: str | None = None
    library: str | None = None
    library_version: str | None = None
    domains: tuple[str, ...] = ()
    nics: tuple[FabricNic, ...] = ()  # in the order of domains
    line_rate_bytes_per_second: float | None = None  # of all NICs together; null when one is not known


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The node in one document."""

    schema: str = "pdd.status/1"
    name: str
    role: str
    state: str  # starting, loading, ready, not_ready, draining, drained, stopping
    epoch: str
    boot_id: str  # changes with every life of the daemon
    version: str
    model: str | None = None
    pid: int | None = None
    api: str | None = None  # address of the HTTP port
    peer_listen: str | None = None
    reasons: tuple[str, ...] = ()  # why the state is not ready
    phase: str | None = None  # of the start
    progress: float | None = None  # of the phase, 0 to 1
    drain_seconds_left: float | None = None  # until what still runs is failed
    uptime_seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    waiting_for_kv: int = 0
    batch_size: int = 0
    max_batch_size: int = 0  # of all engines together, as batch_size is
    page_size: int = 0
    pages: Pages = Pages()
    fences: Fences = Fences()
    transfers: Transfers = Transfers()
    peers: tuple[Peer, ...] = ()
    rates: RateWindows = RateWindows()
    latency: Latency = Latency()
    engine: EngineHealth = EngineHealth()
    fabric: FabricInfo = FabricInfo()
    groups: tuple[EngineGroup, ...] = ()
    ranks: tuple[Rank, ...] = ()
    findings: tuple[Finding, ...] = ()


# -- the other documents -----------------------------------------------------------------------------------------------
class PageNeed(msgspec.Struct, frozen=True, kw_only=True):
    have: int  # computed here, or counted from a prefiller
    need: int


class RequestTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """What one request moved: counted on a decoder, written on a prefiller."""

    pages: int
    units: int  # of all layers and ranks: what the immediates count
    writes: int | None = None  # the prefiller's; merged pages share one
    bytes: int = 0
    via: str | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request, live or lately finished.

    `prompt` is filled for a single request, and only when debug.show_prompts allows it.
    """

    id: str  # HEX, or HEX-INDEX where the answer has several choices
    state: str  # a RequestState value
    age_seconds: float
    state_age_seconds: float | None = None
    peer: str | None = None
    attempt: int | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    pages: PageNeed | None = None
    why: str | None = None  # what it waits for, or why it failed: a sentence for people
    prompt: tuple[int, ...] | None = None
    kind: str = "generate"  # or prefill (for a decoder), attempt (its request is gone, its pages are not)
    attempts: int = 0  # at the KV, failed ones included
    reason: str | None = None  # of a finished one
    queue_seconds: float | None = None  # until its pages were pinned
    prefill_seconds: float | None = None  # decoder: asking to whole; prefiller: first chunk to last
    exposed_seconds: float | None = None  # prefiller: of the transfer, what compute did not hide
    hidden_ratio: float | None = None
    first_token_seconds: float | None = None
    transfer: RequestTransfer | None = None
    client_request_id: str | None = None  # the X-Request-Id that the client sent
    group: int | None = None  # index of the engine that has it


class OneRequest(Request, frozen=True, kw_only=True):
    """What /v1/requests/{id} answers."""

    schema: str = "pdd.request/1"


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a DELETE; the same one again finds the same end."""

    schema: str = "pdd.cancel/1"
    ids: tuple[str, ...]  # of the choices that were live, else those that had ended before
    cancelled: bool  # false: all had ended before


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "pdd.requests/1"
    counts: dict[str, int] = {}  # state → requests
    requests: tuple[Request, ...] | None = None  # null on the status socket


class Peers(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "pdd.peers/1"
    peers: tuple[Peer, ...] = ()


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """What went over one link in one direction."""

    peer: str
    direction: str  # out, in
    via: str | None = None
    nic: str | None = None  # of this side; several are joined by "+"
    state: str | None = None  # of the link, as in Peer; down: there is none
    writes: int = 0
    bytes: int = 0
    units: int = 0
    inflight: int = 0  # attempts or prefills that are not settled
    failed: int = 0
    p50_seconds: float | None = None  # of the latest transfers
    p99_seconds: float | None = None


class TransferList(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "pdd.transfers/1"
    totals: Transfers = Transfers()
    transfers: tuple[Transfer, ...] = ()


class LogRecord(msgspec.Struct, frozen=True, kw_only=True):
    seq: int  # 1, 2, 3, ... in one life of the daemon
    ts: float  # seconds since 1970
    level: str  # debug, info, warning, error, critical
    component: str
    message: str
    fields: dict[str, str | int | float | bool | None] = {}
    trace: str | None = None


class Logs(msgspec.Struct, frozen=True, kw_only=True):
    """The latest log records, the oldest first."""

    schema: str = "pdd.logs/1"
    boot_id: str = ""
    missed: int = 0  # records after the one asked for that are not kept any more
    records: tuple[LogRecord, ...] = ()


class WaterfallCell(msgspec.Struct, frozen=True, kw_only=True):
    """One layer of one chunk. Seconds since the beginning of the transfer; null: not yet, or not known on this side."""

    chunk: int
    layer: int
    compute_begin_seconds: float | None = None
    compute_end_seconds: float | None = None  # the layer counter moved
    armed_seconds: float | None = None
    posted_seconds: float | None = None  # the first write
    landed_seconds: float | None = None  # the last completion, on a decoder the last unit


class Waterfall(msgspec.Struct, frozen=True, kw_only=True):
    """The transfer of one prompt, layer by chunk. As the topic `waterfall` of an event stream: the latest that ended."""

    schema: str = "pdd.waterfall/1"
    id: str  # of the request, as in pdd.request/1
    peer: str | None = None
    direction: str | None = None  # out, in
    tokens: int = 0
    bytes: int = 0
    seconds: float | None = None  # from its beginning to whole
    exposed_seconds: float | None = None
    hidden_ratio: float | None = None
    cells: tuple[WaterfallCell, ...] = ()


class ThreadStack(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    frames: tuple[str, ...]  # "file:line function", the innermost last


class Stacks(msgspec.Struct, frozen=True, kw_only=True):
    """Where the daemon's Python threads and the tasks of its main loop are; not its ranks. No values, no arguments."""

    schema: str = "pdd.stacks/1"
    pid: int
    threads: tuple[ThreadStack, ...] = ()
    tasks: tuple[ThreadStack, ...] = ()


class Version(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "pdd.version/1"
    daemon: str
    api: str = API_VERSION
    name: str | None = None
    boot_id: str | None = None
    protocol: str | None = None  # of peers: "1", or the oldest and newest as "1-2"
    libfabric: str | None = None  # that it opened
    torch: str | None = None
    cuda: str | None = None  # that torch was built for
    driver: str | None = None  # NVIDIA's, in the kernel


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """RFC 9457, with pdd's error id and hint."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    id: str
    hint: str = ""
    supported: tuple[str, ...] = ()  # API versions, for an unknown one
