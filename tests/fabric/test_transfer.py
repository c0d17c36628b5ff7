"""Pages written by one process arrive whole in another: order, merging, striping, early arrivals, cancel, bounds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pdd.fabric import _native as native
from tests.fabric.conftest import NodeFactory, Pair, Stack, find_stack, link
from tests.fabric.fabric_node import PAGE


def permuted(count: int, seed: int = 3) -> list[int]:
    return [int(p) for p in np.random.default_rng(seed).permutation(count)]


def expect_clean(pair: Pair) -> None:
    for node in (pair.writer, pair.reader):
        stats = node.call("stats")
        assert stats["errors"] == 0
        assert stats["inflight_writes"] == stats["inflight_bytes"] == stats["active_transfers"] == 0
        assert stats["armed_plans"] == 0
        assert node.seen() == []


def test_scattered_pages_are_whole_when_the_count_is_reached(pair: Pair) -> None:
    count = 256
    dst = permuted(count)
    key = pair.reader.call("imm_allocate", pair.from_writer)
    pair.reader.call("imm_arm", key, count)
    pair.reader.send("whole", key, dst)
    transfer = pair.writer.push(pair.to_reader, key, list(range(count)), dst)
    assert pair.reader.receive() == pair.writer.digests(list(range(count)))
    assert pair.writer.wait(native.TRANSFER_DONE, transfer)[2:] == [count, 0, 0, ""]
    assert pair.reader.call("imm_retire", key) == count
    expect_clean(pair)


def test_adjacent_pages_go_as_few_writes_and_count_the_same(pair: Pair) -> None:
    count = 256
    pages = list(range(count))
    key = pair.reader.call("imm_allocate", pair.from_writer)
    pair.reader.call("imm_arm", key, count)
    pair.reader.send("whole", key, pages)
    transfer = pair.writer.push(pair.to_reader, key, pages, pages)
    assert pair.reader.receive() == pair.writer.digests(pages)
    pair.writer.wait(native.TRANSFER_DONE, transfer)
    stats = pair.writer.fabric.stats()
    assert stats["units"] == count
    assert stats["writes"] == 2  # 1 MiB is 256 pages, but a write carries at most 255 units
    assert stats["merged"] == count - 2


def test_several_scattered_pages_share_a_write_where_the_provider_takes_them(pair: Pair) -> None:
    segments = pair.writer.caps()["write_segments"]
    count = 64
    key = pair.reader.call("imm_allocate", pair.from_writer)
    pair.reader.call("imm_arm", key, count)
    pair.reader.send("whole", key, list(range(0, 2 * count, 2)))
    transfer = pair.writer.push(pair.to_reader, key, list(range(count)), list(range(0, 2 * count, 2)))
    assert pair.reader.receive() == pair.writer.digests(list(range(count)))
    pair.writer.wait(native.TRANSFER_DONE, transfer)
    assert segments > 1
    assert pair.writer.fabric.stats()["writes"] == count / segments


def test_arrivals_before_the_key_is_armed_count(pair: Pair) -> None:
    key = pair.reader.call("imm_allocate", pair.from_writer)
    transfer = pair.writer.push(pair.to_reader, key, [0, 1, 2], [7, 5, 9])
    pair.writer.wait(native.TRANSFER_DONE, transfer)
    deadline = 200
    while pair.reader.call("imm_arrived", key) < 3 and deadline:
        pair.reader.sleep(0.02)
        deadline -= 1
    pair.reader.call("imm_arm", key, 3)
    assert pair.reader.wait(native.IMM_REACHED, key) == [native.IMM_REACHED, key, 3]
    with pytest.raises(RuntimeError, match="armed already"):
        pair.reader.call("imm_arm", key, 3)
    expect_clean(pair)


def test_more_units_than_expected_is_an_overrun(pair: Pair) -> None:
    key = pair.reader.call("imm_allocate", pair.from_writer)
    pair.reader.call("imm_arm", key, 2)
    pair.writer.push(pair.to_reader, key, [0, 1, 2], [0, 2, 4])
    event = pair.reader.wait(native.IMM_OVERRUN, key)
    assert event[2] > 2


def test_a_key_counts_only_what_comes_through_its_own_endpoint(pair: Pair) -> None:
    other = pair.reader.open()
    key = pair.reader.call("imm_allocate", other)
    pair.reader.call("imm_arm", key, 1)
    transfer = pair.writer.push(pair.to_reader, key, [0], [0])
    pair.writer.wait(native.TRANSFER_DONE, transfer)
    good = pair.reader.call("imm_allocate", pair.from_writer)
    pair.reader.call("imm_arm", good, 1)
    pair.writer.push(pair.to_reader, good, [0], [0])
    pair.reader.wait(native.IMM_REACHED, good)
    assert pair.reader.call("imm_arrived", key) == 0
    assert pair.reader.call("stats")["stale_units"] == 1
    assert pair.reader.seen() == []


def test_a_retired_key_is_stale_and_its_slot_comes_back_as_another_key(pair: Pair) -> None:
    key = pair.reader.call("imm_allocate", pair.from_writer)
    pair.reader.call("imm_retire", key)
    transfer = pair.writer.push(pair.to_reader, key, [0], [0])
    pair.writer.wait(native.TRANSFER_DONE, transfer)
    keys = [pair.reader.call("imm_allocate", pair.from_writer) for _ in range(8)]
    assert key not in keys
    pair.reader.call("imm_arm", keys[0], 1)
    pair.writer.push(pair.to_reader, keys[0], [0], [0])
    pair.reader.wait(native.IMM_REACHED, keys[0])
    assert pair.reader.call("stats")["stale_units"] == 1


def test_single_writes_and_a_write_of_many_units(pair: Pair) -> None:
    key = pair.reader.call("imm_allocate", pair.from_writer)
    pair.reader.call("imm_arm", key, 256)
    transfer = pair.writer.fabric.open_transfer(pair.to_reader, key)
    pair.writer.fabric.write(transfer, pair.writer.region, 0, 0, 3 * PAGE, 10 * PAGE, 255)
    pair.writer.fabric.write(transfer, pair.writer.region, 5, 0, 77, 11, 1)
    pair.writer.fabric.finish(transfer)
    assert pair.reader.whole(key, [3, 12]) == pair.writer.digests([0, 9])
    assert pair.reader.call("stats")["units_received"] == 256
    assert pair.writer.wait(native.TRANSFER_DONE, transfer)[2:] == [256, 0, 0, ""]


def test_cancel_drops_what_is_not_posted_and_the_counts_agree(stack: Stack, make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(stack, num_pages=4096, window_ops=2, window_bytes=64 << 10)
    count = 2048
    dst = list(range(0, 2 * count, 2))
    key = pair.reader.call("imm_allocate", pair.from_writer)
    pair.reader.call("imm_arm", key, count + 1)
    transfer = pair.writer.push(pair.to_reader, key, list(range(count)), dst, finish=False)
    while pair.writer.fabric.stats()["units"] < 40:
        pass
    pair.writer.fabric.cancel(transfer)
    pair.writer.fabric.cancel(transfer)
    _, _, ok, failed, unknown, error = pair.writer.wait(native.TRANSFER_DONE, transfer)
    assert (ok + failed, unknown, error) == (count, 0, "cancelled")
    assert 0 < ok < count
    fence_key = pair.reader.call("imm_allocate", pair.from_writer)
    pair.reader.call("imm_arm", fence_key, 1)
    last = pair.writer.push(pair.to_reader, fence_key, [0], [0])
    pair.reader.wait(native.IMM_REACHED, fence_key)
    pair.writer.wait(native.TRANSFER_DONE, last)
    assert pair.reader.call("imm_arrived", key) == ok
    expect_clean(pair)


def test_cancel_of_plans_that_never_fired(pair: Pair) -> None:
    transfer = pair.writer.fabric.open_transfer(pair.to_reader, 1)
    watch = pair.writer.watch()
    plan = pair.writer.plan([0, 1, 2], [0, 1, 2], layers=5)
    pair.writer.fabric.arm(transfer, watch, 1, plan, 0, 3)
    pair.writer.fabric.cancel(transfer)
    assert pair.writer.wait(native.TRANSFER_DONE, transfer)[2:] == [0, 15, 0, "cancelled"]
    pair.writer.bump(watch)
    pair.writer.fabric.arm(transfer, watch, 1, plan, 0, 3)  # too late: nothing happens
    pair.writer.fabric.finish(transfer)
    key = pair.reader.call("imm_allocate", pair.from_writer)
    pair.reader.call("imm_arm", key, 1)
    transfer = pair.writer.push(pair.to_reader, key, [0], [0])
    pair.reader.wait(native.IMM_REACHED, key)
    pair.writer.wait(native.TRANSFER_DONE, transfer)
    assert pair.writer.fabric.stats()["writes"] == 1
    assert pair.writer.fabric.stats()["armed_plans"] == 0


@pytest.mark.parametrize(
    ("src_page", "dst_page", "what"), [(256, 0, "local"), (0, 256, "remote"), (2**35, 0, "local"), (0, 2**35, "remote")]
)
def test_a_write_outside_a_region_is_never_posted(pair: Pair, src_page: int, dst_page: int, what: str) -> None:
    transfer = pair.writer.push(pair.to_reader, 1, [0, src_page], [0, dst_page])
    _, _, ok, failed, unknown, error = pair.writer.wait(native.TRANSFER_DONE, transfer)
    assert (ok, failed, unknown) == (0, 2, 0)
    assert f"outside {what} region" in error
    assert pair.writer.fabric.stats()["writes"] == 0


def test_a_new_and_an_old_libfabric_understand_each_other(nodes: NodeFactory) -> None:
    new, old = find_stack("mpich-wheel", "tcp"), find_stack("system", "net")
    for ours, theirs in ((new, old), (old, new)):
        reader = nodes.there(theirs, 64, ["127.0.0.1"])
        writer = nodes.here(ours, 64, ["127.0.0.1"])
        writer.fill(5)
        to_reader, from_writer = link(writer, reader)
        key = reader.call("imm_allocate", from_writer)
        reader.call("imm_arm", key, 64)
        dst = permuted(64)
        reader.send("whole", key, dst)
        writer.push(to_reader, key, list(range(64)), dst)
        assert reader.receive() == writer.digests(list(range(64)))


@pytest.mark.parametrize("where", ["::1", "lo"])
def test_a_node_binds_to_ipv6_and_to_an_interface(where: str, fabric_stack: Stack, nodes: NodeFactory) -> None:
    try:
        reader = nodes.there(fabric_stack, 8, [where])
    except EOFError:
        pytest.skip(f"no {where} here")
    writer = nodes.here(fabric_stack, 8, [where])
    writer.fill(5)
    to_reader, from_writer = link(writer, reader)
    key = reader.call("imm_allocate", from_writer)
    reader.call("imm_arm", key, 8)
    writer.push(to_reader, key, list(range(8)), list(range(8)))
    assert reader.whole(key, list(range(8))) == writer.digests(list(range(8)))
    other = nodes.here(fabric_stack, 8, ["127.0.0.1"])
    if where == "::1":
        with pytest.raises(native.FabricError, match="IPv4 against IPv6"):
            other.connect(other.open(), reader.describe(reader.open()))


def test_a_plan_with_offsets_past_256_tib_is_refused(pair: Pair) -> None:
    with pytest.raises(native.FabricError, match="entry 1 of a write plan: its offsets pass 256 TiB"):
        pair.writer.plan([0, 2**36], [0, 1])


def test_more_events_than_the_ring_holds_are_kept_in_order(pair: Pair) -> None:
    count = 5000  # the ring holds 4096
    transfers = []
    for _ in range(count):
        transfer = pair.writer.fabric.open_transfer(pair.to_reader, 1)
        pair.writer.fabric.finish(transfer)
        transfers.append(transfer)
    events: list[tuple[object, ...]] = []
    while len(events) < count:
        got = pair.writer.fabric.drain(700)
        assert len(got) <= 700
        events += got
    assert [event[1] for event in events] == transfers
