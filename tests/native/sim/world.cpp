#include "world.h"

#include <algorithm>

namespace sim {
namespace {

constexpr int kWildSteps = 1000;
constexpr int kMostSweeps = 20000;
constexpr int kPatience = 100;  // sweeps in which nothing happened, before timers act

}  // namespace

World::World(Run& run) : run_(run), ledger_(run) {
    choose_shapes();
    choose_faults();
    note_setting();
    for (Host& host : hosts_) give_birth(host);
}

World::~World() {
    for (Host& host : hosts_) host.node.reset();
}

void World::choose_shapes() {
    Rng& rng = run_.rng;
    const bool software = rng.chance(5000);
    network_ = std::make_unique<Network>(run_, ledger_,
                                         Traits{.early_completion = rng.chance(7000),
                                                .lands_when_polled = software,
                                                .holds_back = software || rng.chance(5000),
                                                .virtual_addressing = rng.chance(5000),
                                                .app_keys = rng.chance(6000),
                                                .segments = rng.between(1, pdd::kMaxWriteSegments),
                                                .most_fragments = static_cast<uint32_t>(rng.between(1, 3))});
    layers_ = static_cast<uint32_t>(rng.between(1, 3));
    page_bytes_ = static_cast<uint32_t>(8 * rng.between(1, 4));
    units_.entries_per_page = static_cast<uint32_t>(rng.between(1, 2));
    units_.units_per_entry = std::array{1u, 1u, 3u, 100u, 255u}[rng.below(5)];
    units_.context = rng.chance(3000);
    most_pages_ = rng.between(1, 8);
    // Now and then so many that their windows fill a NIC.
    const uint64_t decoders = rng.chance(1000) ? 6 : rng.between(1, 2);
    const uint64_t prefillers = rng.between(1, 2);
    for (uint32_t i = 0; i < decoders + prefillers; ++i) {
        Host host;
        host.decodes = i < decoders;
        host.number = i;
        host.num_nics = static_cast<uint32_t>(rng.between(1, 3));
        host.window.ops = static_cast<uint32_t>(rng.between(1, 12));
        host.window.bytes = rng.chance(5000) ? page_bytes_ * rng.between(1, 12) : 8 << 20;
        host.num_pages = static_cast<uint32_t>(most_pages_ + 1 + rng.below(20));
        hosts_.push_back(std::move(host));
    }
}

// Some runs have no faults, some one kind, most several.
void World::choose_faults() {
    Rng& rng = run_.rng;
    const bool clean = rng.chance(1500);
    const auto maybe = [&](uint32_t odds) { return !clean && rng.chance(3000) ? odds : 0; };
    Odds& odds = network_->odds;
    odds.again = rng.chance(5000) ? 1000 : 0;
    odds.late = rng.chance(5000) ? 1500 : 0;
    odds.refused = maybe(60);
    odds.fails_surely = maybe(200);
    odds.fails_somehow = maybe(60);
    odds.twice = maybe(300);
    odds.overrun = maybe(5);
    odds.close_fails = rng.chance(2000) ? maybe(2000) : 0;
    odds.nth_fails = !clean && rng.chance(5000) ? rng.between(1, 60) : 0;
    arms_late_ = rng.chance(5000) ? 5000 : 0;
    cancels_ = maybe(300);
    cuts_ = maybe(20);
    deaths_ = maybe(15);
    pauses_ = maybe(100);
    replays_ = maybe(5000);
    overtakes_ = maybe(5000);
    impatience_ = maybe(20);
}

void World::note_setting() {
    const Traits& traits = network_->traits();
    const Odds& odds = network_->odds;
    run_.note("%llu nodes, %llu layers, pages of %llu bytes, prompts of up to %llu pages", hosts_.size(), layers_,
              page_bytes_, most_pages_);
    run_.note("NICs complete early: %llu, land when polled: %llu, hold back: %llu; pieces of a write: %llu",
              traits.early_completion, traits.lands_when_polled, traits.holds_back, traits.segments);
    run_.note("in 10,000 steps: %llu cancels, %llu cuts, %llu deaths, %llu pauses", cancels_, cuts_, deaths_, pauses_);
    run_.note("in 10,000 writes: %llu refused, %llu fail surely, %llu somehow, %llu told twice", odds.refused,
              odds.fails_surely, odds.fails_somehow, odds.twice);
    run_.note("in 10,000 polls: %llu overrun; closes: %llu fail; write %llu fails", odds.overrun, odds.close_fails,
              odds.nth_fails);
}

void World::give_birth(Host& host) {
    host.node = std::make_unique<Node>(
        run_, *network_, ledger_,
        NodeConfig{++last_life_, host.number, host.num_nics, host.window, {layers_, host.num_pages, page_bytes_}});
    host.node->now = now_;
    host.epoch = run_.rng.next();
    if (host.decodes)
        host.decoder = std::make_unique<Decoder>(run_, *network_, ledger_, *host.node, units_, host.epoch);
    else
        host.prefiller = std::make_unique<Prefiller>(run_, *network_, *host.node, units_);
}

// -- the wild part ----------------------------------------------------------------------------------------------------
void World::play() {
    for (int step = 0; step < kWildSteps && run_.good(); ++step) wild_step();
    if (run_.good()) calm_down();
    if (run_.good()) end();
}

void World::wild_step() {
    now_ += std::chrono::microseconds(run_.rng.below(100));
    Host& host = hosts_[run_.rng.below(hosts_.size())];
    switch (run_.rng.below(10)) {
        case 0:
            new_prompt();
            break;
        case 1:
        case 2:
            deliver();
            break;
        case 3:
        case 4:
            turn(host);
            break;
        case 5:
            hear(host);
            break;
        case 6:
            if (host.prefiller && !host.node->paused) host.prefiller->compute();
            break;
        case 7:
            if (!host.node->paused) host.node->watch();
            break;
        case 8:
            if (host.decoder && !host.node->paused && run_.rng.chance(1500)) host.decoder->arm_one();
            break;
        default:
            for (uint64_t times = run_.rng.below(12); times > 0; --times) network_->step();
    }
    go_wrong();
    check();
}

void World::check() {
    for (Host& host : hosts_)
        if (host.decoder)
            host.decoder->check();
        else
            host.prefiller->check();
}

void World::go_wrong() {
    Rng& rng = run_.rng;
    if (rng.chance(cancels_)) {
        Host& host = any(true);
        if (!host.node->paused) host.decoder->cancel_one(rng.chance(overtakes_));
    }
    if (rng.chance(cuts_) && !links_.empty()) cut(*links_[rng.below(links_.size())]);
    if (rng.chance(deaths_)) {
        Host& host = hosts_[rng.below(hosts_.size())];
        die(host);
        give_birth(host);
    }
    if (rng.chance(pauses_)) {
        Host& host = hosts_[rng.below(hosts_.size())];
        host.node->paused = !host.node->paused;
        run_.tally.pauses += host.node->paused ? 1 : 0;
        run_.note(host.node->paused ? "life %llu pauses" : "life %llu goes on", host.node->life());
    }
    if (rng.chance(impatience_)) {
        run_.faults = true;
        now_ += std::chrono::seconds(rng.below(12));
        Host& host = any(true);
        if (!host.node->paused) host.decoder->lose_patience();
    }
}

World::Host& World::any(bool decodes) {
    for (;;) {
        Host& host = hosts_[run_.rng.below(hosts_.size())];
        if (host.decodes == decodes) return host;
    }
}

// The link that both use, made anew if there is none.
Link* World::link_of(Host& decoder, Host& prefiller, bool dial) {
    for (auto& link : links_)
        if (link->decoder.node == decoder.node.get() && link->prefiller.node == prefiller.node.get() &&
            (link->decoder.up() || link->prefiller.up()))
            return link->decoder.up() && link->prefiller.up() ? link.get() : nullptr;
    if (!dial) return nullptr;
    auto link = std::make_unique<Link>();
    link->decoder.node = decoder.node.get();
    link->prefiller.node = prefiller.node.get();
    for (Side* side : {&link->decoder, &link->prefiller}) side->endpoint = side->node->open_endpoint();
    const auto meet = [this](Side& here, Side& there) {
        auto descriptor = there.node->worker->describe(there.endpoint, {there.node->region});
        if (!descriptor) return run_.violate(descriptor.error().message);
        const pdd::Status connected = here.node->worker->connect(here.endpoint, *descriptor);
        if (!connected) run_.violate(connected.error().message);
    };
    meet(link->decoder, link->prefiller);
    meet(link->prefiller, link->decoder);
    decoder.decoder->connect(*link);
    prefiller.prefiller->connect(*link, decoder.epoch, decoder.node->config.shape);
    run_.note("life %llu dials life %llu: endpoints %llu and %llu", decoder.node->life(), prefiller.node->life(),
              link->decoder.endpoint, link->prefiller.endpoint);
    if (!decoder.stale.pages.empty() && run_.rng.chance(replays_)) {
        run_.faults = true;
        run_.tally.stale += 1;
        run_.note("a request of a former life comes, attempt %llu", decoder.stale.attempt);
        link->prefiller.inbox.push_back(decoder.stale);
    }
    links_.push_back(std::move(link));
    return links_.back().get();
}

void World::new_prompt() {
    Host& decoder = any(true);
    Host& prefiller = any(false);
    if (decoder.node->paused || prefiller.node->paused || decoder.decoder->num_attempts() >= 8) return;
    Link* link = link_of(decoder, prefiller, true);
    const auto pages = static_cast<uint32_t>(run_.rng.between(1, most_pages_) + (units_.context ? 1 : 0));
    if (link != nullptr) decoder.decoder->ask(*link, ++last_prompt_, pages, run_.rng.chance(arms_late_));
}

// One message of one link, to a node that is not paused.
void World::deliver() {
    if (links_.empty()) return;
    const size_t first = run_.rng.below(links_.size());
    for (size_t i = 0; i < links_.size(); ++i) {
        Link& link = *links_[(first + i) % links_.size()];
        for (Host& host : hosts_) {
            Side& side = host.decodes ? link.decoder : link.prefiller;
            if (side.node != host.node.get() || !side.up() || side.inbox.empty() || host.node->paused) continue;
            return host.decodes ? host.decoder->hear(link) : host.prefiller->hear(link);
        }
    }
}

void World::turn(Host& host) {
    if (host.node->paused) return;
    host.node->now = std::max(host.node->now, now_);
    host.node->turn();
}

void World::hear(Host& host) {
    if (host.node->paused) return;
    const size_t most = run_.rng.between(1, 8);
    if (host.decoder)
        host.decoder->hear_events(most);
    else
        host.prefiller->hear_events(most);
}

void World::cut(Link& link) {
    if (!link.decoder.up() || !link.prefiller.up()) return;
    run_.faults = true;
    run_.tally.cuts += 1;
    run_.note("the link of endpoints %llu and %llu is cut", link.decoder.endpoint, link.prefiller.endpoint);
    for (Side* side : {&link.decoder, &link.prefiller}) {
        const size_t kept = run_.rng.below(side->inbox.size() + 1);
        side->inbox.resize(kept);
        side->inbox.push_back({});
    }
}

// The process is gone: its memory, its endpoints and its sockets with it.
void World::die(Host& host) {
    run_.tally.deaths += 1;
    run_.note("life %llu is killed", host.node->life());
    if (host.decoder && host.decoder->last_request() != nullptr) host.stale = *host.decoder->last_request();
    for (auto& link : links_) {
        for (const auto& [mine, other] :
             {std::pair(&link->decoder, &link->prefiller), std::pair(&link->prefiller, &link->decoder)}) {
            if (mine->node != host.node.get()) continue;
            mine->node = nullptr;
            mine->state = Side::State::Gone;
            mine->inbox.clear();
            other->deliver({});
        }
    }
    network_->die(host.node->life());
    host.decoder.reset();
    host.prefiller.reset();
    host.node.reset();
}

// -- the calm part ----------------------------------------------------------------------------------------------------
void World::calm_down() {
    run_.note("calm");
    network_->odds = {};
    for (Host& host : hosts_) host.node->paused = false;
    int still = 0;  // sweeps in which nothing happened
    size_t seen = 0;
    for (int sweeps = 1; sweeps <= kMostSweeps && run_.good(); ++sweeps) {
        if (unfinished().empty()) return;
        sweep();
        still = run_.history.size() == seen ? still + 1 : 0;
        seen = run_.history.size();
        if (still < kPatience) continue;
        still = 0;
        if (!run_.faults) return run_.violate("nothing went wrong, and yet " + unfinished() + " does not end");
        now_ += std::chrono::seconds(12);
        for (Host& host : hosts_)
            if (host.decoder) host.decoder->lose_patience();
    }
    run_.violate(unfinished() + " does not end");
}

void World::sweep() {
    now_ += std::chrono::milliseconds(1);
    for (Host& host : hosts_) {
        turn(host);
        hear(host);
        host.node->watch();
        if (host.prefiller) host.prefiller->compute();
        if (host.decoder) host.decoder->arm_one();
        check();
    }
    for (int i = 0; i < 8; ++i) deliver();
    for (int i = 0; i < 32; ++i) network_->step();
    check();
}

// What has not come to its end; "" when all has.
std::string World::unfinished() const {
    for (const Host& host : hosts_) {
        const bool idle = host.decoder ? host.decoder->idle() : host.prefiller->idle();
        if (!idle) return (host.decoder ? "an attempt of life " : "a job of life ") + std::to_string(host.node->life());
    }
    for (const auto& link : links_)
        for (const Side* side : {&link->decoder, &link->prefiller}) {
            const bool ends = side->state == Side::State::Closing;
            if (ends || !side->inbox.empty())
                return std::string(ends ? "the fence" : "a message") + " of endpoint " +
                       std::to_string(side->endpoint) + " of life " + std::to_string(side->node->life());
        }
    return "";
}

// Every link ends, and then every node.
void World::end() {
    run_.note("the end");
    for (auto& link : links_) {
        if (!link->decoder.up()) continue;
        for (Host& host : hosts_)
            if (host.node.get() == link->decoder.node) host.decoder->fence(*link, "the node ends");
    }
    for (int sweeps = 0; sweeps < kMostSweeps && !unfinished().empty() && run_.good(); ++sweeps) sweep();
    for (int i = 0; i < kMostSweeps && !network_->empty() && network_->step(); ++i) {
    }
    if (!unfinished().empty()) return run_.violate(unfinished() + " does not end");
    check();
    for (Host& host : hosts_) {
        host.node->turn();
        host.node->shut_down();
        host.node->check_nothing_left(host.decoder ? host.decoder->num_attempts() : 0);
        host.node->worker.reset();
    }
    if (network_->open_ports() > 0) run_.violate("a port is left open");
    if (network_->open_memories() > 0) run_.violate("memory is left registered");
}

}  // namespace sim
