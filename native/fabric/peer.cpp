#include "fabric/peer.h"

namespace pdd {
namespace {

constexpr uint32_t kPollBudget = 64;  // completions of a NIC before it is another peer's turn
constexpr uint32_t kLastLook = 512;   // completions of a NIC when its endpoint closes
constexpr uint32_t kPostBudget = 32;  // writes before completions are looked at again

}  // namespace

bool imm_event(uint32_t key, ImmTable::Arrival arrival, Event& event) {
    if (arrival.outcome != ImmTable::Outcome::Reached && arrival.outcome != ImmTable::Outcome::Overrun) return false;
    const bool reached = arrival.outcome == ImmTable::Outcome::Reached;
    event = {.kind = reached ? EventKind::ImmReached : EventKind::ImmOverrun, .id = key, .ok = arrival.arrived};
    return true;
}

uint32_t Peer::poll() {
    return endpoint_->poll(*this, kPollBudget);
}

uint32_t Peer::pump() {
    return sender_.pump(kPostBudget);
}

void Peer::on_immediate(uint32_t imm) {
    const auto arrival = imms_.add(id_, imm, shared_.now);
    const bool stale = arrival.outcome == ImmTable::Outcome::Stale;
    stat_add(stale ? shared_.stats.stale_units : shared_.stats.units_received, imm_units(imm));
    Event event;
    if (imm_event(imm_key(imm), arrival, event)) shared_.events.push(std::move(event));
}

void Peer::on_error(const std::string& message) {
    stat_add(shared_.stats.errors);
    sender_.fail(endpoint_->name() + ": " + message);  // told once: a broken connection yields an error per half write
}

void Peer::close() {
    // What has arrived so far still counts: it may be all that was awaited. Bounded, because looking lands more.
    endpoint_->poll(*this, kLastLook);
    const Status closed = endpoint_->close();
    sender_.abandon("endpoint closed");
    if (closed)
        shared_.events.push({.kind = EventKind::EndpointClosed, .id = id_});
    else
        shared_.events.push(
            {.kind = EventKind::EndpointFailed, .id = id_, .text = closed.error().message, .last = true});
}

}  // namespace pdd
