// Bounded rings: MpscRing (Vyukov's cells: many producers, one consumer) and SpscRing.
//
// try_push never blocks and never allocates; false means full. T must be movable and default constructible. A consumed
// cell is reset to T{}, so that what it owned dies on the consumer's side at once.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace pdd {

inline constexpr size_t kCacheLine = 64;

template <class T>
class MpscRing {
  public:
    explicit MpscRing(size_t capacity) : cells_(std::bit_ceil(capacity)), mask_(cells_.size() - 1) {
        for (size_t i = 0; i < cells_.size(); ++i) cells_[i].turn.store(i, std::memory_order_relaxed);
    }
    MpscRing(const MpscRing&) = delete;
    MpscRing& operator=(const MpscRing&) = delete;

    // Any thread. On false `value` is untouched.
    bool try_push(T& value) {
        size_t tail = tail_.load(std::memory_order_relaxed);
        for (;;) {
            Cell& cell = cells_[tail & mask_];
            const auto lead = static_cast<intptr_t>(cell.turn.load(std::memory_order_acquire) - tail);
            if (lead < 0) return false;  // the cell still holds what was pushed one lap ago
            if (lead == 0 && tail_.compare_exchange_weak(tail, tail + 1, std::memory_order_relaxed)) {
                cell.value = std::move(value);
                cell.turn.store(tail + 1, std::memory_order_release);
                return true;
            }
            if (lead > 0) tail = tail_.load(std::memory_order_relaxed);
        }
    }

    // The consumer's thread only.
    bool try_pop(T& out) {
        Cell& cell = cells_[head_ & mask_];
        if (cell.turn.load(std::memory_order_acquire) != head_ + 1) return false;
        out = std::exchange(cell.value, T{});
        cell.turn.store(head_ + mask_ + 1, std::memory_order_release);
        ++head_;
        return true;
    }

    // The consumer's thread only. A push that is half done counts as empty; its producer signals afterwards.
    bool empty() const { return cells_[head_ & mask_].turn.load(std::memory_order_seq_cst) != head_ + 1; }

  private:
    struct alignas(kCacheLine) Cell {
        std::atomic<size_t> turn{0};  // == position: free for the producer; == position + 1: full
        T value{};
    };
    std::vector<Cell> cells_;
    const size_t mask_;
    alignas(kCacheLine) std::atomic<size_t> tail_{0};
    alignas(kCacheLine) size_t head_ = 0;
};

template <class T>
class SpscRing {
  public:
    explicit SpscRing(size_t capacity) : cells_(std::bit_ceil(capacity)), mask_(cells_.size() - 1) {}
    SpscRing(const SpscRing&) = delete;
    SpscRing& operator=(const SpscRing&) = delete;

    // The producer's thread only. On false `value` is untouched.
    bool try_push(T& value) {
        const size_t tail = tail_.load(std::memory_order_relaxed);
        if (tail - head_.load(std::memory_order_acquire) > mask_) return false;
        cells_[tail & mask_] = std::move(value);
        tail_.store(tail + 1, std::memory_order_release);
        return true;
    }

    // The consumer's thread only.
    bool try_pop(T& out) {
        const size_t head = head_.load(std::memory_order_relaxed);
        if (head == tail_.load(std::memory_order_acquire)) return false;
        out = std::exchange(cells_[head & mask_], T{});
        head_.store(head + 1, std::memory_order_release);
        return true;
    }

  private:
    std::vector<T> cells_;
    const size_t mask_;
    alignas(kCacheLine) std::atomic<size_t> head_{0};
    alignas(kCacheLine) std::atomic<size_t> tail_{0};
};

}  // namespace pdd
