// Rings: order per producer, nothing lost or doubled, full and empty, owned values die when consumed.
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "fabric/command_queue.h"
#include "util/ring.h"

using namespace pdd;

namespace {

void mpsc_keeps_each_producers_order() {
    constexpr int kProducers = 4;
    constexpr uint64_t kEach = 20000;
    MpscRing<uint64_t> ring(64);
    std::vector<std::thread> producers;
    for (uint64_t p = 0; p < kProducers; ++p) {
        producers.emplace_back([&ring, p] {
            for (uint64_t i = 0; i < kEach; ++i) {
                uint64_t value = p << 32 | i;
                while (!ring.try_push(value)) std::this_thread::yield();
            }
        });
    }
    std::vector<uint64_t> next(kProducers, 0);
    uint64_t value = 0;
    for (uint64_t taken = 0; taken < kProducers * kEach;) {
        if (!ring.try_pop(value)) {
            std::this_thread::yield();
            continue;
        }
        CHECK((value & 0xffffffff) == next[value >> 32]++);
        ++taken;
    }
    CHECK(ring.empty());
    CHECK(!ring.try_pop(value));
    for (auto& producer : producers) producer.join();
}

void full_rings_refuse_and_leave_the_value() {
    MpscRing<std::shared_ptr<int>> many(4);
    SpscRing<std::shared_ptr<int>> single(4);
    auto value = std::make_shared<int>(7);
    for (int i = 0; i < 4; ++i) {
        auto copy = value;
        CHECK(many.try_push(copy));
        copy = value;
        CHECK(single.try_push(copy));
    }
    auto fifth = value;
    CHECK(!many.try_push(fifth) && fifth == value);
    CHECK(!single.try_push(fifth) && fifth == value);
    fifth.reset();
    std::shared_ptr<int> out;
    for (int i = 0; i < 4; ++i) CHECK(many.try_pop(out) && *out == 7);
    for (int i = 0; i < 4; ++i) CHECK(single.try_pop(out) && *out == 7);
    out.reset();
    CHECK(value.use_count() == 1);  // no cell holds on to what was consumed
    CHECK(!single.try_pop(out));
}

void spsc_passes_everything_in_order() {
    constexpr uint64_t kCount = 200000;
    SpscRing<uint64_t> ring(128);
    std::thread producer([&] {
        for (uint64_t i = 0; i < kCount; ++i) {
            uint64_t value = i;
            while (!ring.try_push(value)) std::this_thread::yield();
        }
    });
    for (uint64_t expected = 0; expected < kCount;) {
        uint64_t value = 0;
        if (ring.try_pop(value))
            CHECK(value == expected++);
        else
            std::this_thread::yield();
    }
    producer.join();
}

// A consumer that sleeps after each command never misses one: a lost wake-up would hang here.
void a_sleeping_consumer_is_always_woken() {
    constexpr uint64_t kCount = 20000;
    CommandQueue queue(8);
    std::thread producer([&] {
        for (uint64_t i = 0; i < kCount; ++i) CHECK(queue.push(command::Finish{i}, std::chrono::seconds(30)));
    });
    for (uint64_t expected = 0; expected < kCount;) {
        Command command;
        if (queue.try_pop(command)) {
            CHECK(std::get<command::Finish>(command).transfer == expected++);
        } else if (queue.about_to_sleep()) {
            eventfd_t ignored;
            while (::eventfd_read(queue.fd(), &ignored) != 0) std::this_thread::yield();
            queue.awake();
        }
    }
    producer.join();
    queue.close();
    CHECK(!queue.push(command::Finish{1}, std::chrono::seconds(30)));
    CHECK(!queue.about_to_sleep());
}

}  // namespace

int main() {
    mpsc_keeps_each_producers_order();
    full_rings_refuse_and_leave_the_value();
    spsc_passes_everything_in_order();
    a_sleeping_consumer_is_always_woken();
}
