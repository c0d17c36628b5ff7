// Engine: the face of native/ that bind/ exposes. Owns the workers' threads, the watcher, the immediate table and the
// queues.
//
// Each rail group has a worker of its own. An endpoint is one endpoint of each worker under one id, a region belongs to
// one worker, and a write goes by the worker of its source region. Callers see one of each: events are joined,
// immediates of all workers count in one table.
//
// Methods are safe from any thread. Those that libfabric must answer (registering, endpoints) wait for the worker with
// a deadline; all others only push a command. Locks: registry_mutex_ alone, held over no call that blocks.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "fabric/caps.h"
#include "fabric/command_queue.h"
#include "fabric/event_join.h"
#include "fabric/events.h"
#include "fabric/imm_table.h"
#include "fabric/library_choice.h"
#include "fabric/stats.h"
#include "fabric/worker.h"
#include "util/unique_fd.h"
#include "watch/layer_watcher.h"

namespace pdd {

struct RailGroupConfig {
    std::vector<std::string> bind;  // its NICs; empty: the provider's best one
    std::vector<int> cpus;          // of its worker; empty: any
};

struct EngineConfig {
    std::string provider = "auto";
    std::string library;
    std::vector<SearchDir> search;
    std::vector<RailGroupConfig> groups = {{}};
    std::string source;   // local address for providers whose NICs are named by one (tcp), where bind is empty
    std::string require;  // kind or name of the only provider to use; empty: any
    uint32_t window_ops = 64;
    uint64_t window_bytes = 8 << 20;
    std::string idle = "auto";
    bool local = false;                // beside the provider, endpoints to peers on this host may be opened
    uint64_t flight_bytes = 16 << 20;  // of all flight logs together
    std::string device{};  // the GPU whose memory is registered: its PCI address, or cuda:N; "": host memory
};

// Opens the NICs of one rail group.
using NicOpener = std::function<Result<Nics>(const RailGroupConfig&)>;

class Engine {
  public:
    static Result<std::unique_ptr<Engine>> open(const EngineConfig& config);
    // With NICs of the caller's: `open_nics` runs on each worker's thread, once that is pinned.
    static Result<std::unique_ptr<Engine>> open(const EngineConfig& config, NicOpener open_nics);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    size_t num_groups() const { return shared_->groups.size(); }
    // One per NIC, without the local one.
    const std::vector<ProviderCaps>& caps(size_t group) const { return shared_->groups[group]->caps; }
    // What the system refused when the workers were pinned.
    std::vector<std::string> warnings() const;
    int fileno() const;
    std::vector<Event> drain(size_t max_events);
    // Closes endpoints and joins the threads; idempotent. After 5 s it gives up and says so: the thread is left behind.
    Status close();

    Result<uint32_t> add_region(uint8_t* base, uint64_t length, int fd = -1, uint32_t group = 0);
    Status remove_region(uint32_t id);

    Result<uint32_t> open_endpoint(bool local = false);
    Result<std::string> describe(uint32_t endpoint, std::vector<uint32_t> regions);
    Status connect(uint32_t endpoint, std::string descriptor);
    Status close_endpoint(uint32_t endpoint);

    Result<uint32_t> imm_allocate(uint32_t endpoint);
    Status imm_arm(uint32_t key, uint32_t expected);
    Result<uint32_t> imm_arrived(uint32_t key) const;
    Result<uint32_t> imm_retire(uint32_t key);

    Result<uint64_t> open_transfer(uint32_t endpoint, uint32_t key);
    Result<uint32_t> watch(std::shared_ptr<const Counter> counter);
    Status unwatch(uint32_t watch);
    Status arm(uint64_t transfer, uint32_t watch, uint64_t first_value, std::shared_ptr<const WritePlan> plan,
               uint32_t begin, uint32_t end);
    Status write(uint64_t transfer, std::shared_ptr<const WritePlan> plan);
    Status finish(uint64_t transfer);
    Status cancel(uint64_t transfer);

    Status inject_fault(const std::string& kind, uint64_t after, uint64_t count, int nic = -1);
    const Stats& stats(size_t group) const { return shared_->groups[group]->stats; }
    // What the workers remember of one transfer, or, for 0, of all: the latest `most` plans of each group, with the
    // NICs numbered through as in `caps`. Waits for the workers.
    struct Flight {
        std::vector<FlightReport> groups;
        std::vector<uint32_t> first_nics;  // number of each group's first NIC
    };
    Result<Flight> flight(uint64_t transfer, size_t most);
    Result<ImmTable::Arrivals> imm_arrivals(uint32_t key) const;
    uint32_t keys_in_use() const { return shared_->imms.in_use(); }

  private:
    // One worker and what goes in and out of it.
    struct Group final : Alarms {
        Group(uint32_t number, LayerWatcher* watcher);
        // -- the watcher is one for all groups: alarms carry the group's number in their highest bits; without one, the
        // worker looks itself
        void set(Alarm alarm) override;
        void clear(std::vector<uint64_t> ids) override;
        bool look(const Fire& fire) override { return live_.fire(fire); }

        const uint32_t number;
        CommandQueue commands;
        EventQueue events;
        Stats stats;
        std::vector<ProviderCaps> caps;  // one per NIC; written before anybody else reads
        std::string warning;             // of pinning; likewise
        Worker* worker = nullptr;        // set and used on the worker's thread
        bool ended = false;              // guarded by ended_mutex

      private:
        LayerWatcher* watcher_;
        LiveAlarms live_;  // the worker's thread only
    };
    // Everything that workers and watcher touch: it outlives the Engine if a thread can not be joined.
    struct Shared {
        Shared(size_t num_groups, bool watched);
        void fire(uint64_t id, uint32_t from, uint32_t to);

        ImmTable imms;
        std::vector<std::unique_ptr<Group>> groups;
        std::unique_ptr<LayerWatcher> watcher;  // null where workers spin
        std::mutex ended_mutex;
        std::condition_variable ended_changed;
    };

    Engine() = default;
    Status start(size_t group, const EngineConfig& config, const IdlePolicy& idle, const NicOpener& open_nics);
    Group& group_of_region(uint32_t region) { return *shared_->groups[region % shared_->groups.size()]; }
    Status send(Group& group, Command command);
    Status send_all(const Command& command);
    // Runs `work` on a worker's thread and waits for its result.
    template <class R>
    R call(Group& group, std::function<R(Worker&)> work);
    Status check_transfer(uint64_t transfer) const;

    std::shared_ptr<Shared> shared_;
    std::vector<std::thread> threads_;  // by group
    UniqueFd any_events_;               // an epoll of all queues, where there are several
    std::mutex join_mutex_;             // guards join_
    std::optional<EventJoin> join_;     // where there are several groups
    mutable std::mutex registry_mutex_;
    std::unordered_set<uint32_t> open_endpoints_;
    std::unordered_map<uint32_t, std::shared_ptr<const Counter>> watches_;
    uint32_t last_endpoint_ = 0;
    uint32_t last_transfer_ = 0;
    uint32_t last_watch_ = 0;
    std::mutex close_mutex_;
};

// Opens the NICs that `config` asks for in one rail group: the best provider that has all of them. With a device, that
// is bound to the calling thread.
Result<Nics> open_nics(const std::shared_ptr<const Library>& library, const EngineConfig& config,
                       const RailGroupConfig& group);

// Every usable provider's best NIC, opened and closed again.
Result<std::vector<ProviderCaps>> probe(const LibraryChoice& choice, const std::string& provider);

}  // namespace pdd
