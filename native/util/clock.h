// The clock of the native threads. Workers are given the time of each turn, so that a simulation can bring its own.
#pragma once

#include <chrono>

namespace pdd {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;

}  // namespace pdd
