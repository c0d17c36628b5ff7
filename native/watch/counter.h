// Counter: a monotonic u64 in shared memory, one cache line. The rank bumps it, the watcher of the daemon reads it.
//
// Never reset: step k, layer l of a model with L layers is the value k*L + l + 1. On a GPU the same line is written by
// a kernel; nothing here depends on who writes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>

#include "util/result.h"
#include "util/unique_fd.h"

namespace pdd {

class Counter {
  public:
    static constexpr size_t kBytes = 64;

    // Maps the line at `offset` (a multiple of 64) of `fd`; the caller keeps and closes the fd.
    static Result<std::shared_ptr<Counter>> map(int fd, uint64_t offset);
    // A zeroed counter in a memfd of its own, and that memfd.
    static Result<std::pair<std::shared_ptr<Counter>, UniqueFd>> create();

    Counter(const Counter&) = delete;
    Counter& operator=(const Counter&) = delete;
    ~Counter();

    // Release: what the caller wrote before is visible to whoever reads the new value. Returns the new value.
    uint64_t bump() {
        // Sequentially consistent, as the two accesses in wait(): either this sees the sleeper, or the sleeper the
        // value.
        const uint64_t value = cell().fetch_add(1, std::memory_order_seq_cst) + 1;
        if (!wakes()) word(kWakes).store(1, std::memory_order_relaxed);
        if (word(kSleepers).load(std::memory_order_seq_cst) != 0) wake();
        return value;
    }
    uint64_t value() const { return cell().load(std::memory_order_acquire); }

    // Whether bumps wake a sleeper: true once a process has bumped, never for a GPU, which can only store.
    bool wakes() const { return word(kWakes).load(std::memory_order_relaxed) != 0; }
    // Sleeps until the value is not `seen` any more, or for `timeout`.
    void wait(uint64_t seen, std::chrono::microseconds timeout) const;

  private:
    Counter(void* mapping, size_t length, uint64_t* line) : mapping_(mapping), length_(length), line_(line) {}
    // The line: u64 value, u32 sleepers, u32 "somebody bumps with a wake".
    static constexpr size_t kSleepers = 2;
    static constexpr size_t kWakes = 3;
    std::atomic_ref<uint64_t> cell() const { return std::atomic_ref<uint64_t>(*line_); }
    std::atomic_ref<uint32_t> word(size_t index) const {
        return std::atomic_ref<uint32_t>(reinterpret_cast<uint32_t*>(line_)[index]);
    }
    void wake() const;

    void* mapping_;
    size_t length_;
    uint64_t* line_;
};

}  // namespace pdd
