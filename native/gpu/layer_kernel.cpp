#include "gpu/layer_kernel.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace pdd {

using namespace cuda;

namespace {

// st.release at system scope comes with its own fence (MEMBAR.SYS); a plain store would overtake the KV.
constexpr char kPtx[] = R"(
.version 7.0
.target sm_80
.address_size 64
.visible .entry pdd_bump(.param .u64 count_at, .param .u64 line_at, .param .u64 add)
{
    .reg .u64 %count_at, %line_at, %add, %count;
    ld.param.u64 %count_at, [count_at];
    ld.param.u64 %line_at, [line_at];
    ld.param.u64 %add, [add];
    cvta.to.global.u64 %count_at, %count_at;
    cvta.to.global.u64 %line_at, %line_at;
    ld.global.u64 %count, [%count_at];
    add.u64 %count, %count, %add;
    st.global.u64 [%count_at], %count;
    st.release.sys.global.u64 [%line_at], %count;
    ret;
}
)";

}  // namespace

Result<std::unique_ptr<LayerKernel>> LayerKernel::make(std::shared_ptr<const GpuDevice> device, int fd) {
    const std::string what = "a layer counter on GPU " + device->pci_address() + ": ";
    const GpuDevice::Current current(*device);
    const CudaDriver& cu = device->cu();
    const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    struct stat info {};
    if (::fstat(fd, &info) != 0) return Error{what + std::strerror(errno), errno};
    if (static_cast<uint64_t>(info.st_size) < page)
        return Error{what + "fd " + std::to_string(fd) + " is no counter", EINVAL};
    std::unique_ptr<LayerKernel> kernel(new LayerKernel(device));
    void* mapping = ::mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapping == MAP_FAILED) return Error{what + std::strerror(errno), errno};
    kernel->page_ = mapping;
    CUresult rc = cu.cuMemHostRegister_v2(mapping, page, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    if (rc != CUDA_SUCCESS) return cu.error(what + "cuMemHostRegister", rc);
    kernel->registered_ = true;
    rc = cu.cuMemHostGetDevicePointer_v2(&kernel->line_, mapping, 0);
    if (rc != CUDA_SUCCESS) return cu.error(what + "cuMemHostGetDevicePointer", rc);
    rc = cu.cuMemAlloc_v2(&kernel->count_, sizeof(uint64_t));
    if (rc != CUDA_SUCCESS) return cu.error(what + "cuMemAlloc", rc);
    rc = cu.cuMemsetD8_v2(kernel->count_, 0, sizeof(uint64_t));
    if (rc != CUDA_SUCCESS) return cu.error(what + "cuMemsetD8", rc);
    rc = cu.cuModuleLoadData(&kernel->module_, kPtx);
    if (rc != CUDA_SUCCESS) return cu.error(what + "cuModuleLoadData", rc);
    rc = cu.cuModuleGetFunction(&kernel->function_, kernel->module_, "pdd_bump");
    if (rc != CUDA_SUCCESS) return cu.error(what + "cuModuleGetFunction", rc);
    // Takes the line's value over, and loads the code, which no capture allows.
    uint64_t value = 0;
    std::memcpy(&value, mapping, sizeof value);
    if (Status warm = kernel->launch(0, value); !warm) return Error{what + warm.error().message, EIO};
    rc = cu.cuCtxSynchronize();  // the bumps are on other streams, which do not wait for this one
    if (rc != CUDA_SUCCESS) return cu.error(what + "the first launch", rc);
    return kernel;
}

Status LayerKernel::launch(uint64_t stream, uint64_t add) {
    const GpuDevice::Current current(*device_);
    void* arguments[] = {&count_, &line_, &add};
    const CUresult rc = device_->cu().cuLaunchKernel(function_, 1, 1, 1, 1, 1, 1, 0, reinterpret_cast<CUstream>(stream),
                                                     arguments, nullptr);
    if (rc != CUDA_SUCCESS) return device_->cu().error("cuLaunchKernel of a layer counter", rc);
    return {};
}

LayerKernel::~LayerKernel() {
    const GpuDevice::Current current(*device_);
    const CudaDriver& cu = device_->cu();
    if (module_ != nullptr) cu.cuModuleUnload(module_);
    if (count_ != 0) cu.cuMemFree_v2(count_);
    if (registered_) cu.cuMemHostUnregister(page_);
    if (page_ != nullptr) ::munmap(page_, static_cast<size_t>(::sysconf(_SC_PAGESIZE)));
}

}  // namespace pdd
