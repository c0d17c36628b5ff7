// LayerWatcher: a thread that reads layer counters and says which layers became ready.
//
// An alarm fires value by value: [from, to) when the counter reads at least first_value + to - 1. A counter that jumped
// by k fires k layers at once. The thread looks only while alarms are set: a brief spin, yields, then it sleeps until
// the rank's next bump wakes it, or, where the counter cannot wake (a GPU writes it), for naps that grow to 200 us.
// With no alarm set it blocks, whatever the idle policy; while some are set, `spin` keeps it from sleeping. It never calls out with its lock held.
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

#include "watch/alarms.h"

namespace pdd {

class LayerWatcher final : public Alarms {
  public:
    // On the watcher's thread: values [from, to) of this alarm are there.
    using Fire = std::function<void(uint64_t id, uint32_t from, uint32_t to)>;

    // `spin`: looks without a pause while alarms are set.
    LayerWatcher(Fire fire, bool spin);
    ~LayerWatcher() override;

    void set(Alarm alarm) override;
    void clear(std::vector<uint64_t> ids) override;
    void stop();

  private:
    struct Live {
        Alarm alarm;
        uint32_t fired = 0;
    };
    void run();
    bool take_inbox(std::vector<Live>& live);
    bool step(std::vector<Live>& live);
    void idle(uint32_t turns, const std::vector<Live>& live);

    Fire fire_;
    bool spin_;
    uint64_t seen_ = 0;  // the value that the last step() began with; the watcher's thread only
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<Alarm> to_set_;       // guarded by mutex_
    std::vector<uint64_t> to_clear_;  // guarded by mutex_
    std::atomic<bool> inbox_{false};
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

}  // namespace pdd
