#include "node.h"

#include <algorithm>

namespace sim {

void SimAlarms::clear(std::vector<uint64_t> ids) {
    for (auto& one : live_)
        if (std::find(ids.begin(), ids.end(), one.alarm.id) != ids.end()) one.cleared = true;
    std::erase_if(live_, [this](const Live& one) { return one.cleared && run_.rng.chance(5000); });
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

Node::Node(Run& run, Network& network, Ledger& ledger, NodeConfig node)
    : config(std::move(node)),
      memory(config.shape.bytes(), 0xee),
      alarms(run),
      run_(run),
      network_(network),
      ledger_(ledger) {
    ledger_.add_pool(config.life, memory.data(), config.shape);
    auto made = pdd::Counter::create();
    if (!made) {
        run_.violate(made.error().message);
        return;
    }
    counter = made->first;
    pdd::Nics nics;
    for (uint32_t i = 0; i < config.num_nics; ++i)
        nics.push_back(network.make_nic(config.life, config.host, i, config.window));
    worker = std::make_unique<pdd::Worker>(pdd::WorkerConfig{config.window, *pdd::IdlePolicy::named("spin")},
                                           std::move(nics), commands, alarms, imms, events, stats);
    auto added = worker->add_region(memory.data(), memory.size());
    if (added)
        region = *added;
    else
        run_.violate(added.error().message);
}

Node::~Node() {
    network_.die(config.life);
    worker.reset();
    ledger_.drop_pool(config.life);
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

uint32_t Node::open_endpoint() {
    const uint32_t id = ++last_endpoint_;
    network_.opening(config.life, id);
    if (auto opened = worker->open_endpoint(id); !opened) run_.violate(opened.error().message);
    return id;
}

uint64_t Node::open_transfer(uint32_t endpoint, uint32_t key) {
    const uint64_t id = pdd::transfer_id(endpoint, ++last_transfer_);
    send(pdd::command::OpenTransfer{id, key});
    return id;
}

void Node::check_sums() {
    const auto& seen = network_.totals(config.life);
    const auto agree = [this](const char* what, uint64_t counted, uint64_t wanted) {
        if (counted != wanted)
            run_.violate("life " + std::to_string(config.life) + " counts " + std::to_string(counted) + " " + what +
                         " where the network saw " + std::to_string(wanted));
    };
    agree("writes", stats.writes, seen.posted);
    agree("writes in flight", stats.inflight_writes, seen.inflight);
    agree("bytes in flight", stats.inflight_bytes, seen.inflight_bytes);
    agree("units received", stats.units_received + stats.stale_units, seen.units_told);
}

void Node::check_nothing_left(size_t quarantined_keys) {
    const auto none = [this](const char* what, uint64_t count) {
        if (count != 0)
            run_.violate("life " + std::to_string(config.life) + " ends with " + std::to_string(count) + " " + what);
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
    if (auto removed = worker->remove_region(region); !removed) run_.violate(removed.error().message);
}

}  // namespace sim
