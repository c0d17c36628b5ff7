// Counter: a monotonic u64 in shared memory, one cache line. The rank bumps it, the watcher of the daemon reads it.
//
// Never reset: step k, layer l of a model with L layers is the value k*L + l + 1. On a GPU the same line is written by
// a kernel; nothing here depends on who writes.
#pragma once

#include <atomic>
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
    uint64_t bump() { return cell().fetch_add(1, std::memory_order_release) + 1; }
    uint64_t value() const { return cell().load(std::memory_order_acquire); }

  private:
    Counter(void* mapping, size_t length, uint64_t* line) : mapping_(mapping), length_(length), line_(line) {}
    std::atomic_ref<uint64_t> cell() const { return std::atomic_ref<uint64_t>(*line_); }

    void* mapping_;
    size_t length_;
    uint64_t* line_;
};

}  // namespace pdd
