#include "decoder.h"

#include <algorithm>

#include "fabric/peer.h"

namespace sim {

using pdd::EventKind;

Decoder::Decoder(Run& run, Witness& witness, Ledger& ledger, Node& node, Units units, uint64_t epoch)
    : run_(run), witness_(witness), ledger_(ledger), node_(node), units_(units), epoch_(epoch) {
    for (uint32_t page = 0; page < node.config.shape.pages; ++page) free_.push_back(page);
}

bool Decoder::idle() const {
    return std::all_of(attempts_.begin(), attempts_.end(), [](const auto& one) {
        return one.second.state == State::Fencing && one.second.link->decoder.state == Side::State::Unfenced;
    });
}

// -- asking -----------------------------------------------------------------------------------------------------------
bool Decoder::ask(Link& link, uint64_t prompt, uint32_t num_pages, bool arm_late) {
    if (free_.size() < num_pages || !link.decoder.up()) return false;
    const auto key = node_.imms.allocate(link.decoder.endpoint);
    if (!key) return false;
    // The freshest pages first, so that one freed too early is hit; or a run of neighbours, so that writes merge.
    std::vector<uint32_t> pages(free_.end() - num_pages, free_.end());
    free_.resize(free_.size() - num_pages);
    if (run_.rng.chance(5000)) std::sort(pages.begin(), pages.end());
    ledger_.reserve(node_.life(), prompt, pages, num_pages - (units_.context ? 1 : 0));

    Attempt attempt{++last_attempt_, prompt, &link, *key, pages, units_.expected(node_.config.shape.layers, num_pages)};
    attempt.told_before = told(attempt);
    run_.tally.asked += 1;
    if (node_.imms.arrived(*key) != 0u) run_.violate("a fresh key has a count");
    // 4,096 slots under 4,096 generations: no run needs a key again, and a straggler could bear it.
    if (!used_keys_.insert(*key).second) run_.violate("key " + std::to_string(*key) + " is used again too early");
    run_.note("life %llu asks: attempt %llu, key %06llx, %llu pages", node_.life(), attempt.number, *key, num_pages);
    Attempt& asked = attempts_.emplace(attempt.number, std::move(attempt)).first->second;
    if (!arm_late) arm(asked);
    Message request{.kind = Message::Kind::Request,
                    .attempt = asked.number,
                    .prompt = prompt,
                    .epoch = epoch_,
                    .key = *key,
                    .pages = std::move(pages)};
    last_request_ = request;
    link.prefiller.deliver(std::move(request));
    return true;
}

// As Engine::imm_arm.
void Decoder::arm(Attempt& attempt) {
    attempt.armed = true;
    const auto arrival = node_.imms.arm(attempt.key, static_cast<uint32_t>(attempt.expected));
    if (arrival.outcome == pdd::ImmTable::Outcome::Stale) run_.violate("a fresh key cannot be armed");
    pdd::Event event;
    if (pdd::imm_event(attempt.key, arrival, event)) node_.send(pdd::command::Tell{std::move(event)});
}

void Decoder::arm_one() {
    for (auto& [number, attempt] : attempts_) {
        if (attempt.armed || attempt.state != State::Requested) continue;
        run_.note("life %llu arms attempt %llu late, %llu units are there", node_.life(), number, arrived(attempt));
        return arm(attempt);
    }
}

void Decoder::cancel_one(bool overtakes) {
    for (auto& [number, attempt] : attempts_) {
        if (attempt.state != State::Requested || !run_.rng.chance(3000)) continue;
        run_.faults = true;
        return cancel(attempt, overtakes);
    }
}

void Decoder::cancel(Attempt& attempt, bool overtakes) {
    run_.note("life %llu cancels attempt %llu", node_.life(), attempt.number);
    attempt.state = State::Cancelling;
    Message cancel{.kind = Message::Kind::Cancel, .attempt = attempt.number};
    auto& inbox = attempt.link->prefiller.inbox;
    const auto request = std::find_if(inbox.begin(), inbox.end(), [&](const Message& one) {
        return one.kind == Message::Kind::Request && one.attempt == attempt.number;
    });
    if (overtakes && request != inbox.end())
        inbox.insert(request, std::move(cancel));
    else
        attempt.link->prefiller.deliver(std::move(cancel));
}

void Decoder::lose_patience() {
    std::vector<Link*> silent;
    for (auto& [number, attempt] : attempts_) {
        if (!attempt.link->decoder.up()) continue;
        if (attempt.state == State::Requested)
            cancel(attempt, false);
        else
            silent.push_back(attempt.link);
    }
    for (Link* link : silent) fence(*link, "nothing was heard");
}

// -- hearing ----------------------------------------------------------------------------------------------------------
uint64_t Decoder::arrived(const Attempt& attempt) const {
    return node_.imms.arrived(attempt.key).value_or(UINT64_MAX);
}

uint64_t Decoder::told(const Attempt& attempt) const {
    return witness_.record(node_.life(), attempt.link->decoder.endpoint).told[attempt.key];
}

Decoder::Attempt* Decoder::by_key(uint64_t key) {
    for (auto& [number, attempt] : attempts_)
        if (attempt.key == key) return &attempt;
    return nullptr;
}

bool Decoder::hear_events(size_t most) {
    const auto events = node_.events.drain(most);
    for (const auto& event : events) {
        switch (event.kind) {
            case EventKind::ImmReached:
            case EventKind::ImmOverrun: {
                Attempt* attempt = by_key(event.id);
                if (attempt == nullptr) break;  // of an earlier use of the key
                bool& told = event.kind == EventKind::ImmReached ? attempt->reached_told : attempt->overrun_told;
                if (told) run_.violate("key " + std::to_string(event.id) + " was told twice");
                told = true;
                if (attempt->state == State::Fencing || !attempt->armed) break;
                if (arrived(*attempt) == attempt->expected)
                    settle(*attempt, true);
                else if (arrived(*attempt) > attempt->expected)
                    fence(*attempt->link, "more units came than were expected");
                break;
            }
            case EventKind::EndpointFailed: {
                const auto found = links_.find(static_cast<uint32_t>(event.id));
                if (found == links_.end()) {
                    run_.violate("an unknown endpoint failed");
                    break;
                }
                if (!found->second->decoder.failed(event)) run_.violate("the failure of an endpoint was told twice");
                fence(*found->second, "the endpoint failed");
                break;
            }
            case EventKind::EndpointClosed: {
                const auto found = links_.find(static_cast<uint32_t>(event.id));
                if (found != links_.end())
                    link_closed(*found->second);
                else
                    run_.violate("an unknown endpoint is closed");
                break;
            }
            case EventKind::TransferDone:
                run_.violate("a decoder hears of a transfer");
        }
    }
    return !events.empty();
}

void Decoder::hear(Link& link) {
    Side& side = link.decoder;
    const Message message = side.inbox.front();
    side.inbox.pop_front();
    if (message.kind == Message::Kind::End) return fence(link, "the stream ended");
    const auto found = attempts_.find(message.attempt);
    if (found == attempts_.end() || found->second.link != &link) return;  // it crossed the end
    Attempt& attempt = found->second;
    if (attempt.state != State::Requested && attempt.state != State::Cancelling) return;
    run_.note("life %llu hears: attempt %llu has %llu units ok, %llu unknown", node_.life(), attempt.number, message.ok,
              message.unknown);
    attempt.ok = message.ok;
    attempt.refused = message.refused;
    if (message.unknown > 0) return fence(link, "the fate of units is unknown");
    compare(attempt);
}

void Decoder::compare(Attempt& attempt) {
    const uint64_t here = arrived(attempt);
    if (here == attempt.expected)
        settle(attempt, true);
    else if (here == attempt.ok)
        settle(attempt, false);
    else if (here > attempt.ok)
        fence(*attempt.link, "more units came than were written");
    else
        attempt.state = State::Draining;
}

// -- ends -------------------------------------------------------------------------------------------------------------
void Decoder::settle(Attempt& attempt, bool whole) {
    if (!whole && !attempt.refused && !run_.faults)
        run_.violate("nothing went wrong, and yet attempt " + std::to_string(attempt.number) + " is not whole");
    (whole ? run_.tally.whole : run_.tally.released) += 1;
    run_.note(whole ? "life %llu: attempt %llu is whole" : "life %llu: attempt %llu is released", node_.life(),
              attempt.number);
    if (whole) ledger_.check_whole(node_.life(), attempt.prompt, attempt.pages);
    node_.imms.retire(attempt.key);
    ledger_.release(node_.life(), attempt.pages);
    free_.insert(free_.end(), attempt.pages.begin(), attempt.pages.end());
    attempts_.erase(attempt.number);
}

void Decoder::fence(Link& link, const char* why) {
    if (!link.decoder.up()) return;
    run_.note("life %llu ends the link with endpoint %llu", node_.life(), link.decoder.endpoint);
    run_.note(why);
    run_.tally.fenced += 1;
    Link::end(link.decoder, link.prefiller);
    link_down(link);
}

void Decoder::link_down(Link& link) {
    std::vector<Attempt*> whole;
    for (auto& [number, attempt] : attempts_) {
        if (attempt.link != &link) continue;
        if (arrived(attempt) == attempt.expected)
            whole.push_back(&attempt);
        else
            attempt.state = State::Fencing;
    }
    for (Attempt* attempt : whole) settle(*attempt, true);
}

void Decoder::link_closed(Link& link) {
    if (link.decoder.state != Side::State::Closing) run_.violate("an endpoint is closed that nobody closed, or twice");
    link.decoder.state = Side::State::Closed;
    std::vector<Attempt*> fenced;
    for (auto& [number, attempt] : attempts_)
        if (attempt.link == &link) fenced.push_back(&attempt);
    for (Attempt* attempt : fenced) settle(*attempt, false);
    links_.erase(link.decoder.endpoint);
}

void Decoder::check() {
    size_t held = free_.size();
    std::vector<Attempt*> ready;
    for (auto& [number, attempt] : attempts_) {
        held += attempt.pages.size();
        if (arrived(attempt) != told(attempt) - attempt.told_before)
            run_.violate("attempt " + std::to_string(number) + " of life " + std::to_string(node_.life()) + " counts " +
                         std::to_string(arrived(attempt)) + " units where " +
                         std::to_string(told(attempt) - attempt.told_before) + " came");
        if (attempt.state == State::Draining) ready.push_back(&attempt);
    }
    if (held != node_.config.shape.pages) run_.violate("life " + std::to_string(node_.life()) + " has lost a page");
    for (Attempt* attempt : ready) compare(*attempt);
}

}  // namespace sim
