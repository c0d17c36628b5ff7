// LayerWatcher: a thread that reads layer counters and says which layers became ready.
//
// An alarm fires value by value: [from, to) when the counter reads at least first_value + to - 1. A counter that jumped
// by k fires k layers at once. The thread looks only while alarms are set: a brief spin, yields, then it sleeps until
// the rank's next bump wakes it, or, where the counter cannot wake (a GPU writes it), for naps that grow to 200 us.
// With no alarm set it blocks. It never calls out with its lock held. Where workers spin there is none: they look
// themselves, and a layer's first write leaves 2 us after the counter moved instead of 10 (DESIGN.md, log).
//
// It does not know what an alarm is for: the worker keeps plans and transfers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "watch/live_alarms.h"

namespace pdd {

class LayerWatcher final : public Alarms {
  public:
    // `fire` is called on the watcher's thread.
    explicit LayerWatcher(Fire fire);
    ~LayerWatcher() override;

    void set(Alarm alarm) override;
    void clear(std::vector<uint64_t> ids) override;
    void stop();

  private:
    void run();
    bool take_inbox();
    void idle(uint32_t turns, const Counter* counter, uint64_t seen);

    Fire fire_;
    LiveAlarms live_;  // the watcher's thread only
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<Alarm> to_set_;       // guarded by mutex_
    std::vector<uint64_t> to_clear_;  // guarded by mutex_
    std::atomic<bool> inbox_{false};
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

}  // namespace pdd
