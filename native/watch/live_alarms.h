// LiveAlarms: the alarms that are set, and which of their values are there. No thread of its own: whoever polls the
// counters holds one. A counter is read once per alarm and look; its line is in the cache until somebody moves it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "watch/alarms.h"

namespace pdd {

class LiveAlarms {
  public:
    bool empty() const { return live_.empty(); }
    void set(Alarms::Alarm alarm) { live_.push_back({std::move(alarm), 0}); }
    void clear(std::span<const uint64_t> ids);
    // Fires what is there and was not fired; whether anything was. `fire` sets and clears nothing.
    bool fire(const Alarms::Fire& fire);
    // The counter that all of them wait for, null when they wait for several or there is none.
    const Counter* only_counter() const;

  private:
    struct Live {
        Alarms::Alarm alarm;
        uint32_t fired;
    };
    std::vector<Live> live_;
};

}  // namespace pdd
