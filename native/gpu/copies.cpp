#include "gpu/copies.h"

#include <utility>

namespace pdd {

using namespace cuda;

Result<CopyMark> CopyMark::make(std::shared_ptr<const GpuDevice> device) {
    CUevent event = nullptr;
    const CUresult rc = device->cu().cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
    if (rc != CUDA_SUCCESS) return device->cu().error("cuEventCreate", rc);
    return CopyMark(std::move(device), event);
}

CopyMark::CopyMark(CopyMark&& other) noexcept
    : device_(std::move(other.device_)), event_(std::exchange(other.event_, nullptr)) {}

CopyMark::~CopyMark() {
    if (event_ != nullptr) device_->cu().cuEventDestroy_v2(event_);
}

CopyMark::State CopyMark::state() const {
    switch (device_->cu().cuEventQuery(event_)) {
        case CUDA_SUCCESS:
            return State::Passed;
        case CUDA_ERROR_NOT_READY:
            return State::Pending;
        default:
            return State::Broken;
    }
}

Result<CopyStream> CopyStream::make(std::shared_ptr<const GpuDevice> device) {
    CUstream stream = nullptr;
    const CUresult rc = device->cu().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
    if (rc != CUDA_SUCCESS) return device->cu().error("cuStreamCreate", rc);
    return CopyStream(std::move(device), stream);
}

CopyStream::CopyStream(CopyStream&& other) noexcept
    : device_(std::move(other.device_)), stream_(std::exchange(other.stream_, nullptr)) {}

CopyStream::~CopyStream() {
    if (stream_ != nullptr) device_->cu().cuStreamDestroy_v2(stream_);
}

Status CopyStream::to_host(void* to, uint64_t from, uint64_t nbytes) {
    const CUresult rc = device_->cu().cuMemcpyDtoHAsync_v2(to, from, nbytes, stream_);
    if (rc != CUDA_SUCCESS) return device_->cu().error("cuMemcpyDtoHAsync", rc);
    return {};
}

Status CopyStream::to_device(uint64_t to, const void* from, uint64_t nbytes) {
    const CUresult rc = device_->cu().cuMemcpyHtoDAsync_v2(to, from, nbytes, stream_);
    if (rc != CUDA_SUCCESS) return device_->cu().error("cuMemcpyHtoDAsync", rc);
    return {};
}

Status CopyStream::mark(CopyMark& mark) {
    const CUresult rc = device_->cu().cuEventRecord(mark.event_, stream_);
    if (rc != CUDA_SUCCESS) return device_->cu().error("cuEventRecord", rc);
    return {};
}

PinnedPool::~PinnedPool() {
    for (uint8_t* block : free_) device_->cu().cuMemFreeHost(block);
}

Result<uint8_t*> PinnedPool::take() {
    if (!free_.empty()) {
        uint8_t* block = free_.back();
        free_.pop_back();
        return block;
    }
    void* block = nullptr;
    const CUresult rc = device_->cu().cuMemHostAlloc(&block, block_bytes_, CU_MEMHOSTALLOC_PORTABLE);
    if (rc != CUDA_SUCCESS)
        return device_->cu().error("cuMemHostAlloc of " + std::to_string(block_bytes_) + " bytes", rc);
    return static_cast<uint8_t*>(block);
}

}  // namespace pdd
