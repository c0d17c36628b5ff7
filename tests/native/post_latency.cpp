// From the counter's move to the first post: the watcher's and the worker's part of a layer's latency.
//
//   post_latency IDLE REPEATS PAGES     prints a JSON object of percentiles, ns
//
// A whole Engine over a NIC that does nothing but note when it was asked. Between two moves the mover sleeps, so that
// the others are as they are between two layers.
#include <rdma/fabric.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fabric/engine.h"

using namespace pdd;

namespace {

struct Seen {
    std::atomic<int64_t> first_ns{0};  // of this round; 0: none yet
    std::atomic<uint64_t> posts{0};
};

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

class NullPort final : public NicPort {
  public:
    explicit NullPort(Seen& seen) : seen_(seen) {}
    const std::vector<uint8_t>& address() const override { return address_; }
    Result<uint64_t> resolve(std::span<const uint8_t>) override { return uint64_t{1}; }
    PostResult post(const NicWrite&, Op* op) override {
        if (seen_.first_ns.load(std::memory_order_relaxed) == 0) seen_.first_ns.store(now_ns());
        posted_.push_back(op);
        seen_.posts.fetch_add(1);
        return {PostOutcome::Posted};
    }
    uint32_t poll(CompletionSink& sink, uint32_t) override {
        for (Op* op : posted_) sink.on_write(op, 0);
        const auto found = static_cast<uint32_t>(posted_.size());
        posted_.clear();
        return found;
    }
    Status close() override { return {}; }
    int wait_fd() const override { return fd_.get(); }
    bool may_wait() override { return posted_.empty(); }

  private:
    Seen& seen_;
    UniqueFd fd_{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};  // never signalled: completions are there at once
    std::vector<uint8_t> address_ = std::vector<uint8_t>(16);
    std::vector<Op*> posted_;
};

class NullMemory final : public NicMemory {
  public:
    int close() override { return 0; }
};

class NullNic final : public Nic {
  public:
    explicit NullNic(Seen& seen) : seen_(seen) {
        caps_.provider = caps_.kind = caps_.wire = "null";
        caps_.max_message = 1ull << 40;
        caps_.fence = "endpoint";
        caps_.wait_fd = true;
    }
    const ProviderCaps& caps() const override { return caps_; }
    uint32_t address_format() const override { return FI_SOCKADDR_IN; }
    Result<std::unique_ptr<NicMemory>> register_memory(uint8_t*, uint64_t, Access) override {
        return std::unique_ptr<NicMemory>(new NullMemory);
    }
    Result<std::unique_ptr<NicPort>> open_port(uint32_t) override {
        return std::unique_ptr<NicPort>(new NullPort(seen_));
    }
    std::string error_text(int) const override { return ""; }

  private:
    Seen& seen_;
    ProviderCaps caps_;
};

}  // namespace

int main(int argc, char** argv) {
    const std::string idle = argc > 1 ? argv[1] : "spin";
    const size_t repeats = argc > 2 ? std::stoul(argv[2]) : 1000;
    const uint64_t pages = argc > 3 ? std::stoul(argv[3]) : 64;
    constexpr uint64_t kPage = 4096;
    Seen seen;
    EngineConfig config;
    config.idle = idle;
    auto engine = Engine::open(config, [&seen](const RailGroupConfig&) -> Result<Nics> {
        Nics nics;
        nics.push_back(std::make_unique<NullNic>(seen));
        return nics;
    });
    CHECK(engine);
    Engine& fabric = **engine;
    std::vector<uint8_t> memory(pages * kPage);
    const auto region = fabric.add_region(memory.data(), memory.size());
    const auto here = fabric.open_endpoint();
    const auto there = fabric.open_endpoint();
    CHECK(region && here && there);
    CHECK(fabric.connect(*here, *fabric.describe(*there, {*region})));
    auto counter = Counter::create();
    CHECK(counter);
    const auto watch = fabric.watch(counter->first);
    CHECK(watch);
    std::vector<PlanEntry> entries;
    for (uint64_t i = 0; i < pages; ++i) entries.push_back({i * kPage, (pages - 1 - i) * kPage, kPage, 1});
    WritePlan::Geometry geometry;
    geometry.src_region = *region;
    const auto plan = *WritePlan::make(geometry, entries);

    std::vector<int64_t> took;
    for (size_t round = 0; round < repeats; ++round) {
        const auto transfer = fabric.open_transfer(*here, 7);
        CHECK(transfer);
        CHECK(fabric.arm(*transfer, *watch, round + 1, plan, 0, static_cast<uint32_t>(pages)));
        CHECK(fabric.finish(*transfer));
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        const uint64_t before = seen.posts.load();
        seen.first_ns.store(0);
        const int64_t moved = now_ns();
        counter->first->bump();
        while (seen.posts.load() < before + pages) std::this_thread::sleep_for(std::chrono::microseconds(50));
        took.push_back(seen.first_ns.load() - moved);
        fabric.drain(16);
    }
    std::sort(took.begin(), took.end());
    const auto at = [&took](double q) { return took[static_cast<size_t>(q * static_cast<double>(took.size() - 1))]; };
    std::printf("{\"idle\": \"%s\", \"repeats\": %zu, \"p50_ns\": %ld, \"p90_ns\": %ld, \"p99_ns\": %ld}\n",
                idle.c_str(), repeats, static_cast<long>(at(0.5)), static_cast<long>(at(0.9)),
                static_cast<long>(at(0.99)));
    CHECK(fabric.close());
}
