#include "fabric/worker.h"

#include <pthread.h>
#include <rdma/fi_errno.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "util/pause.h"

namespace pdd {
namespace {

constexpr int kCommandBatch = 64;
// Blocking is ended by descriptors; these bound what a provider that forgets to signal can cost.
constexpr int kBusyTimeoutMs = 10;   // writes or work outstanding
constexpr int kRetryTimeoutMs = 1;   // the provider said "try again"
constexpr uint32_t kNicWindows = 4;  // peers whose windows fill a NIC; more of them share

}  // namespace

std::string pin_thread(const std::vector<int>& cpus) {
    if (cpus.empty()) return "";
    cpu_set_t allowed;
    if (const int rc = ::pthread_getaffinity_np(::pthread_self(), sizeof allowed, &allowed); rc != 0)
        return "a worker cannot be pinned: " + std::string(std::strerror(rc));  // more than 1,024 CPUs
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : cpus)
        if (cpu >= 0 && cpu < CPU_SETSIZE && CPU_ISSET(cpu, &allowed)) CPU_SET(cpu, &set);
    const std::string where = "CPUs from " + std::to_string(cpus.front()) + " to " + std::to_string(cpus.back());
    if (CPU_COUNT(&set) == 0) return "none of the " + where + " is for this process: a worker stays where it may run";
    const int rc = ::pthread_setaffinity_np(::pthread_self(), sizeof set, &set);
    return rc == 0 ? "" : "the system refuses to pin a worker to " + where + ": " + std::strerror(rc);
}

Worker::Worker(WorkerConfig config, Nics nics, CommandQueue& commands, Alarms& alarms, ImmTable& imms,
               EventQueue& events, Stats& stats)
    : config_(std::move(config)),
      commands_(commands),
      alarms_(alarms),
      imms_(imms),
      events_(events),
      stats_(stats),
      nics_(std::move(nics)),
      regions_(nics_, config_.group, config_.num_groups),
      flight_(config_.flight_bytes),
      nic_windows_(nics_.size(), Window({kNicWindows * config_.window.ops, kNicWindows * config_.window.bytes})),
      fire_([this](uint64_t alarm, uint32_t from, uint32_t to) {
          command::Fire fire{alarm, from, to};
          execute(fire);
      }),
      sleeper_(nics_, commands) {}

void Worker::run() {
    while (!commands_.closed()) {
        const TimePoint now = Clock::now();
        if (turn(now))
            config_.idle.worked(now);
        else
            idle(now);
    }
    close_all(Clock::now());
}

bool Worker::turn(TimePoint now) {
    now_ = now;
    bool worked = take_commands();
    for (auto& [id, peer] : peers_) worked |= peer->poll() > 0;
    worked |= alarms_.look(fire_);
    worked |= pump();
    forget_alarms();
    return worked;
}

// Each peer in turn, and another one first in each turn: peers share the windows of the NICs.
bool Worker::pump() {
    bool worked = false;
    const auto first = peers_.upper_bound(last_first_);
    for (auto it = first; it != peers_.end(); ++it) worked |= it->second->pump() > 0;
    for (auto it = peers_.begin(); it != first; ++it) worked |= it->second->pump() > 0;
    last_first_ = first != peers_.end() ? first->first : 0;
    return worked;
}

bool Worker::take_commands() {
    Command command;
    int taken = 0;
    while (taken < kCommandBatch && commands_.try_pop(command)) {
        std::visit([this](auto& c) { execute(c); }, command);
        ++taken;
    }
    return taken > 0;
}

void Worker::idle(TimePoint now) {
    switch (config_.idle.nothing(now)) {
        case IdlePolicy::Step::Spin:
            cpu_pause();
            return;
        case IdlePolicy::Step::Yield:
            ::sched_yield();
            return;
        case IdlePolicy::Step::Block:
            break;
    }
    sleeper_.sleep(patience_ms());
    stat_add(stats_.wakeups);
}

int Worker::patience_ms() const {
    if (peers_.empty()) return -1;
    int patience = nics_[0]->caps().max_sleep_ms;
    for (const auto& [id, peer] : peers_) {
        if (peer->sender().blocked()) return kRetryTimeoutMs;
        if (!peer->sender().idle()) patience = std::min(patience, kBusyTimeoutMs);
    }
    return patience;
}

void Worker::close_all(TimePoint now) {
    now_ = now;
    Command command;
    while (commands_.try_pop(command)) std::visit([this](auto& c) { execute(c); }, command);
    while (!peers_.empty()) {
        command::CloseEndpoint close{peers_.begin()->first};
        execute(close);
    }
    forget_alarms();
}

Peer* Worker::find(uint32_t endpoint) {
    const auto found = peers_.find(endpoint);
    return found != peers_.end() ? found->second.get() : nullptr;
}

// Null when the transfer has ended, which its owner may not have heard yet: then there is nothing to do.
Sender* Worker::sender_of(uint64_t transfer, Transfer*& found) {
    Peer* peer = find(transfer_endpoint(transfer));
    found = peer != nullptr ? peer->sender().find(transfer) : nullptr;
    return found != nullptr ? &peer->sender() : nullptr;
}

// -- synchronous ------------------------------------------------------------------------------------------------------
Status Worker::open_endpoint(uint32_t id, bool local) {
    if (local && !config_.has_local) return Error{"open_endpoint: local peers are turned off", FI_EINVAL};
    const std::span<const std::unique_ptr<Nic>> all(nics_);
    const size_t num_fabric = all.size() - (config_.has_local ? 1 : 0);
    const size_t first = local ? num_fabric : 0;
    auto endpoint = Endpoint::open(id, all.subspan(first, local ? 1 : num_fabric), first, regions_, stats_,
                                   config_.window.ops, config_.num_groups);
    if (!endpoint) return endpoint.error();
    sleeper_.add(**endpoint);
    peers_.emplace(
        id, std::make_unique<Peer>(
                id, std::move(*endpoint), config_.window,
                SenderContext{ops_, faults_, events_, stats_, dropped_alarms_, now_, nic_windows_, flight_}, imms_));
    stat_add(stats_.endpoints);
    return {};
}

Result<std::string> Worker::describe(uint32_t endpoint, const std::vector<uint32_t>& regions) {
    Peer* peer = find(endpoint);
    if (peer == nullptr) return Error{"describe: endpoint " + std::to_string(endpoint) + " is not open", FI_EINVAL};
    return peer->endpoint().describe(regions);
}

Status Worker::connect(uint32_t endpoint, const std::string& descriptor) {
    Peer* peer = find(endpoint);
    if (peer == nullptr) return Error{"connect: endpoint " + std::to_string(endpoint) + " is not open", FI_EINVAL};
    return peer->endpoint().connect({reinterpret_cast<const uint8_t*>(descriptor.data()), descriptor.size()});
}

Result<uint32_t> Worker::add_region(uint8_t* base, uint64_t length, int fd) {
    auto id = regions_.add(base, length, fd);
    if (id) stat_add(stats_.regions);
    return id;
}

Status Worker::remove_region(uint32_t id) {
    for (auto& [endpoint, peer] : peers_) peer->endpoint().unexpose(id);
    const bool known = regions_.find(id) != nullptr;
    Status removed = regions_.remove(id);
    if (known) stat_sub(stats_.regions);
    return removed;
}

FlightReport Worker::flight(uint64_t transfer, size_t most) const {
    FlightReport report{flight_.latest(transfer, most), {}};
    for (const auto& [endpoint, peer] : peers_) peer->sender().add_in_flight(transfer, report.in_flight);
    return report;
}

// -- transfers --------------------------------------------------------------------------------------------------------
void Worker::execute(command::OpenTransfer& c) {
    if (Peer* peer = find(transfer_endpoint(c.transfer))) {
        peer->sender().open(c.transfer, c.key);
        return;
    }
    events_.push({.kind = EventKind::TransferDone,
                  .id = c.transfer,
                  .text = "endpoint " + std::to_string(transfer_endpoint(c.transfer)) + " is closed"});
}

void Worker::execute(command::Arm& c) {
    Transfer* transfer = nullptr;
    Sender* sender = sender_of(c.transfer, transfer);
    if (sender == nullptr || c.begin == c.end) return;
    const uint64_t alarm = next_alarm_++;
    if (!sender->arm(*transfer, *c.plan, c.begin, c.end, alarm)) return;
    const uint32_t num_layers = c.plan->geometry().num_layers;
    const auto& geometry = c.plan->geometry();
    const FlightPlan flight{.transfer = c.transfer,
                            .first_value = c.first_value,
                            .units = c.plan->units(c.begin, c.end),
                            .key = transfer->key(),
                            .src_region = geometry.src_region,
                            .dst_region = geometry.dst_region,
                            .num_layers = num_layers};
    const uint64_t record = flight_.arm(flight, now_);
    armed_.emplace(alarm, ArmedPlan{c.transfer, std::move(c.plan), c.begin, c.end, record});
    alarms_.set({alarm, std::move(c.counter), c.first_value, num_layers});
}

void Worker::execute(command::Fire& c) {
    const auto found = armed_.find(c.alarm);
    if (found == armed_.end()) return;  // cancelled while it fired
    const ArmedPlan& armed = found->second;
    const bool last = c.to == armed.plan->geometry().num_layers;
    flight_.ready(armed.record, c.from, c.to, now_);
    Transfer* transfer = nullptr;
    if (Sender* sender = sender_of(armed.transfer, transfer)) {
        sender->fire(*transfer, WriteCursor(armed.plan, c.from, c.to, armed.begin, armed.end, armed.record), last);
    }
    if (last) armed_.erase(found);
}

void Worker::execute(command::Write& c) {
    Transfer* transfer = nullptr;
    Sender* sender = sender_of(c.transfer, transfer);
    if (sender != nullptr) sender->write(*transfer, c.plan);
}

void Worker::execute(command::Finish& c) {
    Transfer* transfer = nullptr;
    if (Sender* sender = sender_of(c.transfer, transfer)) sender->finish(*transfer);
}

void Worker::execute(command::Cancel& c) {
    Transfer* transfer = nullptr;
    if (Sender* sender = sender_of(c.transfer, transfer)) sender->drop(*transfer, "cancelled");
}

void Worker::execute(command::FailEndpoint& c) {
    if (Peer* peer = find(c.endpoint)) peer->sender().fail(c.reason);
}

void Worker::execute(command::CloseEndpoint& c) {
    const auto found = peers_.find(c.endpoint);
    if (found == peers_.end()) return;
    sleeper_.remove(found->second->endpoint());
    stat_sub(stats_.endpoints);
    found->second->close();
    peers_.erase(found);
}

void Worker::forget_alarms() {
    if (dropped_alarms_.empty()) return;
    std::erase_if(dropped_alarms_, [this](uint64_t alarm) { return armed_.erase(alarm) == 0; });
    alarms_.clear(std::exchange(dropped_alarms_, {}));
}

}  // namespace pdd
