#include "watch/live_alarms.h"

#include <algorithm>

namespace pdd {

void LiveAlarms::clear(std::span<const uint64_t> ids) {
    const auto is_gone = [ids](const Live& one) { return std::find(ids.begin(), ids.end(), one.alarm.id) != ids.end(); };
    std::erase_if(live_, is_gone);
}

bool LiveAlarms::fire(const Alarms::Fire& fire) {
    bool fired = false;
    bool ended = false;
    for (auto& one : live_) {
        const uint64_t value = one.alarm.counter->value();
        if (value < one.alarm.first_value + one.fired) continue;
        const uint64_t ready = std::min<uint64_t>(value - one.alarm.first_value + 1, one.alarm.num_values);
        fire(one.alarm.id, one.fired, static_cast<uint32_t>(ready));
        one.fired = static_cast<uint32_t>(ready);
        fired = true;
        ended |= one.fired == one.alarm.num_values;
    }
    if (ended) std::erase_if(live_, [](const Live& one) { return one.fired == one.alarm.num_values; });
    return fired;
}

const Counter* LiveAlarms::only_counter() const {
    if (live_.empty()) return nullptr;
    const Counter* first = live_.front().alarm.counter.get();
    const bool only = std::all_of(live_.begin(), live_.end(),
                                  [first](const Live& one) { return one.alarm.counter.get() == first; });
    return only ? first : nullptr;
}

}  // namespace pdd
