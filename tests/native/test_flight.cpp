// The flight log: what a worker remembers of its writes, layer by layer, and that it forgets the oldest alone.
#include <rdma/fi_errno.h>

#include <vector>

#include "check.h"
#include "fabric/flight.h"
#include "fabric/sender.h"

using namespace pdd;
using std::chrono::milliseconds;

namespace {

constexpr int64_t kMs = 1'000'000;

class OnePort final : public WritePort {
  public:
    std::span<const Lane> lanes() const override { return nics; }
    size_t max_segments() const override { return 1; }
    Status check(const WritePlan&) const override { return {}; }
    PostResult post(size_t, const WritePlan&, const WriteBatch&, uint32_t, Op* op) override {
        posted.push_back(op);
        return {PostOutcome::Posted};
    }
    std::string name(size_t) const override { return "one"; }
    std::string error_text(int code) const override { return std::to_string(code); }

    std::vector<Lane> nics{{.nic = 0}, {.nic = 3}};
    std::vector<Op*> posted;
};

struct Bench {
    Bench() : sender(1, port, {}, SenderContext{ops, faults, events, stats, dropped, now, nic_windows, flight}) {}

    // One plan of `pages` scattered pages and `layers`, armed now.
    uint64_t arm(uint64_t transfer, uint32_t pages, uint32_t layers) {
        std::vector<PlanEntry> entries;
        for (uint64_t i = 0; i < pages; ++i) entries.push_back({i * 256, i * 256, 64, 1});
        plan = *WritePlan::make({.num_layers = layers}, entries);
        sender.open(transfer, 5);
        CHECK(sender.arm(*sender.find(transfer), *plan, 0, pages, transfer));
        return flight.arm({.transfer = transfer, .units = pages, .num_layers = layers}, now);
    }
    void fire(uint64_t transfer, uint64_t record, uint32_t from, uint32_t to, bool last) {
        flight.ready(record, from, to, now);
        sender.fire(*sender.find(transfer), WriteCursor(plan, from, to, 0, plan->size(), record), last);
    }
    void complete(size_t index, int error = 0) {
        Op* op = port.posted[index];
        port.posted.erase(port.posted.begin() + static_cast<ptrdiff_t>(index));
        sender.complete(op, error);
    }

    OpPool ops;
    FaultInjector faults;
    EventQueue events{64};
    Stats stats;
    std::vector<uint64_t> dropped;
    TimePoint now{milliseconds(1)};
    std::vector<Window> nic_windows{4, Window({1 << 20, 1ull << 40})};
    OnePort port;
    FlightLog flight{64 << 10};
    std::shared_ptr<const WritePlan> plan;
    Sender sender;
};

void a_layer_is_remembered_from_ready_to_its_last_completion() {
    Bench bench;
    const uint64_t record = bench.arm(7, 2, 3);
    bench.now += milliseconds(4);
    bench.fire(7, record, 0, 2, false);
    bench.now += milliseconds(1);
    CHECK(bench.sender.pump(3) == 3);  // layer 0 whole, half of layer 1
    bench.now += milliseconds(2);
    bench.complete(0);
    bench.complete(0);

    const auto plans = bench.flight.latest(7, 10);
    CHECK(plans.size() == 1 && plans[0].plan.armed == 1 * kMs && plans[0].plan.units == 2);
    const auto& cells = plans[0].cells;
    CHECK(cells.size() == 3);
    CHECK(cells[0].ready == 5 * kMs && cells[0].first_post == 6 * kMs && cells[0].last_end == 8 * kMs);
    CHECK(cells[0].posted == 2 && cells[0].ok == 2 && cells[0].nics == 0b1001);
    CHECK(cells[1].ready == 5 * kMs && cells[1].posted == 1 && cells[1].ok == 0 && cells[1].last_end == 0);
    CHECK(cells[2].ready == 0 && cells[2].posted == 0);

    std::vector<FlightWrites> in_flight;
    bench.sender.add_in_flight(7, in_flight);
    CHECK(in_flight.size() == 1 && in_flight[0].cell == cells[1].number && in_flight[0].nic == 0);
    CHECK(in_flight[0].units == 1);
    in_flight.clear();
    bench.sender.add_in_flight(8, in_flight);
    CHECK(in_flight.empty());
}

void failed_and_unknown_writes_name_their_layer_and_nic() {
    Bench bench;
    const uint64_t record = bench.arm(7, 2, 2);
    bench.fire(7, record, 0, 2, true);
    bench.faults.set(Fault::Error, 2, 1, -1);
    CHECK(bench.sender.pump(10) == 2);  // the second is refused on NIC 3, and ends the transfer
    bench.complete(0, FI_EIO);
    const auto cells = bench.flight.latest(7, 1)[0].cells;
    CHECK(cells[0].failed == 1 && cells[0].unknown == 1 && cells[0].ok == 0);
    CHECK(cells[0].failed_nics == 0b1001 && cells[0].nics == 0b1001 && cells[0].posted == 2);
    CHECK(cells[1].failed == 0 && cells[1].posted == 0);
}

void the_oldest_is_forgotten_and_late_completions_touch_nothing() {
    FlightLog flight(64 << 10);
    const TimePoint now{milliseconds(1)};
    const uint64_t first = flight.arm({.transfer = 1, .num_layers = 4}, now);
    for (uint64_t transfer = 2; transfer < 3000; ++transfer) flight.arm({.transfer = transfer, .num_layers = 4}, now);
    CHECK(flight.latest(1, 10).empty());
    flight.posted(first, 0, 1, now);
    flight.ended(first, 0, 1, Fate::Ok, now);
    size_t touched = 0;
    const auto all = flight.latest(0, 100);
    CHECK(all.size() == 100 && all.back().plan.transfer == 2999 && all.front().plan.transfer == 2900);
    for (const auto& [plan, cells] : flight.latest(0, 1 << 20))
        for (const auto& cell : cells) touched += cell.posted + cell.ok;
    CHECK(touched == 0);
}

void a_plan_that_does_not_fit_is_not_kept_and_harms_nobody() {
    FlightLog flight(0);
    const TimePoint now{milliseconds(1)};
    flight.arm({.transfer = 1, .num_layers = 200}, now);
    const uint64_t none = flight.arm({.transfer = 2, .num_layers = 100'000}, now);
    CHECK(none == FlightLog::kNoCell && flight.latest(2, 10).empty());
    flight.ready(none, 0, 100'000, now);
    for (uint64_t layer = 0; layer < 1000; ++layer) flight.posted(none + layer, 0, 1, now);
    const auto cells = flight.latest(1, 1)[0].cells;
    CHECK(cells.size() == 200);
    for (const auto& cell : cells) CHECK(cell.posted == 0 && cell.ready == 0);
}

}  // namespace

int main() {
    a_layer_is_remembered_from_ready_to_its_last_completion();
    failed_and_unknown_writes_name_their_layer_and_nic();
    the_oldest_is_forgotten_and_late_completions_touch_nothing();
    a_plan_that_does_not_fit_is_not_kept_and_harms_nobody();
}
