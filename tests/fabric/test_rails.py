"""Several NICs at either end, as domains of their own on loopback addresses: sums, striping, and one NIC that fails."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest

from pdd.fabric import _native as native
from tests.fabric.conftest import NodeFactory, Stack, link
from tests.fabric.fabric_node import Node, RemoteNode

FOREVER = 10**9


def nics(count: int) -> list[str]:
    return [f"127.0.0.{1 + nic}" for nic in range(count)]


def scattered(count: int, seed: int) -> list[int]:
    return [2 * int(page) for page in np.random.default_rng(seed).permutation(count)]


def exchange(writer: Node, reader: RemoteNode, to_reader: int, from_writer: int, count: int, seed: int = 1) -> None:
    """Pages through a link, whole when the count is reached, which is the same for any number of NICs."""
    dst = scattered(count, seed)
    key = reader.call("imm_allocate", from_writer)
    reader.call("imm_arm", key, count)
    reader.send("whole", key, dst)
    transfer = writer.push(to_reader, key, list(range(count)), dst)
    assert reader.receive() == writer.digests(list(range(count)))
    assert writer.wait(native.TRANSFER_DONE, transfer)[2:] == [count, 0, 0, ""]
    assert reader.call("imm_retire", key) == count


@pytest.mark.parametrize(
    ("ours", "theirs"), [(1, 1), (2, 2), (4, 4), (1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2), (2, 3), (3, 2)]
)
def test_every_nic_takes_part_and_the_sum_is_the_same(ours: int, theirs: int, fabric_stack: Stack, nodes: NodeFactory) -> None:
    count = 256
    reader = nodes.there(fabric_stack, 2 * count, nics(theirs))
    writer = nodes.here(fabric_stack, 2 * count, nics(ours))
    writer.fill(1)
    to_reader, from_writer = link(writer, reader)
    for seed in range(4):  # the first may be over before the last NIC is connected
        exchange(writer, reader, to_reader, from_writer, count, seed)
    shares = writer.fabric.stats()["nic_writes"]
    assert len(shares) == ours
    assert min(shares) > 0
    used = {address for address, _ in reader.connections()}
    assert used == set(nics(theirs))
    assert reader.call("stats")["stale_units"] == reader.call("stats")["errors"] == 0


def test_nics_are_paired_by_their_number(best_fabric_stack: Stack, nodes: NodeFactory) -> None:
    reader = nodes.there(best_fabric_stack, 256, nics(4))
    writer = nodes.here(best_fabric_stack, 256, nics(2))
    link_of = link(writer, reader)
    for seed in range(4):
        exchange(writer, reader, *link_of, 128, seed)
    pairs = {(source, address) for address, source in reader.connections()}
    one, two, three, four = nics(4)
    assert pairs == {(one, one), (two, two), (one, three), (two, four)}


def test_a_nic_that_takes_nothing_leaves_its_share_to_the_others(fabric_stack: Stack, nodes: NodeFactory) -> None:
    count = 512
    reader = nodes.there(fabric_stack, 2 * count, nics(3))
    writer = nodes.here(fabric_stack, 2 * count, nics(3), window_ops=4)
    writer.fill(1)
    to_reader, from_writer = link(writer, reader)
    writer.fabric.inject_fault("again", 1, FOREVER, nic=1)
    for seed in range(3):
        exchange(writer, reader, to_reader, from_writer, count, seed)
    shares = writer.fabric.stats()["nic_writes"]
    assert shares[1] == 0
    assert min(shares[0], shares[2]) > 0
    writer.fabric.inject_fault("again", 1, 0)
    for seed in range(3):
        exchange(writer, reader, to_reader, from_writer, count, seed)
    assert writer.fabric.stats()["nic_writes"][1] > 0


def test_a_nic_whose_window_is_full_stops_no_other(best_fabric_stack: Stack, nodes: NodeFactory) -> None:
    count = 512
    reader = nodes.there(best_fabric_stack, 2 * count, nics(2))
    writer = nodes.here(best_fabric_stack, 2 * count, nics(2), window_ops=4)
    to_reader, from_writer = link(writer, reader)
    for seed in range(3):
        exchange(writer, reader, to_reader, from_writer, 64, seed)  # both are connected
    before = writer.fabric.stats()["nic_writes"]
    writer.fabric.inject_fault("hold", 1, FOREVER, nic=1)
    key = reader.call("imm_allocate", from_writer)
    reader.call("imm_arm", key, count)
    transfer = writer.push(to_reader, key, list(range(count)), scattered(count, 5))
    reader.wait(native.IMM_REACHED, key)  # all landed, though NIC 1 never told of its four
    shares = np.subtract(writer.fabric.stats()["nic_writes"], before)
    assert shares[1] == 4
    assert shares[0] == count / writer.caps()["write_segments"] - 4
    assert not [event for event in writer.seen() if event[0] == native.TRANSFER_DONE]
    writer.fabric.close_endpoint(to_reader)
    _, _, ok, failed, unknown, _ = writer.wait(native.TRANSFER_DONE, transfer)
    assert ok + unknown == count
    assert failed == 0


def fill_sockets(writer: Node) -> None:
    """Waits until the sockets to a stopped peer take no more, so that each NIC has writes that are not over. A provider that
    loses a connection without such a write says nothing and connects again."""
    before = None
    while (now := (writer.fabric.stats()["inflight_writes"], writer.fabric.stats()["completions"])) != before or not now[0]:
        before = now
        time.sleep(0.2)


def test_a_nic_that_dies_ends_its_link_once_and_no_other(fabric_stack: Stack, nodes: NodeFactory) -> None:
    pages = 16384
    victim = nodes.there(fabric_stack, 2 * pages, nics(2))
    other = nodes.there(fabric_stack, 256, ["127.0.0.5", "127.0.0.6"])
    writer = nodes.here(fabric_stack, 2 * pages, nics(2))
    to_victim, from_writer = link(writer, victim)
    to_other, at_other = link(writer, other)
    for seed in range(3):
        exchange(writer, victim, to_victim, from_writer, 64, seed)
        exchange(writer, other, to_other, at_other, 64, seed)
    key = victim.call("imm_allocate", from_writer)
    victim.process.send_signal(signal.SIGSTOP)  # so that the writes can not be over before the cut
    transfer = writer.push(to_victim, key, list(range(pages)), list(range(0, 2 * pages, 2)))
    fill_sockets(writer)
    writer.connections("127.0.0.2")
    _, _, message = writer.wait(native.ENDPOINT_FAILED, to_victim)
    assert "NIC 127.0.0.2" in message
    exchange(writer, other, to_other, at_other, 64)
    victim.process.send_signal(signal.SIGCONT)  # else what is in flight on its other NIC stays there
    _, _, ok, failed, unknown, error = writer.wait(native.TRANSFER_DONE, transfer)
    assert ok + failed + unknown == pages
    assert failed + unknown > 0
    assert error
    writer.fabric.close_endpoint(to_victim)
    victim.call("close_endpoint", from_writer)
    writer.wait(native.ENDPOINT_CLOSED, to_victim)
    assert not [event for event in writer.seen() if event[0] == native.ENDPOINT_FAILED]
    before = writer.fabric.stats()["nic_writes"]
    again = link(writer, victim)
    for seed in range(3):
        exchange(writer, victim, *again, 64, seed)
    assert np.subtract(writer.fabric.stats()["nic_writes"], before).min() > 0
