#include "watch/barrier.h"

#include <cerrno>
#include <string>

#include "util/clock.h"
#include "util/pause.h"

namespace pdd {
namespace {

constexpr int kLooksPerClock = 32;             // reading the clock costs as much as a few looks
constexpr std::chrono::seconds kPatience{60};  // of one sleep; a bump ends it

bool seen_within(const Counter& line, uint64_t wanted, std::chrono::microseconds spin) {
    const TimePoint end = Clock::now() + spin;
    do {
        for (int i = 0; i < kLooksPerClock; ++i) {
            if (line.value() >= wanted) return true;
            cpu_pause();
        }
    } while (Clock::now() < end);
    return false;
}

}  // namespace

Result<Barrier> Barrier::map(int fd, uint32_t rank, uint32_t world, std::chrono::microseconds spin) {
    if (rank >= world)
        return Error{"a barrier of " + std::to_string(world) + " ranks has no rank " + std::to_string(rank), EINVAL};
    std::vector<std::shared_ptr<Counter>> lines;
    for (uint32_t each = 0; each < world; ++each) {
        auto line = Counter::map(fd, each * Counter::kBytes);
        if (!line) return line.error();
        lines.push_back(std::move(*line));
    }
    return Barrier(std::move(lines), rank, spin);
}

void Barrier::wait() {
    const uint64_t turn = lines_[rank_]->bump();
    for (const auto& line : lines_) {
        if (line->value() >= turn || seen_within(*line, turn, spin_)) continue;
        for (uint64_t value = line->value(); value < turn; value = line->value()) line->wait(value, kPatience);
    }
}

}  // namespace pdd
