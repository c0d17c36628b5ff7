// Alarms: where the worker leaves its plans until their layers are ready. The answer is a command::Fire from a
// LayerWatcher, which is a thread; or, from a worker that spins and may as well read the counters itself, a look().
// A simulation that owns the clock brings its own.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "watch/counter.h"

namespace pdd {

class Alarms {
  public:
    struct Alarm {
        uint64_t id = 0;
        std::shared_ptr<const Counter> counter;
        uint64_t first_value = 0;
        uint32_t num_values = 0;
    };

    // Values [from, to) of an alarm are there.
    using Fire = std::function<void(uint64_t id, uint32_t from, uint32_t to)>;

    virtual ~Alarms() = default;
    virtual void set(Alarm alarm) = 0;
    // Forgets alarms; one that is just firing may still be heard.
    virtual void clear(std::vector<uint64_t> ids) = 0;
    // On the worker's thread, once a turn: fires what nobody else does; whether anything was.
    virtual bool look(const Fire&) { return false; }
};

}  // namespace pdd
