// IdlePolicy: what a polling thread does when it finds nothing: spin, then yield, then block.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <thread>

namespace pdd {

class IdlePolicy {
  public:
    enum class Step { Spin, Yield, Block };

    // "spin" never blocks, "block" blocks at once; "auto" spins and yields shortly. On few cores it hardly spins: the
    // peer that is waited for may need this very core.
    static std::optional<IdlePolicy> named(const std::string& name) {
        const bool many_cores = std::thread::hardware_concurrency() > 8;
        if (name == "auto") return many_cores ? IdlePolicy(2000, 2000) : IdlePolicy(8, 32);
        if (name == "spin") return IdlePolicy(UINT32_MAX, UINT32_MAX);
        if (name == "block") return IdlePolicy(0, 0);
        return std::nullopt;
    }

    void worked() { turns_ = 0; }
    Step nothing() {
        if (turns_ < spins_) {
            if (spins_ != UINT32_MAX) ++turns_;
            return Step::Spin;
        }
        if (turns_ < yields_) {
            ++turns_;
            return Step::Yield;
        }
        return Step::Block;
    }

  private:
    IdlePolicy(uint32_t spins, uint32_t yields)
        : spins_(spins), yields_(yields > UINT32_MAX - spins ? UINT32_MAX : spins + yields) {}
    uint32_t spins_;
    uint32_t yields_;
    uint32_t turns_ = 0;
};

}  // namespace pdd
