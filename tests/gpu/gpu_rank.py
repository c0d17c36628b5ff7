"""A rank process whose KV memory is in a GPU, without a model: `python -m tests.gpu.gpu_rank FD`. The real protocol."""

from __future__ import annotations

import os
import socket
import sys

from pdd.engine.kv_memory import GpuKv
from pdd.engine.rank_protocol import Channel, KvSize, RankFits, RankInit, RankReady, Shutdown
from pdd.fabric import _native as native
from pdd.kv.layout import KvLayout
from tests.gpu.cuda import Cuda

PATTERN = b"KV of a GPU"


def main(fd: int) -> None:
    channel = Channel(socket.socket(fileno=fd))
    init = channel.receive()
    assert isinstance(init, RankInit)
    channel.send(RankFits(8))
    assert channel.receive() == KvSize(8)
    layout = KvLayout(num_layers=2, num_pages=8, num_kv_heads=2, page_size=init.page_size, head_dim=16, dtype="bfloat16")
    memory = GpuKv(layout.region_bytes, "cuda")
    mapped = native.DeviceMemory.import_fd(memory.device, memory.fd, layout.region_bytes)
    Cuda().write(mapped.address, PATTERN)
    counter, counter_fd = native.Counter.create()
    counter.bump()
    ready = RankReady(
        rank=0, num_layers=2, num_pages=8, num_kv_heads=2, page_size=init.page_size, head_dim=16, dtype="bfloat16",
        total_kv_heads=2, vocab_size=99, eos_token_ids=(2,), max_context=64, family="llama", fingerprint="f",
        kv_bytes=layout.region_bytes, param_bytes=1, threads=1, load_seconds=0.0, pid=os.getpid(), kv_kind=memory.kind,
        kv_device=memory.device,
    )
    channel.send(ready, (memory.fd, counter_fd))
    while not isinstance(channel.receive(), Shutdown):
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]))
