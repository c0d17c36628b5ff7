"""Every metric of a node, in a registry of its own, and the text that Prometheus scrapes.

Two kinds. What some part already counts (pages, writes, tokens) is not counted again: that part publishes a
`Snapshot`, and `SnapshotCollector` turns it into families at scrape time. What only happens here (a latency, an
outcome) is observed into the histograms and counters of `Metrics`. Label sets that are known beforehand exist at zero
from the start: a panel is never empty. No request id, no client text is ever a label, and the number of peers that name
themselves is bounded by who makes the snapshot. Names and label values are part of pdd's interface.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdd.metrics_vllm import WithVllmNames

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second time series per counter that nothing reads

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PAGE_STATES = ("free", "cached", "reserved", "running", "sending", "quarantined")
DIRECTIONS = ("out", "in")  # out: this node's writes; in: units that arrived here
OUTCOMES = ("stop", "length", "abort", "error")
FAILURE_REASONS = ("no_prefiller", "refused", "failed", "cancelled", "stalled", "peer_lost", "overrun")
PROVIDERS = ("efa", "verbs", "tcp")
FALLBACKS = ("prefiller", "local", "error")  # where a request goes whose remote attempt failed

# A step of a small model on a GPU, and the wait of a request at an idle node, take a part of a millisecond.
_LATENCY_BUCKETS = (
    100e-6, 250e-6, 500e-6, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120,
)  # fmt: skip
# An RDMA write of a layer takes microseconds; a long prompt over tcp takes seconds.
_TRANSFER_BUCKETS = (
    10e-6,
    25e-6,
    50e-6,
    100e-6,
    250e-6,
    500e-6,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
)
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)


@dataclasses.dataclass(frozen=True, slots=True)
class LinkTotals:
    """What went over one link (a peer on a NIC), since this life of the node began."""

    peer: str
    nic: str  # the NICs of this side, joined by "+"
    direction: str  # one of DIRECTIONS
    bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class GroupTotals:
    """One engine of the node."""

    pages: Mapping[str, int] = dataclasses.field(default_factory=dict)  # state → pages; absent: 0
    running: int = 0
    waiting: int = 0
    waiting_for_kv: int = 0
    steps: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """What the owners of the state have published. Totals never fall within one life of the node."""

    pages: Mapping[str, int] = dataclasses.field(default_factory=dict)  # state → pages; absent: 0
    pages_total: int = 0
    running: int = 0
    waiting: int = 0
    waiting_for_kv: int = 0
    batch_size: int = 0
    prompt_tokens: int = 0  # totals from here
    generation_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    writes: int = 0
    bytes: int = 0
    units: int = 0
    units_received: int = 0
    stale_units: int = 0
    transfers_active: int = 0  # now
    sets_failed: int = 0  # prefills for decoders that failed
    failures: Mapping[str, int] = dataclasses.field(default_factory=dict)  # reason → attempts or prefills
    fallbacks: Mapping[str, int] = dataclasses.field(default_factory=dict)  # one of FALLBACKS → requests
    attempts: int = 0  # at remote KV
    attempts_open: int = 0  # now: attempts whose pages wait for writes
    attempts_expired: int = 0  # ended by a deadline
    cancels: int = 0
    fences: int = 0
    fences_pending: int = 0  # now: links that have ended and are not fenced
    fence_age: float = 0.0  # seconds, of the oldest of those
    fence_alarms: int = 0  # links whose fence was overdue
    quarantine_age: float = 0.0  # seconds, of the oldest pages in quarantine
    integrity_failures: int = 0  # checks of the pool's books that failed
    prefills: int = 0  # taken for decoders
    engine_heartbeat_age: float = 0.0  # seconds that the turn in hand has run; 0 while idle
    peers: Mapping[str, bool] = dataclasses.field(default_factory=dict)  # address dialled, or name of who called → up
    links: Sequence[LinkTotals] = ()
    groups: Sequence[GroupTotals] = ()  # whose sums the totals are
    nic_utilization: Mapping[str, float] = dataclasses.field(default_factory=dict)  # NICs → share of their line rate


class SnapshotCollector(Collector):
    """Families made from the latest snapshot. Holds no numbers of its own."""

    def __init__(self, source: Callable[[], Snapshot], peers: Sequence[str], num_groups: int) -> None:
        self._source = source
        self.peers = tuple(peers)
        self._num_groups = num_groups

    def collect(self) -> Iterator[Metric]:
        now = self._source()
        yield _labelled(
            GaugeMetricFamily("pdd_kv_pages", "Pages of the pool by state.", labels=["state"]),
            [((state,), now.pages.get(state, 0)) for state in PAGE_STATES],
        )
        yield GaugeMetricFamily("pdd_kv_pool_pages", "Pages of the pool.", now.pages_total)
        free = now.pages.get("free", 0) + now.pages.get("cached", 0)
        used = (now.pages_total - free) / now.pages_total if now.pages_total else 0.0
        yield GaugeMetricFamily("pdd_kv_cache_usage_ratio", "Share of the pool that cannot be handed out now.", used)
        for name, text, value in (
            ("requests_running", "Requests in the batch.", now.running),
            ("requests_waiting", "Requests that wait for pages or a slot.", now.waiting),
            ("requests_waiting_for_kv", "Requests that wait for KV from a prefiller.", now.waiting_for_kv),
            ("batch_size", "Requests in the last step.", now.batch_size),
            ("kv_transfers_active", "Transfer sets with writes not yet terminal.", now.transfers_active),
            ("kv_leases", "Attempts whose pages wait for a prefiller's writes.", now.attempts_open),
            ("kv_fences_pending", "Links that have ended and are not fenced yet.", now.fences_pending),
            ("kv_fence_age_seconds", "Since the first of those links ended; 0: none.", now.fence_age),
            ("kv_quarantine_age_seconds", "Since the first of the quarantined pages was; 0: none.", now.quarantine_age),
            ("engine_heartbeat_age_seconds", "Time that the turn in hand of the engine has run.", now.engine_heartbeat_age),
        ):
            yield GaugeMetricFamily(f"pdd_{name}", text, value)
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of requests of clients; of a prefiller, computed.", now.prompt_tokens),
            ("generation_tokens", "Tokens generated.", now.generation_tokens),
            ("preemptions", "Requests thrown out of the batch for pages.", now.preemptions),
            ("engine_steps", "Forward steps.", now.steps),
            ("kv_transfer_writes", "Writes posted.", now.writes),
            ("kv_transfer_units", "Units of the writes posted.", now.units),
            ("kv_transfer_units_received", "Units counted by immediates.", now.units_received),
            ("kv_stale_units", "Units that named a key not in use.", now.stale_units),
            ("kv_transfer_sets_failed", "Prefills for decoders that failed; cancels left out.", now.sets_failed),
            ("kv_attempts", "Tries at the KV of a prompt from a prefiller.", now.attempts),
            ("kv_leases_expired", "Attempts ended by a deadline.", now.attempts_expired),
            ("kv_cancels", "Attempts cancelled at a prefiller.", now.cancels),
            ("kv_fences", "Links ended because the fate of a write was unknown.", now.fences),
            ("kv_fence_alarms", "Links whose fence did not come in time.", now.fence_alarms),
            ("kv_integrity_failures", "Checks of the page pool's books that failed.", now.integrity_failures),
            ("kv_prefills", "Prompts taken for decoders.", now.prefills),
        ):
            yield CounterMetricFamily(f"pdd_{name}", text, value)
        yield _labelled(
            CounterMetricFamily(
                "pdd_kv_transfer_failures",
                "Attempts (on a decoder) and prefills for decoders that did not complete, by why.",
                labels=["reason"],
            ),
            [((reason,), now.failures.get(reason, 0)) for reason in FAILURE_REASONS],
        )
        yield _labelled(
            CounterMetricFamily(
                "pdd_kv_fallback", "Requests whose remote attempt failed, by where they went.", labels=["from", "to"]
            ),
            [(("remote", to), now.fallbacks.get(to, 0)) for to in FALLBACKS],
        )
        yield _labelled(
            GaugeMetricFamily("pdd_peer_up", "Whether the peer takes work.", labels=["peer"]),
            [((peer,), float(now.peers.get(peer, False))) for peer in dict.fromkeys([*self.peers, *now.peers])],
        )
        yield _labelled(
            GaugeMetricFamily(
                "pdd_nic_link_utilization_ratio",
                "Share of the line rate in use, of NICs whose rate is known.",
                labels=["nic"],
            ),
            [((nic,), share) for nic, share in now.nic_utilization.items()],
        )
        links = {(link.peer, link.nic, link.direction): link.bytes for link in now.links}
        for direction in DIRECTIONS:  # the sum over all peers is there before any peer is
            links.setdefault(("", "", direction), 0)
        yield _labelled(
            CounterMetricFamily(
                "pdd_kv_transfer_bytes", "KV bytes by peer and NIC.", labels=["peer", "nic", "direction"]
            ),
            links.items(),
        )
        yield from self._of_groups(now.groups)

    def _of_groups(self, groups: Sequence[GroupTotals]) -> Iterator[Metric]:
        """As many groups as the config says, before they are there, too."""
        known = [*groups, *(GroupTotals() for _ in range(self._num_groups - len(groups)))]
        yield _labelled(
            GaugeMetricFamily("pdd_group_kv_pages", "Pages of one group's pool by state.", labels=["group", "state"]),
            [((str(index), state), each.pages.get(state, 0)) for index, each in enumerate(known) for state in PAGE_STATES],
        )
        states = (("running", "running"), ("waiting", "waiting"), ("wait_kv", "waiting_for_kv"))
        yield _labelled(
            GaugeMetricFamily("pdd_group_requests", "Requests of one group by state.", labels=["group", "state"]),
            [((str(index), state), getattr(each, name)) for index, each in enumerate(known) for state, name in states],
        )
        yield _labelled(
            CounterMetricFamily("pdd_group_engine_steps", "Forward steps of one group.", labels=["group"]),
            [((str(index),), each.steps) for index, each in enumerate(known)],
        )


_Family = GaugeMetricFamily | CounterMetricFamily


def _labelled(family: _Family, samples: Iterable[tuple[Sequence[str], float]]) -> Metric:
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


class Metrics:
    """The registry of one node. Owner: the main loop; observers may call from any thread."""

    def __init__(
        self,
        *,
        name: str = "",
        role: str = "",
        model: str = "",
        version: str = "",
        peers: Sequence[str] = (),
        compat: Sequence[str] = (),
        groups: int = 1,
    ) -> None:
        """`peers`: the addresses that are dialled. `compat`: whose names are written beside ours ("vllm"). `groups`:
        engines that the node has."""
        self.registry = CollectorRegistry()
        self._written: Collector = WithVllmNames(self.registry, model) if "vllm" in compat else self.registry
        self._source: Callable[[], Snapshot] = Snapshot
        self._collector = SnapshotCollector(lambda: self._source(), peers, groups)
        self.registry.register(self._collector)
        Gauge(
            "pdd_build_info",
            "Always 1; what runs is in the labels.",
            ["version", "role", "name", "model"],
            registry=self.registry,
        ).labels(version, role, name, model).set(1)
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From request to first token.", _LATENCY_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a request.", _LATENCY_BUCKETS
        )
        self.request_latency = self._histogram(
            "e2e_request_latency_seconds", "From request to last token.", _LATENCY_BUCKETS
        )
        self.queue_time = self._histogram(
            "request_queue_seconds", "From request to its first step or remote attempt.", _LATENCY_BUCKETS
        )
        self.step_seconds = self._histogram("engine_step_seconds", "Wall time of a forward step.", _LATENCY_BUCKETS)
        self.step_batch_size = self._histogram("step_batch_size", "Requests per step.", _BATCH_BUCKETS)
        self.kv_transfer = Histogram(
            "pdd_kv_transfer_seconds",
            "From asking (in) or first arming (out) to the last write.",
            ["direction", "via"],
            buckets=_TRANSFER_BUCKETS,
            registry=self.registry,
        )
        for via in PROVIDERS:
            self.sees_way(via)
        self.requests = self._counter(
            "requests", "Requests ended, by how.", ["outcome"], [(outcome,) for outcome in OUTCOMES]
        )
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens whose KV was reused.", [], [])

    def sees_way(self, via: str) -> None:
        """KV travels over `via`: its label sets exist from now on."""
        for direction in DIRECTIONS:
            self.kv_transfer.labels(direction, via)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"pdd_{name}", text, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, labels: Sequence[str], sets: Sequence[Sequence[str]]) -> Counter:
        counter = Counter(f"pdd_{name}", text, labels, registry=self.registry)
        for values in sets:
            counter.labels(*values)
        return counter

    def set_peers(self, peers: Sequence[str]) -> None:
        """The addresses that are dialled from now on: no others have a series of their own."""
        self._collector.peers = tuple(peers)

    def read_from(self, source: Callable[[], Snapshot]) -> None:
        """Sets who gives the snapshot at each scrape. It must return at once, and from any thread."""
        self._source = source

    def text(self) -> str:
        """All metrics in the Prometheus text format (CONTENT_TYPE)."""
        return generate_latest(self._written).decode()
