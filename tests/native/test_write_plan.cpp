// WritePlan and WriteCursor: whatever merging does, every byte goes to its place once and the units add up.
#include <random>
#include <vector>

#include "check.h"
#include "fabric/write_plan.h"

using namespace pdd;

namespace {

std::shared_ptr<const WritePlan> plan_of(std::vector<PlanEntry> entries, WritePlan::Geometry geometry = {}) {
    auto plan = WritePlan::make(geometry, std::move(entries));
    CHECK(plan);
    return *plan;
}

uint32_t count_writes(WriteCursor cursor, size_t max_segments) {
    uint32_t writes = 0;
    while (!cursor.done()) {
        const auto batch = cursor.peek(max_segments);
        CHECK(batch.num_entries > 0);
        cursor.advance(batch);
        ++writes;
    }
    return writes;
}

void refuses_what_can_not_be_written() {
    CHECK(!WritePlan::make({}, {{0, 0, 0, 1}}));
    CHECK(!WritePlan::make({}, {{0, 0, 1, 0}}));
    CHECK(!WritePlan::make({}, {{0, 0, 1, 256}}));
    CHECK(!WritePlan::make({.num_layers = 0}, {{0, 0, 1, 1}}));
    CHECK(!WritePlan::make({}, {{UINT64_MAX, 0, 1, 1}}));
    CHECK(!WritePlan::make({.dst_layer_stride = UINT64_MAX / 2, .num_layers = 4}, {{0, 0, 1, 1}}));
    CHECK(WritePlan::make({}, {}));
}

void knows_the_furthest_byte() {
    const auto plan =
        plan_of({{0, 100, 10, 1}, {50, 0, 20, 2}}, {.src_layer_stride = 1000, .dst_layer_stride = 10, .num_layers = 3});
    CHECK(plan->src_end() == 2070 && plan->dst_end() == 130 && plan->largest() == 20);
    CHECK(plan->units(0, 2) == 3 && plan->units(1, 2) == 2 && plan->units(1, 1) == 0);
}

void merges_only_what_continues_on_both_sides() {
    CHECK(count_writes(WriteCursor(plan_of({{0, 0, 8, 1}, {8, 8, 8, 1}, {16, 16, 4, 1}}), 0, 0, 3), 1) == 1);
    CHECK(count_writes(WriteCursor(plan_of({{0, 0, 8, 1}, {8, 9, 8, 1}}), 0, 0, 2), 1) == 2);
    CHECK(count_writes(WriteCursor(plan_of({{0, 0, 8, 1}, {9, 8, 8, 1}}), 0, 0, 2), 1) == 2);
    CHECK(count_writes(WriteCursor(plan_of({{8, 8, 8, 1}, {0, 0, 8, 1}}), 0, 0, 2), 1) == 2);
    CHECK(count_writes(WriteCursor(plan_of({{0, 0, 8, 1}, {8, 9, 8, 1}}), 0, 0, 2), 4) == 1);
}

void stays_within_units_and_bytes() {
    std::vector<PlanEntry> pages;
    for (uint64_t i = 0; i < 300; ++i) pages.push_back({i * 8, i * 8, 8, 1});
    CHECK(count_writes(WriteCursor(plan_of(pages), 0, 0, 300), 1) == 2);  // 255 + 45 units
    CHECK(count_writes(WriteCursor(plan_of(pages), 0, 10, 20), 1) == 1);
    std::vector<PlanEntry> large;
    for (uint64_t i = 0; i < 5; ++i) large.push_back({i << 19, i << 19, 1 << 19, 1});
    CHECK(count_writes(WriteCursor(plan_of(large), 0, 0, 5), 4) == 3);  // two halves of a MiB each
    CHECK(count_writes(WriteCursor(plan_of({{0, 0, 5 << 20, 1}, {5 << 20, 5 << 20, 8, 1}}), 0, 0, 2), 4) == 2);
    CHECK(count_writes(WriteCursor(plan_of({{0, 0, 8, 200}, {8, 8, 8, 56}}), 0, 0, 2), 4) == 2);
}

void peeking_does_not_move() {
    WriteCursor cursor(plan_of({{0, 0, 8, 3}, {100, 100, 8, 4}}), 0, 0, 2);
    CHECK(cursor.peek(1).units == 3 && cursor.peek(1).units == 3 && cursor.units_left() == 7);
    cursor.advance(cursor.peek(1));
    CHECK(cursor.units_left() == 4 && !cursor.done());
}

void random_plans_put_every_byte_in_its_place_once() {
    std::mt19937_64 random(7);
    for (int round = 0; round < 300; ++round) {
        constexpr uint64_t kPage = 64;
        const uint64_t count = 1 + random() % 40;
        const uint32_t layers = 1 + random() % 3;
        std::vector<PlanEntry> entries;
        for (uint64_t i = 0; i < count; ++i)
            entries.push_back({(random() % 4 == 0 ? random() % 100 : i) * kPage, i * kPage, kPage,
                               static_cast<uint32_t>(1 + random() % (random() % 3 == 0 ? 255 : 3))});
        const WritePlan::Geometry geometry{
            .src_layer_stride = 100 * kPage, .dst_layer_stride = 64 * kPage, .num_layers = layers};
        const auto plan = plan_of(entries, geometry);
        const size_t max_segments = 1 + random() % kMaxWriteSegments;
        for (uint32_t layer = 0; layer < layers; ++layer) {
            WriteCursor cursor(plan, layer, 0, count);
            uint64_t units = 0;
            std::vector<int64_t> source(count * kPage, -1);
            while (!cursor.done()) {
                const auto batch = cursor.peek(max_segments);
                CHECK(batch.num_segments <= max_segments && batch.units <= kImmMaxUnits);
                uint64_t nbytes = 0;
                for (uint32_t s = 0; s < batch.num_segments; ++s) {
                    const auto& segment = batch.segments[s];
                    nbytes += segment.nbytes;
                    for (uint64_t b = 0; b < segment.nbytes; ++b) {
                        auto& at = source.at(segment.dst_offset + b - layer * 64 * kPage);
                        CHECK(at == -1);
                        at = static_cast<int64_t>(segment.src_offset + b);
                    }
                }
                CHECK(nbytes == batch.nbytes);
                units += batch.units;
                cursor.advance(batch);
            }
            CHECK(units == plan->units(0, count));
            for (uint64_t i = 0; i < count; ++i)
                for (uint64_t b = 0; b < kPage; ++b)
                    CHECK(source[i * kPage + b] ==
                          static_cast<int64_t>(entries[i].src_offset + layer * 100 * kPage + b));
        }
    }
}

}  // namespace

int main() {
    refuses_what_can_not_be_written();
    knows_the_furthest_byte();
    merges_only_what_continues_on_both_sides();
    stays_within_units_and_bytes();
    peeking_does_not_move();
    random_plans_put_every_byte_in_its_place_once();
}
