// WritePlan: the writes of one layer in token order, shared by all layers and immutable. WriteCursor: a walk over a
// range of it, for some layers, that turns neighbours into as few writes as the limits allow.
//
// An entry takes 14 bytes, whatever the number of layers: two offsets of 48 bits and the number of its size, of which
// a plan has few (a page, the last page). Units are summed up every 64 entries. A queued layer range is one cursor.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <memory>
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

    // Refuses empty entries, units outside 1..255, offsets of 2^48 or more or that wrap in the last layer, and more
    // than 65,536 different sizes.
    static Result<std::shared_ptr<const WritePlan>> make(const Geometry& geometry,
                                                         const std::vector<PlanEntry>& entries);

    const Geometry& geometry() const { return geometry_; }
    uint32_t size() const { return static_cast<uint32_t>(entries_.size()); }
    PlanEntry entry(uint32_t index) const;
    // Where it lies, for whoever will want it soon and fetches it ahead.
    const void* place(uint32_t index) const { return &entries_[index]; }
    // Sum of units of [begin, end) in one layer.
    uint64_t units(uint32_t begin, uint32_t end) const { return units_before(end) - units_before(begin); }
    // The end of the furthest byte that any layer touches on either side.
    uint64_t src_end() const { return src_end_; }
    uint64_t dst_end() const { return dst_end_; }
    uint64_t largest() const { return largest_; }

  private:
    struct [[gnu::packed]] Packed {
        uint32_t src_low;
        uint32_t dst_low;
        uint16_t src_high;
        uint16_t dst_high;
        uint16_t shape;
    };
    static_assert(sizeof(Packed) == 14);
    struct Shape {
        uint64_t nbytes;
        uint32_t units;
        auto operator<=>(const Shape&) const = default;
    };
    static constexpr uint32_t kSumEvery = 64;

    WritePlan() = default;
    uint64_t units_before(uint32_t index) const;

    Geometry geometry_;
    std::vector<Packed> entries_;
    std::vector<Shape> shapes_;
    std::vector<uint64_t> unit_sums_;  // unit_sums_[i]: units of the entries before kSumEvery * i
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

// Entries [begin, end) of layers [from, to) that are still to be posted, layer by layer.
class WriteCursor {
  public:
    // `record`: of layer 0 in the flight log.
    WriteCursor(std::shared_ptr<const WritePlan> plan, uint32_t from, uint32_t to, uint32_t begin, uint32_t end,
                uint64_t record = kNoRecord)
        : plan_(std::move(plan)),
          record_(record),
          layer_(from),
          last_layer_(to),
          begin_(begin),
          end_(end),
          next_(begin) {}

    bool done() const { return layer_ >= last_layer_; }
    uint64_t record() const { return record_ + layer_; }  // of the next write
    const WritePlan& plan() const { return *plan_; }
    uint64_t units_left() const {
        if (done()) return 0;
        return plan_->units(next_, end_) + (last_layer_ - layer_ - 1) * plan_->units(begin_, end_);
    }
    const void* place() const { return plan_->place(next_); }  // of the next entry
    // The next write; at most `max_segments` pieces. Only when not done. Does not move: a refused post asks again.
    WriteBatch peek(size_t max_segments) const;
    void advance(const WriteBatch& batch) {
        next_ += batch.num_entries;
        if (next_ < end_) return;
        next_ = begin_;
        ++layer_;
    }

  private:
    static constexpr uint64_t kNoRecord = uint64_t{1} << 63;

    std::shared_ptr<const WritePlan> plan_;
    uint64_t record_;
    uint32_t layer_;
    uint32_t last_layer_;
    uint32_t begin_;
    uint32_t end_;
    uint32_t next_;
};

}  // namespace pdd
