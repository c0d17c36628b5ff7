#include "fabric/write_plan.h"

#include <algorithm>
#include <string>

namespace pdd {
namespace {

// offset + nbytes + (layers - 1) * stride, or false when it does not fit in 64 bits.
bool furthest(uint64_t offset, uint64_t nbytes, uint64_t stride, uint32_t layers, uint64_t& end) {
    uint64_t jump = 0;
    return !__builtin_mul_overflow(stride, static_cast<uint64_t>(layers - 1), &jump) &&
           !__builtin_add_overflow(offset, nbytes, &end) && !__builtin_add_overflow(end, jump, &end);
}

}  // namespace

Result<std::shared_ptr<const WritePlan>> WritePlan::make(const Geometry& geometry, std::vector<PlanEntry> entries) {
    if (geometry.num_layers == 0) return Error{"a write plan needs at least one layer", 22};
    if (entries.size() > UINT32_MAX) return Error{"a write plan holds at most 2^32-1 entries", 22};
    std::shared_ptr<WritePlan> plan(new WritePlan);
    plan->unit_sums_.reserve(entries.size() + 1);
    plan->unit_sums_.push_back(0);
    for (size_t i = 0; i < entries.size(); ++i) {
        const PlanEntry& entry = entries[i];
        const std::string name = "entry " + std::to_string(i) + " of a write plan: ";
        if (entry.nbytes == 0) return Error{name + "no bytes", 22};
        if (entry.units == 0 || entry.units > kImmMaxUnits)
            return Error{name + std::to_string(entry.units) + " units, not 1..255", 22};
        uint64_t src_end = 0;
        uint64_t dst_end = 0;
        if (!furthest(entry.src_offset, entry.nbytes, geometry.src_layer_stride, geometry.num_layers, src_end) ||
            !furthest(entry.dst_offset, entry.nbytes, geometry.dst_layer_stride, geometry.num_layers, dst_end))
            return Error{name + "its offsets wrap", 22};
        plan->src_end_ = std::max(plan->src_end_, src_end);
        plan->dst_end_ = std::max(plan->dst_end_, dst_end);
        plan->largest_ = std::max(plan->largest_, entry.nbytes);
        plan->unit_sums_.push_back(plan->unit_sums_.back() + entry.units);
    }
    plan->geometry_ = geometry;
    plan->entries_ = std::move(entries);
    return std::shared_ptr<const WritePlan>(std::move(plan));
}

WriteBatch WriteCursor::peek(size_t max_segments) const {
    const auto& geometry = plan_->geometry();
    const uint64_t src_layer = geometry.src_layer_stride * layer_;
    const uint64_t dst_layer = geometry.dst_layer_stride * layer_;
    WriteBatch batch;
    for (uint32_t i = next_; i < end_; ++i) {
        const PlanEntry& entry = plan_->entries()[i];
        const uint64_t src = entry.src_offset + src_layer;
        const uint64_t dst = entry.dst_offset + dst_layer;
        if (batch.num_segments > 0) {
            // A single entry may be larger than what merging may make.
            if (batch.units + entry.units > kImmMaxUnits || batch.nbytes + entry.nbytes > kMaxMergedBytes) break;
            auto& last = batch.segments[batch.num_segments - 1];
            const bool continues = last.src_offset + last.nbytes == src && last.dst_offset + last.nbytes == dst;
            if (!continues && batch.num_segments == max_segments) break;
            if (continues)
                last.nbytes += entry.nbytes;
            else
                batch.segments[batch.num_segments++] = {src, dst, entry.nbytes};
        } else {
            batch.segments[batch.num_segments++] = {src, dst, entry.nbytes};
        }
        batch.units += entry.units;
        batch.nbytes += entry.nbytes;
        batch.num_entries += 1;
    }
    return batch;
}

}  // namespace pdd
