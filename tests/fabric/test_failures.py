"""What goes wrong on one endpoint is told exactly once, is accounted for to the unit, and stays on that endpoint."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from pdd.fabric import _native as native
from tests.fabric.conftest import NodeFactory, Pair, Stack, link
from tests.fabric.fabric_node import PAGE, Node, RemoteNode


def exchange(writer: Node, reader: RemoteNode, to_reader: int, from_writer: int) -> None:
    """One page through a link, as a proof that it lives."""
    key = reader.call("imm_allocate", from_writer)
    reader.call("imm_arm", key, 1)
    transfer = writer.push(to_reader, key, [1], [2])
    assert reader.whole(key, [2]) == writer.digests([1])
    assert writer.wait(native.TRANSFER_DONE, transfer)[2:] == [1, 0, 0, ""]
    reader.call("imm_retire", key)


def flood(node: Node | RemoteNode, endpoint: int, key: int, count: int) -> int:
    """A transfer of `count` scattered pages, several times over if need be: more than any socket buffer holds."""
    transfer: int = node.push(endpoint, key, list(range(count)), list(range(0, 2 * count, 2)))
    return transfer


def test_a_killed_reader_ends_its_transfers_and_no_others(stack: Stack, nodes: NodeFactory) -> None:
    pages = 8192
    victim = nodes.there(stack, 2 * pages, ["127.0.0.1"])
    other = nodes.there(stack, 64, ["127.0.0.1"])
    writer = nodes.here(stack, 2 * pages, ["127.0.0.1"])
    to_victim, _ = link(writer, victim)
    to_other, from_writer = link(writer, other)
    exchange(writer, other, to_other, from_writer)
    transfer = flood(writer, to_victim, 7, pages)
    while writer.fabric.stats()["completions"] < 20:
        time.sleep(0.001)
    victim.kill()
    _, _, message = writer.wait(native.ENDPOINT_FAILED, to_victim)
    assert "endpoint 1" in message
    assert writer.caps()["provider"] in message
    _, _, ok, failed, unknown, error = writer.wait(native.TRANSFER_DONE, transfer)
    assert ok + failed + unknown == pages
    assert failed + unknown > 0
    assert error
    exchange(writer, other, to_other, from_writer)
    posted = writer.fabric.stats()["writes"]
    late = writer.push(to_victim, 7, [0], [0])  # a failed endpoint ends it before anything is armed
    assert writer.wait(native.TRANSFER_DONE, late)[2:5] == [0, 0, 0]
    assert writer.fabric.stats()["writes"] == posted
    writer.fabric.close_endpoint(to_victim)
    writer.wait(native.ENDPOINT_CLOSED, to_victim)
    exchange(writer, other, to_other, from_writer)


def test_a_killed_writer_leaves_the_reader_and_its_other_peers_alone(stack: Stack, nodes: NodeFactory) -> None:
    pages = 4096
    reader = nodes.here(stack, 2 * pages, ["127.0.0.1"])
    victim = nodes.there(stack, 2 * pages, ["127.0.0.1"])
    other = nodes.there(stack, 64, ["127.0.0.1"])
    to_reader, from_victim = link(victim, reader)
    to_reader2, from_other = link(other, reader)
    key = reader.fabric.imm_allocate(from_victim)
    reader.fabric.imm_arm(key, pages + 1)
    flood(victim, to_reader, key, pages)
    while reader.fabric.stats()["units_received"] < 20:
        time.sleep(0.001)
    victim.kill()
    reader.fabric.close_endpoint(from_victim)
    reader.wait(native.ENDPOINT_CLOSED, from_victim)
    frozen = reader.digest()
    arrived = reader.fabric.imm_arrived(key)
    good = reader.fabric.imm_allocate(from_other)
    reader.fabric.imm_arm(good, 1)
    assert reader.digest() == frozen
    other.push(to_reader2, good, [0], [2])
    reader.wait(native.IMM_REACHED, good)
    assert reader.digests([2]) == other.digests([0])
    assert reader.fabric.imm_retire(key) == arrived
    assert all(event[0] == native.ENDPOINT_FAILED and event[1] == from_victim for event in reader.seen())


def test_closing_an_endpoint_is_a_fence(stack: Stack, nodes: NodeFactory) -> None:
    pages = 16384
    reader = nodes.here(stack, 2 * pages, ["127.0.0.1"])
    writer = nodes.there(stack, 2 * pages, ["127.0.0.1"])
    writer.fill(3)
    to_reader, from_writer = link(writer, reader)
    key = reader.fabric.imm_allocate(from_writer)
    reader.fabric.imm_arm(key, pages + 1)
    transfer = flood(writer, to_reader, key, pages)
    while reader.fabric.stats()["units_received"] < 200:
        time.sleep(0.0005)
    reader.fabric.close_endpoint(from_writer)
    reader.wait(native.ENDPOINT_CLOSED, from_writer)
    frozen, arrived = reader.digest(), reader.fabric.imm_arrived(key)
    # The writer goes on until it learns; a second link is open meanwhile, and may even be given the old address.
    to_reader2, from_writer2 = link(writer, reader)
    _, _, ok, failed, unknown, _ = writer.wait(native.TRANSFER_DONE, transfer)
    assert ok + failed + unknown == pages
    assert arrived < pages, "the writer was done before the fence: nothing was tested"
    time.sleep(0.3)
    assert reader.digest() == frozen
    assert reader.fabric.imm_retire(key) == arrived
    good = reader.fabric.imm_allocate(from_writer2)
    reader.fabric.imm_arm(good, 1)
    writer.push(to_reader2, good, [0], [1])
    reader.wait(native.IMM_REACHED, good)
    assert reader.digests([1]) == writer.digests([0])


@pytest.mark.parametrize("kind", ["error", "lost", "hold"])
def test_every_unit_is_accounted_for_whichever_write_fails(
    kind: str, best_stack: Stack, make_pair: Callable[..., Pair]
) -> None:
    pair = make_pair(best_stack, window_ops=3)
    count, layers = 24, 2
    after = 0
    while True:
        after += 1
        key = pair.reader.call("imm_allocate", pair.from_writer)
        fabric = pair.writer.fabric
        fabric.inject_fault(kind, after)
        before = fabric.stats()
        transfer = fabric.open_transfer(pair.to_reader, key)
        watch = pair.writer.watch()
        plan = pair.writer.plan(list(range(count)), list(range(0, 2 * count, 2)), layers, 32, 64)
        fabric.arm(transfer, watch, 1, plan, 0, count // 2)
        fabric.arm(transfer, watch, 1, plan, count // 2, count)
        fabric.finish(transfer)
        for _ in range(layers):
            pair.writer.bump(watch)
        closed = kind == "hold" and after <= 12  # layers * count / 4 writes, where four pages share one
        if closed:
            while fabric.stats()["writes"] - before["writes"] < after:
                time.sleep(0.001)
            fabric.close_endpoint(pair.to_reader)
        _, _, ok, failed, unknown, error = pair.writer.wait(native.TRANSFER_DONE, transfer)
        fabric.unwatch(watch)
        assert ok + failed + unknown == count * layers
        if closed:
            assert unknown > 0
            pair.writer.wait(native.ENDPOINT_CLOSED, pair.to_reader)
            pair.reader.call("close_endpoint", pair.from_writer)
            pair.to_reader, pair.from_writer = link(pair.writer, pair.reader)
        elif kind == "error":
            assert unknown == 0
            assert (failed > 0) == bool(error)
        else:
            assert (failed, unknown, error) == (0, 0, "")
        assert fabric.stats()["inflight_bytes"] == fabric.stats()["armed_plans"] == 0
        fabric.inject_fault(kind, 1, 0)  # takes back one that did not fire
        exchange(pair.writer, pair.reader, pair.to_reader, pair.from_writer)
        arrived = pair.reader.call("imm_retire", key)
        assert arrived <= ok + unknown
        if after > 12:  # no write is left to fail
            assert arrived == count * layers
            break
        if kind == "lost":
            assert arrived < ok, "a local completion alone is no proof of arrival"
        if kind == "error":
            assert arrived == ok


def test_closing_ends_each_open_transfer_once(best_stack: Stack, make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(best_stack)
    fabric = pair.writer.fabric
    watch = pair.writer.watch()
    transfers = [fabric.open_transfer(pair.to_reader, 1) for _ in range(5)]
    plan = pair.writer.plan([0, 1], [0, 1], layers=3)
    for transfer in transfers[1:]:
        fabric.arm(transfer, watch, 1, plan, 0, 2)
    fabric.finish(transfers[1])
    fabric.close_endpoint(pair.to_reader)
    fabric.close_endpoint(pair.to_reader)
    pair.writer.wait(native.ENDPOINT_CLOSED, pair.to_reader)
    done = {event[1]: event[2:5] for event in pair.writer.events if event[0] == native.TRANSFER_DONE}
    assert done == {transfer: [0, 0 if transfer == transfers[0] else 6, 0] for transfer in transfers}
    assert len(pair.writer.seen()) == len(transfers)
    late = fabric.open_transfer(pair.to_reader, 1)
    assert pair.writer.wait(native.TRANSFER_DONE, late)[2:] == [0, 0, 0, "endpoint 1 is closed"]
    with pytest.raises(native.FabricError, match="endpoint 1 is not open"):
        fabric.imm_allocate(pair.to_reader)


def test_a_wrong_key_in_a_descriptor_ends_that_endpoint_only(stack: Stack, nodes: NodeFactory) -> None:
    reader = nodes.there(stack, 64, ["127.0.0.1"])
    writer = nodes.here(stack, 64, ["127.0.0.1"])
    writer.fill(1)
    to_reader, from_writer = link(writer, reader)
    bad, bad_theirs = writer.open(), reader.open()
    descriptor = bytearray.fromhex(reader.describe(bad_theirs))
    descriptor[-16] ^= 0xFF  # the low byte of the last key
    writer.connect(bad, descriptor.hex())
    before = reader.digest()
    transfer = writer.push(bad, 1, [0], [0])
    _, _, ok, failed, unknown, _ = writer.wait(native.TRANSFER_DONE, transfer)
    assert ok + failed + unknown == 1
    exchange(writer, reader, to_reader, from_writer)
    reader.sleep(0.1)
    assert reader.call("stats")["units_received"] == 1
    assert reader.call("stats")["stale_units"] == 0
    writer.fabric.close_endpoint(bad)
    writer.wait(native.ENDPOINT_CLOSED, bad)
    key = reader.call("imm_allocate", from_writer)
    reader.call("imm_arm", key, 1)
    writer.push(to_reader, key, [1], [2])
    reader.wait(native.IMM_REACHED, key)
    assert reader.digest() == before or reader.digests([2]) == writer.digests([1])
    assert reader.digests([0]) != writer.digests([0])


def test_malformed_descriptors_are_refused(best_stack: Stack, make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(best_stack)
    wire = pair.writer.caps()["wire"]
    good = bytes.fromhex(pair.reader.describe(pair.reader.open()))  # a local one takes one peer
    endpoint = pair.writer.open()
    bad = [b"", b"x", good[:-1], good + b"\0", b"NOPE" + good[4:], good[:4] + b"\x63\0" + good[6:], bytes(len(good))]
    bad += [good[:cut] for cut in range(0, len(good), 3)]
    for descriptor in bad:
        with pytest.raises(native.FabricError, match="malformed fabric descriptor"):
            pair.writer.fabric.connect(endpoint, descriptor)
    with pytest.raises(native.FabricError, match=f"speaks other, this node {wire}"):
        pair.writer.fabric.connect(endpoint, good.replace(bytes([len(wire)]) + wire.encode(), b"\x05other"))
    pair.writer.fabric.connect(endpoint, good)
    with pytest.raises(native.FabricError, match="a peer already"):
        pair.writer.fabric.connect(endpoint, good)


def test_a_transfer_on_an_unconnected_endpoint_fails(best_stack: Stack, make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(best_stack)
    endpoint = pair.writer.open()
    transfer = pair.writer.push(endpoint, 1, [0], [0])
    _, _, ok, failed, unknown, error = pair.writer.wait(native.TRANSFER_DONE, transfer)
    assert (ok, failed, unknown) == (0, 1, 0)
    assert "not connected" in error


def test_closing_under_load_is_quick_and_the_same_twice(stack: Stack, make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(stack, num_pages=4096)
    transfer = flood(pair.writer, pair.to_reader, 1, 2048)
    pair.writer.fabric.close()
    pair.writer.fabric.close()
    events = pair.writer.fabric.drain()
    assert [event[0] for event in events] == [native.TRANSFER_DONE, native.ENDPOINT_CLOSED]
    assert events[0][1] == transfer
    assert sum(events[0][2:5]) == 2048
    with pytest.raises(native.FabricError, match="closed"):
        pair.writer.fabric.register(pair.writer.memory.address, PAGE)
    with pytest.raises(native.FabricError, match="closed"):
        pair.writer.fabric.open_transfer(pair.to_reader, 1)
