#include "node.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "fabric/local_nic.h"
#include "gpu/staged_nic.h"
#include "util/system_error.h"

namespace sim {

void SimAlarms::clear(std::vector<uint64_t> ids) {
    for (auto& one : live_)
        if (std::find(ids.begin(), ids.end(), one.alarm.id) != ids.end()) one.cleared = true;
    std::erase_if(live_, [this](const Live& one) { return one.cleared && run_.rng.chance(5000); });
}

bool SimAlarms::look(const Fire& fire) {
    pdd::command::Fire due{};
    if (!run_.rng.chance(1000) || !this->fire(due)) return false;
    fire(due.alarm, due.from, due.to);
    return true;
}

bool SimAlarms::fire(pdd::command::Fire& out) {
    if (live_.empty()) return false;
    const size_t first = run_.rng.below(live_.size());
    for (size_t i = 0; i < live_.size(); ++i) {
        const size_t index = (first + i) % live_.size();
        Live& one = live_[index];
        const uint64_t value = one.alarm.counter->value();
        if (value < one.alarm.first_value + one.fired) continue;
        const uint64_t ready = std::min<uint64_t>(value - one.alarm.first_value + 1, one.alarm.num_values);
        const uint64_t to = run_.rng.between(one.fired + 1, ready);
        out = {one.alarm.id, one.fired, static_cast<uint32_t>(to)};
        one.fired = out.to;
        if (one.cleared || one.fired == one.alarm.num_values) live_.erase(live_.begin() + static_cast<long>(index));
        return true;
    }
    return false;
}

bool SimAlarms::empty() const {
    return std::all_of(live_.begin(), live_.end(), [](const Live& one) { return one.cleared; });
}

namespace {

// Peers that find one of its keys are about to copy: time passes.
class SimLocalNic final : public pdd::LocalNic {
  public:
    explicit SimLocalNic(std::function<void()> meanwhile) : meanwhile_(std::move(meanwhile)) {}
    const pdd::LocalTarget* find_target(uint64_t key) const override {
        meanwhile_();
        return LocalNic::find_target(key);
    }

  private:
    std::function<void()> meanwhile_;
};

}  // namespace

Node::Node(Surroundings around, NodeConfig node, std::function<void()> meanwhile)
    : config(std::move(node)), alarms(around.run), around_(around) {
    Run& run = around_.run;
    auto made = pdd::Counter::create();
    if (auto taken = take_memory(); !taken || !made) {
        run.violate(!taken ? taken.error().message : made.error().message);
        return;
    }
    counter = made->first;
    around_.ledger.add_pool(config.life, memory_, config.shape);
    worker = std::make_unique<pdd::Worker>(
        pdd::WorkerConfig{.window = config.window,
                          .idle = *pdd::IdlePolicy::named("spin"),
                          .has_local = config.memory == KvMemory::Shared},
        make_nics(std::move(meanwhile)), commands, alarms, imms, events, stats);
    auto added = worker->add_region(memory_, config.shape.bytes(), shared_.get());
    if (added)
        region = *added;
    else
        run.violate(added.error().message);
}

pdd::Status Node::take_memory() {
    const size_t nbytes = config.shape.bytes();
    if (config.memory == KvMemory::Shared) {
        shared_ = pdd::UniqueFd(::memfd_create("pdd-sim", MFD_CLOEXEC | MFD_ALLOW_SEALING));
        if (::ftruncate(shared_.get(), static_cast<off_t>(nbytes)) != 0 ||
            ::fcntl(shared_.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0)
            return pdd::system_error("shared memory");
        auto mapped = pdd::MappedMemory::map(shared_.get(), nbytes, false);
        if (!mapped) return mapped.error();
        mapped_ = std::move(*mapped);
        memory_ = mapped_->data();
    } else {
        own_.resize(nbytes);
        memory_ = own_.data();
    }
    std::memset(memory_, 0xee, nbytes);
    return {};
}

pdd::Nics Node::make_nics(std::function<void()> meanwhile) {
    pdd::Nics nics;
    const auto add = [&](std::unique_ptr<pdd::Nic> nic, Watched watched) {
        nics.push_back(around_.witness.watch(std::move(nic), std::move(watched)));
    };
    const bool repeats = config.memory != KvMemory::Gpu;
    for (uint32_t i = 0; i < config.num_nics; ++i) {
        auto nic = around_.network.make_nic(config.life, config.host, i);
        if (config.memory == KvMemory::Gpu) {
            const auto device = around_.gpu.give_birth(config.life, memory_, config.shape.bytes());
            auto staged = pdd::StagedNic::open(std::move(nic), device, "simulated");
            if (!staged) {
                around_.run.violate(staged.error().message);
                return nics;
            }
            nic = std::move(*staged);
        }
        add(std::move(nic), {config.life, config.window, repeats});
    }
    if (config.memory != KvMemory::Shared) return nics;
    const auto notice = [this] {
        if (config.is_target) around_.ledger.notice(config.life, around_.run.faults);
    };
    add(std::make_unique<SimLocalNic>(std::move(meanwhile)), {config.life, config.window, false, notice});
    return nics;
}

Node::~Node() {
    die();
    worker.reset();
    around_.ledger.drop_pool(config.life);
}

void Node::die() {
    around_.network.die(config.life);
    around_.witness.die(config.life);
    around_.gpu.die(config.life);
}

void Node::send(const pdd::Command& command) {
    while (!commands.push(command, std::chrono::milliseconds(0))) turn();
}

void Node::turn() {
    worker->turn(now);
    check_sums();
}

bool Node::watch() {
    pdd::command::Fire fire{};
    if (!alarms.fire(fire)) return false;
    send(fire);
    return true;
}

uint32_t Node::open_endpoint(bool local) {
    const uint32_t id = ++last_endpoint_;
    around_.network.opening(id);
    around_.witness.opening(id);
    if (auto opened = worker->open_endpoint(id, local); !opened) around_.run.violate(opened.error().message);
    return id;
}

uint64_t Node::open_transfer(uint32_t endpoint, uint32_t key) {
    const uint64_t id = pdd::transfer_id(endpoint, ++last_transfer_);
    send(pdd::command::OpenTransfer{id, key});
    return id;
}

void Node::check_sums() {
    const auto& seen = around_.witness.totals(config.life);
    const auto agree = [this](const char* what, uint64_t counted, uint64_t wanted) {
        if (counted != wanted)
            around_.run.violate("life " + std::to_string(config.life) + " counts " + std::to_string(counted) + " " +
                                what + " where the network saw " + std::to_string(wanted));
    };
    agree("writes", stats.writes, seen.posted);
    agree("writes in flight", stats.inflight_writes, seen.inflight);
    agree("bytes in flight", stats.inflight_bytes, seen.inflight_bytes);
    agree("units received", stats.units_received + stats.stale_units, seen.units_told);
}

void Node::check_nothing_left(size_t quarantined_keys) {
    const auto none = [this](const char* what, uint64_t count) {
        if (count != 0)
            around_.run.violate("life " + std::to_string(config.life) + " ends with " + std::to_string(count) + " " +
                                what);
    };
    none("transfers", stats.active_transfers);
    none("armed plans", stats.armed_plans);
    none("endpoints", stats.endpoints);
    none("writes in flight", stats.inflight_writes);
    none("keys", imms.in_use() - quarantined_keys);
    none("regions", stats.regions);
    none("alarms", alarms.empty() ? 0 : 1);
}

void Node::shut_down() {
    worker->close_all(now);
    if (auto removed = worker->remove_region(region); !removed) around_.run.violate(removed.error().message);
}

}  // namespace sim
