// What a page costs the worker, whatever it is part of: sets x pages through Sender over a port that does nothing.
//
//   sender_cost REPEATS     prints a JSON list of {"sets", "pages", "post_ns", "set_ns", "post_off_ns"}
//
// post_ns: from queued to completed, per page, each page a write of its own; the best of the repeats. set_ns: per set,
// opening, arming and firing it and its end. post_off_ns: as post_ns, of writes that have no cell in the flight log. No NIC,
// no thread, no Python.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "check.h"
#include "fabric/sender.h"

using namespace pdd;

namespace {

constexpr uint64_t kPage = 64 << 10;

class NullPort final : public WritePort {
  public:
    std::span<const Lane> lanes() const override { return lanes_; }
    size_t max_segments() const override { return 1; }
    Status check(const WritePlan&) const override { return {}; }
    PostResult post(size_t, const WritePlan&, const WriteBatch&, uint32_t, Op* op) override {
        posted.push_back(op);
        return {PostOutcome::Posted};
    }
    std::string name(size_t) const override { return "null"; }
    std::string error_text(int) const override { return ""; }

    std::vector<Op*> posted;

  private:
    std::vector<Lane> lanes_{{.nic = 0}, {.nic = 1}};
};

double ns_between(TimePoint from, TimePoint to) {
    return static_cast<double>(std::chrono::duration_cast<std::chrono::nanoseconds>(to - from).count());
}

struct Cost {
    double post_ns;
    double set_ns;
};

Cost measure(uint32_t sets, uint32_t pages, bool recorded) {
    std::vector<std::shared_ptr<const WritePlan>> plans;
    std::vector<PlanEntry> entries(pages);
    for (uint32_t set = 0; set < sets; ++set) {
        for (uint64_t i = 0; i < pages; ++i) entries[i] = {(i * 2 + set) * kPage, i * 3 * kPage, kPage, 1};
        plans.push_back(*WritePlan::make({}, entries));
    }
    OpPool ops;
    FaultInjector faults;
    EventQueue events(4096);
    Stats stats;
    std::vector<uint64_t> dropped;
    TimePoint now{};
    std::vector<Window> nic_windows(2, Window({1 << 20, 1ull << 40}));
    FlightLog flight(16 << 20);
    NullPort port;
    Sender sender(1, port, {64, 8 << 20}, {ops, faults, events, stats, dropped, now, nic_windows, flight});

    const uint64_t rounds = std::max<uint64_t>(1, (1 << 18) / (static_cast<uint64_t>(sets) * pages));
    double posting = 0;
    double setting = 0;
    for (uint64_t round = 0; round < rounds; ++round) {
        const TimePoint begin = Clock::now();
        for (uint32_t set = 0; set < sets; ++set) {
            sender.open(set + 1, 7);
            Transfer& transfer = *sender.find(set + 1);
            CHECK(sender.arm(transfer, *plans[set], 0, pages, set));
            const uint64_t record = recorded ? flight.arm({.transfer = set + 1, .num_layers = 1}, now) : FlightLog::kNoCell;
            if (recorded) flight.ready(record, 0, 1, now);
            sender.fire(transfer, WriteCursor(plans[set], 0, 1, 0, pages, record), true);
        }
        const TimePoint queued = Clock::now();
        while (!sender.idle()) {
            sender.pump(32);
            for (Op* op : port.posted) sender.complete(op, 0);
            port.posted.clear();
        }
        const TimePoint completed = Clock::now();
        for (uint32_t set = 0; set < sets; ++set) sender.finish(*sender.find(set + 1));
        const TimePoint end = Clock::now();
        const double clock = ns_between(end, Clock::now());
        CHECK(stats.active_transfers == 0);
        CHECK(events.drain(SIZE_MAX).size() == sets);
        posting += ns_between(queued, completed) - clock;
        setting += ns_between(begin, queued) + ns_between(completed, end);
    }
    const double total = static_cast<double>(rounds) * sets;
    return {posting / (total * pages), setting / total};
}

}  // namespace

int main(int argc, char** argv) {
    const int repeats = argc > 1 ? std::stoi(argv[1]) : 5;
    const uint32_t sizes[] = {1, 16, 256, 4096};
    std::vector<std::vector<Cost>> best(4, std::vector<Cost>(4, {1e18, 1e18}));
    std::vector<std::vector<double>> off(4, std::vector<double>(4, 1e18));
    for (int repeat = 0; repeat < repeats; ++repeat)
        for (int s = 0; s < 4; ++s)
            for (int p = 0; p < 4; ++p) {
                const Cost cost = measure(sizes[s], sizes[p], true);
                off[s][p] = std::min(off[s][p], measure(sizes[s], sizes[p], false).post_ns);
                best[s][p].post_ns = std::min(best[s][p].post_ns, cost.post_ns);
                best[s][p].set_ns = std::min(best[s][p].set_ns, cost.set_ns);
            }
    for (int s = 0; s < 4; ++s)
        for (int p = 0; p < 4; ++p)
            std::printf("%s{\"sets\": %u, \"pages\": %u, \"post_ns\": %.1f, \"set_ns\": %.1f, \"post_off_ns\": %.1f}",
                        s + p ? ",\n" : "[", sizes[s], sizes[p], best[s][p].post_ns, best[s][p].set_ns, off[s][p]);
    std::printf("]\n");
}
