#include "gpu/device.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>

namespace pdd {

using namespace cuda;

Result<std::shared_ptr<const GpuDevice>> GpuDevice::open(const std::string& name) {
    auto driver = CudaDriver::load();
    if (!driver) return Error{"GPU " + name + ": " + driver.error().message, driver.error().code};
    std::shared_ptr<GpuDevice> device(new GpuDevice);
    device->driver_ = *driver;
    const CudaDriver& cu = **driver;
    CUresult rc = CUDA_SUCCESS;
    if (name.rfind("cuda", 0) == 0) {
        int ordinal = 0;
        const char* digits = name.data() + (name.size() > 5 ? 5 : name.size());
        const char* end = name.data() + name.size();
        const auto parsed = std::from_chars(digits, end, ordinal);
        if (name != "cuda" && (name[4] != ':' || parsed.ec != std::errc() || parsed.ptr != end || ordinal < 0))
            return Error{"GPU " + name + ": neither cuda, cuda:N nor a PCI address", EINVAL};
        rc = cu.cuDeviceGet(&device->ordinal_, ordinal);
    } else {
        rc = cu.cuDeviceGetByPCIBusId(&device->ordinal_, name.c_str());
    }
    if (rc != CUDA_SUCCESS) return cu.error("GPU " + name + ": looking it up", rc);
    char pci[32] = {};
    rc = cu.cuDeviceGetPCIBusId(pci, sizeof pci, device->ordinal_);
    if (rc != CUDA_SUCCESS) return cu.error("GPU " + name + ": cuDeviceGetPCIBusId", rc);
    device->pci_ = pci;
    std::transform(device->pci_.begin(), device->pci_.end(), device->pci_.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    char model[128] = {};
    rc = cu.cuDeviceGetName(model, sizeof model, device->ordinal_);
    if (rc != CUDA_SUCCESS) return cu.error("GPU " + name + ": cuDeviceGetName", rc);
    device->model_ = model;
    rc = cu.cuDevicePrimaryCtxRetain(&device->context_, device->ordinal_);
    if (rc != CUDA_SUCCESS) return cu.error("GPU " + name + ": cuDevicePrimaryCtxRetain", rc);
    return std::shared_ptr<const GpuDevice>(std::move(device));
}

GpuDevice::~GpuDevice() {
    if (context_ != nullptr) cu().cuDevicePrimaryCtxRelease_v2(ordinal_);
}

Status GpuDevice::bind() const {
    const CUresult rc = cu().cuCtxSetCurrent(context_);
    if (rc != CUDA_SUCCESS) return cu().error("cuCtxSetCurrent (" + pci_ + ")", rc);
    return {};
}

int GpuDevice::attribute(int which) const {
    int value = 0;
    return cu().cuDeviceGetAttribute(&value, which, ordinal_) == CUDA_SUCCESS ? value : 0;
}

bool GpuDevice::is_device_memory(uint64_t address) const {
    const Current current(*this);
    unsigned type = 0;
    return cu().cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) == CUDA_SUCCESS &&
           type == CU_MEMORYTYPE_DEVICE;
}

bool GpuDevice::needs_flush() const {
    return attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING) < CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER;
}

Status GpuDevice::flush() const {
    if (cu().cuFlushGPUDirectRDMAWrites == nullptr)
        return Error{"GPU " + pci_ + ": this driver cannot flush the writes of NICs; update it to CUDA 11.3 or later",
                     ENOSYS};
    const CUresult rc = cu().cuFlushGPUDirectRDMAWrites(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                                                        CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER);
    if (rc != CUDA_SUCCESS) return cu().error("cuFlushGPUDirectRDMAWrites (" + pci_ + ")", rc);
    return {};
}

Result<UniqueFd> GpuDevice::dmabuf(uint64_t address, uint64_t nbytes) const {
    if (cu().cuMemGetHandleForAddressRange == nullptr || attribute(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) == 0)
        return Error{"GPU " + pci_ + ": no dma-buf (CUDA 11.7, the open kernel modules and Linux 5.12 have it)",
                     ENOTSUP};
    const Current current(*this);
    int fd = -1;
    const CUresult rc =
        cu().cuMemGetHandleForAddressRange(&fd, address, nbytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
    if (rc != CUDA_SUCCESS) return cu().error("cuMemGetHandleForAddressRange (" + pci_ + ")", rc);
    return UniqueFd(fd);
}

}  // namespace pdd
