// Sender over a fake port with a seeded fate for each write: accounting, window, fairness, and the end of every
// transfer.
#include <rdma/fi_errno.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "fabric/imm_table.h"
#include "fabric/sender.h"

using namespace pdd;

namespace {

struct Posted {
    Op* op;
    size_t lane;
    uint64_t transfer;
    uint32_t units;
    uint64_t nbytes;
};

// Takes writes until `room` are in flight, or refuses with a code. A lane in `shut` takes nothing for now.
class FakePort final : public WritePort {
  public:
    std::span<const Lane> lanes() const override { return nics; }
    size_t max_segments() const override { return 1; }
    Status check(const WritePlan& plan) const override {
        if (plan.dst_end() > 1 << 20) return Error{"outside", FI_EINVAL};
        return {};
    }
    PostResult post(size_t lane, const WritePlan&, const WriteBatch& batch, uint32_t imm, Op* op) override {
        if (refuse != 0) return {PostOutcome::Refused, refuse};
        tries += 1;
        if (posted.size() >= room || shut.contains(lane)) return {PostOutcome::Again};
        CHECK(imm_units(imm) == batch.units);
        posted.push_back({op, lane, op->transfer->id(), batch.units, batch.nbytes});
        order.push_back(op->transfer->id());
        per_lane[lane] += 1;
        return {PostOutcome::Posted};
    }
    std::string name(size_t lane) const override { return "fake lane " + std::to_string(lane); }
    std::string error_text(int code) const override { return std::to_string(code); }

    size_t room = SIZE_MAX;
    int refuse = 0;
    std::vector<Lane> nics{{}};
    std::set<size_t> shut;
    std::map<size_t, int> per_lane;
    int tries = 0;
    std::vector<Posted> posted;
    std::vector<uint64_t> order;
};

struct Bench {
    explicit Bench(WindowSize window = {})
        : sender(1, port, window, SenderContext{ops, faults, events, stats, dropped, now, nic_windows, flight}) {}

    std::map<uint64_t, Event> done() {
        std::map<uint64_t, Event> out;
        for (auto& event : events.drain(SIZE_MAX)) {
            if (event.kind != EventKind::TransferDone) continue;
            CHECK(!out.contains(event.id));
            out.emplace(event.id, event);
        }
        return out;
    }
    void complete_first(int error = 0) {
        const Posted first = port.posted.front();
        port.posted.erase(port.posted.begin());
        sender.complete(first.op, error);
    }

    OpPool ops;
    FaultInjector faults;
    EventQueue events{64};
    Stats stats;
    std::vector<uint64_t> dropped;
    TimePoint now{};
    std::vector<Window> nic_windows{4, Window({1 << 20, 1ull << 40})};
    FakePort port;
    FlightLog flight{64 << 10};
    Sender sender;
};

std::shared_ptr<const WritePlan> pages(uint32_t count, uint64_t nbytes = 64, uint32_t layers = 1) {
    std::vector<PlanEntry> entries;
    for (uint32_t i = 0; i < count; ++i) entries.push_back({i * nbytes * 2, i * nbytes * 2, nbytes, 1});
    return *WritePlan::make({.num_layers = layers}, std::move(entries));
}

// Scattered entries that never leave the fake region: all go to the same place.
std::vector<PlanEntry> long_run(uint32_t count, uint64_t nbytes) {
    std::vector<PlanEntry> entries;
    for (uint32_t i = 0; i < count; ++i) entries.push_back({i * nbytes * 2, 0, nbytes, 1});
    return entries;
}

void write_all(Bench& bench, uint64_t id, const std::shared_ptr<const WritePlan>& plan) {
    bench.sender.open(id, 5);
    Transfer& transfer = *bench.sender.find(id);
    const auto count = plan->size();
    CHECK(bench.sender.arm(transfer, *plan, 0, count, id));
    bench.sender.fire(transfer, WriteCursor(plan, 0, 1, 0, count), true);
    bench.sender.finish(transfer);
}

void ends_when_all_is_terminal() {
    Bench bench(WindowSize{3, 1 << 20});
    write_all(bench, 1, pages(7));
    CHECK(bench.sender.pump(100) == 3);  // the window
    CHECK(bench.done().empty());
    for (int i = 0; i < 7; ++i) {
        bench.complete_first();
        bench.sender.pump(100);
    }
    const auto done = bench.done();
    CHECK(done.at(1).ok == 7 && done.at(1).failed == 0 && done.at(1).unknown == 0 && done.at(1).text.empty());
    CHECK(bench.sender.find(1) == nullptr && bench.sender.idle());
    CHECK(bench.stats.inflight_bytes == 0 && bench.stats.active_transfers == 0 && bench.stats.armed_plans == 0);
}

void a_write_larger_than_the_window_passes_alone() {
    Bench bench(WindowSize{4, 100});
    write_all(bench, 1, pages(3, 1000));
    for (int i = 0; i < 3; ++i) {
        CHECK(bench.sender.pump(100) == 1);
        bench.complete_first();
    }
    CHECK(bench.done().at(1).ok == 3);
}

void again_loses_nothing() {
    Bench bench;
    bench.port.room = 2;
    write_all(bench, 1, pages(5));
    CHECK(bench.sender.pump(100) == 2 && bench.sender.blocked());
    CHECK(bench.sender.pump(100) == 0 && bench.stats.again == 1);  // not asked again yet
    bench.now += std::chrono::milliseconds(1);
    CHECK(bench.sender.pump(100) == 0 && bench.stats.again == 2);
    while (!bench.port.posted.empty()) {
        bench.complete_first();
        bench.sender.pump(100);
    }
    CHECK(bench.done().at(1).ok == 5);
}

void a_long_transfer_does_not_starve_a_short_one() {
    constexpr uint64_t kBytes = 64 << 10;
    Bench bench(WindowSize{1, 1 << 30});
    const auto turn = [&bench] {
        if (!bench.port.posted.empty()) bench.complete_first();
        bench.sender.pump(1);
    };
    write_all(bench, 1, pages(1, kBytes));
    for (uint64_t id = 2; id < 4; ++id) write_all(bench, id, *WritePlan::make({}, long_run(100, kBytes)));
    turn();
    write_all(bench, 4, pages(2, kBytes));
    for (int i = 0; i < 16; ++i) turn();  // a quantum of four writes each for 2 and 3, then 4's two
    CHECK(bench.done().contains(4));
    // Equals stay equal: their bytes differ by a quantum and a write at most.
    int64_t lead = 0;
    for (int i = 0; i < 120; ++i) turn();
    for (const uint64_t id : bench.port.order) {
        if (id == 2) lead += kBytes;
        if (id == 3) lead -= kBytes;
        CHECK(std::abs(lead) <= static_cast<int64_t>((256 << 10) + kBytes));
    }
}

void a_refused_write_ends_its_transfer_only() {
    Bench bench;
    write_all(bench, 1, pages(5));
    write_all(bench, 2, pages(5));
    bench.port.refuse = FI_EACCES;
    bench.sender.pump(1);
    bench.port.refuse = 0;
    bench.sender.pump(100);
    while (!bench.port.posted.empty()) bench.complete_first();
    const auto done = bench.done();
    CHECK(done.at(1).ok == 0 && done.at(1).failed == 5 && !done.at(1).text.empty());
    CHECK(done.at(2).ok == 5);
}

void an_unknown_write_fails_the_endpoint() {
    Bench bench(WindowSize{3, 1 << 20});
    write_all(bench, 1, pages(5));
    write_all(bench, 2, pages(5));
    bench.sender.pump(100);
    bench.complete_first();
    bench.complete_first(FI_ECANCELED);
    CHECK(bench.sender.pump(100) == 0);
    auto events = bench.events.drain(SIZE_MAX);
    CHECK(events.size() == 2);  // the failure, and the transfer with nothing in flight
    CHECK(events[0].kind == EventKind::EndpointFailed && events[1].id == 2 && events[1].failed == 5);
    bench.complete_first(FI_ECANCELED);
    const auto done = bench.done();
    CHECK(done.at(1).ok == 1 && done.at(1).unknown == 2 && done.at(1).failed == 2);
    bench.sender.open(3, 1);
    CHECK(bench.done().at(3).failed == 0);
}

// At once, when its context is free, and when the context serves a write of another endpoint.
void a_write_reported_twice_fails_the_endpoint() {
    for (const bool late : {false, true}) {
        Bench bench;
        Sender other(2, bench.port, {},
                     SenderContext{bench.ops, bench.faults, bench.events, bench.stats, bench.dropped, bench.now,
                                   bench.nic_windows, bench.flight});
        write_all(bench, 1, pages(1));
        bench.sender.pump(100);
        Op* told = bench.port.posted.front().op;
        bench.complete_first();
        if (late) {
            other.open(2, 1);
            other.write(*other.find(2), pages(1));
            other.pump(100);
            CHECK(bench.port.posted.front().op == told);
        }
        bench.events.drain(SIZE_MAX);
        bench.sender.complete(told, 0);
        const auto events = bench.events.drain(SIZE_MAX);
        CHECK(events.size() == 1 && events[0].kind == EventKind::EndpointFailed);
        CHECK(bench.stats.inflight_writes == (late ? 1 : 0));
    }
}

void closing_makes_what_is_in_flight_unknown() {
    Bench bench(WindowSize{2, 1 << 20});
    write_all(bench, 1, pages(5));
    bench.sender.open(2, 1);
    bench.sender.pump(100);
    bench.sender.abandon("closed");
    const auto done = bench.done();
    CHECK(done.at(1).unknown == 2 && done.at(1).failed == 3 && done.at(2).unknown == 0);
    CHECK(bench.stats.inflight_writes == 0 && bench.stats.inflight_bytes == 0);
}

void plans_outside_and_after_the_end_count_as_failed() {
    Bench bench;
    bench.sender.open(1, 1);
    const auto outside = *WritePlan::make({}, {{0, 2 << 20, 8, 3}});
    CHECK(!bench.sender.arm(*bench.sender.find(1), *outside, 0, 1, 9));
    CHECK(bench.done().at(1).failed == 3);
    bench.sender.open(2, 1);
    const auto plan = pages(4, 64, 3);
    CHECK(bench.sender.arm(*bench.sender.find(2), *plan, 0, 4, 10));
    bench.sender.fire(*bench.sender.find(2), WriteCursor(plan, 0, 1, 0, 4), false);
    bench.sender.pump(1);
    bench.sender.drop(*bench.sender.find(2), "cancelled");
    CHECK(bench.dropped == std::vector<uint64_t>{10});
    CHECK(!bench.sender.arm(*bench.sender.find(2), *plan, 0, 4, 11));  // the last write is still in flight
    bench.sender.write(*bench.sender.find(2), outside);
    bench.complete_first();
    const auto done = bench.done();
    CHECK(done.at(2).ok == 1 && done.at(2).failed == 11 + 12 + 3 && done.at(2).text == "cancelled");
}

void set_lanes(Bench& bench, uint32_t count) {
    bench.port.nics.clear();
    for (uint32_t nic = 0; nic < count; ++nic) bench.port.nics.push_back({.nic = nic});
}

void drain(Bench& bench) {
    bench.sender.pump(100);
    while (!bench.port.posted.empty()) {
        bench.complete_first();
        bench.sender.pump(100);
    }
}

void writes_are_striped_over_the_lanes() {
    for (uint32_t lanes = 1; lanes <= 4; ++lanes) {
        Bench bench;
        set_lanes(bench, lanes);
        write_all(bench, 1, pages(24));
        drain(bench);
        CHECK(bench.done().at(1).ok == 24 && bench.port.per_lane.size() == lanes);
        for (const auto& [lane, count] : bench.port.per_lane) CHECK(count == static_cast<int>(24 / lanes));
    }
}

void lanes_take_turns_under_light_load_too() {
    Bench bench;
    set_lanes(bench, 3);
    write_all(bench, 1, pages(12));
    for (int i = 0; i < 12; ++i) {  // each is over before the next
        CHECK(bench.sender.pump(1) == 1);
        bench.complete_first();
    }
    for (size_t lane = 0; lane < 3; ++lane) CHECK(bench.port.per_lane[lane] == 4);
}

void try_again_passes_to_the_next_lane_at_once() {
    Bench bench;
    set_lanes(bench, 3);
    bench.port.shut = {0, 1};
    write_all(bench, 1, pages(8));
    CHECK(bench.sender.pump(100) == 8 && bench.port.per_lane.at(2) == 8);
}

void a_lane_that_takes_nothing_stops_no_other() {
    Bench bench;
    set_lanes(bench, 3);
    bench.port.shut = {1};
    for (uint64_t id = 1; id < 40; ++id) {
        write_all(bench, id, pages(8));
        drain(bench);
        bench.now += std::chrono::seconds(1);  // far past the deadline of an endpoint
        CHECK(bench.done().at(id).ok == 8);
    }
    CHECK(bench.port.per_lane.at(0) == bench.port.per_lane.at(2) && !bench.port.per_lane.contains(1));
    bench.port.shut.clear();
    write_all(bench, 40, pages(9));
    drain(bench);
    CHECK(bench.port.per_lane.at(1) == 3);
}

void a_lane_that_does_not_connect_is_asked_rarely() {
    Bench bench;
    set_lanes(bench, 2);
    bench.port.shut = {0, 1};
    write_all(bench, 1, pages(1));
    for (int i = 0; i < 9000; ++i) {
        bench.sender.pump(100);
        bench.now += std::chrono::milliseconds(1);
    }
    CHECK(bench.sender.blocked() && bench.done().empty());
    CHECK(bench.port.tries < 2 * 9000 / 20 + 30);
    for (int i = 0; i < 1100; ++i) {
        bench.sender.pump(100);
        bench.now += std::chrono::milliseconds(1);
    }
    CHECK(bench.done().at(1).failed == 1);  // no lane for 10 s: the endpoint has failed
}

void a_full_lane_stops_no_other() {
    Bench bench(WindowSize{2, 1 << 20});
    set_lanes(bench, 2);
    write_all(bench, 1, pages(20));
    CHECK(bench.sender.pump(100) == 4);
    for (int i = 0; i < 16; ++i) {  // lane 0 completes nothing
        const auto other = std::find_if(bench.port.posted.begin(), bench.port.posted.end(),
                                        [](const Posted& one) { return one.lane == 1; });
        Op* op = other->op;
        bench.port.posted.erase(other);
        bench.sender.complete(op, 0);
        CHECK(bench.sender.pump(100) == 1);
    }
    CHECK(bench.port.per_lane.at(0) == 2 && bench.port.per_lane.at(1) == 18);
}

void peers_that_fill_a_nic_leave_one_write_to_each() {
    Bench bench(WindowSize{8, 1 << 20});
    bench.nic_windows.assign(1, Window({8, 1 << 20}));
    write_all(bench, 1, pages(20));
    CHECK(bench.sender.pump(100) == 8);
    Sender other(2, bench.port, {8, 1 << 20},
                 {bench.ops, bench.faults, bench.events, bench.stats, bench.dropped, bench.now, bench.nic_windows,
                  bench.flight});
    other.open(9, 5);
    const auto plan = pages(3);
    CHECK(other.arm(*other.find(9), *plan, 0, 3, 9));
    other.fire(*other.find(9), WriteCursor(plan, 0, 1, 0, 3), true);
    CHECK(other.pump(100) == 1);
    other.abandon("closed");
    bench.port.posted.pop_back();  // its completion never comes
    drain(bench);
    CHECK(bench.nic_windows[0].ops() == 0 && bench.nic_windows[0].bytes() == 0);
}

// Thousands of random lives: whatever happens, each transfer ends once and its units add up.
void random_lives_add_up() {
    for (uint64_t seed = 0; seed < 2000; ++seed) {
        std::mt19937_64 random(seed);
        Bench bench(WindowSize{static_cast<uint32_t>(1 + random() % 5), 64u << (random() % 8)});
        bench.port.room = 1 + random() % 6;
        set_lanes(bench, 1 + random() % 4);
        if (random() % 3 == 0) bench.port.shut = {random() % 4};
        bench.faults.set(static_cast<Fault>(random() % 5), 1 + random() % 30, random() % 3,
                         static_cast<int>(random() % 5) - 1);
        std::map<uint64_t, uint64_t> units;
        std::map<uint64_t, Event> done;
        const auto collect = [&] {
            for (auto& [id, event] : bench.done()) CHECK(done.emplace(id, event).second);
        };
        for (int step = 0; step < 60; ++step) {
            const uint64_t id = 1 + random() % 6;
            Transfer* transfer = bench.sender.find(id);
            switch (random() % 8) {
                case 0:
                    if (!units.contains(id)) {
                        units[id] = 0;
                        bench.sender.open(id, 1);
                    }
                    break;
                case 1:
                case 2:
                    if (transfer != nullptr) {
                        const auto plan = pages(1 + random() % 5, 64);
                        const auto count = plan->size();
                        units[id] += count;
                        if (bench.sender.arm(*transfer, *plan, 0, count, step))
                            bench.sender.fire(*transfer, WriteCursor(plan, 0, 1, 0, count), true);
                    }
                    break;
                case 3:
                    if (transfer != nullptr) bench.sender.finish(*transfer);
                    break;
                case 4:
                    if (transfer != nullptr && random() % 4 == 0) bench.sender.drop(*transfer, "cancelled");
                    break;
                case 5:
                    bench.now += std::chrono::milliseconds(random() % 3);
                    bench.sender.pump(1 + random() % 4);
                    break;
                default:
                    if (!bench.port.posted.empty()) {
                        const int errors[] = {0, 0, 0, 0, 0, 0, FI_EACCES, random() % 4 == 0 ? FI_ENOTCONN : 0};
                        bench.complete_first(errors[random() % 8]);
                    }
            }
            collect();
        }
        bench.sender.abandon("closed");
        collect();
        CHECK(done.size() == units.size());
        for (const auto& [id, event] : done) CHECK(event.ok + event.failed + event.unknown == units[id]);
        CHECK(bench.stats.inflight_writes == 0 && bench.stats.inflight_bytes == 0);
        CHECK(bench.stats.active_transfers == 0 && bench.stats.armed_plans == 0);
        for (const auto& window : bench.nic_windows) CHECK(window.ops() == 0 && window.bytes() == 0);
    }
}

}  // namespace

int main() {
    ends_when_all_is_terminal();
    a_write_larger_than_the_window_passes_alone();
    again_loses_nothing();
    writes_are_striped_over_the_lanes();
    lanes_take_turns_under_light_load_too();
    try_again_passes_to_the_next_lane_at_once();
    a_lane_that_takes_nothing_stops_no_other();
    a_lane_that_does_not_connect_is_asked_rarely();
    a_full_lane_stops_no_other();
    peers_that_fill_a_nic_leave_one_write_to_each();
    a_long_transfer_does_not_starve_a_short_one();
    a_refused_write_ends_its_transfer_only();
    an_unknown_write_fails_the_endpoint();
    a_write_reported_twice_fails_the_endpoint();
    closing_makes_what_is_in_flight_unknown();
    plans_outside_and_after_the_end_count_as_failed();
    random_lives_add_up();
}
