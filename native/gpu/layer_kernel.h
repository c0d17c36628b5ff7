// LayerKernel: the GPU's side of a layer Counter: a kernel of one thread that adds one and tells the host.
//
// The count itself is in device memory, which one stream writes; the host sees it in the counter's line, by a store
// with release semantics at system scope: whatever the stream did before is visible to whoever reads the new value. A
// launch is captured by a CUDA graph like any other, and counts at each replay, which a value written by the stream
// would not. The device cannot wake a sleeper: the watcher polls (Counter::wakes).
#pragma once

#include <cstdint>
#include <memory>

#include "gpu/device.h"

namespace pdd {

class LayerKernel {
  public:
    // The counter at the start of memfd `fd`, which the caller keeps; counts on from its value. One per counter.
    static Result<std::unique_ptr<LayerKernel>> make(std::shared_ptr<const GpuDevice> device, int fd);
    ~LayerKernel();
    LayerKernel(const LayerKernel&) = delete;
    LayerKernel& operator=(const LayerKernel&) = delete;

    // Queues a bump on a stream of this device (0: the default one), or captures it.
    Status bump(uint64_t stream) { return launch(stream, 1); }

  private:
    explicit LayerKernel(std::shared_ptr<const GpuDevice> device) : device_(std::move(device)) {}
    Status launch(uint64_t stream, uint64_t add);

    std::shared_ptr<const GpuDevice> device_;
    void* page_ = nullptr;  // that the line begins
    bool registered_ = false;
    cuda::CUdeviceptr line_ = 0;   // the line, as the device sees it
    cuda::CUdeviceptr count_ = 0;  // in device memory
    cuda::CUmodule module_ = nullptr;
    cuda::CUfunction function_ = nullptr;
};

}  // namespace pdd
