// IdlePolicy: what a polling thread does when it finds nothing: spin, then yield, then block. Pure: it is told the
// time.
//
// The lingering before it blocks is what adjacent writes live on: a receiver that blocks between the pieces of a 1 MiB
// write is woken three times for each, and the waking costs its sender (DESIGN.md, log).
#pragma once

#include <optional>
#include <string>
#include <thread>

#include "util/clock.h"

namespace pdd {

class IdlePolicy {
  public:
    enum class Step { Spin, Yield, Block };

    // "spin" never blocks, "block" blocks at once; "auto" spins and yields shortly. On few cores it hardly spins: the
    // peer that is waited for may need this very core.
    static std::optional<IdlePolicy> named(const std::string& name) {
        using std::chrono::microseconds;
        const bool many_cores = std::thread::hardware_concurrency() > 8;
        if (name == "auto")
            return many_cores ? IdlePolicy(microseconds(500), microseconds(1000))
                              : IdlePolicy(microseconds(5), microseconds(400));
        if (name == "spin") return IdlePolicy(Clock::duration::max(), Clock::duration::max());
        if (name == "block") return IdlePolicy(Clock::duration::zero(), Clock::duration::zero());
        return std::nullopt;
    }

    bool blocks() const { return linger_ != Clock::duration::max(); }
    void worked(TimePoint now) { last_work_ = now; }
    Step nothing(TimePoint now) const {
        const auto since = now - last_work_;
        if (since < spin_) return Step::Spin;
        return since < linger_ ? Step::Yield : Step::Block;
    }

  private:
    IdlePolicy(Clock::duration spin, Clock::duration linger) : spin_(spin), linger_(linger) {}
    Clock::duration spin_;    // since something happened
    Clock::duration linger_;  // since something happened, the spinning included
    TimePoint last_work_{};
};

}  // namespace pdd
