#include "network.h"

#include <rdma/fi_errno.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "port.h"

namespace sim {

using pdd::PostOutcome;
using pdd::PostResult;

namespace {

constexpr std::array<int, 5> kSureCodes = {FI_EACCES, FI_EPERM, FI_EKEYREJECTED, FI_ENOKEY, FI_EMSGSIZE};
constexpr std::array<int, 5> kOtherCodes = {FI_EIO, FI_ECONNRESET, FI_ECANCELED, FI_ETIMEDOUT, FI_ENOTCONN};

}  // namespace

bool is_sure(int code) {
    return std::find(kSureCodes.begin(), kSureCodes.end(), code) != kSureCodes.end();
}

Network::Network(Run& run, Ledger& ledger, Traits traits) : run_(run), ledger_(ledger), traits_(traits) {}

// -- posting ----------------------------------------------------------------------------------------------------------
Port* Network::connect(Port& source, uint64_t index) {
    auto& route = source.routes[index];
    if (route.peer != nullptr && route.peer->lands()) return route.peer;
    const auto found = by_address_.find(route.address);
    if (route.peer != nullptr && !traits_.app_keys) return route.peer;  // a connection for life: its writes fail
    if (found != by_address_.end()) route.peer = found->second;         // whoever has the address by now
    return route.peer;
}

PostResult Network::post(Port& source, const pdd::NicWrite& write, pdd::Op* op) {
    if (source.state != Port::State::Open) run_.violate("a write was posted on a closed port");
    if (source.barred) run_.violate("a write was posted on a port that had failed");
    if (write.num_pieces == 0 || write.num_pieces > traits_.segments) run_.violate("a write of too many pieces");
    if (!run_.good()) return {PostOutcome::Refused, FI_EINVAL};
    auto& route = source.routes[write.peer];
    if (run_.rng.chance(odds.again) || now_ < route.ready_at) return {PostOutcome::Again};
    if (route.peer == nullptr && route.ready_at == 0 && run_.rng.chance(4 * odds.again)) {
        route.ready_at = now_ + run_.rng.below(200);
        return {PostOutcome::Again};
    }
    if (run_.rng.chance(odds.refused)) {
        run_.faults = true;
        const bool sure = run_.rng.chance(5000);
        source.barred |= !sure;
        const int code = sure ? kSureCodes[run_.rng.below(kSureCodes.size())] : FI_ENOTCONN;
        run_.tally.failed += 1;
        run_.note("life %llu: a post is refused with code %llu", source.nic->life, code);
        return {PostOutcome::Refused, code};
    }

    Port* target = connect(source, write.peer);
    auto carried = std::make_unique<Carried>();
    Carried& one = *carried;
    one.number = ++num_writes_;
    one.source = &source;
    one.source_life = source.nic->life;
    one.target = target != nullptr && target->lands() ? target : nullptr;
    one.key = write.key;
    one.op = op;
    one.imm = write.imm;
    if (one.number == odds.nth_fails || run_.rng.chance(odds.fails_somehow))
        one.fate = Fate::FailsSomehow;
    else if (run_.rng.chance(odds.fails_surely))
        one.fate = Fate::FailsSurely;
    if (run_.rng.chance(odds.late)) one.not_before = now_ + run_.rng.below(400);
    uint8_t* base = nullptr;
    if (one.target != nullptr) {
        const auto memory = target->nic->memories.find(write.key);
        if (memory == target->nic->memories.end() || !memory->second.remote) {
            one.fate = Fate::FailsSurely;  // of a former life
            for (const auto& port : ports_)
                if (port->nic->life == target->nic->life && port->nic->memories.contains(write.key))
                    run_.violate("a write names memory by the key of another NIC, or memory that is not for writes");
        } else if (!traits_.virtual_addressing)
            base = memory->second.base;
    }
    run_.faults |= one.fate != Fate::Good;
    if (one.fate == Fate::FailsSurely) one.code = kSureCodes[run_.rng.below(kSureCodes.size())];
    if (one.fate == Fate::FailsSomehow) one.code = kOtherCodes[run_.rng.below(kOtherCodes.size())];

    for (uint32_t i = 0; i < write.num_pieces; ++i) {
        const auto& piece = write.pieces[i];
        uint64_t done = 0;
        const uint64_t parts = run_.rng.between(1, traits_.most_fragments);
        for (uint64_t part = 0; part < parts && done < piece.nbytes; ++part) {
            const uint64_t left = piece.nbytes - done;
            const uint64_t size = part + 1 == parts ? left : run_.rng.between(1, left);
            auto* to = base != nullptr ? base + piece.to : reinterpret_cast<uint8_t*>(piece.to);
            one.fragments.push_back(
                {piece.from + done, to + done, static_cast<uint32_t>(size), static_cast<uint32_t>(one.bytes.size())});
            one.bytes.resize(one.bytes.size() + size);
            done += size;
        }
    }
    one.unread = one.unlanded = static_cast<uint32_t>(one.fragments.size());

    source.untold.push_back({one.number, op});
    run_.tally.writes += 1;
    run_.note("write %llu posted by life %llu: %llu bytes, immediate %08llx", one.number, one.source_life,
              one.bytes.size(), one.imm);
    writes_.push_back(std::move(carried));
    return {PostOutcome::Posted};
}

// -- on the way -------------------------------------------------------------------------------------------------------
bool Network::step() {
    now_ += 1;
    if (writes_.empty()) return false;
    const size_t first = run_.rng.below(writes_.size());
    bool moved = false;
    for (size_t i = 0; i < writes_.size() && !moved; ++i)
        moved = advance(*writes_[(first + i) % writes_.size()], nullptr);
    sweep();
    return moved;
}

// One thing, at random. `polled`: the port that is being polled, for NICs that land nothing else.
bool Network::advance(Carried& write, const Port* polled) {
    if (now_ < write.not_before) return false;
    if (write.target != nullptr && !write.target->lands()) lose_target(write);
    const bool lands =
        write.target != nullptr && write.fate != Fate::FailsSurely &&
        (!traits_.lands_when_polled || write.target == polled || write.target->state == Port::State::Unfenced);
    const bool all_landed = write.unlanded == 0;
    enum Thing { Read, Land, Arrive, Complete };
    std::array<Thing, 4> things{};
    size_t count = 0;
    uint32_t landable = write.unlanded - write.unread;
    if (write.unread > 0 && write.source != nullptr && polled == nullptr) things[count++] = Read;
    if (lands && landable > 0) things[count++] = Land;
    if (lands && all_landed && !write.arrived) things[count++] = Arrive;
    if (!write.completed && polled == nullptr) {
        const bool done = write.fate != Fate::Good || write.target == nullptr ||
                          (traits_.early_completion ? write.unread == 0 : write.arrived);
        if (done) things[count++] = Complete;
    }
    if (count == 0) return false;
    switch (things[run_.rng.below(count)]) {
        case Read: {
            uint64_t nth = run_.rng.below(write.unread);
            for (auto& fragment : write.fragments) {
                if (fragment.read || nth-- > 0) continue;
                std::copy_n(fragment.from, fragment.nbytes, &write.bytes[fragment.at]);
                fragment.read = true;
                break;
            }
            write.unread -= 1;
            return true;
        }
        case Land:
            return land(write);
        case Arrive:
            return arrive(write);
        case Complete:
            complete(write);
            return true;
    }
    return false;
}

bool Network::land(Carried& write) {
    uint64_t nth = run_.rng.below(write.unlanded - write.unread);
    for (auto& fragment : write.fragments) {
        if (!fragment.read || fragment.landed || nth-- > 0) continue;
        fragment.landed = true;
        write.unlanded -= 1;
        run_.note("write %llu: %llu bytes land at life %llu, %llu to go", write.number, fragment.nbytes,
                  write.target->nic->life, write.unlanded);
        const uint32_t life = write.target->nic->life;
        if (ledger_.owns(life, fragment.to))
            ledger_.land(life, fragment.to, &write.bytes[fragment.at], fragment.nbytes);
        else if (write.target->nic->memories.contains(write.key))
            std::memcpy(fragment.to, &write.bytes[fragment.at], fragment.nbytes);
        else
            run_.violate("a write landed in memory of life " + std::to_string(life) + " that was given back before");
        return true;
    }
    return false;
}

// False: the queue is full, it waits.
bool Network::arrive(Carried& write) {
    Port& target = *write.target;
    if (target.entries.size() >= target.queue && traits_.holds_back) return false;
    write.arrived = true;
    if (target.entries.size() >= target.queue) target.overrun = run_.faults = true;
    if (target.state != Port::State::Open || target.overrun) return true;
    target.entries.push_back({.imm = write.imm, .write = write.number});
    return true;
}

void Network::complete(Carried& write) {
    write.completed = true;
    int error = write.code;
    if (write.fate == Fate::Good && write.target == nullptr) {
        // A write to a peer that is gone: what is in the socket's buffer looks done.
        const bool looks_done = traits_.early_completion && write.unread == 0 && run_.rng.chance(5000);
        error = looks_done ? 0 : kOtherCodes[run_.rng.below(kOtherCodes.size())];
    }
    if (error != 0 && write.unread > 0) {  // the source is the caller's again
        write.unread = write.unlanded = 0;
        write.arrived = true;
        std::erase_if(write.fragments, [](const Fragment& one) { return !one.read || one.landed; });
        write.unlanded = static_cast<uint32_t>(write.fragments.size());
        if (write.unlanded == 0) write.target = nullptr;
    }
    run_.tally.failed += error != 0 ? 1 : 0;
    Port& source = *write.source;
    if (source.overrun) return;  // lost: nobody hears of it
    run_.note("write %llu completes with code %llu", write.number, error);
    source.entries.push_back({write.op, error, 0, write.number});
}

void Network::lose_target(Carried& write) {
    write.target = nullptr;
    write.arrived = true;
    run_.faults = true;
}

void Network::forget_source(Carried& write) {
    write.source = nullptr;
    write.completed = true;
    if (write.unread == 0) return;
    write.arrived = true;
    std::erase_if(write.fragments, [](const Fragment& one) { return !one.read || one.landed; });
    write.unread = 0;
    write.unlanded = static_cast<uint32_t>(write.fragments.size());
}

void Network::sweep() {
    std::erase_if(writes_, [](const auto& write) {
        const bool may_land =
            write->target != nullptr && write->fate != Fate::FailsSurely && (write->unlanded > 0 || !write->arrived);
        return write->completed && !may_land;
    });
}

// -- polling and ends -------------------------------------------------------------------------------------------------
uint32_t Network::poll(Port& port, pdd::CompletionSink& sink, uint32_t budget) {
    if (port.state != Port::State::Open) run_.violate("a closed port was polled");
    if (port.broken || !run_.good()) return 0;
    if (traits_.lands_when_polled && !writes_.empty()) {
        for (uint64_t times = run_.rng.below(8); times > 0; --times)
            advance(*writes_[run_.rng.below(writes_.size())], &port);
        sweep();
    }
    if (run_.rng.chance(odds.overrun)) port.overrun = run_.faults = true;
    if (port.overrun) {
        port.broken = port.barred = true;
        port.entries.clear();
        run_.tally.overruns += 1;
        run_.note("life %llu: the queue of a port of endpoint %llu is overrun", port.nic->life, port.endpoint);
        sink.on_error("fi_cq_read: overrun");
        return 0;
    }
    uint32_t found = 0;
    while (found < budget && !port.entries.empty() && !run_.rng.chance(1000)) {
        const size_t index = run_.rng.below(port.entries.size());
        const Entry entry = port.entries[index];
        port.entries[index] = port.entries.back();
        port.entries.pop_back();
        ++found;
        if (entry.op == nullptr) {
            run_.note("life %llu hears of write %llu: immediate %08llx", port.nic->life, entry.write, entry.imm);
            sink.on_immediate(entry.imm);
            continue;
        }
        if (entry.again) {
            tell_again(port, entry, sink);
            continue;
        }
        std::erase_if(port.untold, [&](const Untold& one) { return one.write == entry.write; });
        if (entry.error != 0 && !is_sure(entry.error)) port.barred = true;
        sink.on_write(entry.op, entry.error);
        if (!run_.rng.chance(odds.twice)) continue;
        run_.faults = true;
        if (run_.rng.chance(5000)) {
            run_.tally.twice += 1;
            tell_again(port, entry, sink);
        } else {
            port.entries.push_back({entry.op, entry.error, 0, entry.write, true});
        }
    }
    return found;
}

void Network::tell_again(Port& port, const Entry& entry, pdd::CompletionSink& sink) {
    bool serves_here = false;
    bool serves_elsewhere = false;
    for (const auto& one : ports_) {
        if (one->nic->life != port.nic->life) continue;
        const bool serves = std::any_of(one->untold.begin(), one->untold.end(),
                                        [&](const Untold& other) { return other.op == entry.op; });
        (one->endpoint == port.endpoint ? serves_here : serves_elsewhere) |= serves;
    }
    if (serves_here) return;
    if (entry.again && !serves_elsewhere && run_.rng.chance(9000)) {  // its context may yet serve another endpoint
        port.entries.push_back(entry);
        return;
    }
    run_.tally.misleading += serves_elsewhere ? 1 : 0;
    run_.tally.late_twice += entry.again ? 1 : 0;
    run_.note("write %llu is told twice", entry.write);
    sink.on_write(entry.op, entry.error);
}

pdd::Status Network::close(Port& port) {
    if (port.state == Port::State::Dead) return {};
    if (port.state != Port::State::Open) {
        run_.violate("a port was closed twice");
        return {};
    }
    port.untold.clear();
    for (auto& write : writes_)
        if (write->source == &port) forget_source(*write);
    const std::string address(port.address.begin(), port.address.end());
    if (by_address_[address] == &port) by_address_.erase(address);
    port.entries.clear();
    if (run_.rng.chance(odds.close_fails)) {
        run_.faults = true;
        port.state = Port::State::Unfenced;
        run_.tally.unfenced += 1;
        run_.note("life %llu: closing a port of endpoint %llu fails", port.nic->life, port.endpoint);
        return pdd::Error{"fi_close: busy", FI_EBUSY};
    }
    run_.note("life %llu: a port of endpoint %llu is closed", port.nic->life, port.endpoint);
    port.state = Port::State::Closed;
    return {};
}

void Network::die(uint32_t life) {
    for (auto& port : ports_) {
        if (port->nic->life != life || port->state == Port::State::Dead) continue;
        for (auto& write : writes_)
            if (write->source == port.get()) forget_source(*write);
        const std::string address(port->address.begin(), port->address.end());
        const auto found = by_address_.find(address);
        if (found != by_address_.end() && found->second == port.get()) by_address_.erase(found);
        port->untold.clear();
        port->entries.clear();
        port->state = Port::State::Dead;
    }
    sweep();
}

}  // namespace sim
