// ImmTable: counts the units that arrive under each key.
//
// imm32 = key (24 bits) | units - 1 (8 bits). key = generation (12 bits) | slot (12 bits): a slot is handed out again
// as late as possible and under a new generation, so a straggler of an old key is stale and touches nothing. A slot is
// bound to the endpoint it was allocated for; what arrives through another one is stale too. Counting starts at
// allocate(): arrivals before arm() are kept.
//
// allocate/retire take a lock; add() and arm() meet without one. One 64-bit word holds {live, overrun told, reached
// told, generation, arrived}: add() changes it by compare-and-swap, so an arrival can never be added to the next owner
// of the slot. arm() stores `expected` and then reads the word, add() changes the word and then reads `expected` (both
// sequentially consistent): at least one of them sees both and tells "reached"; the bit in the word makes it exactly
// one.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "util/clock.h"

namespace pdd {

inline constexpr uint32_t kKeyBits = 24;

inline constexpr uint32_t imm_pack(uint32_t key, uint32_t units) {
    return key << 8 | (units - 1);
}
inline constexpr uint32_t imm_key(uint32_t imm) {
    return imm >> 8;
}
inline constexpr uint32_t imm_units(uint32_t imm) {
    return (imm & 0xff) + 1;
}

class ImmTable {
  public:
    static constexpr uint32_t kSlotBits = 12;
    static constexpr uint32_t kSlots = 1u << kSlotBits;

    enum class Outcome { Counted, Reached, Overrun, Stale };
    struct Arrival {
        Outcome outcome;
        uint32_t arrived;  // units so far, 0 when stale
    };

    // When the units of a key came, for `pdd explain`: each mark is the time of the last arrival that raised the count
    // to at most (its index + 1) << shift, ns of the native clock; 0: none. Kept after the key is retired, until its
    // slot is handed out again. Written without a lock beside the count, so it may lag behind that.
    struct Arrivals {
        static constexpr size_t kMarks = 16;
        uint32_t expected = 0;
        uint32_t shift = 0;
        int64_t first = 0;
        int64_t last = 0;
        std::array<int64_t, kMarks> marks{};
    };

    ImmTable();

    // None when all 4096 slots are in use. Any thread.
    std::optional<uint32_t> allocate(uint32_t endpoint);
    // Announces how many units make the key whole, once per key; 0 is refused. The outcome is Reached or Overrun when
    // what arrived already decides it, Stale for a key that is not in use or armed already. Any thread.
    Arrival arm(uint32_t key, uint32_t expected);
    std::optional<uint32_t> arrived(uint32_t key) const;
    // Forgets the key and says what had arrived. Any thread.
    std::optional<uint32_t> retire(uint32_t key);
    // An arrival. Reached and Overrun are each told at most once per key. The worker's thread.
    Arrival add(uint32_t endpoint, uint32_t imm, TimePoint now = {});
    // None for a key whose slot has another one now, or never had any. Any thread.
    std::optional<Arrivals> arrivals(uint32_t key) const;
    uint32_t in_use() const { return in_use_.load(std::memory_order_relaxed); }

  private:
    struct Slot {
        std::atomic<uint64_t> word{0};
        std::atomic<uint32_t> expected{0};  // 0: not armed
        std::atomic<uint32_t> endpoint{0};
        // of the latest key, retired or not
        std::atomic<uint32_t> key{UINT32_MAX};
        std::atomic<uint32_t> armed{0};  // expected
        std::atomic<uint32_t> shift{0};
        std::atomic<int64_t> first{0};
        std::atomic<int64_t> last{0};
        std::array<std::atomic<int64_t>, Arrivals::kMarks> marks{};
    };
    static void mark(Slot& slot, uint32_t arrived, TimePoint now);
    Slot* live_slot(uint32_t key, uint64_t& word);
    Arrival tell(Slot& slot, uint64_t word);

    std::vector<Slot> slots_;
    std::mutex mutex_;           // guards free_ and generations_
    std::deque<uint32_t> free_;  // oldest first
    std::vector<uint32_t> generations_;
    std::atomic<uint32_t> in_use_{0};
};

}  // namespace pdd
