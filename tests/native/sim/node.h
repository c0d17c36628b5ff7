// Node: one life of one node: a real Worker with its queues and its immediate table over simulated NICs, KV memory,
// and the layer counter with a watcher that fires when the scheduler lets it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fabric/worker.h"
#include "network.h"
#include "watch/alarms.h"

namespace sim {

// Alarms that fire late, several layers at once, and once more though they were just cleared.
class SimAlarms final : public pdd::Alarms {
  public:
    explicit SimAlarms(Run& run) : run_(run) {}
    void set(Alarm alarm) override { live_.push_back({std::move(alarm), 0, false}); }
    void clear(std::vector<uint64_t> ids) override;
    // Fires one that is due.
    bool fire(pdd::command::Fire& out);
    // None is set; cleared ones do not count.
    bool empty() const;

  private:
    struct Live {
        Alarm alarm;
        uint32_t fired;
        bool cleared;
    };
    Run& run_;
    std::vector<Live> live_;
};

struct NodeConfig {
    uint32_t life;
    uint32_t host;
    uint32_t num_nics;
    pdd::WindowSize window;
    Shape shape;
};

class Node {
  public:
    Node(Run& run, Network& network, Ledger& ledger, NodeConfig config);
    ~Node();

    uint32_t life() const { return config.life; }
    uint8_t* page(uint32_t layer, uint32_t number) {
        return &memory[layer * config.shape.layer_stride() + size_t{number} * config.shape.page_bytes];
    }
    // A command from another thread, that waits for the worker where the ring is full.
    void send(const pdd::Command& command);
    void turn();
    bool watch();  // false: no alarm is due
    uint32_t open_endpoint();
    uint64_t open_transfer(uint32_t endpoint, uint32_t key);
    // What the worker counts against what the network saw.
    void check_sums();
    void check_nothing_left(size_t quarantined_keys);
    // Ends in good order, the worker included.
    void shut_down();

    const NodeConfig config;
    pdd::TimePoint now{};
    bool paused = false;
    std::vector<uint8_t> memory;
    pdd::CommandQueue commands{64};
    pdd::EventQueue events{8};
    pdd::ImmTable imms;
    pdd::Stats stats;
    SimAlarms alarms;
    std::shared_ptr<pdd::Counter> counter;
    std::unique_ptr<pdd::Worker> worker;
    uint32_t region = 0;

  private:
    Run& run_;
    Network& network_;
    Ledger& ledger_;
    uint32_t last_endpoint_ = 0;
    uint32_t last_transfer_ = 0;
};

}  // namespace sim
