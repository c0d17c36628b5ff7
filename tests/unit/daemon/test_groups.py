"""A node of several engines: what documents say of each, and of all together."""

from __future__ import annotations

import dataclasses
import time
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdd.config_load import load
from pdd.control.schema import FabricInfo
from pdd.daemon import loading, placing
from pdd.daemon.explain import explain
from pdd.daemon.group import EngineGroup
from pdd.daemon.node import Node
from pdd.engine.rank_protocol import RankProgress, RankReady
from pdd.engine.request import Finished, FinishReason
from pdd.engine.snapshot import EngineSnapshot, RequestRow, Totals, joined
from pdd.errors import RankDied
from pdd.fabric.types import Stats
from pdd.kv.pool import PageCounts
from pdd.messenger.fencing import FenceStatus
from pdd.metrics import PAGE_STATES
from pdd.states import Change, Facts
from pdd.topology import sysfs
from pdd.topology.placement import plan_placement
from tests.topology.build import SysTree

STATES = {"waiting": 1, "wait_kv": 2, "ready": 3, "running": 4}


def picture(at: float, *, free: int = 5, reserved: int = 0, steps: int = 10, batch_size: int = 4) -> EngineSnapshot:
    return EngineSnapshot(
        at, dict(STATES), PageCounts(free, 0, reserved, 2, 0, 1), batch_size, 40, 0.5 / steps, 100,
        Totals(steps=steps, step_seconds=1.0, generated_tokens=7), (RequestRow(f"r{steps}", "generate", "running", at, at),),
    )


def group(index: int, snapshot: EngineSnapshot, busy_since: float | None = None, num_ranks: int = 1) -> EngineGroup:
    loop: Any = types.SimpleNamespace(snapshot=snapshot, busy_since=busy_since)
    ranks: Any = tuple(types.SimpleNamespace(ready=ready(rank)) for rank in range(num_ranks))
    executor: Any = None
    return EngineGroup(index, executor, ranks, loop=loop)


def ready(rank: int) -> RankReady:
    return RankReady(
        rank=rank, num_layers=3, num_pages=8, num_kv_heads=1, page_size=16, head_dim=4, dtype="bfloat16", total_kv_heads=2,
        vocab_size=9, eos_token_ids=(2,), max_context=64, family="llama", fingerprint="f", kv_bytes=1, param_bytes=1,
        threads=1, load_seconds=0.0, pid=100 + rank,
    )


async def test_status_says_each_group_and_the_totals_are_their_sums() -> None:
    config, _ = load(env={}, demo=True, search=False)
    node = Node(config, demo=True)
    assert node.documents.status().groups == ()
    now = time.monotonic()
    node.groups = group(0, picture(now), num_ranks=2), group(1, picture(now, reserved=6, steps=5), now - 30)
    status = node.documents.status()
    first, second = status.groups
    assert (first.index, first.ranks, second.index, second.ranks) == (0, 2, 1, 1)
    assert (first.running, first.waiting, first.waiting_for_kv, first.batch_size) == (7, 1, 2, 4)
    assert (first.pages.total, second.pages.total, second.pages.reserved) == (8, 14, 6)
    assert (first.steps, second.steps, first.heartbeat_age_seconds) == (10, 5, 0.0)
    assert second.heartbeat_age_seconds == pytest.approx(30, abs=20)
    assert status.engine.heartbeat_age_seconds == pytest.approx(30, abs=20)
    for total in ("running", "waiting", "waiting_for_kv", "batch_size"):
        assert getattr(status, total) == getattr(first, total) + getattr(second, total)
    for state in (*PAGE_STATES, "total"):
        assert getattr(status.pages, state) == getattr(first.pages, state) + getattr(second.pages, state)
    assert status.engine.steps == 15
    assert [(rank.group, rank.rank) for rank in status.ranks] == [(0, 0), (0, 1), (1, 0)]


async def test_metrics_tell_groups_apart_from_the_start_and_their_sums_are_the_totals() -> None:
    config, _ = load(env={}, assignments=["engine.dp=2"], demo=True, search=False)
    node = Node(config, demo=True)
    before = node.metrics.text()
    for group_label in (0, 1):
        assert f'pdd_group_requests{{group="{group_label}",state="running"}} 0.0' in before
    assert 'group="2"' not in before
    now = time.monotonic()
    node.groups = group(0, picture(now)), group(1, picture(now, reserved=6, steps=5))
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in node.metrics.text().splitlines() if line[0] != "#"}
    for state in PAGE_STATES:
        parts = [values[f'pdd_group_kv_pages{{group="{index}",state="{state}"}}'] for index in (0, 1)]
        assert sum(parts) == values[f'pdd_kv_pages{{state="{state}"}}'], state
    assert values['pdd_group_kv_pages{group="1",state="reserved"}'] == 6
    for state, total in (("running", "running"), ("waiting", "waiting"), ("wait_kv", "waiting_for_kv")):
        parts = [values[f'pdd_group_requests{{group="{index}",state="{state}"}}'] for index in (0, 1)]
        assert sum(parts) == values[f"pdd_requests_{total}"], state
        assert all(parts)
    assert [values[f'pdd_group_engine_steps_total{{group="{index}"}}'] for index in (0, 1)] == [10, 5]
    assert node.documents.status().max_batch_size == 128


@pytest.mark.parametrize("of", [1, 2])
def test_what_goes_wrong_in_a_group_names_it_where_there_is_another(of: int) -> None:
    executor: Any = None
    error = RankDied("rank 0 was killed by SIGKILL", hint="see dmesg")
    named = EngineGroup(1, executor, of=of).named(error)
    assert isinstance(named, RankDied)
    assert (str(named), named.hint) == ("group 1: " * (of > 1) + "rank 0 was killed by SIGKILL", "see dmesg")
    assert str(EngineGroup(1, executor, of=of).named(ValueError("x"))) == "x"


async def test_a_request_says_which_group_has_it_live_and_ended() -> None:
    config, _ = load(env={}, assignments=["engine.dp=2"], demo=True, search=False)
    node = Node(config, demo=True)
    now = time.monotonic()
    rows = tuple(RequestRow(f"{index}ab", "generate", "running", now, now, 5, group=index) for index in (0, 1))
    node.groups = tuple(group(index, dataclasses.replace(picture(now), requests=(rows[index],))) for index in (0, 1))
    for index in (0, 1):
        node.ledger.open(f"{index}ab", (1, 2))
        node.ledger.placed(f"{index}ab", index)
    found = node.documents.requests().requests
    assert found is not None
    assert {row.id: row.group for row in found} == {"0ab": 0, "1ab": 1}
    assert [(await explain(node, request_id)).group for request_id in ("0ab", "1ab")] == [0, 1]
    both = node.groups
    node.groups = both[:1]
    assert (await explain(node, "0ab")).group is None
    node.groups = both
    node.groups = group(0, dataclasses.replace(picture(now), requests=())), group(1, dataclasses.replace(picture(now), requests=()))
    node.ledger.engine_event(Finished("1ab", FinishReason.STOP))
    assert node.documents.request("1ab").group == 1


# -- loading -----------------------------------------------------------------------------------------------------------
class FakeGroup:
    """Takes a moment to load, and finds room for 9 pages when it is to find out."""

    def __init__(self, index: int, num_pages: int, at_work: set[int]) -> None:
        self.index, self.num_pages, self.ranks = index, num_pages, ()
        self._at_work = at_work
        self.beside: set[int] = set()

    def load(self) -> None:
        self._at_work.add(self.index)
        time.sleep(0.02)
        self.beside = set(self._at_work)
        found: Any = types.SimpleNamespace(ready=dataclasses.make_dataclass("Ready", ["num_pages"])(self.num_pages or 9))
        self.ranks = (found,)
        self._at_work.discard(self.index)


@pytest.mark.parametrize(("num_pages", "told"), [(0, [0, 9, 9]), (5, [5, 5, 5])])
async def test_all_groups_have_pools_of_one_size(num_pages: int, told: list[int]) -> None:
    """A prefiller is told one for all."""
    made: list[FakeGroup] = []
    at_work: set[int] = set()

    def make(index: int, pages: int) -> Any:
        made.append(FakeGroup(index, pages, at_work))
        return made[-1]

    await loading.load(make, 3, num_pages)
    assert [each.index for each in made] == [0, 1, 2]
    assert [each.num_pages for each in made] == told
    if not num_pages:
        assert made[0].beside == {0}  # else the others would take its memory while it looks


def test_groups_share_the_memory_that_one_would_take_and_each_has_its_place(tmp_path: Path) -> None:
    config, _ = load(env={}, assignments=["engine.dp=2", "kv.memory_fraction=0.5"], demo=True, search=False)
    tree = SysTree(tmp_path)
    tree.node(0, "0-3")
    tree.node(1, "4-7")
    placement = plan_placement(sysfs.read(tmp_path), placing.wanted(config))
    inits = [loading.rank_init(config, placement, index, "m", 0, 1000) for index in (0, 1)]
    assert [(init.memory_bytes, init.memory_fraction, init.cpus, init.numa, init.threads, init.beside) for init in inits] == [
        (500, 0.5, (0, 1, 2, 3), 0, 4, 0), (500, 0.5, (4, 5, 6, 7), 1, 4, 0),
    ]


@pytest.mark.parametrize(("tp", "dp", "memory", "beside"), [(2, 1, 0, 0), (1, 2, 500, 1), (2, 2, 500, 2), (2, 4, 250, 6)])
def test_ranks_of_other_groups_on_the_same_cpus_are_counted(tmp_path: Path, tp: int, dp: int, memory: int, beside: int) -> None:
    config, _ = load(env={}, assignments=[f"engine.tp={tp}", f"engine.dp={dp}"], demo=True, search=False)
    assert config.engine.num_ranks == tp * dp
    SysTree(tmp_path).node(0, "0-3")
    placement = plan_placement(sysfs.read(tmp_path), placing.wanted(config))
    init = loading.rank_init(config, placement, dp - 1, "m", 0, 1000)
    assert (init.world, init.memory_bytes, init.beside) == (tp, memory, beside)


async def test_a_finding_of_a_rank_names_its_group_where_there_is_another() -> None:
    config, _ = load(env={}, demo=True, search=False)
    node: Any = Node(config, demo=True)
    told: Any = types.SimpleNamespace(ready=msgspec.structs.replace(ready(1), warnings=("memory stays where it is",)))
    executor: Any = None
    for of, who in ((1, "rank 1"), (2, "group 1 rank 1")):
        node.groups = (EngineGroup(1, executor, (told,), of=of),)
        assert [each.message for each in node.view.findings()] == [f"{who}: memory stays where it is"]


def test_progress_is_that_of_whoever_is_furthest_behind() -> None:
    progress = loading.Progress()
    assert progress.add(0, 0, RankProgress("weights", 10, 100)) == ("weights", 0.1)
    assert progress.add(1, 0, RankProgress("weights", 30, 100)) == ("weights", 0.2)
    assert progress.add(0, 0, RankProgress("kv", 5, 5)) == ("weights", 0.3)
    assert progress.add(1, 0, RankProgress("warm-up", 0, 0)) == ("kv", 1.0)
    assert progress.add(0, 0, RankProgress("warm-up", 0, 0)) == ("warm-up", None)


async def test_fences_and_quarantine_are_in_status_and_metrics() -> None:
    config, _ = load(env={}, demo=True, search=False)
    node: Any = Node(config, demo=True)
    healthy = node.documents.status().fences
    assert (healthy.pending, healthy.oldest_seconds, healthy.alarms, healthy.oldest_quarantine_seconds) == (0, None, 0, None)
    assert "pdd_kv_fence_age_seconds 0.0" in node.metrics.text()
    now = time.monotonic()
    old = dataclasses.replace(picture(now), quarantined_since=now - 50, totals=Totals(integrity_failures=2))
    node.groups = group(0, picture(now)), group(1, old)
    node.fabric = types.SimpleNamespace(
        fencing=types.SimpleNamespace(status=lambda now: FenceStatus(pending=3, oldest_seconds=9.0, overdue=1, alarms=4)),
        stats=Stats, provider="tcp", info=FabricInfo, findings=lambda: (),
    )
    fences = node.documents.status().fences
    assert (fences.pending, fences.oldest_seconds, fences.overdue, fences.alarms) == (3, 9.0, 1, 4)
    assert fences.oldest_quarantine_seconds == pytest.approx(50, abs=20)
    assert fences.integrity_failures == 2
    text = node.metrics.text()
    for line in ("fences_pending 3.0", "fence_age_seconds 9.0", "fence_alarms_total 4.0", "integrity_failures_total 2.0"):
        assert f"pdd_kv_{line}" in text
    assert float(text.split("pdd_kv_quarantine_age_seconds ")[-1].split()[0]) == pytest.approx(50, abs=20)


async def test_a_node_that_fails_says_what_happened_before(caplog: pytest.LogCaptureFixture) -> None:
    config, _ = load(env={}, demo=True, search=False)
    node = Node(config, demo=True)
    for n in range(30):
        node.history(Change(0.0, "request", f"r{n}", "waiting", "running", "", Facts(step=n)))
    node._fail(RankDied("rank 0 was killed by SIGKILL"))
    node._fail(RankDied("again"))
    told = [record.message for record in caplog.records if "before it failed" in record.message]
    assert len(told) == 16
    assert told[-1] == "before it failed: request r29 waiting -> running (step 29)"
    assert "rank 0" in str(node.failed.exception() or node.failed.result())


def test_one_snapshot_is_joined_to_itself() -> None:
    one = picture(1.0)
    assert joined([one]) is one


def test_joined_snapshots_lose_no_field() -> None:
    one, two = picture(3.0), picture(2.0, reserved=1, steps=20, batch_size=9)
    both = joined([one, two])
    assert both.at == 2.0
    assert both.states == {state: 2 * count for state, count in STATES.items()}
    assert both.pages.total == one.pages.total + two.pages.total
    assert (both.batch_size, both.batch_tokens, both.queued_prefill_tokens) == (13, 80, 200)
    assert both.last_step_seconds == 0.05
    assert dataclasses.asdict(both.totals) == {
        name: value + getattr(two.totals, name) for name, value in dataclasses.asdict(one.totals).items()
    }
    assert [row.request_id for row in both.requests] == ["r10", "r20"]
