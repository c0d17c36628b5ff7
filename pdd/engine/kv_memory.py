"""A rank's KV memory, made so that the daemon can map the same bytes: it gets a descriptor of them (SCM_RIGHTS).

On the CPU a sealed memfd, which neither side can shrink under the other; its pages are zero and take memory when first
written. On a GPU physical memory (cuMem) whose handle is a file descriptor; zeroed when made. `RankReady.kv_kind` tells the
daemon which it is. Both live until neither process maps them.
"""

from __future__ import annotations

import mmap
import os
from typing import ClassVar, Protocol

import torch

from pdd import memfd
from pdd.errors import HOW_TO_INSTALL, LimitError, NotInstalled
from pdd.kv.layout import KvLayout
from pdd.model.attention import TORCH_DTYPES, kv_tensor
from pdd.units import show_bytes


class KvMemory(Protocol):
    """Kept by the rank for as long as it uses the tensor."""

    kind: ClassVar[str]  # "memfd", "cuda"
    device: str  # PCI address of the GPU; "" on the CPU
    fd: int  # for the daemon; the caller closes it once it is sent

    def tensor(self, layout: KvLayout) -> torch.Tensor:
        """`[layers, pages, heads, tiles, page_size, head_dim]` over the same bytes."""


class HostKv:
    """A sealed memfd of exactly `num_bytes`."""

    kind: ClassVar[str] = "memfd"
    device = ""

    def __init__(self, num_bytes: int) -> None:
        """Raises LimitError when there is no room for it."""
        fd = -1
        try:
            fd = self.fd = memfd.sealed("pdd-kv", num_bytes)
            self.mapping = mmap.mmap(self.fd, num_bytes)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise LimitError(f"a KV region of {show_bytes(num_bytes)} cannot be made: {error.strerror}",
                             hint="Lower kv.memory_fraction or kv.num_pages, or raise the limit of address space "
                                  "(ulimit -v).") from error

    def tensor(self, layout: KvLayout) -> torch.Tensor:
        return kv_tensor(layout, memoryview(self.mapping))


class GpuKv:
    """At least `num_bytes` of a GPU. `tensor` needs a torch that drives it."""

    kind: ClassVar[str] = "cuda"

    def __init__(self, num_bytes: int, device: str) -> None:
        """device: PCI address, or cuda:N.

        Raises:
            LimitError: the GPU has no room for it, or is not there.
        """
        try:
            from pdd.fabric import _native
        except ImportError as error:
            raise NotInstalled(f"pdd's native core cannot be loaded: {error}", hint=HOW_TO_INSTALL) from error
        try:
            self._memory = _native.DeviceMemory.allocate(device, num_bytes)
            self.fd = self._memory.export_fd()
        except _native.FabricError as error:
            raise LimitError(f"a KV region of {show_bytes(num_bytes)} cannot be made: {error}",
                             hint="Lower kv.memory_fraction or kv.num_pages, and look at nvidia-smi for the GPU and for who "
                                  "else uses its memory.") from error
        self.device = self._memory.device
        self._ordinal: int = _native.gpu(self.device)["ordinal"]

    def tensor(self, layout: KvLayout) -> torch.Tensor:
        flat = torch.as_tensor(self._memory, device=torch.device("cuda", self._ordinal))
        return flat[: layout.region_bytes].view(TORCH_DTYPES[layout.dtype]).view(layout.shape)
