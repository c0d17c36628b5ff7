// Sender: the writes of one endpoint, from all its transfers, posted fairly inside a window. Owner: the worker's
// thread.
//
// Transfers with work stand in line; each turn at the front is worth 256 KiB (deficit round robin), so a prompt of 128k
// tokens can not starve a short one. Their writes go whole over the lanes in turn, a lane being one NIC here and one of
// the peer's. Each lane has a window and a mind of its own: one that is full, or that its provider asks to leave alone,
// is passed over, and its share goes to the others. A lane that never connects carries nothing and harms nothing.
// Each of the peer's rail groups has lanes of its own; a transfer whose group takes nothing lets those of others pass.
//
// A write with an unknown fate, or a reset connection, fails the endpoint as a
// whole: nothing is ever posted on it again, because the next post would silently reconnect to whoever owns the address
// by then.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>

#include "fabric/events.h"
#include "fabric/faults.h"
#include "fabric/flight.h"
#include "fabric/nic.h"
#include "fabric/op_pool.h"
#include "fabric/stats.h"
#include "fabric/transfer.h"
#include "fabric/window.h"
#include "fabric/write_plan.h"
#include "util/clock.h"

namespace pdd {

// What a Sender posts through: an Endpoint, or a fake in tests.
class WritePort {
  public:
    virtual ~WritePort() = default;
    struct Lane {
        uint32_t nic = 0;       // here
        uint32_t sharing = 1;   // lanes of this endpoint on that NIC
        uint32_t max_ops = 64;  // that the peer's side can take
        uint32_t group = 0;     // of the peer's rail groups; a group's lanes stand together
    };
    // None before a plan was found good.
    virtual std::span<const Lane> lanes() const = 0;
    virtual size_t max_segments() const = 0;
    // The peer's rail group that a plan which was found good writes to.
    virtual uint32_t group_of(const WritePlan&) const { return 0; }
    // Whether every layer of the plan stays inside both regions. Asked before anything of it is posted.
    virtual Status check(const WritePlan& plan) const = 0;
    virtual PostResult post(size_t lane, const WritePlan& plan, const WriteBatch& batch, uint32_t imm, Op* op) = 0;
    // "provider tcp, NIC 10.0.0.1, endpoint 3 to 10.0.0.2:4711" and the text of an errno, for messages.
    virtual std::string name(size_t lane) const = 0;
    virtual std::string error_text(int code) const = 0;
};

// What the worker shares among its senders.
struct SenderContext {
    OpPool& ops;
    FaultInjector& faults;
    EventQueue& events;
    Stats& stats;
    // Of transfers that post nothing more; the worker takes them off the watcher.
    std::vector<uint64_t>& dropped_alarms;
    const TimePoint& now;              // of the worker's turn
    std::vector<Window>& nic_windows;  // of all peers together, by NIC
    FlightLog& flight;
};

class Sender {
  public:
    // A peer that lets no write in on any lane for this long, with none in flight, is given up.
    static constexpr auto kConnectDeadline = std::chrono::seconds(10);

    // `window`: of each NIC.
    Sender(uint32_t endpoint, WritePort& port, WindowSize window, SenderContext shared);

    // Null for an id that is not open (never was, or its TRANSFER_DONE is out).
    Transfer* find(uint64_t id);
    void open(uint64_t id, uint32_t key);
    // Takes the plan's units on, to be posted by fire(). False when the plan does not fit or the transfer is ending:
    // the units have failed, and the transfer may be gone.
    bool arm(Transfer& transfer, const WritePlan& plan, uint32_t begin, uint32_t end, uint64_t alarm);
    void fire(Transfer& transfer, WriteCursor work, bool last_of_plan);
    // A plan of one entry, at once.
    void write(Transfer& transfer, const std::shared_ptr<const WritePlan>& plan);
    void finish(Transfer& transfer);
    void drop(Transfer& transfer, const std::string& reason);

    // Posts up to `budget` writes. Returns how many.
    uint32_t pump(uint32_t budget);
    void complete(Op* op, int error);
    // Drops all transfers and refuses more; what is in flight may still complete. Tells ENDPOINT_FAILED once.
    void fail(const std::string& reason);
    // The endpoint is closed: what is in flight becomes unknown and every transfer ends.
    void abandon(const std::string& reason);

    // Writes that were posted and have not ended; of one transfer, or, for 0, of all.
    void add_in_flight(uint64_t transfer, std::vector<FlightWrites>& found) const;

    bool idle() const { return line_.empty() && outstanding_.empty(); }
    bool blocked() const { return blocked_; }  // work waits, and some lane is to be asked again

  private:
    struct Lane {
        uint32_t nic;
        uint32_t group;  // of the peer's
        Window window;
        TimePoint retry_at{};
        Clock::duration patience{};                // until the next try of a lane with nothing in flight
        std::optional<TimePoint> refused_since{};  // with nothing in flight
    };

    void open_lanes();
    bool has_room(const Lane& lane, uint64_t nbytes) const;
    // The lanes that writes of this plan may take: positions [first, last).
    std::pair<size_t, size_t> lanes_for(const WritePlan& plan) const;
    bool admit(Transfer& transfer, const WritePlan& plan, uint64_t units);
    void enqueue(Transfer& transfer);
    // One write of a transfer, the one at the front before others, on the first lane that takes it; false: none does.
    bool post_next();
    bool post_front();
    // False: asked to try again.
    bool post(size_t lane, Transfer& transfer, const WriteBatch& batch);
    void refused_for_now(size_t lane);
    void settle(Op* op, Fate fate);
    void end_if_done(Transfer& transfer);

    uint32_t endpoint_;
    WritePort& port_;
    WindowSize window_;
    SenderContext shared_;
    std::vector<Lane> lanes_;
    uint32_t num_groups_ = 0;
    size_t next_lane_ = 0;  // within the lanes of a group
    size_t max_segments_ = 1;
    std::unordered_map<uint64_t, std::unique_ptr<Transfer>> transfers_;
    TransferLine line_;
    OpList outstanding_;
    std::string failure_;  // "" while usable
    bool blocked_ = false;
};

}  // namespace pdd
