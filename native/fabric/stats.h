// Stats: what a Fabric counts. Written by its threads with relaxed order, read by anyone.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "fabric/caps.h"

namespace pdd {

using StatCell = std::atomic<uint64_t>;

inline void stat_add(StatCell& cell, uint64_t value = 1) {
    cell.fetch_add(value, std::memory_order_relaxed);
}
inline void stat_sub(StatCell& cell, uint64_t value = 1) {
    cell.fetch_sub(value, std::memory_order_relaxed);
}

struct Stats {
    // monotonic
    StatCell writes{0};          // posted
    StatCell bytes{0};           // of posted writes
    StatCell units{0};           // of posted writes
    StatCell units_received{0};  // of live keys
    StatCell completions{0};     // of our writes, good ones
    StatCell errors{0};          // error completions and refused posts
    StatCell stale_units{0};     // arrived under a key that is not in use, or through another key's endpoint
    StatCell merged{0};          // plan entries that needed no write of their own
    StatCell again{0};           // posts that the provider asked to repeat
    StatCell wakeups{0};         // of the worker from blocking
    std::array<StatCell, kMaxNics + 1> nic_writes{};  // posted, per NIC; the local one last
    // now
    StatCell active_transfers{0};
    StatCell inflight_writes{0};
    StatCell inflight_bytes{0};
    StatCell armed_plans{0};
    StatCell endpoints{0};
    StatCell regions{0};
};

}  // namespace pdd
