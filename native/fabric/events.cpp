#include "fabric/events.h"

namespace pdd {

void EventQueue::push(Event event) {
    {
        const std::lock_guard lock(overflow_mutex_);
        if (!overflow_.empty() || !ring_.try_push(event)) overflow_.push_back(std::move(event));
    }
    signal();
}

void EventQueue::signal() {
    if (!signalled_.exchange(true)) fd_.signal();
}

std::vector<Event> EventQueue::drain(size_t max_events) {
    const std::lock_guard one_consumer(drain_mutex_);
    // Cleared before looking: what is pushed after the look signals again.
    fd_.clear();
    signalled_.store(false);
    std::vector<Event> out;
    Event event;
    while (out.size() < max_events && ring_.try_pop(event)) out.push_back(std::move(event));
    if (out.size() < max_events) {
        const std::lock_guard lock(overflow_mutex_);
        // What the ring got since the loop above is older than the overflow list.
        while (out.size() < max_events && ring_.try_pop(event)) out.push_back(std::move(event));
        while (out.size() < max_events && !overflow_.empty()) {
            out.push_back(std::move(overflow_.front()));
            overflow_.pop_front();
        }
    }
    if (out.size() == max_events) signal();  // perhaps more; an empty drain costs less than a look
    return out;
}

}  // namespace pdd
