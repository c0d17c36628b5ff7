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
    Again,  // not posted: the provider "says" to ask later
};

inline std::optional<Fault> fault_named(const std::string& name) {
    if (name == "error") return Fault::Error;
    if (name == "lost") return Fault::Lost;
    if (name == "hold") return Fault::Hold;
    if (name == "again") return Fault::Again;
    return std::nullopt;
}

class FaultInjector {
  public:
    // The `after`-th write from now on (1 is the next) and the `count` - 1 that follow it; of one NIC, or of any (-1).
    void set(Fault fault, uint64_t after, uint64_t count, int nic) {
        fault_ = fault;
        skip_ = after > 0 ? after - 1 : 0;
        left_ = count;
        nic_ = nic;
    }
    // The fate of the write that is about to be posted on a NIC. consume() follows once it was not refused for now, or
    // by this.
    Fault next(size_t nic) const { return concerns(nic) && skip_ == 0 && left_ > 0 ? fault_ : Fault::None; }
    void consume(size_t nic) {
        if (!concerns(nic)) return;
        if (skip_ > 0)
            --skip_;
        else if (left_ > 0)
            --left_;
    }

  private:
    bool concerns(size_t nic) const { return nic_ < 0 || static_cast<size_t>(nic_) == nic; }

    int nic_ = -1;
    Fault fault_ = Fault::None;
    uint64_t skip_ = 0;
    uint64_t left_ = 0;
};

}  // namespace pdd
