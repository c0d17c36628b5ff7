// EventQueue: nothing lost, order kept across the overflow, and the fd is readable whenever something waits.
#include <poll.h>

#include <thread>

#include "check.h"
#include "fabric/events.h"

using namespace pdd;

namespace {

bool readable(const EventQueue& queue, int timeout_ms) {
    pollfd fd{queue.fileno(), POLLIN, 0};
    return ::poll(&fd, 1, timeout_ms) == 1;
}

void overflow_keeps_order() {
    EventQueue queue(8);
    CHECK(!readable(queue, 0));
    for (uint64_t i = 0; i < 100; ++i) queue.push({.kind = EventKind::EndpointClosed, .id = i});
    uint64_t next = 0;
    while (next < 100) {
        CHECK(readable(queue, 0));
        for (const auto& event : queue.drain(7)) CHECK(event.id == next++);
        if (next == 49)  // in the middle of the overflow
            for (uint64_t i = 100; i < 110; ++i) queue.push({.kind = EventKind::EndpointClosed, .id = i});
        if (next == 98) break;
    }
    for (const auto& event : queue.drain(SIZE_MAX)) CHECK(event.id == next++);
    CHECK(next == 110);
    queue.drain(1);
    CHECK(!readable(queue, 0));
}

// The consumer only ever looks after the fd says so: a lost signal would hang here.
void a_waiting_consumer_is_always_woken() {
    constexpr uint64_t kCount = 50000;
    EventQueue queue(16);
    std::thread producer([&] {
        for (uint64_t i = 0; i < kCount; ++i) {
            queue.push({.kind = EventKind::EndpointClosed, .id = i, .text = std::string(40, 'x')});
            if (i % 64 == 0) std::this_thread::yield();
        }
    });
    uint64_t next = 0;
    while (next < kCount) {
        CHECK(readable(queue, 60000));
        for (const auto& event : queue.drain(1 + next % 50)) CHECK(event.id == next++ && event.text.size() == 40);
    }
    producer.join();
}

}  // namespace

int main() {
    overflow_keeps_order();
    a_waiting_consumer_is_always_woken();
}
