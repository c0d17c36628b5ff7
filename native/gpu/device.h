// GpuDevice: one GPU of this process: the driver, the device's primary context, and what it can do for a NIC.
//
// The context is the one that torch uses too. It is current on a thread only where somebody made it so: Current does
// for a scope, bind() for the life of a thread (a worker's).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "gpu/driver.h"
#include "util/unique_fd.h"

namespace pdd {

class GpuDevice {
  public:
    // `name`: a PCI address ("0000:1b:00.0"), or "cuda:N" or "cuda" by this process' numbering.
    static Result<std::shared_ptr<const GpuDevice>> open(const std::string& name);
    ~GpuDevice();
    GpuDevice(const GpuDevice&) = delete;
    GpuDevice& operator=(const GpuDevice&) = delete;

    class Current {
      public:
        explicit Current(const GpuDevice& device)
            : device_(device), pushed_(device_.cu().cuCtxPushCurrent_v2(device_.context_) == 0) {}
        ~Current() {
            cuda::CUcontext popped;
            if (pushed_) device_.cu().cuCtxPopCurrent_v2(&popped);  // else it would be the caller's
        }
        Current(const Current&) = delete;
        Current& operator=(const Current&) = delete;

      private:
        const GpuDevice& device_;
        const bool pushed_;
    };
    Status bind() const;

    const cuda::CudaDriver& cu() const { return *driver_; }
    int ordinal() const { return ordinal_; }                 // in this process
    const std::string& pci_address() const { return pci_; }  // lower case
    const std::string& model() const { return model_; }
    int attribute(int which) const;  // 0 when the driver does not know it

    // Whether it is memory of a GPU; false for what the driver has never heard of.
    bool is_device_memory(uint64_t address) const;

    // Whether a NIC's writes may reach the device later than the NIC's word that they landed.
    bool needs_flush() const;
    // Blocks until all that NICs wrote so far is visible to the device. For whoever bound the context.
    Status flush() const;
    // A dma-buf of [address, address + nbytes), both multiples of the host's page size.
    Result<UniqueFd> dmabuf(uint64_t address, uint64_t nbytes) const;

  private:
    GpuDevice() = default;
    std::shared_ptr<const cuda::CudaDriver> driver_;
    cuda::CUdevice ordinal_ = 0;
    cuda::CUcontext context_ = nullptr;
    std::string pci_;
    std::string model_;
};

}  // namespace pdd
