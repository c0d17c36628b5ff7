// FaultInjector: makes a chosen write go wrong, for tests. Owner: the worker's thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace pdd {

enum class Fault {
    None,
    Error,  // completes with an error, never posted
    Lost,   // completes well, never posted
    Hold,   // posted, its completion is withheld until the endpoint closes
};

inline std::optional<Fault> fault_named(const std::string& name) {
    if (name == "error") return Fault::Error;
    if (name == "lost") return Fault::Lost;
    if (name == "hold") return Fault::Hold;
    return std::nullopt;
}

class FaultInjector {
  public:
    // The `after`-th write from now on (1 is the next) and the `count` - 1 that follow it.
    void set(Fault fault, uint64_t after, uint64_t count) {
        fault_ = fault;
        skip_ = after > 0 ? after - 1 : 0;
        left_ = count;
    }
    // The fate of the write that is about to be posted. consume() follows once it was not refused for now.
    Fault next() const { return skip_ == 0 && left_ > 0 ? fault_ : Fault::None; }
    void consume() {
        if (skip_ > 0)
            --skip_;
        else if (left_ > 0)
            --left_;
    }

  private:
    Fault fault_ = Fault::None;
    uint64_t skip_ = 0;
    uint64_t left_ = 0;
};

}  // namespace pdd
