// A libcuda.so.1 without a GPU: the driver entry points that pdd uses, over memfds and threads. Tests put its directory
// first in LD_LIBRARY_PATH; the product knows nothing of it.
//
// Device memory is a memfd mapped twice: at the address that callers get, without any access, so that code which
// touches device memory by itself crashes; and at another one, which copies go through. Each stream is a thread, so
// copies are really asynchronous. Streams can be held, broken and slowed from outside: fake_cuda_* at the end.
#include <fcntl.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "gpu/driver.h"

using namespace pdd::cuda;

namespace {

constexpr CUresult kInvalidContext = 201;
constexpr CUresult kLaunchFailure = 719;
constexpr size_t kGranularity = 2 << 20;
constexpr char kPci[] = "0000:FA:CE.0";

struct Mapping {
    uint64_t nbytes;
    uint8_t* alias;  // what copies go through
};

std::mutex mutex;  // guards the tables
std::map<uint64_t, Mapping> mappings;
std::map<CUmemGenericAllocationHandle, int> handles;  // to memfds
CUmemGenericAllocationHandle last_handle = 0;
std::map<uint64_t, uint64_t> reserved;

std::mutex hold_mutex;
std::condition_variable hold_changed;
bool held = false;
std::atomic<bool> broken{false};
std::atomic<uint64_t> pinned{0};
std::atomic<uint64_t> flushes{0};
std::atomic<int> ordering{200};
thread_local int contexts = 0;

// The alias of [address, address + nbytes), null when that is no mapped device memory.
uint8_t* alias_of(uint64_t address, uint64_t nbytes) {
    const std::lock_guard lock(mutex);
    auto after = mappings.upper_bound(address);
    if (after == mappings.begin()) return nullptr;
    const auto& [base, mapping] = *--after;
    if (address - base > mapping.nbytes || nbytes > mapping.nbytes - (address - base)) return nullptr;
    return mapping.alias + (address - base);
}

uint8_t* any_address(uint64_t address, uint64_t nbytes) {
    uint8_t* alias = alias_of(address, nbytes);
    return alias != nullptr ? alias : reinterpret_cast<uint8_t*>(address);
}

}  // namespace

namespace pdd::cuda {

struct CUctx_st {};
struct CUmod_st {};
struct CUfunc_st {};
struct CUevent_st {
    std::atomic<uint64_t> recorded{0};
    std::shared_ptr<std::atomic<uint64_t>> passed = std::make_shared<std::atomic<uint64_t>>(0);  // a stream's, too
};

struct CUstream_st {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> work;
    bool stopping = false;
    std::thread thread{[this] { run(); }};

    void push(std::function<void()> one) {
        const std::lock_guard lock(mutex);
        work.push_back(std::move(one));
        changed.notify_one();
    }
    void run() {
        for (;;) {
            std::function<void()> one;
            {
                std::unique_lock lock(mutex);
                changed.wait(lock, [this] { return stopping || !work.empty(); });
                if (work.empty()) return;
                one = std::move(work.front());
                work.pop_front();
            }
            {
                std::unique_lock lock(hold_mutex);
                hold_changed.wait(lock, [] { return !held; });
            }
            one();
        }
    }
    ~CUstream_st() {
        {
            const std::lock_guard lock(mutex);
            stopping = true;
            changed.notify_one();
        }
        thread.join();
    }
};

}  // namespace pdd::cuda

namespace {

CUctx_st context;
CUmod_st module_object;
CUfunc_st function_object;

CUstream_st& default_stream() {
    static CUstream_st* stream = new CUstream_st;  // never ends, as a driver's does not
    return *stream;
}
CUstream_st& stream_of(CUstream stream) {
    return stream != nullptr ? *stream : default_stream();
}

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default"))) CUresult
#define NEEDS_CONTEXT \
    if (contexts == 0) return kInvalidContext

FAKE cuInit(unsigned) {
    return CUDA_SUCCESS;
}
FAKE cuDriverGetVersion(int* version) {
    *version = 12080;
    return CUDA_SUCCESS;
}
FAKE cuGetErrorName(CUresult, const char** text) {
    *text = "CUDA_ERROR_OF_THE_FAKE_DRIVER";
    return CUDA_SUCCESS;
}
FAKE cuGetErrorString(CUresult, const char** text) {
    *text = nullptr;
    return CUDA_SUCCESS;
}
FAKE cuDeviceGet(CUdevice* device, int ordinal) {
    *device = 0;
    return ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
FAKE cuDeviceGetByPCIBusId(CUdevice* device, const char* id) {
    *device = 0;
    return ::strcasecmp(id, kPci) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
FAKE cuDeviceGetPCIBusId(char* id, int size, CUdevice) {
    ::snprintf(id, static_cast<size_t>(size), "%s", kPci);
    return CUDA_SUCCESS;
}
FAKE cuDeviceGetName(char* name, int size, CUdevice) {
    ::snprintf(name, static_cast<size_t>(size), "fake GPU");
    return CUDA_SUCCESS;
}
FAKE cuDeviceGetAttribute(int* value, int attribute, CUdevice) {
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
            *value = 1;
            return CUDA_SUCCESS;
        case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING:
            *value = ordering;
            return CUDA_SUCCESS;
        default:
            *value = 0;
            return CUDA_SUCCESS;
    }
}
FAKE cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice) {
    *out = &context;
    return CUDA_SUCCESS;
}
FAKE cuDevicePrimaryCtxRelease_v2(CUdevice) {
    return CUDA_SUCCESS;
}
FAKE cuCtxPushCurrent_v2(CUcontext) {
    ++contexts;
    return CUDA_SUCCESS;
}
FAKE cuCtxPopCurrent_v2(CUcontext* out) {
    NEEDS_CONTEXT;
    *out = &context;
    --contexts;
    return CUDA_SUCCESS;
}
FAKE cuCtxSetCurrent(CUcontext) {
    contexts = contexts > 0 ? contexts : 1;
    return CUDA_SUCCESS;
}
FAKE cuCtxSynchronize() {  // what is tested here waits for the default stream alone
    NEEDS_CONTEXT;
    std::promise<void> reached;
    default_stream().push([&] { reached.set_value(); });
    reached.get_future().wait();
    return CUDA_SUCCESS;
}
FAKE cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp* prop, int) {
    *bytes = kGranularity;
    return prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
FAKE cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* prop,
                 unsigned long long) {
    NEEDS_CONTEXT;
    if (size == 0 || size % kGranularity != 0 || prop->requested_handle_types != 1) return CUDA_ERROR_INVALID_VALUE;
    const int fd = ::memfd_create("fake-gpu", MFD_CLOEXEC);
    if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(size)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
    // What a real allocation holds is whatever it held before.
    void* dirt = ::mmap(nullptr, kGranularity, PROT_WRITE, MAP_SHARED, fd, 0);
    std::memset(dirt, 0xdd, kGranularity);
    ::munmap(dirt, kGranularity);
    const std::lock_guard lock(mutex);
    handles[*handle = ++last_handle] = fd;
    return CUDA_SUCCESS;
}
FAKE cuMemRelease(CUmemGenericAllocationHandle handle) {
    const std::lock_guard lock(mutex);
    const auto found = handles.find(handle);
    if (found == handles.end()) return CUDA_ERROR_INVALID_VALUE;
    ::close(found->second);
    handles.erase(found);
    return CUDA_SUCCESS;
}
FAKE cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle, int, unsigned long long) {
    const std::lock_guard lock(mutex);
    const auto found = handles.find(handle);
    if (found == handles.end()) return CUDA_ERROR_INVALID_VALUE;
    *static_cast<int*>(out) = ::fcntl(found->second, F_DUPFD_CLOEXEC, 0);
    return CUDA_SUCCESS;
}
FAKE cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* os_handle, int) {
    NEEDS_CONTEXT;
    const int fd = ::fcntl(static_cast<int>(reinterpret_cast<intptr_t>(os_handle)), F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return CUDA_ERROR_INVALID_VALUE;
    const std::lock_guard lock(mutex);
    handles[*handle = ++last_handle] = fd;
    return CUDA_SUCCESS;
}
FAKE cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr, unsigned long long) {
    void* range = ::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = reinterpret_cast<CUdeviceptr>(range);
    const std::lock_guard lock(mutex);
    reserved[*address] = size;
    return CUDA_SUCCESS;
}
FAKE cuMemAddressFree(CUdeviceptr address, size_t size) {
    const std::lock_guard lock(mutex);
    if (reserved.erase(address) == 0) return CUDA_ERROR_INVALID_VALUE;
    ::munmap(reinterpret_cast<void*>(address), size);
    return CUDA_SUCCESS;
}
FAKE cuMemMap(CUdeviceptr address, size_t size, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
    const std::lock_guard lock(mutex);
    const auto found = handles.find(handle);
    if (found == handles.end() || !reserved.contains(address) || size % kGranularity != 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct stat info {};
    ::fstat(found->second, &info);
    if (static_cast<size_t>(info.st_size) != size) return CUDA_ERROR_INVALID_VALUE;
    void* alias = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, found->second, 0);
    if (alias == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    mappings[address] = {size, static_cast<uint8_t*>(alias)};
    return CUDA_SUCCESS;
}
FAKE cuMemUnmap(CUdeviceptr address, size_t) {
    const std::lock_guard lock(mutex);
    const auto found = mappings.find(address);
    if (found == mappings.end()) return CUDA_ERROR_INVALID_VALUE;
    ::munmap(found->second.alias, found->second.nbytes);
    mappings.erase(found);
    return CUDA_SUCCESS;
}
FAKE cuMemSetAccess(CUdeviceptr address, size_t, const CUmemAccessDesc* access, size_t count) {
    const std::lock_guard lock(mutex);
    return mappings.contains(address) && count == 1 && access->flags == 3 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
FAKE cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
    NEEDS_CONTEXT;
    CUmemAllocationProp prop{};
    prop.requested_handle_types = 1;
    CUmemGenericAllocationHandle handle = 0;
    bytes = (bytes + kGranularity - 1) / kGranularity * kGranularity;
    if (cuMemCreate(&handle, bytes, &prop, 0) != 0 || cuMemAddressReserve(address, bytes, 0, 0, 0) != 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    const CUresult mapped = cuMemMap(*address, bytes, 0, handle, 0);
    cuMemRelease(handle);
    return mapped;
}
FAKE cuMemFree_v2(CUdeviceptr address) {
    return cuMemUnmap(address, 0);
}
FAKE cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t count) {
    NEEDS_CONTEXT;
    uint8_t* alias = alias_of(address, count);
    if (alias == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::memset(alias, value, count);
    return CUDA_SUCCESS;
}
FAKE cuMemGetInfo_v2(size_t* free, size_t* total) {
    *free = *total = size_t{1} << 30;
    return CUDA_SUCCESS;
}
FAKE cuPointerGetAttribute(void* value, int attribute, CUdeviceptr address) {
    NEEDS_CONTEXT;
    if (attribute != CU_POINTER_ATTRIBUTE_MEMORY_TYPE || alias_of(address, 1) == nullptr)
        return CUDA_ERROR_INVALID_VALUE;
    *static_cast<unsigned*>(value) = CU_MEMORYTYPE_DEVICE;
    return CUDA_SUCCESS;
}
FAKE cuPointerSetAttribute(const void*, int, CUdeviceptr) {
    return CUDA_SUCCESS;
}
FAKE cuMemHostAlloc(void** address, size_t bytes, unsigned) {
    NEEDS_CONTEXT;
    ++pinned;
    *address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const std::lock_guard lock(mutex);
    reserved[reinterpret_cast<uint64_t>(*address)] = bytes;
    return CUDA_SUCCESS;
}
FAKE cuMemFreeHost(void* address) {
    NEEDS_CONTEXT;
    const std::lock_guard lock(mutex);
    const auto found = reserved.find(reinterpret_cast<uint64_t>(address));
    if (found == reserved.end()) return CUDA_ERROR_INVALID_VALUE;
    ::munmap(address, found->second);
    reserved.erase(found);
    return CUDA_SUCCESS;
}
FAKE cuMemHostRegister_v2(void*, size_t, unsigned) {
    NEEDS_CONTEXT;
    return CUDA_SUCCESS;
}
FAKE cuMemHostUnregister(void*) {
    return CUDA_SUCCESS;
}
FAKE cuMemHostGetDevicePointer_v2(CUdeviceptr* device, void* host, unsigned) {
    *device = reinterpret_cast<CUdeviceptr>(host);
    return CUDA_SUCCESS;
}
// Copies that wait are for tests: they pass while streams are held.
FAKE cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
    NEEDS_CONTEXT;
    uint8_t* alias = alias_of(to, bytes);
    if (alias != nullptr) std::memcpy(alias, from, bytes);
    return alias != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
FAKE cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
    NEEDS_CONTEXT;
    const uint8_t* alias = alias_of(from, bytes);
    if (alias != nullptr) std::memcpy(to, alias, bytes);
    return alias != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
FAKE cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
    NEEDS_CONTEXT;
    uint8_t* alias = alias_of(to, bytes);
    if (alias == nullptr) return CUDA_ERROR_INVALID_VALUE;
    stream_of(stream).push([=] { std::memcpy(alias, from, bytes); });
    return CUDA_SUCCESS;
}
FAKE cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
    NEEDS_CONTEXT;
    const uint8_t* alias = alias_of(from, bytes);
    if (alias == nullptr) return CUDA_ERROR_INVALID_VALUE;
    stream_of(stream).push([=] { std::memcpy(to, alias, bytes); });
    return CUDA_SUCCESS;
}
FAKE cuStreamCreate(CUstream* stream, unsigned flags) {
    NEEDS_CONTEXT;
    *stream = new CUstream_st;
    return flags == CU_STREAM_NON_BLOCKING ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
FAKE cuStreamDestroy_v2(CUstream stream) {
    delete stream;
    return CUDA_SUCCESS;
}
FAKE cuEventCreate(CUevent* event, unsigned) {
    NEEDS_CONTEXT;
    *event = new CUevent_st;
    return CUDA_SUCCESS;
}
FAKE cuEventDestroy_v2(CUevent event) {
    delete event;
    return CUDA_SUCCESS;
}
FAKE cuEventRecord(CUevent event, CUstream stream) {
    const uint64_t round = ++event->recorded;
    stream_of(stream).push([passed = event->passed, round] { *passed = round; });
    return CUDA_SUCCESS;
}
FAKE cuEventQuery(CUevent event) {
    NEEDS_CONTEXT;
    if (broken) return kLaunchFailure;
    return *event->passed == event->recorded ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
FAKE cuModuleLoadData(CUmodule* out, const void* image) {
    NEEDS_CONTEXT;
    *out = &module_object;
    return std::strstr(static_cast<const char*>(image), ".entry pdd_bump") != nullptr ? CUDA_SUCCESS
                                                                                      : CUDA_ERROR_INVALID_VALUE;
}
FAKE cuModuleUnload(CUmodule) {
    return CUDA_SUCCESS;
}
FAKE cuModuleGetFunction(CUfunction* out, CUmodule, const char* name) {
    *out = &function_object;
    return std::strcmp(name, "pdd_bump") == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
// Knows one kernel: count at [0] += [2], then stored at [1].
FAKE cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream stream,
                    void** arguments, void**) {
    NEEDS_CONTEXT;
    uint64_t values[3];
    for (int i = 0; i < 3; ++i) std::memcpy(&values[i], arguments[i], 8);
    stream_of(stream).push([count_at = reinterpret_cast<uint64_t*>(any_address(values[0], 8)),
                            line = reinterpret_cast<uint64_t*>(any_address(values[1], 8)), add = values[2]] {
        *count_at += add;
        std::atomic_ref(*line).store(*count_at, std::memory_order_release);
    });
    return CUDA_SUCCESS;
}
FAKE cuFlushGPUDirectRDMAWrites(int target, int scope) {
    NEEDS_CONTEXT;
    if (target != 0 || scope != 100) return CUDA_ERROR_INVALID_VALUE;
    ++flushes;
    return CUDA_SUCCESS;
}

// -- for tests --------------------------------------------------------------------------------------------------------
#define CONTROL extern "C" __attribute__((visibility("default")))

// Nothing that is queued runs until it is let go.
CONTROL void fake_cuda_hold(int on) {
    const std::lock_guard lock(hold_mutex);
    held = on != 0;
    hold_changed.notify_all();
}
// The device fails: whoever asks after a copy is told so.
CONTROL void fake_cuda_break(int on) {
    broken = on != 0;
}
CONTROL void fake_cuda_ordering(int value) {
    ordering = value;
}
// Pinned allocations so far.
CONTROL uint64_t fake_cuda_pinned_blocks() {
    return pinned;
}
CONTROL uint64_t fake_cuda_flushes() {
    return flushes;
}
