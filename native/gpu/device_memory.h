// DeviceMemory: memory of a GPU that two processes share: a rank allocates it and hands a descriptor over, the daemon
// maps it. The counterpart of MappedMemory.
//
// Physical memory (cuMemCreate) with a POSIX file descriptor as its handle, mapped at an address of each process' own.
// It lives until the last process that maps it, or holds a descriptor, lets go.
#pragma once

#include <cstdint>
#include <memory>

#include "gpu/device.h"

namespace pdd {

class DeviceMemory {
  public:
    // At least `nbytes`, zeroed; NICs may be given it where device and driver allow that.
    static Result<DeviceMemory> allocate(std::shared_ptr<const GpuDevice> device, uint64_t nbytes);
    // Maps what another process exported; `nbytes` as it was allocated with. The caller keeps and closes the fd.
    static Result<DeviceMemory> import(std::shared_ptr<const GpuDevice> device, int fd, uint64_t nbytes);

    DeviceMemory(DeviceMemory&& other) noexcept;
    DeviceMemory& operator=(DeviceMemory&&) = delete;
    ~DeviceMemory();

    // A descriptor for another process; the caller owns it.
    Result<UniqueFd> export_fd() const;

    uint64_t address() const { return address_; }
    uint64_t nbytes() const { return nbytes_; }  // as asked for
    const GpuDevice& device() const { return *device_; }

  private:
    DeviceMemory(std::shared_ptr<const GpuDevice> device, uint64_t nbytes)
        : device_(std::move(device)), nbytes_(nbytes) {}
    // Takes `handle_` as it is, reserves addresses and maps.
    Status map(const cuda::CUmemAllocationProp& prop);

    std::shared_ptr<const GpuDevice> device_;
    uint64_t nbytes_;
    uint64_t mapped_ = 0;  // nbytes_ rounded up to the granularity
    uint64_t address_ = 0;
    bool is_mapped_ = false;
    cuda::CUmemGenericAllocationHandle handle_ = 0;
    bool has_handle_ = false;
};

}  // namespace pdd
