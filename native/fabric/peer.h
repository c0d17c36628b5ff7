// Peer: one endpoint with its sender; turns completions into counts and events. Owner: the worker's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "fabric/endpoint.h"
#include "fabric/imm_table.h"
#include "fabric/sender.h"

namespace pdd {

class Peer final : public CompletionSink {
  public:
    Peer(uint32_t id, std::unique_ptr<Endpoint> endpoint, WindowSize window, SenderContext shared, ImmTable& imms)
        : id_(id),
          endpoint_(std::move(endpoint)),
          sender_(id, *endpoint_, window, shared),
          shared_(shared),
          imms_(imms) {}

    Endpoint& endpoint() { return *endpoint_; }
    Sender& sender() { return sender_; }
    const Sender& sender() const { return sender_; }

    // Reads completions; returns how many there were.
    uint32_t poll();
    // Posts what the windows admit, up to a budget that keeps peers even; returns how many writes.
    uint32_t pump();
    // The fence. Tells TRANSFER_DONE for each open transfer, then ENDPOINT_CLOSED (or ENDPOINT_FAILED when the fence
    // does not stand).
    void close();

    void on_write(Op* op, int error) override { sender_.complete(op, error); }
    void on_immediate(uint32_t imm) override;
    void on_error(const std::string& message) override;

  private:
    uint32_t id_;
    std::unique_ptr<Endpoint> endpoint_;
    Sender sender_;
    SenderContext shared_;
    ImmTable& imms_;
};

// The event that an arrival, or arming, calls for; EventKind is meaningless when nothing is to be told.
bool imm_event(uint32_t key, ImmTable::Arrival arrival, Event& event);

}  // namespace pdd
