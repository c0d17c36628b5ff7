#include "fabric/event_join.h"

#include <algorithm>
#include <utility>

namespace pdd {

std::optional<Event> EventJoin::add(Event event, std::vector<Command>& orders) {
    switch (event.kind) {
        case EventKind::TransferDone:
            return add_transfer(std::move(event), orders);
        case EventKind::EndpointClosed:
            return add_closed(std::move(event));
        case EventKind::EndpointFailed:
            break;
        default:
            return event;
    }
    if (event.last) return add_closed(std::move(event));
    Endpoint& endpoint = endpoints_[event.id];
    if (std::exchange(endpoint.failed, true)) return std::nullopt;
    orders.push_back(command::FailEndpoint{static_cast<uint32_t>(event.id), event.text});
    return event;
}

std::optional<Event> EventJoin::add_transfer(Event event, std::vector<Command>& orders) {
    auto [found, fresh] = transfers_.try_emplace(event.id);
    Transfer& transfer = found->second;
    if (fresh) {
        transfer.sum = std::move(event);
    } else {
        Event& sum = transfer.sum;
        sum.ok += event.ok;
        sum.failed += event.failed;
        sum.unknown += event.unknown;
        sum.traffic.writes += event.traffic.writes;
        sum.traffic.bytes += event.traffic.bytes;
        sum.traffic.busy_ns = std::max(sum.traffic.busy_ns, event.traffic.busy_ns);
        sum.traffic.exposed_ns = std::max(sum.traffic.exposed_ns, event.traffic.exposed_ns);
        if (sum.text.empty()) sum.text = std::move(event.text);
    }
    if (++transfer.parts == num_groups_) {
        Event sum = std::move(transfer.sum);
        transfers_.erase(found);
        return sum;
    }
    if (!transfer.sum.text.empty()) orders.push_back(command::Cancel{transfer.sum.id});
    return std::nullopt;
}

std::optional<Event> EventJoin::add_closed(Event event) {
    const auto found = endpoints_.try_emplace(event.id).first;
    Endpoint& endpoint = found->second;
    if (event.kind == EventKind::EndpointFailed && endpoint.no_fence.empty()) endpoint.no_fence = event.text;
    if (++endpoint.closed < num_groups_) return std::nullopt;
    if (!endpoint.no_fence.empty()) {
        event.kind = EventKind::EndpointFailed;
        event.text = std::move(endpoint.no_fence);
        event.last = true;
    }
    endpoints_.erase(found);
    return event;
}

}  // namespace pdd
