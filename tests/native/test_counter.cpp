// Counter and LayerWatcher: every value fires once, in order, jumps included; clearing and stopping are final.
#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <thread>

#include "check.h"
#include "watch/layer_watcher.h"

using namespace pdd;

namespace {

std::shared_ptr<Counter> counter() {
    auto made = Counter::create();
    CHECK(made);
    return made->first;
}

void two_mappings_share_one_value() {
    auto made = Counter::create();
    CHECK(made);
    auto other = Counter::map(made->second.get(), 0);
    CHECK(other);
    CHECK(made->first->bump() == 1 && (*other)->value() == 1 && (*other)->bump() == 2 && made->first->value() == 2);
    CHECK(!Counter::map(made->second.get(), 4) && !Counter::map(made->second.get(), 1 << 20) && !Counter::map(-1, 0));
}

struct Heard {
    Alarms::Fire ear() {
        return [this](uint64_t id, uint32_t from, uint32_t to) {
            const std::lock_guard lock(mutex);
            CHECK(from < to && from == upto[id]);
            upto[id] = to;
            total += to - from;
        };
    }
    void await(uint64_t count) const {
        while (total.load() < count) std::this_thread::yield();
    }
    std::mutex mutex;
    std::map<uint64_t, uint32_t> upto;
    std::atomic<uint64_t> total{0};
};

void fires_each_value_once_in_order() {
    Heard heard;
    LayerWatcher watcher(heard.ear());
    const auto one = counter();
    const auto two = counter();
    for (int i = 0; i < 5; ++i) one->bump();
    watcher.set({1, one, 4, 2});  // there already
    watcher.set({2, one, 6, 1000});
    watcher.set({3, two, 1, 10});
    heard.await(2);
    for (int i = 0; i < 1000; ++i) one->bump();
    heard.await(1002);
    CHECK(heard.total == 1002);
    for (int i = 0; i < 10; ++i) {
        two->bump();
        heard.await(1003 + i);
    }
    CHECK(heard.upto[1] == 2 && heard.upto[2] == 1000 && heard.upto[3] == 10);
}

// A sleeper that no bump wakes would sleep its patience of a minute out, and the test would end by ctest's time limit.
void a_bump_wakes_a_sleeper_of_another_mapping() {
    auto made = Counter::create();
    CHECK(made);
    auto other = Counter::map(made->second.get(), 0);
    CHECK(other && !(*other)->wakes());
    made->first->bump();
    CHECK((*other)->wakes());
    for (uint64_t round = 1; round <= 2000; ++round) {
        std::thread sleeper([&] {
            while ((*other)->value() == round) (*other)->wait(round, std::chrono::minutes(1));
        });
        if (round % 2 == 0) std::this_thread::yield();
        CHECK(made->first->bump() == round + 1);
        sleeper.join();
    }
}

void a_cleared_alarm_is_silent() {
    Heard heard;
    LayerWatcher watcher(heard.ear());
    const auto gone = counter();
    const auto kept = counter();
    watcher.set({1, gone, 1, 5});
    watcher.set({2, kept, 1, 5});
    watcher.clear({1});
    kept->bump();
    heard.await(1);
    gone->bump();
    for (int i = 0; i < 4; ++i) kept->bump();
    heard.await(5);
    watcher.set({3, gone, 1, 1});  // proves that the thread looked at `gone` again
    heard.await(6);
    CHECK(!heard.upto.contains(1));
    CHECK(gone.use_count() <= 2);
}

void stopping_ends_the_thread_with_alarms_set() {
    Heard heard;
    LayerWatcher watcher(heard.ear());
    watcher.set({1, counter(), 1, 5});
    watcher.stop();
    watcher.stop();
    CHECK(heard.total == 0);
}

void what_was_written_before_a_bump_is_seen_after_it() {
    static uint64_t data[8];
    std::atomic<bool> wrong{false};
    std::atomic<uint64_t> seen{0};
    const auto line = counter();
    const auto check = [&](uint64_t, uint32_t from, uint32_t to) {
        for (uint32_t i = from; i < to; ++i)
            if (data[i % 8] < i + 1) wrong = true;
        seen = to;
    };
    LayerWatcher watcher(check);
    watcher.set({1, line, 1, 5000});
    for (uint64_t i = 0; i < 5000; ++i) {
        while (seen.load() + 8 <= i) std::this_thread::yield();
        data[i % 8] = i + 1;
        line->bump();
    }
    while (seen.load() < 5000) std::this_thread::yield();
    CHECK(!wrong);
}

void the_only_counter_is_one_that_all_wait_for() {
    LiveAlarms live;
    CHECK(live.only_counter() == nullptr);
    const auto one = counter();
    live.set({1, one, 1, 1});
    live.set({2, one, 2, 1});
    CHECK(live.only_counter() == one.get());
    live.set({3, counter(), 1, 1});
    CHECK(live.only_counter() == nullptr);
    live.clear(std::array<uint64_t, 1>{3});
    CHECK(live.only_counter() == one.get());
    Heard heard;
    one->bump();
    CHECK(live.fire(heard.ear()) && heard.upto[1] == 1 && !heard.upto.contains(2) && !live.empty());
    CHECK(!live.fire(heard.ear()));
    one->bump();
    CHECK(live.fire(heard.ear()) && heard.upto[2] == 1 && live.empty());
}

}  // namespace

int main() {
    two_mappings_share_one_value();
    a_bump_wakes_a_sleeper_of_another_mapping();
    fires_each_value_once_in_order();
    a_cleared_alarm_is_silent();
    stopping_ends_the_thread_with_alarms_set();
    what_was_written_before_a_bump_is_seen_after_it();
    the_only_counter_is_one_that_all_wait_for();
}
