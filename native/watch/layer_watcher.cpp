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
constexpr uint32_t kLongSleep = 200;               // us: small against the compute time of a layer (2 to 35 ms on GPUs)

}  // namespace

LayerWatcher::LayerWatcher(Fire fire, bool spin) : fire_(std::move(fire)), spin_(spin), thread_([this] { run(); }) {}

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
    std::vector<Live> live;
    uint32_t turns = 0;
    while (!stopping_.load()) {
        if (live.empty() && !inbox_.load()) {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [this] { return stopping_.load() || inbox_.load(); });
        }
        if (take_inbox(live)) turns = 0;
        if (step(live))
            turns = 0;
        else if (!live.empty())
            idle(turns++, live);
    }
}

bool LayerWatcher::take_inbox(std::vector<Live>& live) {
    if (!inbox_.load()) return false;
    std::vector<Alarm> fresh;
    std::vector<uint64_t> gone;
    {
        const std::lock_guard lock(mutex_);
        fresh.swap(to_set_);
        gone.swap(to_clear_);
        inbox_.store(false);
    }
    for (auto& alarm : fresh) live.push_back({std::move(alarm), 0});
    std::erase_if(live,
                  [&](const Live& one) { return std::find(gone.begin(), gone.end(), one.alarm.id) != gone.end(); });
    return true;
}

bool LayerWatcher::step(std::vector<Live>& live) {
    bool moved = false;
    if (!live.empty()) seen_ = live.front().alarm.counter->value();  // before any alarm is compared: see idle()
    for (auto& one : live) {
        const uint64_t value = one.alarm.counter->value();
        if (value < one.alarm.first_value + one.fired) continue;
        const uint64_t ready = std::min<uint64_t>(value - one.alarm.first_value + 1, one.alarm.num_values);
        fire_(one.alarm.id, one.fired, static_cast<uint32_t>(ready));
        one.fired = static_cast<uint32_t>(ready);
        moved = true;
    }
    std::erase_if(live, [](const Live& one) { return one.fired == one.alarm.num_values; });
    return moved;
}

void LayerWatcher::idle(uint32_t turns, const std::vector<Live>& live) {
    if (spin_ || turns < kSpins) {
        cpu_pause();
        return;
    }
    const auto& counter = live.front().alarm.counter;
    const bool wakes = counter->wakes() && std::all_of(live.begin(), live.end(), [&](const Live& one) {
                           return one.alarm.counter == counter;
                       });
    if (wakes) {
        counter->wait(seen_, kPatience * (1 << std::min(turns - kSpins, kDoublings)));
    } else if (turns < kSpins + kYields) {
        std::this_thread::yield();
    } else {
        const uint32_t nap = std::min(kShortSleep + (turns - kSpins - kYields), kLongSleep);
        std::this_thread::sleep_for(std::chrono::microseconds(nap));
    }
}

}  // namespace pdd
