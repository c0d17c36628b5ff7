// Sender: the writes of one endpoint, from all its transfers, posted fairly inside a window. Owner: the worker's
// thread.
//
// Transfers with work stand in line; each turn at the front is worth 256 KiB (deficit round robin), so a prompt of 128k
// tokens can not starve a short one. A write with an unknown fate, or a reset connection, fails the endpoint as a
// whole: nothing is ever posted on it again, because the next post would silently reconnect to whoever owns the address
// by then.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>

#include "fabric/events.h"
#include "fabric/faults.h"
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
    virtual size_t max_segments() const = 0;
    // Whether every layer of the plan stays inside both regions. Asked before anything of it is posted.
    virtual Status check(const WritePlan& plan) const = 0;
    virtual PostResult post(const WritePlan& plan, const WriteBatch& batch, uint32_t imm, Op* op) = 0;
    // "provider tcp, endpoint 3 to 10.0.0.2:4711" and the text of an errno, for messages.
    virtual std::string name() const = 0;
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
    const TimePoint& now;  // of the worker's turn
};

class Sender {
  public:
    // A peer that does not let the first write in for this long is given up.
    static constexpr auto kConnectDeadline = std::chrono::seconds(10);

    Sender(uint32_t endpoint, WritePort& port, Window window, SenderContext shared);

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

    bool idle() const { return line_.empty() && window_.ops() == 0; }
    bool blocked() const { return blocked_; }  // the last pump ended on "try again"

  private:
    bool admit(Transfer& transfer, const WritePlan& plan, uint64_t units);
    void enqueue(Transfer& transfer);
    void post(Transfer& transfer, const WriteBatch& batch, Fault fault);
    void end_if_done(Transfer& transfer);

    uint32_t endpoint_;
    WritePort& port_;
    Window window_;
    SenderContext shared_;
    std::unordered_map<uint64_t, std::unique_ptr<Transfer>> transfers_;
    std::deque<Transfer*> line_;
    OpList outstanding_;
    std::string failure_;  // "" while usable
    bool blocked_ = false;
    TimePoint blocked_since_{};
};

}  // namespace pdd
