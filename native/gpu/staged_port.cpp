#include "gpu/staged_port.h"

#include <rdma/fi_errno.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "util/clock.h"

namespace pdd {
namespace {

constexpr uint32_t kCredit = 1u << 31;
constexpr uint64_t kSink = 0;     // in the landing block: where credits of the peer land
constexpr uint64_t kSource = 64;  // and where ours come from
constexpr uint64_t kCreditBytes = 8;
constexpr uint32_t kMagic = 0x53444450;                  // "PDDS"
constexpr auto kCopyDeadline = std::chrono::seconds(2);  // a slot is copied within a millisecond

// Both ends are little-endian, as every machine with these GPUs is.
struct Header {
    struct Piece {
        uint64_t to;  // offset in the region
        uint64_t nbytes;
    };
    uint32_t magic;
    uint32_t imm;
    uint64_t key;  // of the region
    uint64_t num_pieces;
    Piece pieces[kMaxWriteSegments];
};
static_assert(sizeof(Header) <= kStagedHeaderBytes);

// What follows the inner port's address in ours.
struct Tail {
    uint64_t key;
    uint64_t base;
    uint64_t slots;
    uint64_t slot_bytes;
};

uint64_t slot_offset(uint32_t slot) {
    return kStagedHeaderBytes + slot * kStagedSlotBytes;
}

}  // namespace

Result<std::unique_ptr<StagedPort>> StagedPort::open(StagedNic& nic) {
    // Each slot has a write and a credit in flight, in both directions.
    auto inner = nic.inner().open_port(4 * kStagedSlots);
    if (!inner) return inner.error();
    std::unique_ptr<StagedPort> port(new StagedPort(nic, std::move(*inner)));
    if (Status taken = port->take_blocks(); !taken) return taken.error();
    return port;
}

Status StagedPort::take_blocks() {
    auto block = nic_.pool().take();
    if (!block) return block.error();
    landing_block_ = *block;
    std::memset(landing_block_, 0, kStagedHeaderBytes);
    auto memory = nic_.inner().register_memory(landing_block_, kStagedBlockBytes, Access::Both);
    if (!memory) return memory.error();
    landing_memory_ = std::move(*memory);
    for (uint32_t slot = 0; slot < kStagedSlots; ++slot) {
        auto mark = CopyMark::make(nic_.device());
        if (!mark) return mark.error();
        incoming_.emplace_back(std::move(*mark));
        incoming_.back().credit.lane = slot;
    }
    const Tail tail{landing_memory_->key,
                    nic_.inner().caps().virtual_addressing ? reinterpret_cast<uintptr_t>(landing_block_) : 0,
                    kStagedSlots, kStagedSlotBytes};
    address_ = inner_->address();
    const auto* bytes = reinterpret_cast<const uint8_t*>(&tail);
    address_.insert(address_.end(), bytes, bytes + sizeof tail);
    return {};
}

Status StagedPort::open_send_block() {
    auto block = nic_.pool().take();
    if (!block) return block.error();
    send_block_ = *block;
    auto memory = nic_.inner().register_memory(send_block_, kStagedBlockBytes, Access::Local);
    if (!memory) return memory.error();
    send_memory_ = std::move(*memory);
    for (uint32_t slot = 0; slot < kStagedSlots; ++slot) {
        auto mark = CopyMark::make(nic_.device());
        if (!mark) return mark.error();
        outgoing_.emplace_back(std::move(*mark));
        outgoing_.back().inner.lane = slot;
    }
    return {};
}

Result<uint64_t> StagedPort::resolve(std::span<const uint8_t> address) {
    if (remote_)
        return Error{"staged copies between GPUs need as many NICs on the peer as here: NIC " + nic_.name() +
                         " would be shared by two of the peer's",
                     FI_EINVAL};
    if (address.size() != address_.size()) return Error{"staged copies: a malformed address", FI_EINVAL};
    Tail tail;
    std::memcpy(&tail, address.data() + address.size() - sizeof tail, sizeof tail);
    if (tail.slots != kStagedSlots || tail.slot_bytes != kStagedSlotBytes)
        return Error{"staged copies: the peer has " + std::to_string(tail.slots) + " slots of " +
                         std::to_string(tail.slot_bytes) + " bytes, this node " + std::to_string(kStagedSlots) +
                         " of " + std::to_string(kStagedSlotBytes) + "; run one version of pdd on both",
                     FI_EINVAL};
    auto peer = inner_->resolve(address.first(address.size() - sizeof tail));
    if (!peer) return peer.error();
    remote_ = Remote{*peer, tail.key, tail.base};
    return uint64_t{0};
}

// -- sending ----------------------------------------------------------------------------------------------------------
PostResult StagedPort::post(const NicWrite& write, Op* op) {
    if (closed_ || failed_ || !remote_) return {PostOutcome::Refused, FI_ENOTCONN};
    if (send_block_ == nullptr) {
        if (Status opened = open_send_block(); !opened) return {PostOutcome::Refused, opened.error().code};
    }
    const auto free = std::find_if(outgoing_.begin(), outgoing_.end(),
                                   [](const Outgoing& one) { return one.state == Outgoing::State::Free; });
    if (free == outgoing_.end()) return {PostOutcome::Again};
    const auto slot = static_cast<uint32_t>(free - outgoing_.begin());

    Header header{kMagic, write.imm, write.key, write.num_pieces, {}};
    uint64_t nbytes = 0;
    for (uint32_t i = 0; i < write.num_pieces; ++i) {
        header.pieces[i] = {write.pieces[i].to, write.pieces[i].nbytes};
        nbytes += write.pieces[i].nbytes;
    }
    if (nbytes > kMaxMergedBytes) return {PostOutcome::Refused, FI_EMSGSIZE};
    uint8_t* place = send_block_ + slot_offset(slot);
    std::memcpy(place, &header, sizeof header);
    uint8_t* bytes = place + kStagedHeaderBytes;
    Status copied;
    for (uint32_t i = 0; i < write.num_pieces && copied; ++i) {
        copied = nic_.out().to_host(bytes, reinterpret_cast<uintptr_t>(write.pieces[i].from), write.pieces[i].nbytes);
        bytes += write.pieces[i].nbytes;
    }
    if (copied) copied = nic_.out().mark(free->mark);
    if (!copied) {
        failed_ = broken_ = true;  // a part of it may be on its way, with no mark behind it
        return {PostOutcome::Refused, FI_EIO};
    }
    free->state = Outgoing::State::Copying;
    free->op = op;
    free->nbytes = kStagedHeaderBytes + nbytes;
    free->completed = free->credited = false;
    copying_.push_back(slot);
    return {PostOutcome::Posted};
}

uint32_t StagedPort::step_outgoing() {
    uint32_t moved = 0;
    while (!copying_.empty()) {
        const uint32_t slot = copying_.front();
        const auto state = outgoing_[slot].mark.state();
        if (state == CopyMark::State::Pending) break;
        copying_.pop_front();
        ++moved;
        if (state == CopyMark::State::Passed) {
            outgoing_[slot].state = Outgoing::State::Copied;
            copied_.push_back(slot);
        } else {
            fail("copying out of GPU " + nic_.device()->pci_address() + ": the device failed");
            finish(slot, FI_EIO);
        }
    }
    while (!copied_.empty() && !failed_) {
        const uint32_t slot = copied_.front();
        post_slot(slot);
        if (outgoing_[slot].state == Outgoing::State::Copied) break;  // the wire takes nothing now
        copied_.pop_front();
        ++moved;
    }
    return moved;
}

void StagedPort::post_slot(uint32_t slot) {
    Outgoing& out = outgoing_[slot];
    NicWrite write;
    write.pieces[0] = {send_block_ + slot_offset(slot), remote_->base + slot_offset(slot), out.nbytes};
    write.num_pieces = 1;
    write.imm = slot;
    write.descriptor = send_memory_->descriptor;
    write.key = remote_->key;
    write.peer = remote_->peer;
    const PostResult result = inner_->post(write, &out.inner);
    if (result.outcome == PostOutcome::Posted) out.state = Outgoing::State::Posted;
    if (result.outcome == PostOutcome::Refused) finish(slot, result.code);
}

void StagedPort::credited(uint32_t slot) {
    if (slot >= outgoing_.size() || outgoing_[slot].state != Outgoing::State::Posted || outgoing_[slot].credited) {
        fail("the peer gave a slot back that it does not have");
        return;
    }
    outgoing_[slot].credited = true;
    if (outgoing_[slot].completed) finish(slot, 0);
}

void StagedPort::finish(uint32_t slot, int error) {
    Outgoing& out = outgoing_[slot];
    out.state = Outgoing::State::Free;
    outer_->on_write(std::exchange(out.op, nullptr), error);
    if (error != 0) fail("writing to the peer's slot: " + nic_.error_text(error));
}

// -- receiving --------------------------------------------------------------------------------------------------------
void StagedPort::land(uint32_t slot) {
    if (slot >= incoming_.size() || incoming_[slot].busy) {
        fail("the peer wrote to a slot that it does not have");
        return;
    }
    Incoming& in = incoming_[slot];
    const uint8_t* place = landing_block_ + slot_offset(slot);
    Header header;  // a copy: the peer can write to the slot whenever it likes
    std::memcpy(&header, place, sizeof header);
    const StagedNic::Memory* memory = nic_.find(header.key);
    if (header.magic != kMagic || memory == nullptr || header.num_pieces > kMaxWriteSegments) {
        fail("the peer wrote something else than a staged write, or to a region that is gone");
        return;
    }
    uint64_t room = kMaxMergedBytes;
    for (uint64_t i = 0; i < header.num_pieces; ++i) {
        const auto& piece = header.pieces[i];
        if (piece.nbytes > room || piece.to > memory->nbytes || piece.nbytes > memory->nbytes - piece.to) {
            fail("the peer wrote " + std::to_string(piece.nbytes) + " bytes to offset " + std::to_string(piece.to) +
                 " of a region of " + std::to_string(memory->nbytes));
            return;
        }
        room -= piece.nbytes;
    }
    in.busy = true;
    const uint8_t* bytes = place + kStagedHeaderBytes;
    Status copied;
    for (uint64_t i = 0; i < header.num_pieces && copied; ++i) {
        copied = nic_.in().to_device(memory->base + header.pieces[i].to, bytes, header.pieces[i].nbytes);
        bytes += header.pieces[i].nbytes;
    }
    if (copied) copied = nic_.in().mark(in.mark);
    if (!copied) {
        fail("copying into GPU " + nic_.device()->pci_address() + ": " + copied.error().message);
        broken_ = true;  // a part of it may be on its way, with no mark behind it
        return;
    }
    in.imm = header.imm;
    landing_.push_back(slot);
}

uint32_t StagedPort::step_incoming() {
    uint32_t moved = 0;
    while (!landing_.empty() && !broken_) {
        const uint32_t slot = landing_.front();
        const auto state = incoming_[slot].mark.state();
        if (state == CopyMark::State::Pending) break;
        if (state == CopyMark::State::Broken) {
            broken_ = true;
            fail("copying into GPU " + nic_.device()->pci_address() + ": the device failed");
            break;
        }
        landing_.pop_front();
        ++moved;
        outer_->on_immediate(incoming_[slot].imm);
        credits_.push_back(slot);
    }
    while (!credits_.empty() && !failed_ && post_credit(credits_.front())) {
        credits_.pop_front();
        ++moved;
    }
    return moved;
}

// False: to be tried again.
bool StagedPort::post_credit(uint32_t slot) {
    Incoming& in = incoming_[slot];
    if (!remote_ || in.credit_in_flight) return false;
    NicWrite write;
    write.pieces[0] = {landing_block_ + kSource, remote_->base + kSink, kCreditBytes};
    write.num_pieces = 1;
    write.imm = kCredit | slot;
    write.descriptor = landing_memory_->descriptor;
    write.key = remote_->key;
    write.peer = remote_->peer;
    in.busy = false;  // before the post: the slot's next write may overtake the credit's completion
    const PostResult result = inner_->post(write, &in.credit);
    if (result.outcome == PostOutcome::Again) {
        in.busy = true;
        return false;
    }
    if (result.outcome == PostOutcome::Refused)
        fail("giving a slot back: " + nic_.error_text(result.code));
    else
        in.credit_in_flight = true;
    return true;
}

// -- both -------------------------------------------------------------------------------------------------------------
uint32_t StagedPort::poll(CompletionSink& sink, uint32_t budget) {
    if (closed_) return 0;
    outer_ = &sink;
    uint32_t moved = inner_->poll(*this, budget);
    moved += step_outgoing();
    moved += step_incoming();
    outer_ = nullptr;
    return moved;
}

// Nothing tells the end of a copy but asking: until then the thread gives its turn away instead of sleeping.
bool StagedPort::may_wait() {
    if (copying_.empty() && landing_.empty()) return inner_->may_wait();
    ::sched_yield();
    return false;
}

void StagedPort::on_write(Op* op, int error) {
    const uint32_t slot = op->lane;
    if (op == &incoming_[slot].credit) {
        incoming_[slot].credit_in_flight = false;
        if (error != 0) fail("giving a slot back: " + nic_.error_text(error));
        return;
    }
    Outgoing& out = outgoing_[slot];
    if (out.state != Outgoing::State::Posted) return;
    out.completed = true;
    if (error != 0 || out.credited) finish(slot, error);
}

void StagedPort::on_immediate(uint32_t imm) {
    if (failed_) return;
    if ((imm & kCredit) != 0)
        credited(imm & ~kCredit);
    else
        land(imm);
}

void StagedPort::fail(const std::string& message) {
    if (failed_) return;
    failed_ = true;
    outer_->on_error("staged copies (NIC " + nic_.name() + "): " + message);
}

// Bounded: a device that hangs must not stop the other peers of this worker for long.
Status StagedPort::wait_for_copies() {
    const auto deadline = Clock::now() + kCopyDeadline;
    const auto state = [this](std::deque<uint32_t>& slots, const auto& marks) {
        while (!slots.empty()) {
            const auto state = marks(slots.front()).state();
            if (state != CopyMark::State::Passed) return state;
            slots.pop_front();
        }
        return CopyMark::State::Passed;
    };
    for (;;) {
        const auto out = state(copying_, [this](uint32_t slot) -> const CopyMark& { return outgoing_[slot].mark; });
        const auto in = state(landing_, [this](uint32_t slot) -> const CopyMark& { return incoming_[slot].mark; });
        if (broken_ || out == CopyMark::State::Broken || in == CopyMark::State::Broken)
            return Error{"GPU " + nic_.device()->pci_address() + " failed with copies in flight", FI_EIO};
        if (out == CopyMark::State::Passed && in == CopyMark::State::Passed) return {};
        if (Clock::now() > deadline)
            return Error{"copies of GPU " + nic_.device()->pci_address() + " have not ended within 2 s", FI_ETIMEDOUT};
        ::sched_yield();
    }
}

Status StagedPort::close() {
    closed_ = true;
    Status fenced = inner_->close();
    Status ended = wait_for_copies();
    if (!fenced || !ended) {  // whatever may still be written to or read from stays as it is
        landing_block_ = send_block_ = nullptr;
        [[maybe_unused]] auto* leaked_landing = landing_memory_.release();
        [[maybe_unused]] auto* leaked_send = send_memory_.release();
        return fenced ? ended : fenced;
    }
    return {};
}

StagedPort::~StagedPort() {
    if (!closed_) {
        const Status closed = close();
        if (!closed) return;
    }
    inner_.reset();
    landing_memory_.reset();
    send_memory_.reset();
    if (landing_block_ != nullptr) nic_.pool().give(landing_block_);
    if (send_block_ != nullptr) nic_.pool().give(send_block_);
}

}  // namespace pdd
