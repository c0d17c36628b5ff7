// Barrier: nobody passes before the last has come, what was written before is seen after, sleepers are woken.
#include <atomic>
#include <thread>
#include <vector>

#include "check.h"
#include "watch/barrier.h"

using namespace pdd;

namespace {

constexpr uint32_t kWorld = 4;

UniqueFd lines() {
    auto made = Counter::create();
    CHECK(made);
    return std::move(made->second);  // a page: room for 64 lines
}

// Each rank writes its word, meets the others, reads all words, meets them again: no other order is right. The words
// are relaxed, not plain, for the thread sanitizer: ranks map the lines at addresses of their own, where it sees no
// order.
void all_meet_every_time(std::chrono::microseconds spin) {
    const UniqueFd fd = lines();
    std::atomic<uint64_t> words[kWorld] = {};
    std::vector<std::thread> ranks;
    for (uint32_t rank = 0; rank < kWorld; ++rank) {
        ranks.emplace_back([&, rank] {
            auto barrier = Barrier::map(fd.get(), rank, kWorld, spin);
            CHECK(barrier);
            for (uint64_t turn = 1; turn <= 2000; ++turn) {
                words[rank].store(turn, std::memory_order_relaxed);
                barrier->wait();
                for (const auto& word : words) CHECK(word.load(std::memory_order_relaxed) == turn);
                barrier->wait();
            }
        });
    }
    for (auto& rank : ranks) rank.join();
    for (uint32_t rank = 0; rank < kWorld; ++rank) {
        auto line = Counter::map(fd.get(), rank * Counter::kBytes);
        CHECK(line && (*line)->value() == 4000);
    }
}

// A sleep that no bump ended would last a minute, and the test would end by ctest's time limit.
void the_last_wakes_all_that_sleep() {
    const UniqueFd fd = lines();
    std::atomic<uint32_t> passed{0};
    std::vector<std::thread> ranks;
    for (uint32_t rank = 1; rank < kWorld; ++rank) {
        ranks.emplace_back([&, rank] {
            auto barrier = Barrier::map(fd.get(), rank, kWorld, std::chrono::microseconds(0));
            CHECK(barrier);
            barrier->wait();
            ++passed;
        });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(passed == 0);
    auto last = Barrier::map(fd.get(), 0, kWorld, std::chrono::microseconds(0));
    CHECK(last);
    last->wait();
    for (auto& rank : ranks) rank.join();
    CHECK(passed == kWorld - 1);
}

void a_rank_that_cannot_be_is_refused() {
    const UniqueFd fd = lines();
    CHECK(!Barrier::map(fd.get(), 2, 2, std::chrono::microseconds(0)));
    CHECK(!Barrier::map(fd.get(), 0, 1000, std::chrono::microseconds(0)));  // more lines than the file has
    CHECK(!Barrier::map(-1, 0, 2, std::chrono::microseconds(0)));
}

}  // namespace

int main() {
    all_meet_every_time(std::chrono::microseconds(0));
    all_meet_every_time(std::chrono::microseconds(100));
    the_last_wakes_all_that_sleep();
    a_rank_that_cannot_be_is_refused();
    return 0;
}
