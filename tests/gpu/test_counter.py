"""The layer counter that a GPU writes: what it counts, and that the watcher sees it."""

from __future__ import annotations

import time

import pytest

from pdd.fabric import _native as native
from tests.gpu.conftest import Gpu


def wait_for(counter: native.Counter, value: int) -> None:
    deadline = time.monotonic() + 20
    while counter.value < value:
        assert time.monotonic() < deadline, f"the counter stands at {counter.value}"
        time.sleep(0.001)


def test_bumps_of_the_kernel_are_what_the_host_reads(gpu: Gpu) -> None:
    counter, fd = native.Counter.create()
    rank = gpu.rank(pass_fds=(fd,))
    rank.count_at(fd)
    rank.bump(3)
    wait_for(counter, 3)
    rank.bump(2)
    wait_for(counter, 5)
    assert counter.value == 5


def test_it_counts_on_from_where_the_host_was(gpu: Gpu) -> None:
    counter, fd = native.Counter.create()
    counter.bump()
    counter.bump()
    rank = gpu.rank(pass_fds=(fd,))
    rank.count_at(fd)
    rank.bump(1)
    wait_for(counter, 3)


def test_each_bump_fires_the_next_layers_writes(gpu: Gpu) -> None:
    """Rank, watcher and peer in three processes: layer l arrives after bump l + 1, and not before."""
    _, fd = native.Counter.create()
    rank = gpu.rank(pass_fds=(fd,))
    rank.count_at(fd)
    writer, reader = gpu.node(pass_fds=(fd,)), gpu.node()
    writer.fill(1)
    from tests.fabric.conftest import link

    to_reader, from_writer = link(writer, reader)
    key = reader.call("imm_allocate", from_writer)
    transfer = writer.arm_layers(to_reader, key, fd, 4)
    for layer in range(4):
        time.sleep(0.05)
        assert reader.call("imm_arrived", key) == layer
        rank.bump(1)
        deadline = time.monotonic() + 20
        while reader.call("imm_arrived", key) != layer + 1:
            assert time.monotonic() < deadline
    assert writer.wait(native.TRANSFER_DONE, transfer)[2:] == [4, 0, 0, ""]
    assert reader.digests([0, 1, 2, 3]) == writer.digests([0, 1, 2, 3])


@pytest.mark.cuda
def test_a_captured_bump_counts_at_every_replay(real_gpu: Gpu) -> None:
    counter, fd = native.Counter.create()
    rank = real_gpu.rank(pass_fds=(fd,))
    rank.count_at(fd)
    seconds = rank.replay(1, 100)
    many = rank.replay(80, 10)
    assert counter.value == 100 + 800
    print(f"\nlaunch of a graph with one bump until the host sees it: {seconds * 1e6:.1f} us at best; "
          f"with 80 bumps, {(many - seconds) / 79 * 1e6:.2f} us more for each")
