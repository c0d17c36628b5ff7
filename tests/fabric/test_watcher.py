"""Plans fire layer by layer as a counter in another process moves; an idle node costs nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from pdd.fabric import _native as native
from tests.fabric.conftest import Pair, Stack, link
from tests.fabric.fabric_node import PAGE, make_memory

LAYERS = 6

RANK = """
import sys
from pdd.fabric._native import Counter, MappedMemory
counter, memory = Counter(int(sys.argv[1])), MappedMemory(int(sys.argv[2]), int(sys.argv[3])).view()
pages_per_layer = int(sys.argv[4])
for line in sys.stdin:
    layer = int(line)
    part = memory[layer * pages_per_layer * 4096 : (layer + 1) * pages_per_layer * 4096]
    part[:] = layer + 1  # the layer's KV
    print(counter.bump(), flush=True)
"""


@pytest.mark.parametrize("idle", ["auto", "spin"])  # a watcher looks, or the worker itself
def test_layers_of_another_process_arrive_as_its_counter_moves(idle: str, stack: Stack, make_pair: Callable[..., Pair]) -> None:
    pages = 8
    pair = make_pair(stack, num_pages=LAYERS * pages, idle=idle)
    fabric = pair.writer.fabric
    counter, counter_fd = native.Counter.create()
    nbytes = LAYERS * pages * PAGE
    arena_fd = make_memory("kv", nbytes)
    memory = native.MappedMemory(arena_fd, nbytes)
    region = fabric.register(memory.address, nbytes, arena_fd)
    pair.to_reader, pair.from_writer = link(pair.writer, pair.reader)  # a local peer is lent what there is when it links
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK, str(counter_fd), str(arena_fd), str(nbytes), str(pages)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(counter_fd, arena_fd),
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path)),
    )
    assert rank.stdin is not None
    assert rank.stdout is not None

    key = pair.reader.call("imm_allocate", pair.from_writer)
    pair.reader.call("imm_arm", key, LAYERS * pages)
    watch = fabric.watch(counter)
    offsets = np.arange(pages, dtype=np.int64) * PAGE
    plan = native.WritePlan(
        src_region=region,
        dst_region=0,
        src_offset=offsets,
        dst_offset=offsets[::-1].copy(),
        nbytes=np.full(pages, PAGE),
        units=np.ones(pages, dtype=np.int64),
        src_layer_stride=pages * PAGE,
        dst_layer_stride=pages * PAGE,
        num_layers=LAYERS,
    )
    assert len(plan) == pages
    transfer = fabric.open_transfer(pair.to_reader, key)
    fabric.arm(transfer, watch, 1, plan, 0, 5)
    fabric.arm(transfer, watch, 1, plan, 5, pages)
    fabric.finish(transfer)
    for layer in range(LAYERS):
        assert pair.reader.call("imm_arrived", key) <= layer * pages
        print(layer, file=rank.stdin, flush=True)
        assert rank.stdout.readline() == f"{layer + 1}\n"
        deadline = time.monotonic() + 10
        while pair.reader.call("imm_arrived", key) < (layer + 1) * pages:
            assert time.monotonic() < deadline
    digests = pair.reader.whole(key, list(range(LAYERS * pages)))
    assert digests == pair.reader.digests(list(range(LAYERS * pages)))
    expected = pair.writer.memory.view()
    expected[: LAYERS * pages * PAGE] = memory.view()
    assert digests == pair.writer.digests(list(range(LAYERS * pages)))
    assert pair.writer.wait(native.TRANSFER_DONE, transfer)[2:] == [LAYERS * pages, 0, 0, ""]
    rank.stdin.close()
    rank.stdout.close()
    assert rank.wait(10) == 0
    fabric.unwatch(watch)
    fabric.unregister(region)
    os.close(counter_fd)
    os.close(arena_fd)


@pytest.mark.parametrize("idle", ["auto", "spin"])
def test_a_counter_that_jumps_fires_many_layers(idle: str, best_stack: Stack, make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(best_stack, idle=idle)
    fabric = pair.writer.fabric
    watch = pair.writer.watch()
    for _ in range(3):
        pair.writer.bump(watch)  # the counter is never reset
    key = pair.reader.call("imm_allocate", pair.from_writer)
    pair.reader.call("imm_arm", key, 16)
    plan = pair.writer.plan([0, 1], [10, 12], layers=4, src_stride=2, dst_stride=20)
    transfer = fabric.open_transfer(pair.to_reader, key)
    fabric.arm(transfer, watch, 4, plan, 0, 2)
    fabric.arm(transfer, watch, 8, plan, 0, 2)
    fabric.finish(transfer)
    for _ in range(4):
        pair.writer.bump(watch)
    deadline = time.monotonic() + 10
    while pair.reader.call("imm_arrived", key) < 8:
        assert time.monotonic() < deadline
    time.sleep(0.05)
    assert pair.reader.call("imm_arrived", key) == 8
    assert fabric.stats()["armed_plans"] == 1
    for _ in range(4):
        pair.writer.bump(watch)
    assert pair.reader.wait(native.IMM_REACHED, key)[2] == 16
    assert fabric.stats()["armed_plans"] == 0


@pytest.mark.parametrize("idle", ["auto", "spin"])
def test_a_cancelled_plan_never_fires(idle: str, best_stack: Stack, make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(best_stack, idle=idle)
    fabric = pair.writer.fabric
    watch = pair.writer.watch()
    key = pair.reader.call("imm_allocate", pair.from_writer)
    gone, kept = (fabric.open_transfer(pair.to_reader, key) for _ in range(2))
    for transfer in (gone, kept):
        fabric.arm(transfer, watch, 1, pair.writer.plan([0], [10], layers=4, src_stride=2, dst_stride=20), 0, 1)
    fabric.cancel(gone)
    fabric.finish(kept)
    assert pair.writer.wait(native.TRANSFER_DONE, gone)[2:] == [0, 4, 0, "cancelled"]
    for _ in range(4):
        pair.writer.bump(watch)
    assert pair.writer.wait(native.TRANSFER_DONE, kept)[2:] == [4, 0, 0, ""]
    deadline = time.monotonic() + 10
    while pair.reader.call("imm_arrived", key) < 4:  # a completion is no proof that it landed
        assert time.monotonic() < deadline
    time.sleep(0.05)
    assert pair.reader.call("imm_arrived", key) == 4
    assert fabric.stats()["armed_plans"] == 0


def test_counters_and_plans_refuse_what_makes_no_sense(best_stack: Stack, make_pair: Callable[..., Pair]) -> None:
    fd = os.memfd_create("small")
    with pytest.raises(native.FabricError, match="has 0 bytes"):
        native.Counter(fd)
    os.ftruncate(fd, 4096)
    with pytest.raises(native.FabricError, match="multiple of 64"):
        native.Counter(fd, 8)
    with pytest.raises(native.FabricError, match="has 4096 bytes"):
        native.Counter(fd, 4096)
    with pytest.raises(native.FabricError, match="has 4096 bytes"):
        native.MappedMemory(fd, 8192)
    native.Counter(fd, 64).bump()
    assert (native.Counter(fd, 64).value, native.Counter(fd, 0).value) == (1, 0)
    os.close(fd)
    with pytest.raises(native.FabricError):
        native.Counter(fd)

    pair = make_pair(best_stack)
    one = np.ones(1, dtype=np.int64)
    good = {"src_region": 0, "dst_region": 0, "src_offset": one, "dst_offset": one, "nbytes": one, "units": one}
    good |= {"src_layer_stride": 0, "dst_layer_stride": 0, "num_layers": 1}
    native.WritePlan(**good)
    for name, value in [
        ("units", one * 256),
        ("units", one * 0),
        ("nbytes", one * 0),
        ("src_offset", one * -1),
        ("nbytes", np.ones(2, dtype=np.int64)),
        ("num_layers", 0),
    ]:
        with pytest.raises(native.FabricError, match="write plan"):
            native.WritePlan(**{**good, name: value})
    transfer = pair.writer.fabric.open_transfer(pair.to_reader, 0)
    with pytest.raises(native.FabricError, match="no watch 9"):
        pair.writer.fabric.arm(transfer, 9, 0, pair.writer.plan([0], [0]), 0, 1)
    with pytest.raises(native.FabricError, match="a plan of 1"):
        pair.writer.fabric.arm(transfer, 9, 0, pair.writer.plan([0], [0]), 0, 2)
    with pytest.raises(native.FabricError, match="no transfer 5"):
        pair.writer.fabric.finish(5)
    with pytest.raises(native.FabricError, match="24 bits"):
        pair.writer.fabric.open_transfer(pair.to_reader, 1 << 24)


def test_an_idle_link_costs_less_than_two_percent_of_a_core(stack: Stack, make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(stack)
    key = pair.reader.call("imm_allocate", pair.from_writer)
    pair.reader.call("imm_arm", key, 2)
    transfer = pair.writer.push(pair.to_reader, key, [0], [0])
    pair.writer.wait(native.TRANSFER_DONE, transfer)
    pair.reader.sleep(0.2)
    before = pair.writer.cpu_seconds(), pair.reader.cpu_seconds()
    pair.reader.sleep(3)
    used = pair.writer.cpu_seconds() - before[0], pair.reader.cpu_seconds() - before[1]
    assert max(used) < 0.06, used  # processor time, not wall time: other load does not count
    pair.writer.push(pair.to_reader, key, [1], [1])
    assert pair.reader.wait(native.IMM_REACHED, key)[2] == 2


@pytest.mark.parametrize("idle", ["spin", "block", "auto"])
def test_every_idle_policy_moves_pages_and_wakes_for_commands(
    idle: str, best_stack: Stack, make_pair: Callable[..., Pair]
) -> None:
    pair = make_pair(best_stack, idle=idle, groups=[(["127.0.0.1"], [0])])
    for _ in range(20):
        key = pair.reader.call("imm_allocate", pair.from_writer)
        pair.reader.call("imm_arm", key, 3)
        transfer = pair.writer.push(pair.to_reader, key, [0, 1, 2], [5, 3, 9])
        assert pair.reader.whole(key, [5, 3, 9]) == pair.writer.digests([0, 1, 2])
        pair.writer.wait(native.TRANSFER_DONE, transfer)
        pair.reader.call("imm_retire", key)


def test_many_threads_may_use_one_fabric(best_stack: Stack, make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(best_stack)
    per_thread, num_threads = 60, 4
    key = pair.reader.call("imm_allocate", pair.from_writer)
    pair.reader.call("imm_arm", key, per_thread * num_threads)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(per_thread):
                pair.writer.push(pair.to_reader, key, [0], [1])
        except BaseException as error:  # handed to the main thread
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert pair.reader.wait(native.IMM_REACHED, key)[2] == per_thread * num_threads
