#include "sim_gpu.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace sim {
namespace {

SimGpu* the_gpu = nullptr;

}  // namespace

SimGpu::SimGpu(Run& run, Ledger& ledger) : run_(run), ledger_(ledger) {
    the_gpu = this;
}

// Blocks of a fence that did not stand were never given back.
SimGpu::~SimGpu() {
    for (const auto& [block, nbytes] : pinned_) ::munmap(block, nbytes);
    the_gpu = nullptr;
}

SimGpu& SimGpu::get() {
    return *the_gpu;
}

std::shared_ptr<const pdd::GpuDevice> SimGpu::give_birth(uint32_t life, const uint8_t* memory, size_t nbytes) {
    devices_.push_back(std::make_unique<Device>(Device{life, memory, nbytes}));
    auto device = pdd::GpuDevice::open("cuda:0");
    if (!device) run_.violate(device.error().message);
    return *device;
}

void SimGpu::die(uint32_t life) {
    for (auto& device : devices_)
        if (device->life == life) device->dead = true;
    for (auto& stream : streams_)
        if (stream->device->dead) {
            stream->copies.clear();
            stream->done = stream->queued;
        }
}

bool SimGpu::step() {
    if (streams_.empty()) return false;
    const size_t first = run_.rng.below(streams_.size());
    for (size_t i = 0; i < streams_.size(); ++i) {
        Stream& stream = *streams_[(first + i) % streams_.size()];
        if (stream.copies.empty()) continue;
        advance(stream);
        return true;
    }
    return false;
}

// A part of the copy whose turn it is.
void SimGpu::advance(Stream& stream) {
    if (stream.copies.empty() || !run_.good()) return;
    Copy& copy = stream.copies.front();
    const size_t part = copy.nbytes == 0 ? 0 : run_.rng.between(1, copy.nbytes);
    if (copy.into_device)
        ledger_.land(stream.device->life, copy.to, copy.from, part);
    else
        std::memcpy(copy.to, copy.from, part);
    run_.tally.copies += 1;
    copy = {copy.to + part, copy.from + part, copy.nbytes - part, copy.into_device};
    if (copy.nbytes > 0) return;
    stream.copies.pop_front();
    stream.done += 1;
}

bool SimGpu::is_device_memory(const uint8_t* address) const {
    return std::any_of(devices_.begin(), devices_.end(), [address](const auto& device) {
        return !device->dead && address >= device->memory && address < device->memory + device->nbytes;
    });
}

SimGpu::Stream* SimGpu::make_stream() {
    streams_.push_back(std::make_unique<Stream>(Stream{devices_.back().get(), {}}));
    return streams_.back().get();
}

void SimGpu::drop(Stream* stream) {
    std::erase_if(streams_, [stream](const auto& one) { return one.get() == stream; });
}

bool SimGpu::queue(Stream& stream, Copy copy) {
    if (stream.device->broken) return false;
    stream.copies.push_back(copy);
    stream.queued += 1;
    return true;
}

bool SimGpu::record(Event& event, const Stream& stream) {
    event = {&stream, stream.queued};
    return !stream.device->broken;
}

// Asking is what time passes by where a thread waits for nothing else.
SimGpu::State SimGpu::state(const Event& event) {
    auto& stream = const_cast<Stream&>(*event.stream);
    if (run_.rng.chance(3000)) advance(stream);
    if (!stream.device->dead && run_.rng.chance(fails)) {
        run_.faults = stream.device->broken = true;
        run_.tally.broken_gpus += 1;
        run_.note("the GPU of life %llu breaks, %llu copies wait", stream.device->life, stream.copies.size());
    }
    if (stream.device->broken && !stream.device->dead) return State::Broken;
    return stream.done >= event.at ? State::Passed : State::Pending;
}

// Fresh from the system: all zero in every play of a seed, and clearing it costs only what is touched.
void* SimGpu::pin(size_t nbytes) {
    void* block = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (block != MAP_FAILED) pinned_.emplace(block, nbytes);
    return block;
}

void SimGpu::unpin(void* block) {
    ::munmap(block, pinned_.at(block));
    pinned_.erase(block);
}

}  // namespace sim

// -- libcuda, as far as copies need it --------------------------------------------------------------------------------
namespace pdd::cuda {
namespace {

using sim::SimGpu;

constexpr CUresult kBroken = 719;  // CUDA_ERROR_LAUNCH_FAILED

SimGpu::Stream* stream_of(CUstream stream) {
    return reinterpret_cast<SimGpu::Stream*>(stream);
}

SimGpu::Event& event_of(CUevent event) {
    return *reinterpret_cast<SimGpu::Event*>(event);
}

}  // namespace

Result<std::shared_ptr<const CudaDriver>> CudaDriver::load() {
    std::shared_ptr<CudaDriver> driver(new CudaDriver);
    driver->cuGetErrorName = [](CUresult, const char** text) { return *text = "the simulated device failed", 0; };
    driver->cuGetErrorString = [](CUresult, const char** text) { return *text = nullptr, 0; };
    driver->cuDeviceGet = [](CUdevice* device, int ordinal) { return *device = ordinal, 0; };
    driver->cuDeviceGetPCIBusId = [](char* id, int size, CUdevice) {
        std::strncpy(id, "0000:00:00.0", static_cast<size_t>(size));
        return 0;
    };
    driver->cuDeviceGetName = [](char* name, int size, CUdevice) {
        std::strncpy(name, "simulated", static_cast<size_t>(size));
        return 0;
    };
    driver->cuDevicePrimaryCtxRetain = [](CUcontext*, CUdevice) { return 0; };
    driver->cuDevicePrimaryCtxRelease_v2 = [](CUdevice) { return 0; };
    driver->cuCtxPushCurrent_v2 = [](CUcontext) { return 0; };
    driver->cuCtxPopCurrent_v2 = [](CUcontext*) { return 0; };
    driver->cuPointerGetAttribute = [](void* value, int, CUdeviceptr address) {
        if (!SimGpu::get().is_device_memory(reinterpret_cast<const uint8_t*>(address)))
            return int{CUDA_ERROR_INVALID_VALUE};
        const unsigned type = CU_MEMORYTYPE_DEVICE;
        std::memcpy(value, &type, sizeof type);
        return 0;
    };
    driver->cuMemHostAlloc = [](void** block, size_t nbytes, unsigned) {
        *block = SimGpu::get().pin(nbytes);
        return *block != MAP_FAILED ? 0 : int{CUDA_ERROR_OUT_OF_MEMORY};
    };
    driver->cuMemFreeHost = [](void* block) { return SimGpu::get().unpin(block), 0; };
    driver->cuStreamCreate = [](CUstream* stream, unsigned) {
        *stream = reinterpret_cast<CUstream>(SimGpu::get().make_stream());
        return 0;
    };
    driver->cuStreamDestroy_v2 = [](CUstream stream) { return SimGpu::get().drop(stream_of(stream)), 0; };
    driver->cuEventCreate = [](CUevent* event, unsigned) {
        *event = reinterpret_cast<CUevent>(new SimGpu::Event);
        return 0;
    };
    driver->cuEventDestroy_v2 = [](CUevent event) {
        delete &event_of(event);
        return 0;
    };
    driver->cuEventRecord = [](CUevent event, CUstream stream) {
        return SimGpu::get().record(event_of(event), *stream_of(stream)) ? 0 : kBroken;
    };
    driver->cuEventQuery = [](CUevent event) {
        switch (SimGpu::get().state(event_of(event))) {
            case SimGpu::State::Passed:
                return 0;
            case SimGpu::State::Pending:
                return int{CUDA_ERROR_NOT_READY};
            default:
                return kBroken;
        }
    };
    driver->cuMemcpyHtoDAsync_v2 = [](CUdeviceptr to, const void* from, size_t nbytes, CUstream stream) {
        const SimGpu::Copy copy{reinterpret_cast<uint8_t*>(to), static_cast<const uint8_t*>(from), nbytes, true};
        return SimGpu::get().queue(*stream_of(stream), copy) ? 0 : kBroken;
    };
    driver->cuMemcpyDtoHAsync_v2 = [](void* to, CUdeviceptr from, size_t nbytes, CUstream stream) {
        const SimGpu::Copy copy{static_cast<uint8_t*>(to), reinterpret_cast<const uint8_t*>(from), nbytes, false};
        return SimGpu::get().queue(*stream_of(stream), copy) ? 0 : kBroken;
    };
    return std::shared_ptr<const CudaDriver>(std::move(driver));
}

Error CudaDriver::error(const std::string& operation, CUresult) const {
    return Error{operation + ": the simulated device failed", 5};
}

std::string CudaDriver::version_text() const {
    return "0.0";
}

}  // namespace pdd::cuda
