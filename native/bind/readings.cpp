// What an engine tells: events, counters, the flight log.
#include <algorithm>
#include <unordered_map>

#include "bind/binding.h"

namespace pdd {
namespace {

nb::list nic_list(uint32_t bits, uint32_t first, uint32_t num_nics) {
    nb::list out;
    for (uint32_t nic = 0; nic < 32; ++nic)
        if ((bits >> nic & 1) != 0) out.append(nic < num_nics ? static_cast<int>(first + nic) : -1);
    return out;
}

}  // namespace

nb::object seconds(int64_t ns) {
    return ns == 0 ? nb::none() : nb::cast(static_cast<double>(ns) * 1e-9);
}

nb::tuple event_tuple(const Event& event) {
    const int kind = static_cast<int>(event.kind);
    switch (event.kind) {
        case EventKind::ImmReached:
        case EventKind::ImmOverrun:
            return nb::make_tuple(kind, event.id, event.ok);
        case EventKind::TransferDone:
            return nb::make_tuple(kind, event.id, event.ok, event.failed, event.unknown, event.text,
                                  event.traffic.writes, event.traffic.bytes,
                                  static_cast<double>(event.traffic.busy_ns) * 1e-9,
                                  static_cast<double>(event.traffic.exposed_ns) * 1e-9);
        case EventKind::EndpointFailed:
            return nb::make_tuple(kind, event.id, event.text);
        case EventKind::EndpointClosed:
            break;
    }
    return nb::make_tuple(kind, event.id);
}

nb::dict stats_dict(const Engine& engine) {
    nb::dict out;
    const auto put = [&](const char* name, StatCell Stats::*cell) {
        uint64_t sum = 0;
        for (size_t group = 0; group < engine.num_groups(); ++group)
            sum += (engine.stats(group).*cell).load(std::memory_order_relaxed);
        out[name] = sum;
    };
    // What every group has a part of.
    const auto put_most = [&](const char* name, StatCell Stats::*cell) {
        uint64_t most = 0;
        for (size_t group = 0; group < engine.num_groups(); ++group)
            most = std::max(most, (engine.stats(group).*cell).load(std::memory_order_relaxed));
        out[name] = most;
    };
    put("writes", &Stats::writes);
    put("bytes", &Stats::bytes);
    put("units", &Stats::units);
    put("units_received", &Stats::units_received);
    put("completions", &Stats::completions);
    put("errors", &Stats::errors);
    put("stale_units", &Stats::stale_units);
    put("merged", &Stats::merged);
    put("again", &Stats::again);
    put("wakeups", &Stats::wakeups);
    put_most("active_transfers", &Stats::active_transfers);
    put("inflight_writes", &Stats::inflight_writes);
    put("inflight_bytes", &Stats::inflight_bytes);
    put_most("endpoints", &Stats::endpoints);
    put("regions", &Stats::regions);
    put("armed_plans", &Stats::armed_plans);
    out["keys"] = engine.keys_in_use();
    nb::list per_nic;
    for (size_t group = 0; group < engine.num_groups(); ++group)
        for (size_t nic = 0; nic < engine.caps(group).size(); ++nic)
            per_nic.append(engine.stats(group).nic_writes[nic].load(std::memory_order_relaxed));
    out["nic_writes"] = per_nic;
    return out;
}

// One tuple a plan, as pdd/fabric/types.py reads it. The NIC of local peers is -1.
nb::list flight_list(const Engine::Flight& flight, const Engine& engine) {
    nb::list out;
    for (size_t group = 0; group < flight.groups.size(); ++group) {
        const auto& report = flight.groups[group];
        const uint32_t first = flight.first_nics[group];
        const auto num_nics = static_cast<uint32_t>(engine.caps(group).size());
        std::unordered_multimap<uint64_t, FlightWrites> by_cell;
        for (const auto& write : report.in_flight) by_cell.emplace(write.cell, write);
        for (const auto& [plan, cells] : report.plans) {
            nb::list layers;
            for (const auto& cell : cells) {
                nb::list in_flight;
                for (auto [write, end] = by_cell.equal_range(cell.number); write != end; ++write) {
                    const uint32_t nic = write->second.nic;
                    in_flight.append(
                        nb::make_tuple(nic < num_nics ? static_cast<int>(first + nic) : -1, write->second.units));
                }
                layers.append(nb::make_tuple(
                    cell.number - plan.first_cell, seconds(cell.ready), seconds(cell.first_post),
                    seconds(cell.last_post), seconds(cell.last_end), cell.posted, cell.ok, cell.failed, cell.unknown,
                    nic_list(cell.nics, first, num_nics), nic_list(cell.failed_nics, first, num_nics), in_flight));
            }
            out.append(nb::make_tuple(plan.transfer, plan.key, plan.src_region, plan.dst_region, plan.first_value,
                                      plan.num_layers, plan.units, seconds(plan.armed), layers));
        }
    }
    return out;
}

}  // namespace pdd
