#include "fabric/write_plan.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>

namespace pdd {
namespace {

// offset + nbytes + (layers - 1) * stride, or false when it does not fit in 64 bits.
bool furthest(uint64_t offset, uint64_t nbytes, uint64_t stride, uint32_t layers, uint64_t& end) {
    uint64_t jump = 0;
    return !__builtin_mul_overflow(stride, static_cast<uint64_t>(layers - 1), &jump) &&
           !__builtin_add_overflow(offset, nbytes, &end) && !__builtin_add_overflow(end, jump, &end);
}

}  // namespace

Result<std::shared_ptr<const WritePlan>> WritePlan::make(const Geometry& geometry,
                                                         const std::vector<PlanEntry>& entries) {
    if (geometry.num_layers == 0) return Error{"a write plan needs at least one layer", 22};
    if (entries.size() > UINT32_MAX) return Error{"a write plan holds at most 2^32-1 entries", 22};
    std::shared_ptr<WritePlan> plan(new WritePlan);
    plan->geometry_ = geometry;
    plan->entries_.reserve(entries.size());
    plan->unit_sums_.reserve(entries.size() / kSumEvery + 1);
    std::map<Shape, uint16_t> known;
    auto shape = known.end();
    uint64_t units = 0;
    for (size_t i = 0; i < entries.size(); ++i) {
        const PlanEntry& entry = entries[i];
        const auto refuse = [i](const std::string& why) {
            return Error{"entry " + std::to_string(i) + " of a write plan: " + why, 22};
        };
        if (entry.nbytes == 0) return refuse("no bytes");
        if (entry.units == 0 || entry.units > kImmMaxUnits)
            return refuse(std::to_string(entry.units) + " units, not 1..255");
        if ((entry.src_offset | entry.dst_offset) >> 48 != 0) return refuse("its offsets pass 256 TiB");
        uint64_t src_end = 0;
        uint64_t dst_end = 0;
        if (!furthest(entry.src_offset, entry.nbytes, geometry.src_layer_stride, geometry.num_layers, src_end) ||
            !furthest(entry.dst_offset, entry.nbytes, geometry.dst_layer_stride, geometry.num_layers, dst_end))
            return refuse("its offsets wrap");
        plan->src_end_ = std::max(plan->src_end_, src_end);
        plan->dst_end_ = std::max(plan->dst_end_, dst_end);
        plan->largest_ = std::max(plan->largest_, entry.nbytes);

        const Shape wanted{entry.nbytes, entry.units};
        if (shape == known.end() || shape->first != wanted) {
            if (plan->shapes_.size() > UINT16_MAX && !known.contains(wanted))
                return refuse("more than 65,536 different sizes");
            bool fresh = false;
            std::tie(shape, fresh) = known.emplace(wanted, static_cast<uint16_t>(plan->shapes_.size()));
            if (fresh) plan->shapes_.push_back(wanted);
        }
        if (i % kSumEvery == 0) plan->unit_sums_.push_back(units);
        units += entry.units;
        plan->entries_.push_back({static_cast<uint32_t>(entry.src_offset), static_cast<uint32_t>(entry.dst_offset),
                                  static_cast<uint16_t>(entry.src_offset >> 32),
                                  static_cast<uint16_t>(entry.dst_offset >> 32), shape->second});
    }
    if (entries.size() % kSumEvery == 0) plan->unit_sums_.push_back(units);
    return std::shared_ptr<const WritePlan>(std::move(plan));
}

PlanEntry WritePlan::entry(uint32_t index) const {
    const Packed& packed = entries_[index];
    const Shape& shape = shapes_[packed.shape];
    return {static_cast<uint64_t>(packed.src_high) << 32 | packed.src_low,
            static_cast<uint64_t>(packed.dst_high) << 32 | packed.dst_low, shape.nbytes, shape.units};
}

uint64_t WritePlan::units_before(uint32_t index) const {
    uint64_t units = unit_sums_[index / kSumEvery];
    for (uint32_t i = index / kSumEvery * kSumEvery; i < index; ++i) units += shapes_[entries_[i].shape].units;
    return units;
}

WriteBatch WriteCursor::peek(size_t max_segments) const {
    const auto& geometry = plan_->geometry();
    const uint64_t src_layer = geometry.src_layer_stride * layer_;
    const uint64_t dst_layer = geometry.dst_layer_stride * layer_;
    WriteBatch batch;
    for (uint32_t i = next_; i < end_; ++i) {
        const PlanEntry entry = plan_->entry(i);
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
