"""Memory of a GPU that one process makes, another maps and a third gets by the fabric."""

from __future__ import annotations

import os
import re
import socket

import pytest

from tests.fabric.conftest import link
from tests.fabric.fabric_node import PAGE
from tests.gpu.conftest import Gpu, handed_over


def test_what_a_rank_allocates_the_daemon_maps_and_its_peers_fill(gpu: Gpu) -> None:
    """Allocation, export, SCM_RIGHTS, import, mapping, registration, transfer: seen from the two ranks at the ends."""
    ranks, nodes = [], []
    for _ in range(2):
        ours, theirs = socket.socketpair()
        rank = gpu.rank(16, pass_fds=(theirs.fileno(),))
        fd = handed_over(rank, ours, theirs)
        ours.close()
        nodes.append(gpu.node(16, fd=fd, pass_fds=(fd,)))
        os.close(fd)
        ranks.append(rank)
    assert ranks[1].read(0, 16 * PAGE) == "00" * 16 * PAGE, "memory comes zeroed"
    content = os.urandom(3 * PAGE)
    ranks[0].write(5 * PAGE, content.hex())
    to_reader, from_writer = link(*nodes)
    key = nodes[1].call("imm_allocate", from_writer)
    nodes[1].call("imm_arm", key, 3)
    nodes[0].push(to_reader, key, [5, 6, 7], [2, 9, 11])
    nodes[1].whole(key, [2, 9, 11])
    for number, page in enumerate([2, 9, 11]):
        assert ranks[1].read(page * PAGE, PAGE) == content[number * PAGE : (number + 1) * PAGE].hex()
    assert ranks[1].read(3 * PAGE, PAGE) == "00" * PAGE


def test_the_mapping_outlives_the_rank(gpu: Gpu) -> None:
    ours, theirs = socket.socketpair()
    rank = gpu.rank(4, pass_fds=(theirs.fileno(),))
    rank.write(0, "ab" * 8)
    fd = handed_over(rank, ours, theirs)
    ours.close()
    node = gpu.node(4, fd=fd, pass_fds=(fd,))
    os.close(fd)
    rank.kill()
    assert node.bytes_at(0, 8) == "ab" * 8


def test_tensors_find_address_size_and_type(gpu: Gpu) -> None:
    interface = gpu.rank(3).interface()
    assert interface["shape"] == [3 * PAGE]
    assert (interface["typestr"], interface["version"], interface["data"][1]) == ("|u1", 3, False)
    assert interface["data"][0] > 0


def test_something_else_than_a_handle_is_refused(gpu: Gpu) -> None:
    with open("/dev/null") as nothing, pytest.raises(RuntimeError, match=r"importing fd \d+ as 8192 bytes on GPU"):
        gpu.node(2, fd=nothing.fileno(), pass_fds=(nothing.fileno(),))


def test_a_machine_without_a_driver_says_what_is_missing(gpu: Gpu) -> None:
    if not gpu.environment:
        pytest.skip("this machine has a driver")
    gpu.environment.clear()
    with pytest.raises(RuntimeError) as told:
        gpu.node()
    assert re.search(r"GPU cuda: the CUDA driver cannot be loaded: .*NVIDIA's driver", str(told.value))


@pytest.mark.cuda
def test_torch_computes_in_the_memory_that_the_daemon_maps(real_gpu: Gpu) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch drives no GPU")
    from pdd.engine.kv_memory import GpuKv
    from pdd.fabric import _native as native
    from pdd.kv.layout import KvLayout
    from tests.gpu.cuda import Cuda

    layout = KvLayout(num_layers=2, num_pages=4, num_kv_heads=2, page_size=16, head_dim=64, dtype="bfloat16")
    memory = GpuKv(layout.region_bytes, "cuda")
    memory.tensor(layout)[1, 3] = 2.0
    torch.cuda.synchronize()
    mapped = native.DeviceMemory.import_fd("cuda", memory.fd, layout.region_bytes)
    os.close(memory.fd)
    offset = layout.layer_bytes + 3 * layout.page_bytes
    assert Cuda().read(mapped.address + offset, layout.page_bytes) == b"\x00\x40" * (layout.page_bytes // 2)
