#include "fabric/sender.h"

#include <rdma/fi_errno.h>

#include <algorithm>

#include "fabric/imm_table.h"

namespace pdd {
namespace {

constexpr int64_t kQuantum = 256 << 10;

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

Sender::Sender(uint32_t endpoint, WritePort& port, Window window, SenderContext shared)
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
    if (inside && !transfer.dropping()) return true;
    transfer.count(units, Fate::Failed);
    if (!inside) drop(transfer, inside.error().message);
    return false;
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
    transfer.add(WriteCursor(plan, 0, 0, 1), shared_.now);
    enqueue(transfer);
}

void Sender::enqueue(Transfer& transfer) {
    if (transfer.in_line) return;
    transfer.in_line = true;
    transfer.deficit = kQuantum;  // its first turn; it waits one round for it, not two
    line_.push_back(&transfer);
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
    end_if_done(transfer);
}

uint32_t Sender::pump(uint32_t budget) {
    blocked_ = false;
    uint32_t posted = 0;
    while (posted < budget && !line_.empty()) {
        Transfer& transfer = *line_.front();
        if (!transfer.has_work()) {
            transfer.in_line = false;
            line_.pop_front();
            continue;
        }
        if (transfer.deficit <= 0) {
            transfer.deficit += kQuantum;
            line_.pop_front();
            line_.push_back(&transfer);
            continue;
        }
        const WriteBatch batch = transfer.work().peek(port_.max_segments());
        if (!window_.admits(batch.nbytes)) break;
        post(transfer, batch, shared_.faults.next());
        if (blocked_) break;
        ++posted;
    }
    return posted;
}

void Sender::post(Transfer& transfer, const WriteBatch& batch, Fault fault) {
    WriteCursor& work = transfer.work();
    Op* op = nullptr;
    PostResult result{PostOutcome::Posted};
    if (fault == Fault::None || fault == Fault::Hold) {
        op = shared_.ops.take();
        op->transfer = &transfer;
        op->nbytes = batch.nbytes;
        op->units = batch.units;
        op->held = fault == Fault::Hold;
        result = port_.post(work.plan(), batch, imm_pack(transfer.key(), batch.units), op);
    }
    if (result.outcome == PostOutcome::Again) {
        shared_.ops.give(op);
        stat_add(shared_.stats.again);
        blocked_ = true;
        const TimePoint now = shared_.now;
        if (window_.ops() > 0 || blocked_since_ == TimePoint{})
            blocked_since_ = now;
        else if (now - blocked_since_ > kConnectDeadline)
            fail("fi_writemsg (" + port_.name() + "): no connection, no write was taken for 10 s");
        return;
    }

    blocked_since_ = {};
    shared_.faults.consume();
    transfer.deficit -= static_cast<int64_t>(batch.nbytes);
    work.advance(batch);
    transfer.pop_done_work();
    if (op != nullptr && result.outcome == PostOutcome::Posted) {
        outstanding_.push(op);
        window_.posted(batch.nbytes);
        transfer.posted(batch.nbytes);
        stat_add(shared_.stats.writes);
        stat_add(shared_.stats.bytes, batch.nbytes);
        stat_add(shared_.stats.units, batch.units);
        stat_add(shared_.stats.merged, batch.num_entries - 1);
        stat_add(shared_.stats.inflight_writes);
        stat_add(shared_.stats.inflight_bytes, batch.nbytes);
        return;
    }

    if (op != nullptr) shared_.ops.give(op);
    if (fault == Fault::Lost) {
        transfer.count(batch.units, Fate::Ok);
        end_if_done(transfer);
        return;
    }
    transfer.count(batch.units, Fate::Failed);
    stat_add(shared_.stats.errors);
    const std::string text = fault == Fault::Error ? "injected fault" : port_.error_text(result.code);
    const std::string reason =
        "fi_writemsg (" + port_.name() + ", key " + std::to_string(transfer.key()) + "): " + text;
    if (fault == Fault::None && fate_of(result.code) == Fate::Unknown)
        fail(reason);  // a refused post means the connection, not this write, is bad
    else
        drop(transfer, reason);
}

void Sender::complete(Op* op, int error) {
    if (op->held) return;
    Transfer& transfer = *op->transfer;
    const Fate fate = fate_of(error);
    outstanding_.remove(op);
    window_.completed(op->nbytes);
    stat_sub(shared_.stats.inflight_writes);
    stat_sub(shared_.stats.inflight_bytes, op->nbytes);
    stat_add(error == 0 ? shared_.stats.completions : shared_.stats.errors);
    transfer.settle(op->units, fate, shared_.now);
    shared_.ops.give(op);
    if (error == 0) {
        end_if_done(transfer);
        return;
    }
    const std::string reason =
        "write (" + port_.name() + ", key " + std::to_string(transfer.key()) + "): " + port_.error_text(error);
    if (fate == Fate::Unknown && failure_.empty())
        fail(reason);
    else
        drop(transfer, reason);
}

void Sender::fail(const std::string& reason) {
    if (!failure_.empty()) return;
    failure_ = reason;
    shared_.events.push({.kind = EventKind::EndpointFailed, .id = endpoint_, .text = reason});
    for (auto it = transfers_.begin(); it != transfers_.end();) drop(*(it++)->second, reason);
}

void Sender::abandon(const std::string& reason) {
    if (failure_.empty()) failure_ = reason;
    while (Op* op = outstanding_.front()) {
        outstanding_.remove(op);
        window_.completed(op->nbytes);
        stat_sub(shared_.stats.inflight_writes);
        stat_sub(shared_.stats.inflight_bytes, op->nbytes);
        op->transfer->settle(op->units, Fate::Unknown, shared_.now);
        shared_.ops.give(op);
    }
    for (auto it = transfers_.begin(); it != transfers_.end();) drop(*(it++)->second, failure_);
}

void Sender::end_if_done(Transfer& transfer) {
    if (!transfer.done()) return;
    const auto& counts = transfer.counts();
    shared_.events.push({.kind = EventKind::TransferDone,
                         .id = transfer.id(),
                         .ok = counts.ok,
                         .failed = counts.failed,
                         .unknown = counts.unknown,
                         .text = transfer.error(),
                         .traffic = transfer.traffic()});
    if (transfer.in_line) std::erase(line_, &transfer);
    stat_sub(shared_.stats.active_transfers);
    transfers_.erase(transfer.id());
}

}  // namespace pdd
