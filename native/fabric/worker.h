// Worker: owns the NICs of a rail group, and is the only caller of them.
//
// turn() takes commands and, for each peer, reads completions and posts what its window admits. It knows no thread and
// no clock: run() turns by the real one and idles when nothing happened (spin, yield, block on queues and commands); a
// simulation calls turn() with a time of its own. It never waits for a consumer: events overflow into memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "fabric/command_queue.h"
#include "fabric/idle.h"
#include "fabric/peer.h"
#include "fabric/region.h"
#include "fabric/sleeper.h"
#include "util/clock.h"
#include "watch/alarms.h"

namespace pdd {

struct WorkerConfig {
    WindowSize window;  // of each peer on each NIC
    IdlePolicy idle;
    bool has_local = false;  // the last NIC is for endpoints to peers on this host, and for those alone
    uint32_t group = 0;      // of the rail groups of this node
    uint32_t num_groups = 1;
    uint64_t flight_bytes = 64 << 10;  // of the flight log
};

// Keeps the calling thread on those of these CPUs that it may run on; an empty list leaves it where it is. Returns what
// the system refused, "" when nothing: that costs speed, not correctness.
std::string pin_thread(const std::vector<int>& cpus);

class Worker {
  public:
    Worker(WorkerConfig config, Nics nics, CommandQueue& commands, Alarms& alarms, ImmTable& imms, EventQueue& events,
           Stats& stats);

    // The thread's body: returns once the queue is closed and every endpoint is.
    void run();

    // One turn; whether anything happened. Time never runs backwards.
    bool turn(TimePoint now);
    // How long a turn may be put off, unless a command or a completion comes. -1: for ever.
    int patience_ms() const;
    // Takes the commands that are left and closes every endpoint.
    void close_all(TimePoint now);

    // -- called by commands of kind Call, on the worker's thread
    Status open_endpoint(uint32_t id, bool local = false);
    Result<std::string> describe(uint32_t endpoint, const std::vector<uint32_t>& regions);
    Status connect(uint32_t endpoint, const std::string& descriptor);
    Result<uint32_t> add_region(uint8_t* base, uint64_t length, int fd = -1);
    Status remove_region(uint32_t id);
    // What is remembered of one transfer, or, for 0, of all: the latest `most` plans.
    FlightReport flight(uint64_t transfer, size_t most) const;

  private:
    struct ArmedPlan {
        uint64_t transfer;
        std::shared_ptr<const WritePlan> plan;
        uint32_t begin;
        uint32_t end;
        uint64_t record;  // of layer 0, in the flight log
    };

    bool take_commands();
    bool pump();
    void idle(TimePoint now);
    Peer* find(uint32_t endpoint);
    Sender* sender_of(uint64_t transfer, Transfer*& found);
    void forget_alarms();

    void execute(std::monostate&) {}
    void execute(command::Call& c) { c.run(); }
    void execute(command::OpenTransfer& c);
    void execute(command::Arm& c);
    void execute(command::Fire& c);
    void execute(command::Write& c);
    void execute(command::Finish& c);
    void execute(command::Cancel& c);
    void execute(command::FailEndpoint& c);
    void execute(command::CloseEndpoint& c);
    void execute(command::Tell& c) { events_.push(std::move(c.event)); }
    void execute(command::InjectFault& c) { faults_.set(c.fault, c.after, c.count, c.nic); }

    WorkerConfig config_;
    CommandQueue& commands_;
    Alarms& alarms_;
    ImmTable& imms_;
    EventQueue& events_;
    Stats& stats_;
    TimePoint now_{};  // of this turn
    // Closed in reverse: peers, then regions, then NICs.
    Nics nics_;
    RegionTable regions_;
    OpPool ops_;
    FaultInjector faults_;
    FlightLog flight_;
    std::vector<Window> nic_windows_;
    std::map<uint32_t, std::unique_ptr<Peer>> peers_;
    uint32_t last_first_ = 0;                        // the peer that began the last round of posting
    std::unordered_map<uint64_t, ArmedPlan> armed_;  // by alarm
    std::vector<uint64_t> dropped_alarms_;
    uint64_t next_alarm_ = 1;
    const Alarms::Fire fire_;  // what a look() of our own finds
    Sleeper sleeper_;
};

}  // namespace pdd
