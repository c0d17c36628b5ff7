#include "fabric/flight.h"

#include <algorithm>
#include <bit>
#include <new>

namespace pdd {
namespace {

constexpr uint64_t kPlanShare = 8;  // a plan has about as many cells as a model has layers: one part in eight is ample
constexpr uint64_t kLeast = 256;    // cells, however little memory is given

// Zeroed, and not touched: pages come as they are written.
template <class T>
T* zeroed(uint64_t count) {
    void* memory = std::calloc(count, sizeof(T));
    if (memory == nullptr) throw std::bad_alloc();
    return static_cast<T*>(memory);
}

}  // namespace

FlightLog::FlightLog(uint64_t bytes) {
    const uint64_t for_plans = bytes / kPlanShare;
    const uint64_t cells = std::max(kLeast, std::bit_floor((bytes - for_plans) / sizeof(FlightCell)));
    const uint64_t plans = std::max(kLeast, std::bit_floor(for_plans / sizeof(FlightPlan)));
    cells_.reset(zeroed<FlightCell>(cells));
    plans_.reset(zeroed<FlightPlan>(plans));
    mask_ = cells - 1;
    plan_mask_ = plans - 1;
}

uint64_t FlightLog::arm(FlightPlan plan, TimePoint now) {
    if (plan.num_layers > mask_) return kNoCell;
    plan.first_cell = num_cells_ + 1;
    plan.armed = ns(now);
    for (uint32_t layer = 0; layer < plan.num_layers; ++layer) {
        const uint64_t number = ++num_cells_;
        cells_[number & mask_] = FlightCell{.number = number};
    }
    plans_[num_plans_++ & plan_mask_] = plan;
    return plan.first_cell;
}

void FlightLog::ready(uint64_t first_cell, uint32_t from, uint32_t to, TimePoint now) {
    for (uint32_t layer = from; layer < to; ++layer) {
        FlightCell& cell = cells_[(first_cell + layer) & mask_];
        if (cell.number == first_cell + layer) cell.ready = ns(now);
    }
}

std::vector<FlightReport::Plan> FlightLog::latest(uint64_t transfer, size_t most) const {
    std::vector<FlightReport::Plan> found;
    const uint64_t kept = std::min(num_plans_, plan_mask_ + 1);
    for (uint64_t back = 1; back <= kept && found.size() < most; ++back) {
        const FlightPlan& plan = plans_[(num_plans_ - back) & plan_mask_];
        if (transfer != 0 && plan.transfer != transfer) continue;
        auto& entry = found.emplace_back(FlightReport::Plan{plan, {}});
        for (uint32_t layer = 0; layer < plan.num_layers; ++layer) {
            const FlightCell& cell = cells_[(plan.first_cell + layer) & mask_];
            if (cell.number == plan.first_cell + layer) entry.cells.push_back(cell);
        }
    }
    std::reverse(found.begin(), found.end());
    return found;
}

}  // namespace pdd
