// SimGpu: the GPUs of all nodes, as the CUDA driver shows them. A copy does nothing until the scheduler, or whoever
// asks for its end, lets a part of it happen; copies of one stream happen in order, those of others in any.
//
// It takes the place of libcuda at link time: sim_gpu.cpp defines CudaDriver::load(), whose functions reach the one
// SimGpu that lives.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "gpu/device.h"
#include "ledger.h"
#include "run.h"

namespace sim {

class SimGpu {
  public:
    SimGpu(Run& run, Ledger& ledger);
    ~SimGpu();
    SimGpu(const SimGpu&) = delete;
    static SimGpu& get();

    uint32_t fails = 0;  // odds in ten thousand, per question: a device breaks, with copies that go on or do not

    // The device of a node; its memory is the node's. Streams made from now on are of that life.
    std::shared_ptr<const pdd::GpuDevice> give_birth(uint32_t life, const uint8_t* memory, size_t nbytes);
    void die(uint32_t life);
    bool step();  // a part of a copy; false: none is waiting

    // -- for the driver
    struct Copy {
        uint8_t* to;
        const uint8_t* from;
        size_t nbytes;
        bool into_device;
    };
    struct Device {
        uint32_t life;
        const uint8_t* memory;
        size_t nbytes;
        bool broken = false;
        bool dead = false;
    };
    struct Stream {
        Device* device;
        std::deque<Copy> copies;
        uint64_t queued = 0;
        uint64_t done = 0;
    };
    struct Event {
        const Stream* stream = nullptr;
        uint64_t at = 0;  // copies of it
    };
    bool is_device_memory(const uint8_t* address) const;
    Stream* make_stream();
    void drop(Stream* stream);
    bool queue(Stream& stream, Copy copy);  // false: the device is broken
    bool record(Event& event, const Stream& stream);
    enum class State { Pending, Passed, Broken };
    State state(const Event& event);
    void* pin(size_t nbytes);
    void unpin(void* block);

  private:
    void advance(Stream& stream);

    Run& run_;
    Ledger& ledger_;
    std::vector<std::unique_ptr<Device>> devices_;
    std::vector<std::unique_ptr<Stream>> streams_;
    std::map<void*, size_t> pinned_;
};

}  // namespace sim
