// StagedPort: one peer's endpoint on a StagedNic. Writes travel in slots of pinned host memory, a slot at a time.
//
// Slot i here pairs with slot i of the peer. A write takes a free one and is copied out of the device; once that copy
// has ended, header and bytes go to the peer's slot as one write of the inner NIC, whose immediate is the slot's
// number. The peer checks the header, copies into its device, and only when that copy has ended counts the write's own
// immediate and gives the slot back: a write of eight bytes to our sink, whose immediate is the number with the highest
// bit set. So a completion here says that the bytes are in the peer's device, and no immediate is counted before they
// are.
//
// One failure of the inner NIC ends it all: nobody knows any more what the peer does with its slot, and a later post
// might reach whoever has the address by then.
//
// Page safety: after close() the inner port is closed, so nothing more arrives, and no copy of this port runs: it waits
// for those that had begun. Where that wait finds no end, or the device failed, the fence does not stand, and says so;
// the slots are then never used again.
//
// Not for peers with another number of NICs: two of theirs would share our slots.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "gpu/staged_nic.h"

namespace pdd {

class StagedPort final : public NicPort, private CompletionSink {
  public:
    static Result<std::unique_ptr<StagedPort>> open(StagedNic& nic);
    ~StagedPort() override;

    // -- NicPort
    const std::vector<uint8_t>& address() const override { return address_; }
    Result<uint64_t> resolve(std::span<const uint8_t> address) override;
    PostResult post(const NicWrite& write, Op* op) override;
    uint32_t poll(CompletionSink& sink, uint32_t budget) override;
    Status close() override;
    int wait_fd() const override { return inner_->wait_fd(); }
    bool may_wait() override;
    void take_back_signal() override { inner_->take_back_signal(); }

  private:
    struct Outgoing {
        enum class State { Free, Copying, Copied, Posted };
        explicit Outgoing(CopyMark mark) : mark(std::move(mark)) {}
        State state = State::Free;
        CopyMark mark;
        Op* op = nullptr;  // whose completion is owed
        Op inner;
        uint64_t nbytes = 0;     // with the header
        bool completed = false;  // the inner NIC has done with our slot
        bool credited = false;   // the peer has done with its slot
    };
    struct Incoming {
        explicit Incoming(CopyMark mark) : mark(std::move(mark)) {}
        CopyMark mark;
        bool busy = false;  // from arrival to the posting of its credit
        uint32_t imm = 0;   // to be counted when the copy has ended
        bool credit_in_flight = false;
        Op credit;
    };
    struct Remote {  // the peer's slots, as its address says
        uint64_t peer;
        uint64_t key;
        uint64_t base;
    };

    StagedPort(StagedNic& nic, std::unique_ptr<NicPort> inner) : nic_(nic), inner_(std::move(inner)) {}
    Status take_blocks();
    Status open_send_block();
    // -- CompletionSink, of the inner port
    void on_write(Op* op, int error) override;
    void on_immediate(uint32_t imm) override;
    void on_error(const std::string& message) override { fail(message); }

    void land(uint32_t slot);
    void credited(uint32_t slot);
    void finish(uint32_t slot, int error);
    uint32_t step_outgoing();
    uint32_t step_incoming();
    void post_slot(uint32_t slot);
    bool post_credit(uint32_t slot);
    void fail(const std::string& message);
    Status wait_for_copies();

    StagedNic& nic_;
    std::unique_ptr<NicPort> inner_;
    std::vector<uint8_t> address_;
    // Of peers' writes: control bytes, then slots. And of ours; taken with the first write.
    uint8_t* landing_block_ = nullptr;
    uint8_t* send_block_ = nullptr;
    std::unique_ptr<NicMemory> landing_memory_;
    std::unique_ptr<NicMemory> send_memory_;
    std::vector<Outgoing> outgoing_;  // by slot
    std::vector<Incoming> incoming_;  // by slot
    std::deque<uint32_t> copying_;    // slots being copied out, in the stream's order
    std::deque<uint32_t> copied_;     // to be posted
    std::deque<uint32_t> landing_;    // slots being copied in, in the stream's order
    std::deque<uint32_t> credits_;    // to be posted
    std::optional<Remote> remote_;
    CompletionSink* outer_ = nullptr;  // of the poll that runs
    bool failed_ = false;              // told; nothing more is sent or taken
    bool broken_ = false;              // a copy's end cannot be known any more
    bool closed_ = false;
};

}  // namespace pdd
