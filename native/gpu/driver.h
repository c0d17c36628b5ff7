// CudaDriver: the CUDA driver, libcuda.so.1, loaded at run time. Built without CUDA's headers and without linking to
// it.
//
// Only what pdd calls, declared by hand after the driver API's manual; a name carries the version suffix of the ABI
// that the declaration describes. Entry points newer than CUDA 11.0 are optional: null where the driver is older. A
// loaded driver stays loaded for the life of the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "util/result.h"

namespace pdd::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUmemGenericAllocationHandle = unsigned long long;

struct CUmemLocation {
    int type;
    int id;
};
struct CUmemAllocationProp {
    int type;
    int requested_handle_types;
    CUmemLocation location;
    void* win32_handle_meta_data;
    struct {
        unsigned char compression_type;
        unsigned char gpu_direct_rdma_capable;
        unsigned short usage;
        unsigned char reserved[4];
    } alloc_flags;
};
static_assert(sizeof(CUmemAllocationProp) == 32);
struct CUmemAccessDesc {
    CUmemLocation location;
    int flags;
};
static_assert(sizeof(CUmemAccessDesc) == 12);

enum : CUresult {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_NOT_READY = 600,
};
enum : int {
    CU_MEM_ALLOCATION_TYPE_PINNED = 1,
    CU_MEM_LOCATION_TYPE_DEVICE = 1,
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
    CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1,
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
    CU_POINTER_ATTRIBUTE_SYNC_MEMOPS = 6,
    CU_MEMORYTYPE_DEVICE = 2,
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED = 116,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING = 118,
    CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED = 124,
    CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER = 100,
    CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX = 0,
    CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER = 100,
};
enum : unsigned {
    CU_MEMHOSTALLOC_PORTABLE = 1,
    CU_MEMHOSTREGISTER_PORTABLE = 1,
    CU_MEMHOSTREGISTER_DEVICEMAP = 2,
    CU_STREAM_NON_BLOCKING = 1,
    CU_EVENT_DISABLE_TIMING = 2,
};

// clang-format off
// Name in libcuda, then arguments. Every one returns CUresult.
#define PDD_CUDA_REQUIRED(X)                                                                                          \
    X(cuInit, (unsigned flags))                                                                                       \
    X(cuDriverGetVersion, (int* version))                                                                             \
    X(cuGetErrorName, (CUresult error, const char** text))                                                            \
    X(cuGetErrorString, (CUresult error, const char** text))                                                          \
    X(cuDeviceGet, (CUdevice* device, int ordinal))                                                                   \
    X(cuDeviceGetByPCIBusId, (CUdevice* device, const char* id))                                                      \
    X(cuDeviceGetPCIBusId, (char* id, int size, CUdevice device))                                                     \
    X(cuDeviceGetName, (char* name, int size, CUdevice device))                                                       \
    X(cuDeviceGetAttribute, (int* value, int attribute, CUdevice device))                                             \
    X(cuDevicePrimaryCtxRetain, (CUcontext* context, CUdevice device))                                                \
    X(cuDevicePrimaryCtxRelease_v2, (CUdevice device))                                                                \
    X(cuCtxPushCurrent_v2, (CUcontext context))                                                                       \
    X(cuCtxPopCurrent_v2, (CUcontext* context))                                                                       \
    X(cuCtxSetCurrent, (CUcontext context))                                                                           \
    X(cuCtxSynchronize, ())                                                                                           \
    X(cuMemGetAllocationGranularity, (size_t* bytes, const CUmemAllocationProp* prop, int option))                    \
    X(cuMemCreate, (CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* prop,               \
                    unsigned long long flags))                                                                        \
    X(cuMemRelease, (CUmemGenericAllocationHandle handle))                                                            \
    X(cuMemExportToShareableHandle, (void* out, CUmemGenericAllocationHandle handle, int type,                        \
                                     unsigned long long flags))                                                       \
    X(cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle* handle, void* os_handle, int type))              \
    X(cuMemAddressReserve, (CUdeviceptr* address, size_t size, size_t alignment, CUdeviceptr where,                   \
                            unsigned long long flags))                                                                \
    X(cuMemAddressFree, (CUdeviceptr address, size_t size))                                                           \
    X(cuMemMap, (CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,                \
                 unsigned long long flags))                                                                           \
    X(cuMemUnmap, (CUdeviceptr address, size_t size))                                                                 \
    X(cuMemSetAccess, (CUdeviceptr address, size_t size, const CUmemAccessDesc* access, size_t count))                \
    X(cuMemAlloc_v2, (CUdeviceptr* address, size_t bytes))                                                            \
    X(cuMemFree_v2, (CUdeviceptr address))                                                                            \
    X(cuMemsetD8_v2, (CUdeviceptr address, unsigned char value, size_t count))                                        \
    X(cuMemGetInfo_v2, (size_t* free, size_t* total))                                                                 \
    X(cuPointerGetAttribute, (void* value, int attribute, CUdeviceptr address))                                       \
    X(cuPointerSetAttribute, (const void* value, int attribute, CUdeviceptr address))                                 \
    X(cuMemHostAlloc, (void** address, size_t bytes, unsigned flags))                                                 \
    X(cuMemFreeHost, (void* address))                                                                                 \
    X(cuMemHostRegister_v2, (void* address, size_t bytes, unsigned flags))                                            \
    X(cuMemHostUnregister, (void* address))                                                                           \
    X(cuMemHostGetDevicePointer_v2, (CUdeviceptr* device, void* host, unsigned flags))                                \
    X(cuMemcpyHtoDAsync_v2, (CUdeviceptr to, const void* from, size_t bytes, CUstream stream))                        \
    X(cuMemcpyDtoHAsync_v2, (void* to, CUdeviceptr from, size_t bytes, CUstream stream))                              \
    X(cuStreamCreate, (CUstream* stream, unsigned flags))                                                             \
    X(cuStreamDestroy_v2, (CUstream stream))                                                                          \
    X(cuEventCreate, (CUevent* event, unsigned flags))                                                                \
    X(cuEventDestroy_v2, (CUevent event))                                                                             \
    X(cuEventRecord, (CUevent event, CUstream stream))                                                                \
    X(cuEventQuery, (CUevent event))                                                                                  \
    X(cuModuleLoadData, (CUmodule* module, const void* image))                                                        \
    X(cuModuleUnload, (CUmodule module))                                                                              \
    X(cuModuleGetFunction, (CUfunction* function, CUmodule module, const char* name))                                 \
    X(cuLaunchKernel, (CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,          \
                       unsigned bz, unsigned shared, CUstream stream, void** arguments, void** extra))
// From 11.3 and 11.7.
#define PDD_CUDA_OPTIONAL(X)                                                                                          \
    X(cuFlushGPUDirectRDMAWrites, (int target, int scope))                                                            \
    X(cuMemGetHandleForAddressRange, (void* handle, CUdeviceptr address, size_t size, int type,                       \
                                      unsigned long long flags))
// clang-format on

class CudaDriver {
  public:
    // Loads and initializes it. The error says what to install when there is none.
    static Result<std::shared_ptr<const CudaDriver>> load();

    // "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
    Error error(const std::string& operation, CUresult code) const;
    std::string version_text() const;  // of CUDA that it speaks, "12.8"

#define PDD_CUDA_MEMBER(name, arguments) CUresult(*name) arguments = nullptr;
    PDD_CUDA_REQUIRED(PDD_CUDA_MEMBER)
    PDD_CUDA_OPTIONAL(PDD_CUDA_MEMBER)
#undef PDD_CUDA_MEMBER

  private:
    CudaDriver() = default;
    int version_ = 0;
};

}  // namespace pdd::cuda
