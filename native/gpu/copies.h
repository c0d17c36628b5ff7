// Copies between host and device memory that nobody waits for: a CopyStream takes them in order, a CopyMark says when
// those so far have ended. PinnedPool: the host memory that they start from or end in.
//
// Owner: the worker's thread, which has bound the device.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "gpu/device.h"

namespace pdd {

// Place in a stream. Reusable once passed.
class CopyMark {
  public:
    static Result<CopyMark> make(std::shared_ptr<const GpuDevice> device);
    CopyMark(CopyMark&& other) noexcept;
    CopyMark& operator=(CopyMark&&) = delete;
    ~CopyMark();

    enum class State { Pending, Passed, Broken };
    // Broken: the device failed; whether the copies ended is not known.
    State state() const;

  private:
    friend class CopyStream;
    CopyMark(std::shared_ptr<const GpuDevice> device, cuda::CUevent event)
        : device_(std::move(device)), event_(event) {}
    std::shared_ptr<const GpuDevice> device_;
    cuda::CUevent event_;
};

class CopyStream {
  public:
    // A stream of its own, which waits for no work of the model's.
    static Result<CopyStream> make(std::shared_ptr<const GpuDevice> device);
    CopyStream(CopyStream&& other) noexcept;
    CopyStream& operator=(CopyStream&&) = delete;
    ~CopyStream();

    // Host memory must be pinned. An Error means that nothing was queued.
    Status to_host(void* to, uint64_t from, uint64_t nbytes);
    Status to_device(uint64_t to, const void* from, uint64_t nbytes);
    Status mark(CopyMark& mark);

  private:
    CopyStream(std::shared_ptr<const GpuDevice> device, cuda::CUstream stream)
        : device_(std::move(device)), stream_(stream) {}
    std::shared_ptr<const GpuDevice> device_;
    cuda::CUstream stream_;
};

// Blocks of one size. Pinning is slow, so a block that comes back is kept for the next taker.
class PinnedPool {
  public:
    PinnedPool(std::shared_ptr<const GpuDevice> device, uint64_t block_bytes)
        : device_(std::move(device)), block_bytes_(block_bytes) {}
    ~PinnedPool();
    PinnedPool(const PinnedPool&) = delete;
    PinnedPool& operator=(const PinnedPool&) = delete;

    Result<uint8_t*> take();
    // A block that a copy or a NIC may still touch is never given back.
    void give(uint8_t* block) { free_.push_back(block); }
    uint64_t block_bytes() const { return block_bytes_; }

  private:
    std::shared_ptr<const GpuDevice> device_;
    uint64_t block_bytes_;
    std::vector<uint8_t*> free_;
};

}  // namespace pdd
