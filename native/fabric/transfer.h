// Transfer: all writes of one attempt, and what became of each unit. Owner: the worker's thread.
//
//   Open -> (finish) -> Finishing -> Done          every armed plan fired, every write terminal
//     `-> (cancel, or a write failed) -> Dropping -> Done     nothing more is posted; what was posted is awaited
//
// Every unit that was armed or written ends in exactly one of:
//   ok       its write completed here (which is not a proof that it landed: only the peer's count is)
//   failed   it was never posted, or the target certainly refused it: it did not land and will not
//   unknown  it was posted and its fate is not known: it may have landed, or may yet land, until the peer fences
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "fabric/events.h"
#include "fabric/flight.h"
#include "fabric/write_plan.h"
#include "util/clock.h"

namespace pdd {

class Transfer {
  public:
    struct Counts {
        uint64_t ok = 0;
        uint64_t failed = 0;
        uint64_t unknown = 0;
    };

    Transfer(uint64_t id, uint32_t endpoint, uint32_t key) : id_(id), endpoint_(endpoint), key_(key) {}
    Transfer(const Transfer&) = delete;
    Transfer& operator=(const Transfer&) = delete;

    uint64_t id() const { return id_; }
    uint32_t endpoint() const { return endpoint_; }
    uint32_t key() const { return key_; }
    const Counts& counts() const { return counts_; }
    const std::string& error() const { return error_; }
    const Traffic& traffic() const { return traffic_; }
    bool dropping() const { return state_ == State::Dropping; }

    // -- work: armed (units known, not yet to be posted) -> queued -> posted -> settled
    void arm(uint64_t units, uint64_t alarm) {
        armed_plans_ += 1;
        armed_units_ += units;
        alarms_.push_back(alarm);
    }
    void fire(WriteCursor work, bool last_of_plan, TimePoint now) {
        armed_units_ -= work.units_left();
        armed_plans_ -= last_of_plan ? 1 : 0;
        add(std::move(work), now);
    }
    void add(WriteCursor work, TimePoint now) {
        last_added_ = now;
        if (!busy()) busy_since_ = last_added_;
        queue_.push_back(std::move(work));
    }
    uint32_t armed_plans() const { return armed_plans_; }
    // The alarms of its plans, those that have fired included.
    const std::vector<uint64_t>& alarms() const { return alarms_; }
    bool has_work() const { return first_ < queue_.size(); }
    WriteCursor& work() { return queue_[first_]; }
    const WriteCursor* place_of_work() const { return queue_.data() + first_; }
    void pop_done_work() {
        if (!work().done()) return;
        if (++first_ < kKeptDone) return;
        queue_.erase(queue_.begin(), queue_.begin() + first_);
        first_ = 0;
    }
    void posted(uint64_t nbytes) {
        inflight_ += 1;
        traffic_.writes += 1;
        traffic_.bytes += nbytes;
    }
    void settle(uint64_t units, Fate fate, TimePoint now) {
        inflight_ -= 1;
        count(units, fate);
        if (busy()) return;
        traffic_.busy_ns += ns(now - busy_since_);
        traffic_.exposed_ns = ns(now - last_added_);
    }
    // Units that will never be posted.
    void count(uint64_t units, Fate fate) {
        (fate == Fate::Ok ? counts_.ok : fate == Fate::Failed ? counts_.failed : counts_.unknown) += units;
    }

    // -- ends
    void finish() {
        if (state_ == State::Open) state_ = State::Finishing;
    }
    // Nothing more is posted; what was queued or armed counts as failed. The first reason stays.
    void drop(const std::string& reason) {
        if (error_.empty()) error_ = reason;
        if (dropping()) return;
        state_ = State::Dropping;
        for (const auto& work : queue_) count(work.units_left(), Fate::Failed);
        queue_.clear();
        first_ = 0;
        count(armed_units_, Fate::Failed);
        armed_units_ = 0;
        armed_plans_ = 0;
    }
    bool done() const { return inflight_ == 0 && !has_work() && armed_plans_ == 0 && state_ != State::Open; }

    // -- of the fair queue
    int64_t deficit = 0;
    bool in_line = false;
    Transfer* ahead = nullptr;
    Transfer* behind = nullptr;
    const void* upcoming = nullptr;  // what its next turn reads first, fetched during the turn before

  private:
    enum class State { Open, Finishing, Dropping };
    static constexpr size_t kKeptDone = 64;

    bool busy() const { return inflight_ > 0 || has_work(); }
    static uint64_t ns(Clock::duration span) {
        return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(span).count());
    }

    uint64_t id_;
    uint32_t endpoint_;
    uint32_t key_;
    State state_ = State::Open;
    uint32_t inflight_ = 0;
    uint32_t armed_plans_ = 0;
    uint64_t armed_units_ = 0;
    std::vector<WriteCursor> queue_;  // done ones stay until there are kKeptDone of them, so that popping is cheap
    size_t first_ = 0;
    std::vector<uint64_t> alarms_;
    Counts counts_;
    Traffic traffic_;
    TimePoint busy_since_;
    TimePoint last_added_;
    std::string error_;
};

// Transfers in line, linked through themselves: joining, leaving and going to the back cost the same for any number.
class TransferLine {
  public:
    bool empty() const { return head_ == nullptr; }
    Transfer& front() const { return *head_; }
    void join(Transfer& transfer) {
        transfer.upcoming = transfer.work().place();
        transfer.in_line = true;
        transfer.ahead = tail_;
        transfer.behind = nullptr;
        (tail_ != nullptr ? tail_->behind : head_) = &transfer;
        tail_ = &transfer;
    }
    void leave(Transfer& transfer) {
        transfer.in_line = false;
        (transfer.ahead != nullptr ? transfer.ahead->behind : head_) = transfer.behind;
        (transfer.behind != nullptr ? transfer.behind->ahead : tail_) = transfer.ahead;
        if (transfer.ahead == nullptr && head_ != nullptr) look_ahead();
    }
    void front_to_back() {
        Transfer& transfer = front();
        leave(transfer);
        join(transfer);
    }

  private:
    // With thousands in line none of what a turn touches is in a cache any more: it is fetched two turns ahead, and the
    // entries one, which are two lines: five of 14 bytes for 256 KiB of 64 KiB pages.
    void look_ahead() const {
        const Transfer* next = head_->behind;
        if (next == nullptr) return;
        __builtin_prefetch(next->place_of_work());
        __builtin_prefetch(next->upcoming);
        __builtin_prefetch(static_cast<const char*>(next->upcoming) + 64);
        __builtin_prefetch(next->behind);
        __builtin_prefetch(&next->behind->deficit);
    }

    Transfer* head_ = nullptr;
    Transfer* tail_ = nullptr;
};

}  // namespace pdd
