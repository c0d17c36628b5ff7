// FlightLog: what a worker remembers of its latest writes, always: for each armed plan and layer, when it was ready,
// first and last posted and last completed, over which NICs, and what became of its units. Two rings of fixed size, the
// oldest is overwritten. Owner: the worker's thread; whoever wants to read asks the worker for a copy.
//
// A write costs one cache line when it is posted and the same one when it completes, with the time of the worker's
// turn: no clock is read for it. It decides nothing.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <vector>

#include "fabric/write_plan.h"
#include "util/clock.h"

namespace pdd {

enum class Fate { Ok, Failed, Unknown };

// One layer of one armed plan. Times in ns of the native clock; 0: not yet.
struct FlightCell {
    uint64_t number = 0;  // of all cells ever, from 1; tells whose the place in the ring is now
    int64_t ready = 0;    // the layer counter was seen to say so
    int64_t first_post = 0;
    int64_t last_post = 0;
    int64_t last_end = 0;  // of a write, however it ended
    uint32_t posted = 0;   // units, those that the provider refused included
    uint32_t ok = 0;
    uint32_t failed = 0;
    uint32_t unknown = 0;
    uint32_t nics = 0;  // that writes were posted on, one bit each
    uint32_t failed_nics = 0;
};
static_assert(sizeof(FlightCell) == 64);

// The writes that one step makes sendable from one region of this node to one of the peer's.
struct FlightPlan {
    uint64_t transfer = 0;
    uint64_t first_cell = 0;
    uint64_t first_value = 0;  // of the layer counter, when layer 0 is ready
    int64_t armed = 0;         // ns
    uint64_t units = 0;        // of a layer
    uint32_t key = 0;
    uint32_t src_region = 0;
    uint32_t dst_region = 0;
    uint32_t num_layers = 0;
};

// Writes that were posted and have not ended.
struct FlightWrites {
    uint64_t cell;  // number
    uint32_t nic;   // of the worker
    uint32_t units;
};

// A copy for others. Cells that were overwritten are left out.
struct FlightReport {
    struct Plan {
        FlightPlan plan;
        std::vector<FlightCell> cells;
    };
    std::vector<Plan> plans;  // the oldest first
    std::vector<FlightWrites> in_flight;
};

class FlightLog {
  public:
    static constexpr uint64_t kNoCell = uint64_t{1} << 63;  // and what follows it: nobody's

    // Of at most so many bytes, which the system hands out as they are written to.
    explicit FlightLog(uint64_t bytes);

    // The first of the plan's cells, one for each layer; kNoCell when it has more layers than there are cells.
    uint64_t arm(FlightPlan plan, TimePoint now);
    void ready(uint64_t first_cell, uint32_t from, uint32_t to, TimePoint now);
    void posted(uint64_t number, uint32_t nic, uint32_t units, TimePoint now) {
        FlightCell& cell = cells_[number & mask_];
        if (cell.number != number) return;
        cell.last_post = ns(now);
        if (cell.first_post == 0) cell.first_post = cell.last_post;
        cell.posted += units;
        cell.nics |= uint32_t{1} << (nic & 31);
    }
    void ended(uint64_t number, uint32_t nic, uint32_t units, Fate fate, TimePoint now) {
        FlightCell& cell = cells_[number & mask_];
        if (cell.number != number) return;
        cell.last_end = ns(now);
        (fate == Fate::Ok ? cell.ok : fate == Fate::Failed ? cell.failed : cell.unknown) += units;
        if (fate != Fate::Ok) cell.failed_nics |= uint32_t{1} << (nic & 31);
    }

    // The plans of one transfer, or, for 0, of all: at most `most`, the latest.
    std::vector<FlightReport::Plan> latest(uint64_t transfer, size_t most) const;

    static int64_t ns(TimePoint at) {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
    }

  private:
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };
    std::unique_ptr<FlightCell[], Free> cells_;
    std::unique_ptr<FlightPlan[], Free> plans_;
    uint64_t mask_ = 0;
    uint64_t plan_mask_ = 0;
    uint64_t num_cells_ = 0;  // ever
    uint64_t num_plans_ = 0;
};

}  // namespace pdd
