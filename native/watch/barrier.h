// Barrier: processes that wait for each other, one cache line each in shared memory.
//
// Line r is a Counter that rank r alone bumps, once per wait: whoever looks sees who has come how often, so a rank that
// keeps the others waiting can be named from outside. A rank that dies leaves the others waiting; ending them is the
// business of whoever started them.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "watch/counter.h"

namespace pdd {

class Barrier {
  public:
    // Maps the first `world` lines of `fd`; the caller keeps and closes the fd. A wait looks for `spin` before it
    // sleeps.
    static Result<Barrier> map(int fd, uint32_t rank, uint32_t world, std::chrono::microseconds spin);

    // Returns once every rank has called it as often as this one. What they wrote before is visible after. One thread.
    void wait();

  private:
    Barrier(std::vector<std::shared_ptr<Counter>> lines, uint32_t rank, std::chrono::microseconds spin)
        : lines_(std::move(lines)), rank_(rank), spin_(spin) {}

    std::vector<std::shared_ptr<Counter>> lines_;  // by rank
    uint32_t rank_;
    std::chrono::microseconds spin_;
};

}  // namespace pdd
