#include "world.h"

#include <algorithm>

namespace sim {
namespace {

constexpr int kWildSteps = 1000;
constexpr int kMostSweeps = 20000;
constexpr int kPatience = 100;  // sweeps in which nothing happened, before timers act

}  // namespace

World::World(Run& run) : run_(run), ledger_(run), witness_(run), gpu_(run, ledger_) {
    choose_shapes();
    choose_faults();
    note_setting();
    for (Host& host : hosts_) give_birth(host);
}

World::~World() {
    for (Host& host : hosts_) host.node.reset();
    dead_.clear();
}

void World::give_birth(Host& host) {
    const NodeConfig config{.life = ++last_life_,
                            .host = host.number,
                            .num_nics = host.num_nics,
                            .window = host.window,
                            .shape = {layers_, host.num_pages, page_bytes_},
                            .memory = memory_,
                            .is_target = host.decodes};
    host.node = std::make_unique<Node>(surroundings(), config, [this, &host] { meanwhile(host); });
    host.node->now = now_;
    host.epoch = run_.rng.next();
    if (host.decodes)
        host.decoder = std::make_unique<Decoder>(run_, witness_, ledger_, *host.node, units_, host.epoch);
    else
        host.prefiller = std::make_unique<Prefiller>(run_, witness_, *host.node, units_);
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
            carry(run_.rng.below(12));
    }
    go_wrong();
    check();
}

void World::carry(uint64_t times) {
    for (; times > 0; --times) {
        network_->step();
        if (memory_ == KvMemory::Gpu) gpu_.step();
    }
}

// Bytes are copied into the memory of one: the others go on, and may hang up on it.
void World::meanwhile(const Host& busy) {
    if (in_a_copy_ || !run_.rng.chance(overtaken_)) return;
    in_a_copy_ = true;
    run_.tally.meanwhile += 1;
    Link& link = *links_[run_.rng.below(links_.size())];
    if (link.decoder.node == busy.node.get() && run_.rng.chance(hangups_)) cut(link);
    for (uint64_t times = run_.rng.between(1, 24); times > 0; --times) {
        Host& host = hosts_[run_.rng.below(hosts_.size())];
        if (&host == &busy || host.node->paused) continue;
        deliver(&busy);
        turn(host);
        hear(host);
        if (host.prefiller) host.prefiller->compute();
    }
    in_a_copy_ = false;
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
    const bool local = memory_ == KvMemory::Shared && run_.rng.chance(7000);
    run_.tally.local += local ? 1 : 0;
    for (Side* side : {&link->decoder, &link->prefiller}) side->endpoint = side->node->open_endpoint(local);
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
void World::deliver(const Host* but) {
    if (links_.empty()) return;
    const size_t first = run_.rng.below(links_.size());
    for (size_t i = 0; i < links_.size(); ++i) {
        Link& link = *links_[(first + i) % links_.size()];
        for (Host& host : hosts_) {
            Side& side = host.decodes ? link.decoder : link.prefiller;
            if (side.node != host.node.get() || !side.up() || side.inbox.empty()) continue;
            if (&host == but || host.node->paused) continue;
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
    run_.faults = true;
    host.node->die();
    host.decoder.reset();
    host.prefiller.reset();
    if (memory_ == KvMemory::Shared) dead_.push_back(std::move(host.node));
    host.node.reset();
}

// -- the calm part ----------------------------------------------------------------------------------------------------
void World::calm_down() {
    run_.note("calm");
    network_->odds = {};
    gpu_.fails = 0;
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
    carry(32);
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
    dead_.clear();
    if (witness_.open_ports() > 0) run_.violate("a port is left open");
    if (network_->open_memories() > 0 && witness_.fences_that_do_not_stand() == 0)
        run_.violate("memory is left registered");
}

}  // namespace sim
