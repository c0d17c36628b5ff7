#include "gpu/device_memory.h"

#include <cerrno>
#include <utility>

namespace pdd {

using namespace cuda;

namespace {

CUmemAllocationProp properties(const GpuDevice& device) {
    CUmemAllocationProp prop{};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.requested_handle_types = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, device.ordinal()};
    prop.alloc_flags.gpu_direct_rdma_capable =
        device.attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) != 0 ? 1 : 0;
    return prop;
}

std::string what(const std::string& verb, const GpuDevice& device, uint64_t nbytes) {
    return verb + " " + std::to_string(nbytes) + " bytes on GPU " + device.pci_address();
}

}  // namespace

Result<DeviceMemory> DeviceMemory::allocate(std::shared_ptr<const GpuDevice> device, uint64_t nbytes) {
    const std::string text = what("allocating", *device, nbytes);
    if (nbytes == 0) return Error{text + ": nothing to allocate", EINVAL};
    if (device->attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) == 0)
        return Error{text + ": this GPU's memory cannot be shared by a file descriptor", ENOTSUP};
    const GpuDevice::Current current(*device);
    const CudaDriver& cu = device->cu();
    DeviceMemory memory(device, nbytes);  // a copy: `current` needs the device to the end
    const CUmemAllocationProp prop = properties(memory.device());
    size_t granularity = 0;
    CUresult rc = cu.cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (rc != CUDA_SUCCESS) return cu.error(text + ": cuMemGetAllocationGranularity", rc);
    rc = cu.cuMemCreate(&memory.handle_, (nbytes + granularity - 1) / granularity * granularity, &prop, 0);
    if (rc != CUDA_SUCCESS) return cu.error(text + ": cuMemCreate", rc);
    memory.has_handle_ = true;
    if (Status mapped = memory.map(prop); !mapped) return Error{text + ": " + mapped.error().message, EIO};
    rc = cu.cuMemsetD8_v2(memory.address_, 0, memory.mapped_);
    if (rc == CUDA_SUCCESS) rc = cu.cuCtxSynchronize();  // others write there as soon as they have the descriptor
    if (rc != CUDA_SUCCESS) return cu.error(text + ": cuMemsetD8", rc);
    return memory;
}

Result<DeviceMemory> DeviceMemory::import(std::shared_ptr<const GpuDevice> device, int fd, uint64_t nbytes) {
    const std::string text = what("importing fd " + std::to_string(fd) + " as", *device, nbytes);
    if (nbytes == 0) return Error{text + ": nothing to map", EINVAL};
    const GpuDevice::Current current(*device);
    const CudaDriver& cu = device->cu();
    DeviceMemory memory(device, nbytes);  // a copy: `current` needs the device to the end
    // The driver takes the descriptor itself in the place of a pointer.
    const CUresult rc = cu.cuMemImportFromShareableHandle(
        &memory.handle_, reinterpret_cast<void*>(static_cast<intptr_t>(fd)), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (rc != CUDA_SUCCESS) return cu.error(text + ": cuMemImportFromShareableHandle", rc);
    memory.has_handle_ = true;
    if (Status mapped = memory.map(properties(memory.device())); !mapped)
        return Error{text + ": " + mapped.error().message, EIO};
    return memory;
}

Status DeviceMemory::map(const CUmemAllocationProp& prop) {
    const CudaDriver& cu = device_->cu();
    size_t granularity = 0;
    CUresult rc = cu.cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (rc != CUDA_SUCCESS) return cu.error("cuMemGetAllocationGranularity", rc);
    mapped_ = (nbytes_ + granularity - 1) / granularity * granularity;
    CUdeviceptr address = 0;
    rc = cu.cuMemAddressReserve(&address, mapped_, 0, 0, 0);
    if (rc != CUDA_SUCCESS) return cu.error("cuMemAddressReserve", rc);
    address_ = address;
    rc = cu.cuMemMap(address_, mapped_, 0, handle_, 0);
    if (rc != CUDA_SUCCESS) return cu.error("cuMemMap", rc);
    is_mapped_ = true;
    const CUmemAccessDesc access{prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    rc = cu.cuMemSetAccess(address_, mapped_, &access, 1);
    if (rc != CUDA_SUCCESS) return cu.error("cuMemSetAccess", rc);
    return {};
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : device_(std::move(other.device_)),
      nbytes_(other.nbytes_),
      mapped_(other.mapped_),
      address_(std::exchange(other.address_, 0)),
      is_mapped_(std::exchange(other.is_mapped_, false)),
      handle_(other.handle_),
      has_handle_(std::exchange(other.has_handle_, false)) {}

DeviceMemory::~DeviceMemory() {
    if (device_ == nullptr) return;
    const GpuDevice::Current current(*device_);
    if (is_mapped_) device_->cu().cuMemUnmap(address_, mapped_);
    if (address_ != 0) device_->cu().cuMemAddressFree(address_, mapped_);
    if (has_handle_) device_->cu().cuMemRelease(handle_);
}

Result<UniqueFd> DeviceMemory::export_fd() const {
    int fd = -1;
    const CUresult rc =
        device_->cu().cuMemExportToShareableHandle(&fd, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (rc != CUDA_SUCCESS) return device_->cu().error("cuMemExportToShareableHandle", rc);
    return UniqueFd(fd);
}

}  // namespace pdd
