// WritePlan: the writes of one layer in token order, shared and immutable. WriteCursor: a walk over a range of it that
// turns neighbours into as few writes as the limits allow.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "util/result.h"

namespace pdd {

inline constexpr uint32_t kImmMaxUnits = 255;  // 8 bits hold units-1, 0..254: the 256th value stays unused
inline constexpr uint64_t kMaxMergedBytes = 1
                                            << 20;  // a merged write must not hog a connection against other transfers
inline constexpr size_t kMaxWriteSegments = 4;

struct PlanEntry {
    uint64_t src_offset;
    uint64_t dst_offset;
    uint64_t nbytes;
    uint32_t units;
};

class WritePlan {
  public:
    struct Geometry {
        uint32_t src_region = 0;  // local region id
        uint32_t dst_region = 0;  // position in the peer's descriptor
        uint64_t src_layer_stride = 0;
        uint64_t dst_layer_stride = 0;
        uint32_t num_layers = 1;
    };

    // Refuses empty entries, units outside 1..255 and offsets that wrap in the last layer.
    static Result<std::shared_ptr<const WritePlan>> make(const Geometry& geometry, std::vector<PlanEntry> entries);

    const Geometry& geometry() const { return geometry_; }
    std::span<const PlanEntry> entries() const { return entries_; }
    // Sum of units of [begin, end) in one layer.
    uint64_t units(uint32_t begin, uint32_t end) const { return unit_sums_[end] - unit_sums_[begin]; }
    // The end of the furthest byte that any layer touches on either side.
    uint64_t src_end() const { return src_end_; }
    uint64_t dst_end() const { return dst_end_; }
    uint64_t largest() const { return largest_; }

  private:
    WritePlan() = default;
    Geometry geometry_;
    std::vector<PlanEntry> entries_;
    std::vector<uint64_t> unit_sums_;  // unit_sums_[i]: units of entries before i
    uint64_t src_end_ = 0;
    uint64_t dst_end_ = 0;
    uint64_t largest_ = 0;
};

// One write to post: up to four pieces that are scattered on at least one side.
struct WriteBatch {
    struct Segment {
        uint64_t src_offset;
        uint64_t dst_offset;
        uint64_t nbytes;
    };
    std::array<Segment, kMaxWriteSegments> segments;
    uint32_t num_segments = 0;
    uint32_t num_entries = 0;
    uint32_t units = 0;
    uint64_t nbytes = 0;
};

// Entries [next, end) of one layer that are still to be posted.
class WriteCursor {
  public:
    WriteCursor(std::shared_ptr<const WritePlan> plan, uint32_t layer, uint32_t begin, uint32_t end)
        : plan_(std::move(plan)), layer_(layer), next_(begin), end_(end) {}

    bool done() const { return next_ >= end_; }
    const WritePlan& plan() const { return *plan_; }
    uint64_t units_left() const { return plan_->units(next_, end_); }
    // The next write; at most `max_segments` pieces. Only when not done. Does not move: a refused post asks again.
    WriteBatch peek(size_t max_segments) const;
    void advance(const WriteBatch& batch) { next_ += batch.num_entries; }

  private:
    std::shared_ptr<const WritePlan> plan_;
    uint32_t layer_;
    uint32_t next_;
    uint32_t end_;
};

}  // namespace pdd
