"""Several rail groups of one node: a worker each, one face; regions of a group go by its worker, sums are exact."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pdd.fabric import _native as native
from tests.fabric.conftest import NodeFactory, Stack, link
from tests.fabric.fabric_node import PAGE, Node

ONE, TWO, THREE = (f"127.0.0.{last}" for last in (1, 2, 3))
PAGES = 256


class Grouped(Node):
    """A Node with a region of its own in each group."""

    def __init__(self, stack: Stack, groups: list[list[str]], pages: int = PAGES, **options: Any) -> None:
        super().__init__(stack.library, stack.provider, [], pages, groups=[(nics, []) for nics in groups], **options)
        self.regions, self.memories = [self.region], [self.memory]
        for group in range(1, len(groups)):
            fd = os.memfd_create("arena")
            os.ftruncate(fd, self.nbytes)
            self.memories.append(native.MappedMemory(fd, self.nbytes))
            os.close(fd)
            self.regions.append(self.fabric.register(self.memories[group].address, self.nbytes, group=group))
        for seed, memory in enumerate(self.memories):
            memory.view()[:] = np.random.default_rng(seed).integers(0, 256, self.nbytes, dtype=np.uint8)

    def digest_of(self, group: int) -> str:
        return hashlib.sha1(self.memories[group].view()).hexdigest()

    def arm(self, transfer: int, watch: int, source: int, target: int, pages: int = PAGES) -> None:
        """Every page of a region of ours into the peer's `target`-th, none beside its neighbour."""
        order = np.random.default_rng(source).permutation(pages)
        plan = native.WritePlan(
            src_region=self.regions[source], dst_region=target, src_offset=order * PAGE, dst_offset=order * PAGE,
            nbytes=np.full(pages, PAGE, dtype=np.int64), units=np.ones(pages, dtype=np.int64), src_layer_stride=0,
            dst_layer_stride=0, num_layers=1,
        )
        self.fabric.arm(transfer, watch, 1, plan, 0, pages)


class Makes:
    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.nodes: list[Grouped] = []

    def __call__(self, *groups: list[str], **options: Any) -> Grouped:
        self.nodes.append(Grouped(self.stack, list(groups), **options))
        return self.nodes[-1]


@pytest.fixture
def make(fabric_stack: Stack) -> Iterator[Makes]:
    makes = Makes(fabric_stack)
    yield makes
    for node in makes.nodes:
        node.close()


def meet(writer: Grouped, reader: Grouped) -> tuple[int, int]:
    ours, theirs = writer.open(), reader.open()
    writer.fabric.connect(ours, reader.fabric.describe(theirs, reader.regions))
    reader.fabric.connect(theirs, writer.fabric.describe(ours, []))
    return ours, theirs


def exchange(writer: Grouped, reader: Grouped, ours: int, theirs: int, pairs: list[tuple[int, int]]) -> None:
    """Regions of groups to regions of groups, as one transfer under one key."""
    expected = PAGES * len(pairs)
    key = reader.fabric.imm_allocate(theirs)
    reader.fabric.imm_arm(key, expected)
    transfer = writer.fabric.open_transfer(ours, key)
    watch = writer.watch()
    for source, target in pairs:
        writer.arm(transfer, watch, source, target)
    writer.fabric.finish(transfer)
    writer.bump(watch)
    assert reader.wait(native.IMM_REACHED, key)[2] == expected
    assert writer.wait(native.TRANSFER_DONE, transfer)[2:] == [expected, 0, 0, ""]
    assert reader.fabric.imm_retire(key) == expected
    for source, target in pairs:
        assert reader.digest_of(target) == writer.digest_of(source)


def test_each_group_writes_its_region_and_the_sum_is_one(make: Makes) -> None:
    writer, reader = make([ONE], [TWO]), make([ONE], [TWO])
    ends = meet(writer, reader)
    for _ in range(3):
        exchange(writer, reader, *ends, [(0, 0), (1, 1)])
    stats = writer.fabric.stats()
    assert len(stats["nic_writes"]) == 2
    assert stats["nic_writes"][0] == stats["nic_writes"][1] > 0
    assert (stats["units"], stats["endpoints"], stats["active_transfers"], stats["regions"]) == (6 * PAGES, 1, 0, 2)
    assert [nic["group"] for nic in writer.fabric.caps["nics"]] == [0, 1]
    assert (reader.fabric.stats()["stale_units"], reader.fabric.stats()["units_received"]) == (0, 6 * PAGES)


def test_a_write_goes_by_its_own_group_s_worker_to_its_target_s_nics(make: Makes) -> None:
    writer, reader = make([ONE], [TWO]), make([ONE], [THREE])
    ends = meet(writer, reader)
    exchange(writer, reader, *ends, [(0, 1)])
    assert writer.fabric.stats()["nic_writes"][1] == 0
    exchange(writer, reader, *ends, [(1, 0)])
    shares = writer.fabric.stats()["nic_writes"]
    assert shares[0] == shares[1] > 0
    pairs = {pair for pair in writer.connections() if pair[0] == TWO or pair[1] == THREE}
    assert (ONE, THREE) in pairs  # from the first group's NIC to the second one's of the peer
    assert (TWO, ONE) in pairs


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [([[ONE], [TWO]], [[ONE]]), ([[ONE]], [[ONE], [TWO]]), ([[ONE, TWO], [THREE]], [[TWO], [ONE, THREE], [TWO]])],
)
def test_unequal_groups_understand_each_other(make: Makes, ours: list[list[str]], theirs: list[list[str]]) -> None:
    writer, reader = make(*ours, window_ops=8), make(*theirs, window_ops=8)
    ends = meet(writer, reader)
    exchange(writer, reader, *ends, [(group % len(ours), group) for group in range(len(theirs))])


def test_closing_an_endpoint_fences_every_group_and_is_told_once(make: Makes) -> None:
    writer, reader = make([ONE], [TWO]), make([ONE], [TWO])
    ours, theirs = meet(writer, reader)
    exchange(writer, reader, ours, theirs, [(0, 0), (1, 1)])
    key = reader.fabric.imm_allocate(theirs)
    transfer = writer.fabric.open_transfer(ours, key)
    watch = writer.watch()
    for group in (0, 1):
        writer.arm(transfer, watch, group, group)
    reader.fabric.close_endpoint(theirs)
    reader.wait(native.ENDPOINT_CLOSED, theirs)
    for group in (0, 1):
        reader.memories[group].view()[:] = 0
    writer.bump(watch)
    writer.fabric.finish(transfer)
    writer.fabric.close_endpoint(ours)
    _, _, ok, failed, unknown, error = writer.wait(native.TRANSFER_DONE, transfer)
    assert (ok + failed + unknown, bool(error)) == (2 * PAGES, True)
    assert not any(memory.view().any() for memory in reader.memories)
    writer.wait(native.ENDPOINT_CLOSED, ours)
    for node in (writer, reader):
        assert [event for event in node.seen() if event[0] in (native.ENDPOINT_CLOSED, native.TRANSFER_DONE)] == []
        assert node.fabric.stats()["endpoints"] == 0


def test_a_write_that_fails_in_one_group_ends_the_transfer_in_all(make: Makes) -> None:
    writer, reader = make([ONE], [TWO]), make([ONE], [TWO])
    ends = meet(writer, reader)
    exchange(writer, reader, *ends, [(0, 0), (1, 1)])
    key = reader.fabric.imm_allocate(ends[1])
    transfer = writer.fabric.open_transfer(ends[0], key)
    now, never = writer.watch(), writer.watch()
    writer.arm(transfer, never, 0, 0)  # would wait for ever
    writer.fabric.inject_fault("error", 1, nic=1)
    writer.arm(transfer, now, 1, 1)
    writer.bump(now)
    _, _, ok, failed, unknown, error = writer.wait(native.TRANSFER_DONE, transfer)  # without finish
    assert (ok + failed, unknown) == (2 * PAGES, 0)
    assert "injected fault" in error
    assert writer.fabric.stats()["armed_plans"] == 0
    exchange(writer, reader, *ends, [(0, 0), (1, 1)])  # the link is as good as before


def test_a_peer_that_one_group_lost_is_lost_to_all_and_told_once(make: Makes, nodes: NodeFactory) -> None:
    pages = 16384  # more than sockets take while nobody reads
    writer, reader = make([ONE], [TWO], pages=pages), nodes.there(make.stack, pages, [THREE])
    ours, theirs = link(writer, reader)
    first, started = writer.fabric.open_transfer(ours, reader.call("imm_allocate", theirs)), writer.watch()
    writer.arm(first, started, 1, 0, 64)
    writer.fabric.finish(first)
    writer.bump(started)
    writer.wait(native.TRANSFER_DONE, first)  # the second group is connected
    done = writer.fabric.stats()["completions"]
    transfer = writer.fabric.open_transfer(ours, reader.call("imm_allocate", theirs))
    never, now = writer.watch(), writer.watch()
    writer.arm(transfer, never, 0, 0, pages)
    reader.process.send_signal(signal.SIGSTOP)
    writer.arm(transfer, now, 1, 0, pages)
    writer.bump(now)
    while writer.fabric.stats()["completions"] < done + 20:
        time.sleep(0.0005)
    writer.connections(THREE)  # cuts what the second group has; the first one posted nothing, and has none
    assert writer.wait(native.ENDPOINT_FAILED, ours)[2]
    _, _, ok, failed, unknown, error = writer.wait(native.TRANSFER_DONE, transfer)
    assert (ok + failed + unknown, bool(error)) == (2 * pages, True)
    assert failed >= pages
    late = writer.fabric.open_transfer(ours, 1)
    assert writer.wait(native.TRANSFER_DONE, late)[2:5] == [0, 0, 0]
    assert [event for event in writer.seen() if event[0] == native.ENDPOINT_FAILED] == []
    reader.process.send_signal(signal.SIGCONT)


def test_what_a_group_cannot_have_is_an_error(make: Makes, fabric_stack: Stack) -> None:
    node = make([ONE], [TWO])
    with pytest.raises(native.FabricError, match="no rail group 2"):
        node.fabric.register(node.memory.address, PAGE, group=2)
    with pytest.raises(native.FabricError, match="203\\.0\\.113\\.77"):
        native.Fabric(library=fabric_stack.library, provider=fabric_stack.provider, groups=[([ONE], []), (["203.0.113.77"], [])])
    with pytest.raises(native.FabricError, match="no region"):
        node.fabric.unregister(99)


def test_a_worker_is_kept_on_its_cpus_and_a_refusal_is_told(fabric_stack: Stack) -> None:
    first = min(os.sched_getaffinity(0))
    before = set(os.listdir("/proc/self/task"))
    fabric = native.Fabric(library=fabric_stack.library, provider=fabric_stack.provider,
                           groups=[([ONE], [first, 1000]), ([TWO], [1001, 1002])])
    try:
        new = set(os.listdir("/proc/self/task")) - before
        assert {first} in [os.sched_getaffinity(int(thread)) for thread in new]
        [warning] = fabric.warnings
        assert warning.startswith("none of the CPUs from 1001 to 1002 is for this process")
    finally:
        fabric.close()
