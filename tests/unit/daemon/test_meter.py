"""What parts report becomes numbers once, under names that are bounded."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest

from pdd.config_load import load
from pdd.daemon.flows import IN, MOST_NAMES, OTHER, OUT, Flows, Names
from pdd.daemon.latency import Latencies
from pdd.daemon.ledger import Ledger
from pdd.daemon.meter import Meter
from pdd.daemon.node import Node
from pdd.fabric.types import Stats
from pdd.messenger.fencing import Fencing
from pdd.messenger.status import AttemptDone, DecoderCounters, JobDone, PeerStatus, PrefillerCounters
from pdd.metrics import Metrics

WHOLE = AttemptDone("r", 7, "p0", True, "whole", "", 1.0, 1.5, 28, 4096, 7, "tcp")
JOB = JobDone("r", 7, "d0", True, "", "", 0.0, 1.0, 2.0, 3.0, 99, 28, 4, 4096, 0.5, 0.1, 7, "tcp")


def meter() -> Meter:
    return Meter(Metrics(), Ledger(lambda: 0.0), Latencies.new(lambda: 0.0))


def test_names_are_bounded() -> None:
    flows = Flows()
    for number in range(MOST_NAMES + 50):
        flows.of(f"d{number}", OUT).bytes += 1
    assert len(flows.all()) == MOST_NAMES + 1
    assert flows.of(OTHER, OUT).bytes == 50
    assert Names(1).label("a") == "a"


def test_a_plain_cancel_is_no_failure() -> None:
    """A client that leaves ends a transfer, too."""
    made = meter()
    for reason in ("cancelled", "cancelled", "stalled"):
        made.attempt_done(dataclasses.replace(WHOLE, whole=False, reason=reason))
    assert made.flows.of("p0", IN).failed == 1
    assert made.failures == {"cancelled": 2, "stalled": 1}
    made.job_done(dataclasses.replace(JOB, whole=False, reason="cancelled"))
    made.job_done(dataclasses.replace(JOB, whole=False, reason="peer_lost"))
    assert made.flows.of("d0", OUT).failed == 1


def test_an_attempt_that_nobody_was_asked_for_is_no_flow() -> None:
    made = meter()
    made.attempt_done(dataclasses.replace(WHOLE, whole=False, peer="", reason="no_prefiller"))
    made.attempt_done(dataclasses.replace(WHOLE, whole=False, peer="", reason="cancelled"))
    assert made.flows.all() == []
    assert made.failures == {"no_prefiller": 1, "cancelled": 1}


def test_a_flow_and_its_times_say_what_carried_them() -> None:
    """A link to a peer on this host goes through memory, its next one perhaps not."""
    metrics = Metrics()
    made = Meter(metrics, Ledger(lambda: 0.0), Latencies.new(lambda: 0.0))
    made.job_done(JOB)
    made.attempt_done(dataclasses.replace(WHOLE, via="local"))
    assert {(flow.peer, flow.via) for flow in made.flows.all()} == {("d0", "tcp"), ("p0", "local")}
    assert 'pdd_kv_transfer_seconds_count{direction="in",via="local"} 1.0' in metrics.text()
    assert 'pdd_kv_transfer_seconds_count{direction="out",via="tcp"} 1.0' in metrics.text()


def test_percentiles_of_a_flow() -> None:
    made = meter()
    flow = made.flows.of("p0", IN)
    assert flow.seconds(0.5) is None
    for tenths in range(1, 11):
        made.attempt_done(dataclasses.replace(WHOLE, asked=0.0, finished=tenths / 10))
    assert flow.seconds(0.5) == pytest.approx(0.6)
    assert flow.seconds(0.99) == pytest.approx(1.0)
    assert (flow.units, flow.bytes) == (280, 10 * 4096)


# -- a node's snapshot for /metrics -------------------------------------------------------------------------------------
def peer(name: str, address: str, state: str = "up", **more: Any) -> PeerStatus:
    return PeerStatus(name=name, address=address, state=state, age_seconds=1.0, **more)


async def test_peers_are_labelled_by_what_the_node_was_told_or_by_their_bounded_names() -> None:
    config, _ = load(
        env={"PDD_NODE__ROLE": "decode"}, assignments=["peers.static=127.0.0.1:1,127.0.0.1:2"], demo=True, search=False
    )
    node: Any = Node(config, demo=True)
    statuses = [peer("self-given", "127.0.0.1:1"), peer("p1", "127.0.0.1:2", draining=True)]
    node.decoder = types.SimpleNamespace(
        peer_status=lambda: tuple(statuses), num_open=2, attempts=lambda: (), bytes_received=7,
        counters=DecoderCounters(attempts=9, retries=3, local_fallbacks=2, failed=1, stalls=4),
        peers=types.SimpleNamespace(usable_links=lambda: [object()]),
    )
    text = node.metrics.text()
    assert 'pdd_peer_up{peer="127.0.0.1:1"} 1.0' in text
    assert 'pdd_peer_up{peer="127.0.0.1:2"} 0.0' in text
    assert text.count("pdd_peer_up{") == 2
    for line in ('fallback_total{from="remote",to="prefiller"} 3.0', 'fallback_total{from="remote",to="local"} 2.0',
                 'fallback_total{from="remote",to="error"} 1.0', "leases 2.0", "leases_expired_total 4.0",
                 "attempts_total 9.0"):
        assert f"pdd_kv_{line}" in text

    callers = [peer(f"d{number}", "10.0.0.1:1") for number in range(MOST_NAMES + 9)]
    node.decoder = None
    node.prefiller = types.SimpleNamespace(
        peer_status=lambda: tuple(callers), num_jobs=0, jobs=lambda: (),
        counters=PrefillerCounters(jobs=8, refused=1, cancelled=4, failed=2, peer_lost=5),
    )
    text = node.metrics.text()
    assert text.count("pdd_peer_up{") == 2 + MOST_NAMES + 1  # those that the config names stay
    assert f'pdd_peer_up{{peer="{OTHER}"}} 1.0' in text
    assert 'pdd_kv_transfer_failures_total{reason="refused"} 1.0' in text
    assert 'pdd_kv_transfer_failures_total{reason="peer_lost"} 5.0' in text
    assert "pdd_kv_transfer_sets_failed_total 7.0" in text
    assert node.documents.status().transfers.failed == 8
    del callers[1:]
    text = node.metrics.text()
    assert 'pdd_peer_up{peer="d0"} 1.0' in text
    assert 'pdd_peer_up{peer="d1"} 0.0' in text  # it was there and is gone


async def test_only_a_prefiller_that_is_linked_shows_load() -> None:
    config, _ = load(env={"PDD_NODE__ROLE": "decode"}, assignments=["peers.static=127.0.0.1:1"], demo=True, search=False)
    node: Any = Node(config, demo=True)
    dialled = (peer("p0", "127.0.0.1:1", queued_tokens=7), peer("p1", "127.0.0.1:2", "down"))
    node.decoder = types.SimpleNamespace(peer_status=lambda: dialled)
    node.prefiller = types.SimpleNamespace(peer_status=lambda: (peer("d0", "127.0.0.1:3"),))
    loads = {each.name: each.load for each in node.documents.peers().peers}
    assert loads["p0"].queued_tokens == 7
    assert loads["p1"] is loads["d0"] is None


@pytest.mark.parametrize(("role", "expected"), [("decode", 5), ("both", 5), ("prefill", 70)])
async def test_prompt_tokens_are_of_clients_except_on_a_prefiller(role: str, expected: int) -> None:
    settings = {"decode": ["peers.static=127.0.0.1:1"], "prefill": ["peers.listen=127.0.0.1:1"], "both": []}[role]
    config, _ = load(env={"PDD_NODE__ROLE": role}, assignments=settings, demo=True, search=False)
    node: Any = Node(config, demo=True)
    node.ledger.open("r", (1, 2, 3, 4, 5))
    snapshot: Any = types.SimpleNamespace(totals=types.SimpleNamespace(prompt_tokens=70))
    assert node.documents._prompt_tokens(snapshot) == expected


async def test_transfers_in_flight_are_the_fabrics() -> None:
    config, _ = load(env={}, demo=True, search=False)
    node: Any = Node(config, demo=True)
    node.fabric = types.SimpleNamespace(
        stats=lambda: Stats(active_transfers=5, writes=1), provider="tcp", info=lambda: node_fabric(), findings=lambda: (),
        fencing=Fencing(),
    )
    assert "pdd_kv_transfers_active 5.0" in node.metrics.text()
    assert 'pdd_nic_link_utilization_ratio{nic="eth0+eth1"} 0.0' in node.metrics.text()


def node_fabric() -> Any:
    from pdd.control.schema import FabricInfo

    return FabricInfo(provider="tcp", domains=("eth0", "eth1"), line_rate_bytes_per_second=1e9)
