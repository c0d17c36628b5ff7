// Event and EventQueue: from the worker's thread to whoever drains.
//
// A ring takes what fits; an overflow list takes the rest, so that a slow consumer can never stop the worker from
// polling. Order is kept: while the overflow list holds anything, new events go behind it. The eventfd is written once
// per "consumer was caught up", not once per event.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "util/ring.h"
#include "util/unique_fd.h"

namespace pdd {

enum class EventKind : uint8_t { ImmReached = 1, ImmOverrun, TransferDone, EndpointFailed, EndpointClosed };

// What one transfer cost.
struct Traffic {
    uint64_t writes = 0;
    uint64_t bytes = 0;
    uint64_t busy_ns = 0;     // time with writes queued or in flight
    uint64_t exposed_ns = 0;  // from the last plan's last layer, when nothing is left to compute, to the end
};

struct Event {
    EventKind kind = EventKind::ImmReached;
    uint64_t id = 0;       // key, transfer or endpoint
    uint64_t ok = 0;       // TransferDone; ImmReached and ImmOverrun: units arrived
    uint64_t failed = 0;   // TransferDone
    uint64_t unknown = 0;  // TransferDone
    std::string text{};    // TransferDone: error or ""; EndpointFailed: message
    Traffic traffic{};     // TransferDone
    bool last = false;     // EndpointFailed: it is closed, but the fence does not stand
};

class EventQueue {
  public:
    explicit EventQueue(size_t capacity) : ring_(capacity) {}

    // The worker's thread.
    void push(Event event);
    // Any thread. At most `max_events`, in order; the fd stays readable when more are left.
    std::vector<Event> drain(size_t max_events);
    int fileno() const { return fd_.get(); }

  private:
    void signal();

    SpscRing<Event> ring_;
    std::mutex overflow_mutex_;
    std::deque<Event> overflow_;
    std::mutex drain_mutex_;  // consumers, one at a time
    std::atomic<bool> signalled_{false};
    EventFd fd_;
};

}  // namespace pdd
