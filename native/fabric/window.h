// Window: how much may be in flight, of one peer on one NIC or of one NIC. tcp and net accept any number of writes
// without pushing back (200,000 were taken with a queue of 256), so the limit must be ours.
#pragma once

#include <cstdint>

namespace pdd {

struct WindowSize {
    uint32_t ops = 64;
    uint64_t bytes = 8 << 20;
};

class Window {
  public:
    explicit Window(WindowSize size) : size_(size) {}

    // One write is always let through when nothing is in flight, whatever its size.
    bool admits(uint64_t nbytes) const { return ops_ == 0 || (ops_ < size_.ops && bytes_ + nbytes <= size_.bytes); }
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
    WindowSize size_;
    uint32_t ops_ = 0;
    uint64_t bytes_ = 0;
};

}  // namespace pdd
