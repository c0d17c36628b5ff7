// Node: one life of one node: a real Worker with its queues and its immediate table over simulated NICs, KV memory,
// and the layer counter with a watcher that fires when the scheduler lets it. Its KV memory may be a GPU's, which
// writes reach through pinned memory; or shared with other nodes, which then need no NIC.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fabric/worker.h"
#include "memory/mapped_memory.h"
#include "network.h"
#include "sim_gpu.h"
#include "watch/alarms.h"
#include "witness.h"

namespace sim {

// Alarms that fire late, several layers at once, and once more though they were just cleared: by command, as from a
// watcher, or in the worker's own look.
class SimAlarms final : public pdd::Alarms {
  public:
    explicit SimAlarms(Run& run) : run_(run) {}
    void set(Alarm alarm) override { live_.push_back({std::move(alarm), 0, false}); }
    void clear(std::vector<uint64_t> ids) override;
    bool look(const Fire& fire) override;
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

enum class KvMemory { Host, Gpu, Shared };

struct NodeConfig {
    uint32_t life;
    uint32_t host;
    uint32_t num_nics;
    pdd::WindowSize window;
    Shape shape;
    KvMemory memory = KvMemory::Host;
    bool is_target = false;  // of writes
};

// What all nodes of a run live among.
struct Surroundings {
    Run& run;
    Network& network;
    Witness& witness;
    Ledger& ledger;
    SimGpu& gpu;
};

class Node {
  public:
    // `meanwhile`: what others do while bytes are copied from their memory into this node's.
    Node(Surroundings around, NodeConfig config, std::function<void()> meanwhile);
    ~Node();

    uint32_t life() const { return config.life; }
    uint8_t* page(uint32_t layer, uint32_t number) {
        return &memory_[layer * config.shape.layer_stride() + size_t{number} * config.shape.page_bytes];
    }
    // A command from another thread, that waits for the worker where the ring is full.
    void send(const pdd::Command& command);
    void turn();
    bool watch();  // false: no alarm is due
    uint32_t open_endpoint(bool local);
    uint64_t open_transfer(uint32_t endpoint, uint32_t key);
    // What the worker counts against what the network saw.
    void check_sums();
    void check_nothing_left(size_t quarantined_keys);
    // Ends in good order, the worker included.
    void shut_down();
    // The process is gone. Shared memory of it stays as it is for as long as somebody maps it.
    void die();

    const NodeConfig config;
    pdd::TimePoint now{};
    bool paused = false;
    pdd::CommandQueue commands{64};
    pdd::EventQueue events{8};
    pdd::ImmTable imms;
    pdd::Stats stats;
    SimAlarms alarms;
    std::shared_ptr<pdd::Counter> counter;
    std::unique_ptr<pdd::Worker> worker;
    uint32_t region = 0;

  private:
    pdd::Status take_memory();
    pdd::Nics make_nics(std::function<void()> meanwhile);

    Surroundings around_;
    pdd::UniqueFd shared_;
    std::optional<pdd::MappedMemory> mapped_;
    std::vector<uint8_t> own_;
    uint8_t* memory_ = nullptr;
    uint32_t last_endpoint_ = 0;
    uint32_t last_transfer_ = 0;
};

}  // namespace sim
