// Command: what other threads ask of the worker. Whole values: nothing in them is shared mutably with the sender.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>

#include "fabric/events.h"
#include "fabric/faults.h"
#include "fabric/write_plan.h"
#include "watch/counter.h"

namespace pdd {

namespace command {

// Runs on the worker's thread; whoever sent it waits for a promise that `run` fulfils.
struct Call {
    std::function<void()> run;
};
struct OpenTransfer {
    uint64_t transfer;
    uint32_t key;
};
struct Arm {
    uint64_t transfer;
    std::shared_ptr<const Counter> counter;
    uint64_t first_value;
    std::shared_ptr<const WritePlan> plan;
    uint32_t begin;
    uint32_t end;
};
// Layers [from, to) of an armed plan are ready. From the watcher.
struct Fire {
    uint64_t alarm;
    uint32_t from;
    uint32_t to;
};
struct Write {
    uint64_t transfer;
    std::shared_ptr<const WritePlan> plan;  // of one entry
};
struct Finish {
    uint64_t transfer;
};
struct Cancel {
    uint64_t transfer;
};
// Another rail group lost this peer.
struct FailEndpoint {
    uint32_t endpoint;
    std::string reason;
};
struct CloseEndpoint {
    uint32_t endpoint;
};
// An event that another thread found out, told in order with the worker's own.
struct Tell {
    Event event;
};
struct InjectFault {
    Fault fault;
    uint64_t after;
    uint64_t count;
    int nic;  // -1: any
};

}  // namespace command

using Command = std::variant<std::monostate, command::Call, command::OpenTransfer, command::Arm, command::Fire,
                             command::Write, command::Finish, command::Cancel, command::FailEndpoint,
                             command::CloseEndpoint, command::Tell, command::InjectFault>;

// A transfer id names its endpoint, so that no table from one to the other is needed.
inline constexpr uint64_t transfer_id(uint32_t endpoint, uint32_t number) {
    return static_cast<uint64_t>(endpoint) << 32 | number;
}
inline constexpr uint32_t transfer_endpoint(uint64_t transfer) {
    return static_cast<uint32_t>(transfer >> 32);
}

}  // namespace pdd
