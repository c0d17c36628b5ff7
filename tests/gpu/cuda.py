"""What the GPU tests do to a GPU by themselves: look into its memory, capture graphs. By ctypes, real driver or fake one."""

from __future__ import annotations

import ctypes
from typing import Any


class Cuda:
    """The driver with the primary context of device 0 current on this thread."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *args: Any) -> None:
        rc = getattr(self.lib, name)(*args)
        assert rc == 0, f"{name}: CUDA error {rc}"

    def read(self, address: int, nbytes: int) -> bytes:
        out = ctypes.create_string_buffer(nbytes)
        self.call("cuMemcpyDtoH_v2", out, ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
        return out.raw

    def write(self, address: int, data: bytes) -> None:
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))

    # -- real driver only
    def stream(self) -> int:
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        assert stream.value is not None
        return stream.value

    def capture_begin(self, stream: int) -> None:
        self.call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), 1)  # thread-local

    def capture_end(self, stream: int) -> ctypes.c_void_p:
        """The graph of what was captured, ready to launch."""
        graph, launchable = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        self.call("cuGraphInstantiateWithFlags", ctypes.byref(launchable), graph, ctypes.c_uint64(0))
        return launchable

    def launch(self, graph: ctypes.c_void_p, stream: int) -> None:
        self.call("cuGraphLaunch", graph, ctypes.c_void_p(stream))

    def synchronize(self) -> None:
        self.call("cuCtxSynchronize")
