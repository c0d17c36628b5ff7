"""KV between two GPUs by copies through host memory: device, wire, device. On the fake driver, device memory that is
touched by anything but a copy ends the process."""

from __future__ import annotations

import time

import pytest

from pdd.fabric import _native as native
from tests.fabric.conftest import link
from tests.fabric.fabric_node import PAGE
from tests.gpu.conftest import Gpu


def test_pages_arrive_whole_and_are_counted_only_then(gpu: Gpu) -> None:
    pair = gpu.pair()
    source, target = list(range(0, 60)), list(range(59, -1, -1))
    pair.reader.call("imm_arm", pair.key, 60)
    transfer = pair.writer.push(pair.to_reader, pair.key, source, target)
    assert pair.reader.whole(pair.key, target) == pair.writer.digests(source)
    done = pair.writer.wait(native.TRANSFER_DONE, transfer)
    assert done[2:] == [60, 0, 0, ""]


def test_the_path_is_named_with_its_reason(gpu: Gpu) -> None:
    caps = gpu.node().caps()
    assert caps["gpu_path"] == "staged"
    assert "GPU memory" in caps["gpu_path_why"]
    assert caps["wire"] == "tcp+staged1"


def test_more_than_all_slots_hold_goes_through(gpu: Gpu) -> None:
    """Ten times 8 MiB in writes of 1 MiB, both ways at once."""
    pair = gpu.pair(num_pages=4096)
    pair.reader.fill(2)
    back = pair.writer.call("imm_allocate", pair.to_reader)
    rounds, pages = 5, list(range(2048))
    pair.reader.call("imm_arm", pair.key, rounds * len(pages))
    pair.writer.call("imm_arm", back, rounds * len(pages))
    # The lower half of the writer's goes to the upper half of the reader's, and the other way round.
    for _ in range(rounds):
        pair.writer.push(pair.to_reader, pair.key, pages, [page + 2048 for page in pages])
    # The reader was told no region of the writer's: only a fresh link can.
    ours, theirs = pair.reader.open(), pair.writer.open()
    pair.reader.connect(ours, pair.writer.describe(theirs))
    pair.writer.connect(theirs, pair.reader.describe(ours))
    answer = pair.writer.call("imm_allocate", theirs)
    pair.writer.call("imm_retire", back)
    pair.writer.call("imm_arm", answer, rounds * len(pages))
    for _ in range(rounds):
        pair.reader.push(ours, answer, pages, [page + 2048 for page in pages])
    upper = [page + 2048 for page in pages]
    assert pair.reader.whole(pair.key, upper, 60) == pair.writer.digests(pages)
    assert pair.writer.whole(answer, upper, 60) == pair.reader.digests(pages)


def test_no_immediate_counts_before_its_copy_into_the_device_has_ended(fake_gpu: Gpu) -> None:
    pair = fake_gpu.pair()
    pair.reader.call("imm_arm", pair.key, 4)
    pair.reader.fake("hold", 1)
    transfer = pair.writer.push(pair.to_reader, pair.key, [0, 2, 4, 6], [0, 2, 4, 6])
    time.sleep(0.3)
    assert pair.reader.call("imm_arrived", pair.key) == 0
    assert pair.reader.bytes_at(0, PAGE) == "00" * PAGE
    assert pair.writer.seen() == [], "a write completes when its bytes are in the peer's device"
    pair.reader.fake("hold", 0)
    assert pair.reader.whole(pair.key, [0, 2, 4, 6]) == pair.writer.digests([0, 2, 4, 6])
    assert pair.writer.wait(native.TRANSFER_DONE, transfer)[2:] == [4, 0, 0, ""]


def test_cancel_with_copies_out_in_flight_settles_with_what_arrived(fake_gpu: Gpu) -> None:
    """8 of the 40 writes are in slots when the rest is dropped: they land, and both sides count the same."""
    pair = fake_gpu.pair(num_pages=128)
    pages = list(range(0, 80, 2))
    pair.writer.fake("hold", 1)
    transfer = pair.writer.push(pair.to_reader, pair.key, pages, pages)
    time.sleep(0.2)
    pair.writer.call("cancel", transfer)
    time.sleep(0.2)
    assert pair.writer.seen() == [], "it ends only when what was posted is terminal"
    pair.writer.fake("hold", 0)
    done = pair.writer.wait(native.TRANSFER_DONE, transfer)
    ok, failed, unknown = done[2:5]
    assert (ok + failed, unknown) == (40, 0)
    assert 0 < ok < 40
    assert pair.reader.call("imm_arrived", pair.key) == ok


def test_the_fence_waits_for_copies_into_the_device(fake_gpu: Gpu) -> None:
    """A page is not free while a copy to it may still run: closed comes after the copy, and nothing changes it later."""
    pair = fake_gpu.pair()
    pair.reader.fake("hold", 1)
    pair.writer.push(pair.to_reader, pair.key, [0], [0])
    time.sleep(0.3)
    pair.reader.fake_later(0.5, "hold", 0)
    started = time.monotonic()
    pair.reader.call("close_endpoint", pair.from_writer)
    pair.reader.wait(native.ENDPOINT_CLOSED, pair.from_writer)
    assert time.monotonic() - started > 0.3
    landed = pair.reader.bytes_at(0, PAGE)
    assert landed == pair.writer.bytes_at(0, PAGE)
    pair.reader.fill(7)
    now = pair.reader.digest()
    time.sleep(0.3)
    assert pair.reader.digest() == now


def test_a_copy_that_never_ends_leaves_the_fence_down(fake_gpu: Gpu) -> None:
    pair = fake_gpu.pair()
    pair.reader.fake("hold", 1)
    pair.writer.push(pair.to_reader, pair.key, [0], [0])
    time.sleep(0.3)
    pair.reader.call("close_endpoint", pair.from_writer)
    event = pair.reader.wait(native.ENDPOINT_FAILED, pair.from_writer)
    assert "have not ended" in event[2]
    assert not [event for event in pair.reader.seen() if event[0] == native.ENDPOINT_CLOSED]
    pair.reader.fake("hold", 0)


def test_a_device_that_fails_under_arrivals_fails_the_endpoint_and_counts_nothing(fake_gpu: Gpu) -> None:
    pair = fake_gpu.pair()
    pair.reader.fake("break", 1)
    pair.writer.push(pair.to_reader, pair.key, [0], [0])
    event = pair.reader.wait(native.ENDPOINT_FAILED, pair.from_writer)
    assert "the device failed" in event[2]
    assert pair.reader.call("imm_arrived", pair.key) == 0
    pair.reader.call("close_endpoint", pair.from_writer)
    assert "failed with copies in flight" in pair.reader.wait(native.ENDPOINT_FAILED, pair.from_writer)[2]


def test_a_device_that_fails_under_departures_leaves_the_write_unknown(fake_gpu: Gpu) -> None:
    pair = fake_gpu.pair()
    pair.writer.fake("break", 1)
    transfer = pair.writer.push(pair.to_reader, pair.key, [0], [0])
    done = pair.writer.wait(native.TRANSFER_DONE, transfer)
    assert list(done[2:5]) == [0, 0, 1]
    assert done[5]


def test_a_killed_writer_leaves_living_peers_alone(fake_gpu: Gpu) -> None:
    reader = fake_gpu.node()
    first, second = fake_gpu.node(), fake_gpu.node()
    first.fill(1)
    second.fill(2)
    links = [link(first, reader), link(second, reader)]
    keys = [reader.call("imm_allocate", theirs) for _, theirs in links]
    first.fake("hold", 1)
    first.push(links[0][0], keys[0], [0, 2], [0, 2])
    time.sleep(0.2)
    first.kill()
    reader.call("close_endpoint", links[0][1])
    reader.wait(native.ENDPOINT_CLOSED, links[0][1])
    reader.call("imm_arm", keys[1], 2)
    second.push(links[1][0], keys[1], [1, 3], [1, 3])
    assert reader.whole(keys[1], [1, 3]) == second.digests([1, 3])


def test_links_that_come_and_go_reuse_pinned_memory(fake_gpu: Gpu) -> None:
    writer, reader = fake_gpu.node(), fake_gpu.node()
    writer.fill(1)
    for turn in range(5):
        ours, theirs = link(writer, reader)
        key = reader.call("imm_allocate", theirs)
        reader.call("imm_arm", key, 1)
        writer.push(ours, key, [turn], [turn + 10])
        assert reader.whole(key, [turn + 10]) == writer.digests([turn])
        writer.call("close_endpoint", ours)
        reader.call("close_endpoint", theirs)
        writer.wait(native.ENDPOINT_CLOSED, ours)
        reader.wait(native.ENDPOINT_CLOSED, theirs)
    assert reader.fake("pinned_blocks") <= 2


def test_writes_outside_the_peers_region_are_refused(fake_gpu: Gpu) -> None:
    """Here; that the reader checks each header again is seen in tests/native/test_gpu.cpp."""
    small, large = fake_gpu.node(num_pages=512), fake_gpu.node(num_pages=1024)
    large.fill(1)
    ours, theirs = link(large, small)
    key = small.call("imm_allocate", theirs)
    transfer = large.write_at(ours, key, 511 * PAGE, 2 * PAGE)
    assert "outside remote region" in large.wait(native.TRANSFER_DONE, transfer)[5]


def test_host_memory_is_no_memory_of_the_gpu(fake_gpu: Gpu) -> None:
    node = fake_gpu.node()
    with pytest.raises(RuntimeError, match=r"not memory of GPU 0000:fa:ce\.0"):
        node.register(4096, 4096)


def test_gpu_memory_does_not_go_to_local_peers(fake_gpu: Gpu) -> None:
    with pytest.raises(RuntimeError, match="memory of GPU cuda does not go to local peers"):
        fake_gpu.node(local=True)


def test_nodes_that_do_not_stage_are_refused_by_name(fake_gpu: Gpu) -> None:
    from tests.fabric.fabric_node import Node

    plain = Node(fake_gpu.stack.library, fake_gpu.stack.provider, ["127.0.0.1"], 4)
    staged = fake_gpu.node()
    with pytest.raises(native.FabricError, match=r"the peer speaks tcp\+staged1, this node tcp"):
        plain.connect(plain.open(), staged.describe(staged.open()))
    plain.close()
