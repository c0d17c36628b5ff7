#include "gpu/driver.h"

#include <dlfcn.h>

#include <cerrno>

namespace pdd::cuda {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";

}  // namespace

Result<std::shared_ptr<const CudaDriver>> CudaDriver::load() {
    void* handle = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (handle == nullptr)
        return Error{std::string("the CUDA driver cannot be loaded: ") + ::dlerror() +
                         "; it comes with NVIDIA's driver, not with the CUDA toolkit",
                     ENOENT};
    std::shared_ptr<CudaDriver> driver(new CudaDriver);
    std::string missing;
#define PDD_CUDA_LOOK_UP(name, arguments) \
    driver->name = reinterpret_cast<CUresult(*) arguments>(::dlsym(handle, #name));
#define PDD_CUDA_INSIST(name, arguments) \
    PDD_CUDA_LOOK_UP(name, arguments)    \
    if (driver->name == nullptr) missing += std::string(missing.empty() ? "" : ", ") + #name;
    PDD_CUDA_REQUIRED(PDD_CUDA_INSIST)
    PDD_CUDA_OPTIONAL(PDD_CUDA_LOOK_UP)
#undef PDD_CUDA_LOOK_UP
#undef PDD_CUDA_INSIST
    ::dlclose(handle);
    if (!missing.empty())
        return Error{std::string(kLibrary) + " has no " + missing + ": update NVIDIA's driver", ENOSYS};
    if (const CUresult rc = driver->cuInit(0); rc != CUDA_SUCCESS) return driver->error("cuInit", rc);
    if (const CUresult rc = driver->cuDriverGetVersion(&driver->version_); rc != CUDA_SUCCESS)
        return driver->error("cuDriverGetVersion", rc);
    return std::shared_ptr<const CudaDriver>(std::move(driver));
}

Error CudaDriver::error(const std::string& operation, CUresult code) const {
    const char* name = nullptr;
    const char* text = nullptr;
    cuGetErrorName(code, &name);
    cuGetErrorString(code, &text);
    std::string message = operation + ": " + (name != nullptr ? name : "CUDA error " + std::to_string(code));
    if (text != nullptr) message += " (" + std::string(text) + ")";
    return Error{message, code == CUDA_ERROR_OUT_OF_MEMORY ? ENOMEM : EIO};
}

std::string CudaDriver::version_text() const {
    return std::to_string(version_ / 1000) + "." + std::to_string(version_ % 1000 / 10);
}

}  // namespace pdd::cuda
