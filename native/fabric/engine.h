// Engine: the face of native/ that bind/ exposes. Owns the worker's thread, the watcher, the immediate table and the
// queues.
//
// Methods are safe from any thread. Those that libfabric must answer (registering, endpoints) wait for the worker with
// a deadline; all others only push a command. Locks: registry_mutex_ alone, held over no call that blocks.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "fabric/caps.h"
#include "fabric/command_queue.h"
#include "fabric/events.h"
#include "fabric/imm_table.h"
#include "fabric/library_choice.h"
#include "fabric/stats.h"
#include "fabric/worker.h"
#include "watch/layer_watcher.h"

namespace pdd {

struct EngineConfig {
    std::string provider = "auto";
    std::string library;
    std::vector<SearchDir> search;
    std::vector<std::string> bind;
    std::string source;   // local address for providers whose NICs are named by one (tcp), when bind is empty
    std::string require;  // kind or name of the only provider to use; empty: any
    uint32_t window_ops = 64;
    uint64_t window_bytes = 8 << 20;
    std::string idle = "auto";
    std::vector<int> cpus;
    bool local = false;  // beside the provider, endpoints to peers on this host may be opened
    std::string device{};  // the GPU whose memory is registered: its PCI address, or cuda:N; "": host memory
};

class Engine {
  public:
    static Result<std::unique_ptr<Engine>> open(const EngineConfig& config);
    // With NICs of the caller's: `open_nics` runs on the worker's thread, once that is pinned.
    static Result<std::unique_ptr<Engine>> open(const EngineConfig& config, std::function<Result<Nics>()> open_nics);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    const std::vector<ProviderCaps>& caps() const { return caps_; }  // one per NIC, without the local one
    int fileno() const { return shared_->events.fileno(); }
    std::vector<Event> drain(size_t max_events) { return shared_->events.drain(max_events); }
    // Closes endpoints and joins the threads; idempotent. After 5 s it gives up and says so: the thread is left behind.
    Status close();

    Result<uint32_t> add_region(uint8_t* base, uint64_t length, int fd = -1);
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
    const Stats& stats() const { return shared_->stats; }
    uint32_t keys_in_use() const { return shared_->imms.in_use(); }

  private:
    // Everything the two threads touch: it outlives the Engine if a thread can not be joined.
    struct Shared {
        explicit Shared(bool spin);
        CommandQueue commands;
        EventQueue events;
        ImmTable imms;
        Stats stats;
        LayerWatcher watcher;
        Worker* worker = nullptr;  // set and used on the worker's thread
        std::mutex ended_mutex;
        std::condition_variable ended_changed;
        bool ended = false;
    };

    Engine() = default;
    Status send(Command command);
    // Runs `work` on the worker's thread and waits for its result.
    template <class R>
    R call(std::function<R(Worker&)> work);
    Status check_transfer(uint64_t transfer) const;

    std::shared_ptr<Shared> shared_;
    std::thread thread_;
    std::vector<ProviderCaps> caps_;
    mutable std::mutex registry_mutex_;
    std::unordered_set<uint32_t> open_endpoints_;
    std::unordered_map<uint32_t, std::shared_ptr<const Counter>> watches_;
    uint32_t last_endpoint_ = 0;
    uint32_t last_transfer_ = 0;
    uint32_t last_watch_ = 0;
    std::mutex close_mutex_;
};

// Opens the NICs that `config` asks for: the best provider that has all of them. For Engine and for probing. With a
// device, that is bound to the calling thread.
Result<Nics> open_nics(const std::shared_ptr<const Library>& library, const EngineConfig& config);

// Every usable provider's best NIC, opened and closed again.
Result<std::vector<ProviderCaps>> probe(const LibraryChoice& choice, const std::string& provider);

}  // namespace pdd
