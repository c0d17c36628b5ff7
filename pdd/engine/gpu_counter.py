"""The layer counter of a rank that computes on a GPU: a kernel on the layer's own stream, seen by the daemon's watcher.

The kernel runs after what the stream did before, the layer's KV included, and a CUDA graph captures it like any other, so
that every replay counts. The counter's memory is the memfd that the CPU's counter has, too.
"""

from __future__ import annotations

import torch

from pdd.fabric._native import LayerKernel


class GpuLayerCounter:
    """A model.attention.LayerCounter. Make it before any capture begins: making it loads code onto the GPU."""

    def __init__(self, device: str, fd: int) -> None:
        """device: PCI address, or cuda:N; fd: of Counter.create, which stays the caller's."""
        self._kernel = LayerKernel(device, fd)

    def bump(self) -> None:
        """On torch's current stream."""
        self._kernel.bump(torch.cuda.current_stream().cuda_stream)
