// Alarms: where the worker leaves its plans until their layers are ready. The answer is a command::Fire.
//
// LayerWatcher is the real one; a simulation that owns the clock brings its own.
#pragma once

#include <cstdint>
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

    virtual ~Alarms() = default;
    virtual void set(Alarm alarm) = 0;
    // Forgets alarms; one that is just firing may still be heard.
    virtual void clear(std::vector<uint64_t> ids) = 0;
};

}  // namespace pdd
