"""KV that an RDMA NIC reads from one GPU's memory and writes into another's, over the NIC's own loop."""

from __future__ import annotations

import os

import pytest

from pdd.fabric import _native as native
from tests.fabric.conftest import Stack, link
from tests.gpu.conftest import Gpu


@pytest.fixture(params=[pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("efa", "verbs")])
def rdma_gpu(request: pytest.FixtureRequest, real_gpu: Gpu) -> Gpu:
    """A GPU with a NIC of that kind, under the libfabric that a node would choose."""
    if not os.path.isdir("/sys/class/infiniband") or not os.listdir("/sys/class/infiniband"):
        pytest.skip("no RDMA NIC on this machine (/sys/class/infiniband)")
    chosen = native.library()
    real_gpu.stack = Stack(chosen["path"], request.param, chosen["version"])
    return real_gpu


@pytest.mark.cuda
def test_nics_reach_the_gpu_themselves(rdma_gpu: Gpu) -> None:
    """By dma-buf or peer memory, whichever this kernel and this libfabric allow; copies through the host are a failure."""
    writer, reader = rdma_gpu.node(1024, bind=[]), rdma_gpu.node(1024, bind=[])
    caps = writer.caps()
    print(f"\n{caps['provider']} {caps['domain']}: {caps['gpu_path']}; a flush is needed: {native.gpu()['rdma_needs_flush']}")
    assert caps["gpu_path"] in ("dmabuf", "hmem"), caps["gpu_path_why"]
    writer.fill(1)
    to_reader, from_writer = link(writer, reader)
    pages = list(range(1024))
    for turn in range(20):
        reader.fill(2 + turn)
        key = reader.call("imm_allocate", from_writer)
        reader.call("imm_arm", key, len(pages))
        writer.push(to_reader, key, pages, pages[::-1])
        assert reader.whole(key, pages[::-1]) == writer.digests(pages)
