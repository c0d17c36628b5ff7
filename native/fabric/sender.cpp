#include "fabric/sender.h"

#include <rdma/fi_errno.h>

#include <algorithm>

#include "fabric/imm_table.h"

namespace pdd {
namespace {

constexpr int64_t kQuantum = 256 << 10;
// A full provider queue says so by a completion, this is for one that forgets; a lane that does not connect is asked
// ever more rarely, because each time costs a system call or a whole connection attempt.
constexpr auto kFullRetry = std::chrono::milliseconds(1);
constexpr Clock::duration kFirstRetry = std::chrono::microseconds(50);
constexpr Clock::duration kLastRetry = std::chrono::milliseconds(20);

// An error proves that a write did not land only when the target, or our own side, refused this very write. Everything
// else (a reset connection, a lost acknowledgement, an error nobody can name) leaves it open.
Fate fate_of(int error) {
    switch (error) {
        case 0:
            return Fate::Ok;
        case FI_EACCES:
        case FI_EPERM:
        case FI_EKEYREJECTED:
        case FI_ENOKEY:
        case FI_EMSGSIZE:
            return Fate::Failed;
        default:
            return Fate::Unknown;
    }
}

}  // namespace

Sender::Sender(uint32_t endpoint, WritePort& port, WindowSize window, SenderContext shared)
    : endpoint_(endpoint), port_(port), window_(window), shared_(shared) {}

Transfer* Sender::find(uint64_t id) {
    const auto found = transfers_.find(id);
    return found != transfers_.end() ? found->second.get() : nullptr;
}

void Sender::open(uint64_t id, uint32_t key) {
    auto transfer = std::make_unique<Transfer>(id, endpoint_, key);
    Transfer& opened = *transfer;
    transfers_.emplace(id, std::move(transfer));
    stat_add(shared_.stats.active_transfers);
    if (!failure_.empty()) drop(opened, failure_);
}

bool Sender::admit(Transfer& transfer, const WritePlan& plan, uint64_t units) {
    const Status inside = port_.check(plan);
    if (inside && lanes_.empty()) open_lanes();
    if (inside && !transfer.dropping()) return true;
    transfer.count(units, Fate::Failed);
    if (!inside) drop(transfer, inside.error().message);
    return false;
}

void Sender::open_lanes() {
    max_segments_ = port_.max_segments();
    for (const auto& lane : port_.lanes()) {
        const uint32_t ops = std::max(1u, std::min(window_.ops / lane.sharing, lane.max_ops));
        lanes_.push_back({lane.nic, lane.group, Window({ops, window_.bytes / lane.sharing})});
    }
    num_groups_ = lanes_.empty() ? 0 : lanes_.back().group + 1;
}

bool Sender::arm(Transfer& transfer, const WritePlan& plan, uint32_t begin, uint32_t end, uint64_t alarm) {
    const uint64_t units = plan.units(begin, end) * plan.geometry().num_layers;
    if (!admit(transfer, plan, units)) return false;
    transfer.arm(units, alarm);
    stat_add(shared_.stats.armed_plans);
    return true;
}

void Sender::fire(Transfer& transfer, WriteCursor work, bool last_of_plan) {
    if (transfer.dropping()) return;  // counted as failed when it was dropped
    transfer.fire(std::move(work), last_of_plan, shared_.now);
    if (last_of_plan) stat_sub(shared_.stats.armed_plans);
    enqueue(transfer);
}

void Sender::write(Transfer& transfer, const std::shared_ptr<const WritePlan>& plan) {
    if (!admit(transfer, *plan, plan->units(0, 1))) return;
    transfer.add(WriteCursor(plan, 0, 1, 0, 1), shared_.now);
    enqueue(transfer);
}

void Sender::enqueue(Transfer& transfer) {
    if (transfer.in_line) return;
    transfer.deficit = kQuantum;  // its first turn; it waits one round for it, not two
    line_.join(transfer);
}

void Sender::finish(Transfer& transfer) {
    transfer.finish();
    end_if_done(transfer);
}

void Sender::drop(Transfer& transfer, const std::string& reason) {
    if (!transfer.dropping()) {
        stat_sub(shared_.stats.armed_plans, transfer.armed_plans());
        const auto& alarms = transfer.alarms();
        shared_.dropped_alarms.insert(shared_.dropped_alarms.end(), alarms.begin(), alarms.end());
    }
    transfer.drop(reason);
    if (transfer.in_line) line_.leave(transfer);
    end_if_done(transfer);
}

uint32_t Sender::pump(uint32_t budget) {
    blocked_ = false;
    uint32_t posted = 0;
    while (posted < budget && !line_.empty()) {
        Transfer& transfer = line_.front();
        if (transfer.deficit <= 0) {
            transfer.deficit += kQuantum;
            line_.front_to_back();
            continue;
        }
        if (!post_next()) break;
        ++posted;
    }
    blocked_ = blocked_ && !line_.empty();
    return posted;
}

// A NIC that all peers fill together still takes one write of each: peers that are stuck can slow others, not stop
// them.
bool Sender::has_room(const Lane& lane, uint64_t nbytes) const {
    return lane.window.admits(nbytes) && (lane.window.ops() == 0 || shared_.nic_windows[lane.nic].admits(nbytes));
}

std::pair<size_t, size_t> Sender::lanes_for(const WritePlan& plan) const {
    if (num_groups_ == 1) return {0, lanes_.size()};
    const uint32_t group = port_.group_of(plan);
    const auto of = [group](const Lane& lane) { return lane.group == group; };
    const auto first = std::find_if(lanes_.begin(), lanes_.end(), of);
    const auto last = std::find_if_not(first, lanes_.end(), of);
    return {first - lanes_.begin(), last - lanes_.begin()};
}

bool Sender::post_next() {
    if (num_groups_ == 1) return post_front();
    // Each in line once at most: what one group does not take must not hold up another.
    for (size_t tried = transfers_.size(); tried > 0 && !line_.empty(); --tried) {
        if (post_front()) return true;
        if (!line_.empty()) line_.front_to_back();
    }
    return false;
}

// On the emptiest lane, equals in turn. Where a completion means that the peer has it, a slow lane so gets its part
// only; on tcp it means that the socket took it, and nothing was gained (DESIGN.md, log).
bool Sender::post_front() {
    Transfer& transfer = line_.front();
    const WriteBatch batch = transfer.work().peek(max_segments_);
    const auto [first, last] = lanes_for(transfer.work().plan());
    const size_t count = last - first;
    for (;;) {
        size_t best = lanes_.size();
        for (size_t tried = 0; tried < count; ++tried) {
            const size_t lane = first + (next_lane_ + tried) % count;
            if (shared_.now < lanes_[lane].retry_at) {
                blocked_ = true;
            } else if (has_room(lanes_[lane], batch.nbytes)) {
                if (best == lanes_.size() || lanes_[lane].window.bytes() < lanes_[best].window.bytes()) best = lane;
            }
        }
        if (best == lanes_.size()) return false;
        next_lane_ = best - first + 1;
        if (post(best, transfer, batch)) return true;
        if (line_.empty()) return false;  // given up
    }
}

void Sender::refused_for_now(size_t index) {
    Lane& lane = lanes_[index];
    stat_add(shared_.stats.again);
    blocked_ = true;
    if (lane.window.ops() > 0) {
        lane.retry_at = shared_.now + kFullRetry;
        return;
    }
    if (!lane.refused_since) lane.refused_since = shared_.now;
    lane.patience = std::clamp(2 * lane.patience, kFirstRetry, kLastRetry);
    lane.retry_at = shared_.now + lane.patience;
    const bool given_up = std::all_of(lanes_.begin(), lanes_.end(), [this, group = lane.group](const Lane& one) {
        return one.group != group || (one.refused_since && shared_.now - *one.refused_since > kConnectDeadline);
    });
    if (given_up) fail("fi_writemsg (" + port_.name(index) + "): no connection, no write was taken for 10 s");
}

bool Sender::post(size_t index, Transfer& transfer, const WriteBatch& batch) {
    Lane& lane = lanes_[index];
    const Fault fault = shared_.faults.next(lane.nic);
    WriteCursor& work = transfer.work();
    Op* op = nullptr;
    PostResult result{fault == Fault::Again ? PostOutcome::Again : PostOutcome::Posted};
    if (fault == Fault::None || fault == Fault::Hold) {
        op = shared_.ops.take();
        op->transfer = &transfer;
        op->nbytes = batch.nbytes;
        op->units = batch.units;
        op->lane = static_cast<uint32_t>(index);
        op->record = work.record();
        op->held = fault == Fault::Hold;
        result = port_.post(index, work.plan(), batch, imm_pack(transfer.key(), batch.units), op);
    }
    if (result.outcome == PostOutcome::Again) {
        if (op != nullptr) shared_.ops.give(op);
        if (fault == Fault::Again) shared_.faults.consume(lane.nic);
        refused_for_now(index);
        return false;
    }

    lane.patience = {};
    lane.refused_since.reset();
    shared_.faults.consume(lane.nic);
    transfer.deficit -= static_cast<int64_t>(batch.nbytes);
    const uint64_t record = work.record();
    work.advance(batch);
    transfer.pop_done_work();
    if (!transfer.has_work()) line_.leave(transfer);
    if (op != nullptr && result.outcome == PostOutcome::Posted) {
        outstanding_.push(op);
        lane.window.posted(batch.nbytes);
        shared_.nic_windows[lane.nic].posted(batch.nbytes);
        transfer.posted(batch.nbytes);
        shared_.flight.posted(record, lane.nic, batch.units, shared_.now);
        stat_add(shared_.stats.writes);
        stat_add(shared_.stats.bytes, batch.nbytes);
        stat_add(shared_.stats.units, batch.units);
        stat_add(shared_.stats.merged, batch.num_entries - 1);
        stat_add(shared_.stats.inflight_writes);
        stat_add(shared_.stats.inflight_bytes, batch.nbytes);
        return true;
    }

    if (op != nullptr) shared_.ops.give(op);
    if (fault == Fault::Lost) {
        transfer.count(batch.units, Fate::Ok);
        end_if_done(transfer);
        return true;
    }
    transfer.count(batch.units, Fate::Failed);
    shared_.flight.posted(record, lane.nic, batch.units, shared_.now);
    shared_.flight.ended(record, lane.nic, batch.units, Fate::Failed, shared_.now);
    stat_add(shared_.stats.errors);
    const std::string text = fault == Fault::Error ? "injected fault" : port_.error_text(result.code);
    const std::string reason =
        "fi_writemsg (" + port_.name(index) + ", key " + std::to_string(transfer.key()) + "): " + text;
    if (fault == Fault::None && fate_of(result.code) == Fate::Unknown)
        fail(reason);  // a refused post means the connection, not this write, is bad
    else
        drop(transfer, reason);
    return true;
}

void Sender::complete(Op* op, int error) {
    if (op->held) return;
    if (op->transfer == nullptr || op->transfer->endpoint() != endpoint_) {  // it was told before, and given back
        stat_add(shared_.stats.errors);
        fail("endpoint " + std::to_string(endpoint_) + ": the provider reported a write twice");
        return;
    }
    Transfer& transfer = *op->transfer;
    const Fate fate = fate_of(error);
    const size_t lane = op->lane;
    lanes_[lane].retry_at = {};
    stat_add(error == 0 ? shared_.stats.completions : shared_.stats.errors);
    settle(op, fate);
    if (error == 0) {
        end_if_done(transfer);
        return;
    }
    const std::string reason =
        "write (" + port_.name(lane) + ", key " + std::to_string(transfer.key()) + "): " + port_.error_text(error);
    if (fate == Fate::Unknown && failure_.empty())
        fail(reason);
    else
        drop(transfer, reason);
}

void Sender::settle(Op* op, Fate fate) {
    Lane& lane = lanes_[op->lane];
    outstanding_.remove(op);
    lane.window.completed(op->nbytes);
    shared_.nic_windows[lane.nic].completed(op->nbytes);
    stat_sub(shared_.stats.inflight_writes);
    stat_sub(shared_.stats.inflight_bytes, op->nbytes);
    op->transfer->settle(op->units, fate, shared_.now);
    shared_.flight.ended(op->record, lane.nic, op->units, fate, shared_.now);
    shared_.ops.give(op);
}

void Sender::add_in_flight(uint64_t transfer, std::vector<FlightWrites>& found) const {
    for (const Op* op = outstanding_.front(); op != nullptr; op = op->next)
        if (transfer == 0 || op->transfer->id() == transfer)
            found.push_back({op->record, lanes_[op->lane].nic, op->units});
}

void Sender::fail(const std::string& reason) {
    if (!failure_.empty()) return;
    failure_ = reason;
    shared_.events.push({.kind = EventKind::EndpointFailed, .id = endpoint_, .text = reason});
    for (auto it = transfers_.begin(); it != transfers_.end();) drop(*(it++)->second, reason);
}

void Sender::abandon(const std::string& reason) {
    if (failure_.empty()) failure_ = reason;
    while (Op* op = outstanding_.front()) settle(op, Fate::Unknown);
    for (auto it = transfers_.begin(); it != transfers_.end();) drop(*(it++)->second, failure_);
}

void Sender::end_if_done(Transfer& transfer) {
    if (!transfer.done()) return;
    const auto& counts = transfer.counts();
    stat_sub(shared_.stats.active_transfers);  // before the event: whoever hears it may look at once
    shared_.events.push({.kind = EventKind::TransferDone,
                         .id = transfer.id(),
                         .ok = counts.ok,
                         .failed = counts.failed,
                         .unknown = counts.unknown,
                         .text = transfer.error(),
                         .traffic = transfer.traffic()});
    transfers_.erase(transfer.id());
}

}  // namespace pdd
