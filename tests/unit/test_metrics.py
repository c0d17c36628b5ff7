"""Every metric is there at zero, totals are shown once and as they are, and names keep Prometheus' rules."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

from pdd.control import schema
from pdd.kv.pool import PageState
from pdd.metrics import (
    DIRECTIONS,
    FAILURE_REASONS,
    FALLBACKS,
    OUTCOMES,
    PAGE_STATES,
    LinkTotals,
    Metrics,
    Snapshot,
)

PROMISED = (
    "requests_running",
    "requests_waiting",
    "requests_waiting_for_kv",
    "batch_size",
    "kv_cache_usage_ratio",
    "prompt_tokens_total",
    "generation_tokens_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "kv_transfer_seconds",
    "kv_transfer_bytes_total",
    "kv_transfer_writes_total",
    "kv_transfer_units_total",
    "kv_leases",
    "kv_transfer_failures_total",
    "kv_leases_expired_total",
    "kv_fallback_total",
    "peer_up",
    "engine_heartbeat_age_seconds",
    "build_info",
    "kv_pages",
    "group_kv_pages",
    "group_requests",
    "group_engine_steps_total",
)


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(metrics.text()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} comes twice"
            found[key] = sample.value
    return found


def test_everything_is_there_at_zero() -> None:
    found = samples(Metrics(name="d0", role="decode", peers=["p0"]))
    names = {name for name, _ in found}
    for name in PROMISED:
        assert {f"pdd_{name}", f"pdd_{name}_bucket"} & names, name
    text = Metrics().text()
    assert "# HELP pdd_nic_link_utilization_ratio" in text  # it has no value where no line rate is known
    assert "\npdd_nic_link_utilization_ratio" not in text
    nonzero = {key for key, value in found.items() if value and key[0] != "pdd_build_info"}
    assert nonzero == set()
    assert found["pdd_peer_up", (("peer", "p0"),)] == 0


def test_peers_that_are_no_longer_dialled_have_no_series() -> None:
    metrics = Metrics(peers=["p0", "p1"])
    metrics.set_peers(["p1", "p2"])
    assert {labels for name, labels in samples(metrics) if name == "pdd_peer_up"} == {(("peer", "p1"),), (("peer", "p2"),)}


def test_every_label_set_exists_before_its_first_event() -> None:
    metrics = Metrics()
    metrics.sees_way("odd")
    found = samples(metrics)
    for state in PAGE_STATES:
        assert ("pdd_kv_pages", (("state", state),)) in found
    for reason in FAILURE_REASONS:
        assert ("pdd_kv_transfer_failures_total", (("reason", reason),)) in found
    for outcome in OUTCOMES:
        assert ("pdd_requests_total", (("outcome", outcome),)) in found
    for direction in DIRECTIONS:
        for via in ("tcp", "efa", "odd"):
            assert ("pdd_kv_transfer_seconds_count", (("direction", direction), ("via", via))) in found
    for to in FALLBACKS:
        assert ("pdd_kv_fallback_total", (("from", "remote"), ("to", to))) in found


def test_the_states_of_pages_are_those_of_the_pool_and_the_documents() -> None:
    assert set(PAGE_STATES) == {state.value for state in PageState} | {"free"} == {*schema.Pages.__struct_fields__} - {"total"}


def test_totals_are_the_owners_own_numbers() -> None:
    metrics = Metrics()
    now = Snapshot(
        pages={"free": 3, "cached": 1, "running": 4}, pages_total=8, writes=10, bytes=4096, peers={"p1": True},
        links=[LinkTotals("p1", "eth0", "in", 4096)],
    )
    metrics.read_from(lambda: now)
    for _ in range(3):  # a scrape counts nothing
        found = samples(metrics)
    assert found["pdd_kv_transfer_writes_total", ()] == 10
    assert found["pdd_kv_pages", (("state", "running"),)] == 4
    assert sum(value for (name, _), value in found.items() if name == "pdd_kv_pages") == found["pdd_kv_pool_pages", ()]
    assert found["pdd_kv_cache_usage_ratio", ()] == 0.5
    assert found["pdd_peer_up", (("peer", "p1"),)] == 1
    assert found["pdd_kv_transfer_bytes_total", (("direction", "in"), ("nic", "eth0"), ("peer", "p1"))] == 4096


def test_a_transfer_of_fifty_microseconds_is_told_from_one_of_five_milliseconds() -> None:
    metrics = Metrics()
    metrics.kv_transfer.labels("in", "tcp").observe(40e-6)
    metrics.kv_transfer.labels("in", "tcp").observe(0.004)
    found = samples(metrics)
    bucket = ("pdd_kv_transfer_seconds_bucket", (("direction", "in"), ("le", "5e-05"), ("via", "tcp")))
    assert found[bucket] == 1


def test_names_and_help_keep_the_rules() -> None:
    for family in text_string_to_metric_families(Metrics().text()):
        assert re.fullmatch(r"pdd_[a-z0-9_]+", family.name)
        assert family.documentation.endswith("."), family.name
        assert (family.type == "counter") == any(sample.name.endswith("_total") for sample in family.samples), (
            family.name
        )


def test_two_nodes_in_one_process_do_not_meet() -> None:
    one, two = Metrics(), Metrics()
    one.requests.labels("stop").inc()
    assert samples(two)["pdd_requests_total", (("outcome", "stop"),)] == 0


def test_buckets_tell_microseconds_apart() -> None:
    metrics = Metrics()
    for seconds in (8e-6, 20e-6, 40e-6):
        metrics.kv_transfer.labels("in", "verbs").observe(seconds)
    for seconds in (80e-6, 200e-6, 400e-6):
        metrics.queue_time.observe(seconds)
    found = samples(metrics)
    for name, labels in (("pdd_kv_transfer_seconds", {"direction": "in", "via": "verbs"}), ("pdd_request_queue_seconds", {})):
        counts = {
            float(dict(each)["le"]): value for (sample, each), value in found.items()
            if sample == f"{name}_bucket" and labels.items() <= dict(each).items()
        }  # fmt: skip
        assert [counts[edge] for edge in sorted(counts)[:3]] == [1, 2, 3]


def test_vllm_names_are_there_only_when_asked_for() -> None:
    assert "vllm:" not in Metrics(model="m").text()
    asked = Metrics(model="m", compat=["vllm"])
    asked.read_from(lambda: Snapshot(running=3))
    found = samples(asked)
    assert found["vllm:num_requests_running", (("engine", "0"), ("model_name", "m"))] == found["pdd_requests_running", ()] == 3
    assert found["vllm:request_success_total", (("engine", "0"), ("finished_reason", "stop"), ("model_name", "m"))] == 0
