#include "fabric/imm_table.h"

#include <algorithm>
#include <bit>
#include <chrono>

namespace pdd {
namespace {

constexpr uint32_t kGenerations = 1u << (kKeyBits - ImmTable::kSlotBits);
constexpr uint64_t kLive = 1ull << 63;
constexpr uint64_t kOverrunTold = 1ull << 62;
constexpr uint64_t kReachedTold = 1ull << 61;
constexpr uint32_t kGenerationShift = 32;
constexpr uint32_t kMaxImmUnits = 256;

uint32_t slot_of(uint32_t key) {
    return key & (ImmTable::kSlots - 1);
}
uint32_t generation_of(uint32_t key) {
    return key >> ImmTable::kSlotBits;
}
uint32_t word_generation(uint64_t word) {
    return static_cast<uint32_t>(word >> kGenerationShift) & (kGenerations - 1);
}
uint32_t word_arrived(uint64_t word) {
    return static_cast<uint32_t>(word);
}

}  // namespace

ImmTable::ImmTable() : slots_(kSlots), generations_(kSlots, 0) {
    for (uint32_t slot = 0; slot < kSlots; ++slot) free_.push_back(slot);
}

std::optional<uint32_t> ImmTable::allocate(uint32_t endpoint) {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return std::nullopt;
    const uint32_t index = free_.front();
    free_.pop_front();
    const uint32_t generation = generations_[index];
    Slot& slot = slots_[index];
    slot.expected.store(0);
    slot.endpoint.store(endpoint);
    for (auto& mark : slot.marks) mark.store(0, std::memory_order_relaxed);
    slot.first.store(0, std::memory_order_relaxed);
    slot.last.store(0, std::memory_order_relaxed);
    slot.armed.store(0, std::memory_order_relaxed);
    slot.key.store(generation << kSlotBits | index, std::memory_order_relaxed);
    slot.word.store(kLive | static_cast<uint64_t>(generation) << kGenerationShift);  // publishes those above
    in_use_.fetch_add(1, std::memory_order_relaxed);
    return generation << kSlotBits | index;
}

ImmTable::Slot* ImmTable::live_slot(uint32_t key, uint64_t& word) {
    if (key >> kKeyBits != 0) return nullptr;
    Slot& slot = slots_[slot_of(key)];
    word = slot.word.load();
    const bool live = (word & kLive) != 0 && word_generation(word) == generation_of(key);
    return live ? &slot : nullptr;
}

ImmTable::Arrival ImmTable::arm(uint32_t key, uint32_t expected) {
    uint64_t word = 0;
    Slot* slot = live_slot(key, word);
    uint32_t unarmed = 0;
    if (slot == nullptr || expected == 0 || !slot->expected.compare_exchange_strong(unarmed, expected))
        return {Outcome::Stale, 0};
    constexpr uint32_t kMarkBits = std::bit_width(Arrivals::kMarks) - 1;
    const uint32_t bits = static_cast<uint32_t>(std::bit_width(expected - 1));
    slot->shift.store(bits > kMarkBits ? bits - kMarkBits : 0, std::memory_order_relaxed);
    slot->armed.store(expected, std::memory_order_relaxed);
    return tell(*slot, slot->word.load());
}

std::optional<uint32_t> ImmTable::arrived(uint32_t key) const {
    uint64_t word = 0;
    const Slot* slot = const_cast<ImmTable*>(this)->live_slot(key, word);
    return slot != nullptr ? std::optional(word_arrived(word)) : std::nullopt;
}

std::optional<uint32_t> ImmTable::retire(uint32_t key) {
    const std::lock_guard lock(mutex_);
    uint64_t word = 0;
    Slot* slot = live_slot(key, word);
    if (slot == nullptr) return std::nullopt;
    word = slot->word.exchange(0);
    const uint32_t index = slot_of(key);
    generations_[index] = (generations_[index] + 1) % kGenerations;
    free_.push_back(index);
    in_use_.fetch_sub(1, std::memory_order_relaxed);
    return word_arrived(word);
}

// Relaxed stores of one thread, plain ones on the machines there are.
void ImmTable::mark(Slot& slot, uint32_t arrived, TimePoint now) {
    constexpr auto relaxed = std::memory_order_relaxed;
    const int64_t at = std::chrono::duration_cast<std::chrono::nanoseconds>(now.time_since_epoch()).count();
    if (slot.first.load(relaxed) == 0) slot.first.store(at, relaxed);
    slot.last.store(at, relaxed);
    const uint32_t place = (arrived - 1) >> slot.shift.load(relaxed);
    slot.marks[std::min<size_t>(place, Arrivals::kMarks - 1)].store(at, relaxed);
}

std::optional<ImmTable::Arrivals> ImmTable::arrivals(uint32_t key) const {
    if (key >> kKeyBits != 0) return std::nullopt;
    constexpr auto relaxed = std::memory_order_relaxed;
    const Slot& slot = slots_[slot_of(key)];
    if (slot.key.load(relaxed) != key) return std::nullopt;
    Arrivals found{
        slot.armed.load(relaxed), slot.shift.load(relaxed), slot.first.load(relaxed), slot.last.load(relaxed), {}};
    for (size_t i = 0; i < found.marks.size(); ++i) found.marks[i] = slot.marks[i].load(relaxed);
    return found;
}

ImmTable::Arrival ImmTable::add(uint32_t endpoint, uint32_t imm, TimePoint now) {
    uint64_t word = 0;
    Slot* slot = live_slot(imm_key(imm), word);
    for (;;) {
        // Reading the endpoint before the swap is enough: the swap fails if the slot changed hands since `word` was
        // read.
        if (slot == nullptr || slot->endpoint.load() != endpoint) return {Outcome::Stale, 0};
        // A peer that never stops must not carry over into the generation; it was told as an overrun long ago.
        if (word_arrived(word) > UINT32_MAX - kMaxImmUnits) return {Outcome::Counted, word_arrived(word)};
        const uint64_t next = word + imm_units(imm);
        if (slot->word.compare_exchange_weak(word, next)) {
            mark(*slot, word_arrived(next), now);
            return tell(*slot, next);
        }
        if ((word & kLive) == 0 || word_generation(word) != generation_of(imm_key(imm))) slot = nullptr;
    }
}

ImmTable::Arrival ImmTable::tell(Slot& slot, uint64_t word) {
    const uint64_t owner = word & (kLive | static_cast<uint64_t>(kGenerations - 1) << kGenerationShift);
    for (;;) {
        const uint32_t expected = slot.expected.load();
        const uint32_t arrived = word_arrived(word);
        if (expected == 0 || arrived < expected) return {Outcome::Counted, arrived};
        const uint64_t told = arrived == expected ? kReachedTold : kOverrunTold;
        if ((word & told) != 0) return {Outcome::Counted, arrived};
        if (slot.word.compare_exchange_weak(word, word | told))
            return {arrived == expected ? Outcome::Reached : Outcome::Overrun, arrived};
        const uint64_t now = word & (kLive | static_cast<uint64_t>(kGenerations - 1) << kGenerationShift);
        if (now != owner) return {Outcome::Stale, 0};
    }
}

}  // namespace pdd
