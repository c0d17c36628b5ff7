// Window: how much of one endpoint may be in flight. tcp and net accept any number of writes without pushing back
// (200,000 were taken with a queue of 256), so the limit must be ours.
#pragma once

#include <cstdint>

namespace pdd {

class Window {
  public:
    Window(uint32_t max_ops, uint64_t max_bytes) : max_ops_(max_ops), max_bytes_(max_bytes) {}

    // One write is always let through when nothing is in flight, whatever its size.
    bool admits(uint64_t nbytes) const { return ops_ == 0 || (ops_ < max_ops_ && bytes_ + nbytes <= max_bytes_); }
    void posted(uint64_t nbytes) {
        ops_ += 1;
        bytes_ += nbytes;
    }
    void completed(uint64_t nbytes) {
        ops_ -= 1;
        bytes_ -= nbytes;
    }
    uint32_t ops() const { return ops_; }
    uint64_t bytes() const { return bytes_; }

  private:
    uint32_t max_ops_;
    uint64_t max_bytes_;
    uint32_t ops_ = 0;
    uint64_t bytes_ = 0;
};

}  // namespace pdd
