// EventJoin: makes one story of what the workers of several rail groups tell.
//
// Every worker has its part of each endpoint and of each transfer. A transfer is done once all its parts are, an
// endpoint is closed once all its parts are; counts add up. A part that fails ends the others: what the other groups
// must be told comes back as commands. Immediates need no joining, their table is one. Any thread, one at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "fabric/commands.h"
#include "fabric/events.h"

namespace pdd {

class EventJoin {
  public:
    explicit EventJoin(uint32_t num_groups) : num_groups_(num_groups) {}

    // The event to tell, now that one group told `event`; commands for all groups are added to `orders`.
    std::optional<Event> add(Event event, std::vector<Command>& orders);

  private:
    struct Transfer {
        Event sum;
        uint32_t parts = 0;
    };
    struct Endpoint {
        uint32_t closed = 0;     // parts
        bool failed = false;     // told
        std::string no_fence{};  // why a part did not close
    };

    std::optional<Event> add_transfer(Event event, std::vector<Command>& orders);
    std::optional<Event> add_closed(Event event);

    uint32_t num_groups_;
    std::unordered_map<uint64_t, Transfer> transfers_;  // of which some part is done
    std::unordered_map<uint64_t, Endpoint> endpoints_;  // of which some part failed or closed
};

}  // namespace pdd
