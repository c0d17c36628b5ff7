#include "watch/layer_watcher.h"

#include <algorithm>
#include <chrono>

#include "util/pause.h"

namespace pdd {
namespace {

constexpr uint32_t kSpins = 100;
constexpr uint32_t kYields = 50;
constexpr uint32_t kShortSleep = 20;  // us
// Polling at 200 us cost a rank on the same core 13 % of its prefill (tests/bench/bench_ttft.py, one core a node).
// How long a sleep may hide a new alarm or a clear, 5 ms doubling to 80: each needless waking costs the rank on this core
// its caches (5 ms throughout: 410 wakings and 4 % of a prefill of 2 s).
constexpr std::chrono::milliseconds kPatience{5};
constexpr uint32_t kDoublings = 4;
constexpr uint32_t kLongSleep = 200;  // us: small against the compute time of a layer (2 to 35 ms on GPUs)

}  // namespace

LayerWatcher::LayerWatcher(Fire fire) : fire_(std::move(fire)), thread_([this] { run(); }) {}

LayerWatcher::~LayerWatcher() {
    stop();
}

void LayerWatcher::set(Alarm alarm) {
    {
        const std::lock_guard lock(mutex_);
        to_set_.push_back(std::move(alarm));
        inbox_.store(true);
    }
    changed_.notify_one();
}

void LayerWatcher::clear(std::vector<uint64_t> ids) {
    if (ids.empty()) return;
    {
        const std::lock_guard lock(mutex_);
        to_clear_.insert(to_clear_.end(), ids.begin(), ids.end());
        inbox_.store(true);
    }
    changed_.notify_one();
}

void LayerWatcher::stop() {
    {
        const std::lock_guard lock(mutex_);
        stopping_.store(true);
    }
    changed_.notify_one();
    if (thread_.joinable()) thread_.join();
}

void LayerWatcher::run() {
    uint32_t turns = 0;
    while (!stopping_.load()) {
        if (live_.empty() && !inbox_.load()) {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [this] { return stopping_.load() || inbox_.load(); });
        }
        if (take_inbox()) turns = 0;
        const Counter* counter = live_.only_counter();
        const uint64_t seen = counter != nullptr ? counter->value() : 0;  // before any alarm is compared with it
        if (live_.fire(fire_))
            turns = 0;
        else if (!live_.empty())
            idle(turns++, counter, seen);
    }
}

bool LayerWatcher::take_inbox() {
    if (!inbox_.load()) return false;
    std::vector<Alarm> fresh;
    std::vector<uint64_t> gone;
    {
        const std::lock_guard lock(mutex_);
        fresh.swap(to_set_);
        gone.swap(to_clear_);
        inbox_.store(false);
    }
    for (auto& alarm : fresh) live_.set(std::move(alarm));
    live_.clear(gone);
    return true;
}

// Sleeps on the counter that all wait for, if whoever moves it wakes sleepers.
void LayerWatcher::idle(uint32_t turns, const Counter* counter, uint64_t seen) {
    if (turns < kSpins) {
        cpu_pause();
    } else if (counter != nullptr && counter->wakes()) {
        counter->wait(seen, kPatience * (1 << std::min(turns - kSpins, kDoublings)));
    } else if (turns < kSpins + kYields) {
        std::this_thread::yield();
    } else {
        const uint32_t nap = std::min(kShortSleep + (turns - kSpins - kYields), kLongSleep);
        std::this_thread::sleep_for(std::chrono::microseconds(nap));
    }
}

}  // namespace pdd
