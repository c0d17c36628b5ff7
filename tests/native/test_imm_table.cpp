// ImmTable: early, late, stale, foreign and surplus arrivals; exactly one "reached" whoever comes first.
#include <atomic>
#include <thread>
#include <unordered_set>

#include "check.h"
#include "fabric/imm_table.h"
#include "util/pause.h"

using namespace pdd;
using Outcome = ImmTable::Outcome;

namespace {

void packs_key_and_units() {
    for (const uint32_t units : {1u, 2u, 255u, 256u}) {
        const uint32_t imm = imm_pack(0xabcdef, units);
        CHECK(imm_key(imm) == 0xabcdef && imm_units(imm) == units);
    }
}

void counts_to_the_expected_sum() {
    ImmTable table;
    const uint32_t key = *table.allocate(3);
    CHECK(table.add(3, imm_pack(key, 5)).outcome == Outcome::Counted);  // before arm: kept
    CHECK(table.arm(key, 12).outcome == Outcome::Counted);
    CHECK(table.arm(key, 12).outcome == Outcome::Stale);  // once only
    CHECK(table.add(3, imm_pack(key, 6)).outcome == Outcome::Counted);
    const auto reached = table.add(3, imm_pack(key, 1));
    CHECK(reached.outcome == Outcome::Reached && reached.arrived == 12);
    CHECK(table.add(3, imm_pack(key, 1)).outcome == Outcome::Overrun);
    CHECK(table.add(3, imm_pack(key, 1)).outcome == Outcome::Counted);  // told once
    CHECK(*table.arrived(key) == 14);
    CHECK(*table.retire(key) == 14);
    CHECK(!table.retire(key) && !table.arrived(key));
}

void arming_late_reaches_at_once() {
    ImmTable table;
    const uint32_t key = *table.allocate(1);
    CHECK(table.arm(key, 0).outcome == Outcome::Stale);
    table.add(1, imm_pack(key, 7));
    CHECK(table.arm(key, 7).outcome == Outcome::Reached);
    const uint32_t other = *table.allocate(1);
    table.add(1, imm_pack(other, 9));
    CHECK(table.arm(other, 7).outcome == Outcome::Overrun);
}

void stale_and_foreign_arrivals_touch_nothing() {
    ImmTable table;
    const uint32_t old = *table.allocate(1);
    CHECK(table.add(2, imm_pack(old, 1)).outcome == Outcome::Stale);
    CHECK(*table.arrived(old) == 0);
    table.retire(old);
    CHECK(table.add(1, imm_pack(old, 1)).outcome == Outcome::Stale);
    // Go round all slots, back to the same slot: the new key differs from the old one.
    std::unordered_set<uint32_t> keys;
    for (uint32_t i = 0; i < ImmTable::kSlots; ++i) keys.insert(*table.allocate(1));
    CHECK(keys.size() == ImmTable::kSlots && !keys.contains(old));
    CHECK(!table.allocate(1));
    CHECK(table.in_use() == ImmTable::kSlots);
    CHECK(table.add(1, imm_pack(old, 200)).outcome == Outcome::Stale);
    for (const uint32_t key : keys) CHECK(*table.retire(key) == 0);
    CHECK(table.in_use() == 0);
}

void seventy_thousand_keys_in_a_row() {
    ImmTable table;
    uint32_t stale = 0;
    for (uint32_t i = 0; i < 70000; ++i) {
        const uint32_t key = *table.allocate(1);
        CHECK(table.arm(key, 1).outcome == Outcome::Counted);
        CHECK(table.add(1, imm_pack(key, 1)).outcome == Outcome::Reached);
        CHECK(*table.retire(key) == 1);
        stale += table.add(1, imm_pack(key, 1)).outcome == Outcome::Stale;
    }
    CHECK(stale == 70000);
}

void a_peer_that_never_stops_stays_inside_its_own_key() {
    ImmTable table;
    const uint32_t key = *table.allocate(1);
    for (uint64_t i = 0; i < (1ull << 32) / 256 + 10; ++i) table.add(1, imm_pack(key, 256));
    CHECK(*table.arrived(key) > 0xffff0000u);
    CHECK(*table.retire(key) > 0xffff0000u);
}

// arm() on one thread against the last add() on another: exactly one of the two tells. The threads meet by spinning,
// and one of them starts a little later or earlier each round, so that the two calls do overlap.
void the_race_of_arm_and_add_tells_once() {
    constexpr uint32_t kRounds = 100000;
    ImmTable table;
    uint32_t key = 0;
    bool told = false;
    std::atomic<uint32_t> started{0};
    std::atomic<uint32_t> ended{0};
    const auto meet = [](const std::atomic<uint32_t>& count, uint32_t round) {
        for (uint32_t turn = 0; count.load(std::memory_order_acquire) < round; ++turn)
            if (turn % 256 == 255) std::this_thread::yield();
    };
    const auto linger = [](uint32_t turns) {
        for (uint32_t i = 0; i < turns; ++i) cpu_pause();
    };
    std::thread adder([&] {
        for (uint32_t round = 1; round <= kRounds; ++round) {
            meet(started, round);
            linger(round % 7);
            told = table.add(1, imm_pack(key, 1)).outcome == Outcome::Reached;
            ended.store(round, std::memory_order_release);
        }
    });
    for (uint32_t round = 1; round <= kRounds; ++round) {
        key = *table.allocate(1);
        started.store(round, std::memory_order_release);
        linger(round / 7 % 7);
        const bool mine = table.arm(key, 1).outcome == Outcome::Reached;
        meet(ended, round);
        CHECK(told != mine);
        table.retire(key);
    }
    adder.join();
}

void when_units_came_is_kept_until_the_slot_is_used_again() {
    using std::chrono::milliseconds;
    ImmTable table;
    const uint32_t key = *table.allocate(1);
    CHECK(table.arrivals(key)->expected == 0 && table.arrivals(key)->first == 0);
    table.arm(key, 100);
    for (int64_t unit = 1; unit <= 99; ++unit) table.add(1, imm_pack(key, 1), TimePoint(milliseconds(unit)));
    CHECK(table.add(2, imm_pack(key, 1), TimePoint(milliseconds(500))).outcome == Outcome::Stale);
    table.retire(key);
    const auto kept = *table.arrivals(key);
    CHECK(kept.expected == 100 && kept.shift == 3);  // 13 marks of 8 units
    CHECK(kept.first == 1'000'000 && kept.last == 99'000'000);
    CHECK(kept.marks[0] == 8'000'000 && kept.marks[11] == 96'000'000 && kept.marks[12] == 99'000'000);
    CHECK(kept.marks[13] == 0);
    for (uint32_t i = 0; i < ImmTable::kSlots; ++i) table.retire(*table.allocate(1));
    CHECK(!table.arrivals(key));
    CHECK(!table.arrivals(1 << kKeyBits));
}

}  // namespace

int main() {
    when_units_came_is_kept_until_the_slot_is_used_again();
    packs_key_and_units();
    counts_to_the_expected_sum();
    arming_late_reaches_at_once();
    stale_and_foreign_arrivals_touch_nothing();
    seventy_thousand_keys_in_a_row();
    a_peer_that_never_stops_stays_inside_its_own_key();
    the_race_of_arm_and_add_tells_once();
}
