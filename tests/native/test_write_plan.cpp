// WritePlan and WriteCursor: whatever merging does, every byte goes to its place once and the units add up.
#include <malloc.h>

#include <cstdlib>
#include <new>
#include <random>
#include <vector>

#include "check.h"
#include "fabric/transfer.h"
#include "fabric/write_plan.h"

using namespace pdd;

// Bytes that are allocated now.
static size_t live_bytes = 0;

[[gnu::noinline]] void* operator new(size_t nbytes) {
    void* at = std::malloc(nbytes);
    if (at == nullptr) throw std::bad_alloc();
    live_bytes += ::malloc_usable_size(at);
    return at;
}
[[gnu::noinline]] void operator delete(void* at) noexcept {
    if (at != nullptr) live_bytes -= ::malloc_usable_size(at);
    std::free(at);
}
[[gnu::noinline]] void operator delete(void* at, size_t) noexcept {
    operator delete(at);
}

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
    CHECK(!WritePlan::make({}, {{0, 1ull << 48, 1, 1}}));
    CHECK(WritePlan::make({}, {{(1ull << 48) - 1, (1ull << 48) - 1, 1, 1}}));
    std::vector<PlanEntry> sizes;
    for (uint64_t i = 0; i < 65536; ++i) sizes.push_back({i, i, i + 1, 1});
    CHECK(WritePlan::make({}, sizes));
    sizes.push_back({0, 0, 1, 2});
    CHECK(!WritePlan::make({}, sizes));
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
    CHECK(count_writes(WriteCursor(plan_of({{0, 0, 8, 1}, {8, 8, 8, 1}, {16, 16, 4, 1}}), 0, 1, 0, 3), 1) == 1);
    CHECK(count_writes(WriteCursor(plan_of({{0, 0, 8, 1}, {8, 9, 8, 1}}), 0, 1, 0, 2), 1) == 2);
    CHECK(count_writes(WriteCursor(plan_of({{0, 0, 8, 1}, {9, 8, 8, 1}}), 0, 1, 0, 2), 1) == 2);
    CHECK(count_writes(WriteCursor(plan_of({{8, 8, 8, 1}, {0, 0, 8, 1}}), 0, 1, 0, 2), 1) == 2);
    CHECK(count_writes(WriteCursor(plan_of({{0, 0, 8, 1}, {8, 9, 8, 1}}), 0, 1, 0, 2), 4) == 1);
}

void stays_within_units_and_bytes() {
    std::vector<PlanEntry> pages;
    for (uint64_t i = 0; i < 300; ++i) pages.push_back({i * 8, i * 8, 8, 1});
    CHECK(count_writes(WriteCursor(plan_of(pages), 0, 1, 0, 300), 1) == 2);  // 255 + 45 units
    CHECK(count_writes(WriteCursor(plan_of(pages), 0, 1, 10, 20), 1) == 1);
    std::vector<PlanEntry> large;
    for (uint64_t i = 0; i < 5; ++i) large.push_back({i << 19, i << 19, 1 << 19, 1});
    CHECK(count_writes(WriteCursor(plan_of(large), 0, 1, 0, 5), 4) == 3);  // two halves of a MiB each
    CHECK(count_writes(WriteCursor(plan_of({{0, 0, 5 << 20, 1}, {5 << 20, 5 << 20, 8, 1}}), 0, 1, 0, 2), 4) == 2);
    CHECK(count_writes(WriteCursor(plan_of({{0, 0, 8, 200}, {8, 8, 8, 56}}), 0, 1, 0, 2), 4) == 2);
}

void peeking_does_not_move() {
    WriteCursor cursor(plan_of({{0, 0, 8, 3}, {100, 100, 8, 4}}), 0, 1, 0, 2);
    CHECK(cursor.peek(1).units == 3 && cursor.peek(1).units == 3 && cursor.units_left() == 7);
    cursor.advance(cursor.peek(1));
    CHECK(cursor.units_left() == 4 && !cursor.done());
}

// Page lists are shared by layers and small: a prompt of 128k tokens waits in less than 16 bytes a page.
void a_waiting_page_takes_less_than_16_bytes() {
    for (const uint32_t layers : {1u, 61u}) {
        for (const uint64_t count : {256u, 4096u, 100000u}) {
            std::vector<PlanEntry> entries;
            for (uint64_t i = 0; i < count; ++i)
                entries.push_back({i * 7919 % count << 16, i << 16, i + 1 < count ? 65536u : 4096u, 1});
            Transfer transfer(1, 1, 1);
            const size_t before = live_bytes;
            {
                const auto plan = plan_of(entries, {.src_layer_stride = 1ull << 40, .num_layers = layers});
                transfer.arm(plan->units(0, plan->size()) * layers, 1);
                transfer.fire(WriteCursor(plan, 0, layers, 0, plan->size()), true, {});
            }
            CHECK(transfer.has_work());
            CHECK(live_bytes - before <= 15 * count + 1024);
        }
    }
}

void entries_come_back_as_they_were_given() {
    std::mt19937_64 random(3);
    std::vector<PlanEntry> entries;
    uint64_t units = 0;
    for (int i = 0; i < 1000; ++i) {
        entries.push_back(
            {random() >> 16, random() >> 16, 1 + random() % 50, static_cast<uint32_t>(1 + random() % 255)});
        units += entries.back().units;
    }
    const auto plan = plan_of(entries);
    CHECK(plan->size() == 1000 && plan->units(0, 1000) == units);
    for (uint32_t i = 0; i < 1000; ++i) {
        const PlanEntry entry = plan->entry(i);
        CHECK(entry.src_offset == entries[i].src_offset && entry.dst_offset == entries[i].dst_offset);
        CHECK(entry.nbytes == entries[i].nbytes && entry.units == entries[i].units);
        CHECK(plan->units(i, i + 1) == entry.units);
    }
}

void a_cursor_over_layers_is_one_per_layer_after_the_other() {
    std::vector<PlanEntry> entries;
    for (uint64_t i = 0; i < 9; ++i) entries.push_back({i * 100, i * 100, 10, static_cast<uint32_t>(1 + i)});
    const auto plan = plan_of(entries, {.src_layer_stride = 5000, .dst_layer_stride = 7000, .num_layers = 4});
    WriteCursor all(plan, 1, 4, 2, 9);
    CHECK(all.units_left() == 3 * plan->units(2, 9));
    for (uint32_t layer = 1; layer < 4; ++layer) {
        for (WriteCursor one(plan, layer, layer + 1, 2, 9); !one.done();) {
            const auto expected = one.peek(4);
            const auto got = all.peek(4);
            CHECK(got.segments[0].src_offset == expected.segments[0].src_offset && got.units == expected.units);
            one.advance(expected);
            all.advance(got);
            CHECK(all.units_left() == one.units_left() + (3 - layer) * plan->units(2, 9));
        }
    }
    CHECK(all.done());
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
            WriteCursor cursor(plan, layer, layer + 1, 0, count);
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
    a_waiting_page_takes_less_than_16_bytes();
    entries_come_back_as_they_were_given();
    a_cursor_over_layers_is_one_per_layer_after_the_other();
    random_plans_put_every_byte_in_its_place_once();
}
