// What a seed makes of a world before anything happens: its shapes, and what may go wrong in it.
#include <array>

#include "world.h"

namespace sim {

void World::choose_shapes() {
    Rng& rng = run_.rng;
    memory_ = std::array{KvMemory::Host, KvMemory::Host, KvMemory::Gpu, KvMemory::Shared}[rng.below(4)];
    const bool software = rng.chance(5000);
    network_ = std::make_unique<Network>(run_, ledger_,
                                         Traits{.early_completion = rng.chance(7000),
                                                .lands_when_polled = software,
                                                .holds_back = software || rng.chance(5000),
                                                .virtual_addressing = rng.chance(5000),
                                                .app_keys = rng.chance(6000),
                                                .named = memory_ != KvMemory::Gpu,
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
    const auto nics_of_each = static_cast<uint32_t>(rng.between(1, 3));
    for (uint32_t i = 0; i < decoders + prefillers; ++i) {
        Host host;
        host.decodes = i < decoders;
        host.number = i;
        host.num_nics = nics_of_each;  // staged copies want as many on both sides
        if (memory_ != KvMemory::Gpu) host.num_nics = static_cast<uint32_t>(rng.between(1, 3));
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
    odds.close_fails = rng.chance(4000) ? maybe(2000) : 0;
    odds.nth_fails = !clean && rng.chance(5000) ? rng.between(1, 60) : 0;
    arms_late_ = rng.chance(5000) ? 5000 : 0;
    cancels_ = maybe(300);
    cuts_ = maybe(20);
    deaths_ = maybe(15);
    pauses_ = maybe(100);
    replays_ = maybe(5000);
    overtakes_ = maybe(5000);
    impatience_ = maybe(20);
    overtaken_ = rng.chance(5000) ? 1500 : 0;
    hangups_ = maybe(2000);
    gpu_.fails = maybe(20);
}

void World::note_setting() {
    const Traits& traits = network_->traits();
    const Odds& odds = network_->odds;
    run_.note("%llu nodes, %llu layers, pages of %llu bytes, prompts of up to %llu pages", hosts_.size(), layers_,
              page_bytes_, most_pages_);
    constexpr std::array kMemory = {"KV memory of the host", "KV memory of a GPU", "KV memory that is shared"};
    run_.note(kMemory[static_cast<size_t>(memory_)]);
    run_.note("NICs complete early: %llu, land when polled: %llu, hold back: %llu; pieces of a write: %llu",
              traits.early_completion, traits.lands_when_polled, traits.holds_back, traits.segments);
    run_.note("in 10,000 steps: %llu cancels, %llu cuts, %llu deaths, %llu pauses", cancels_, cuts_, deaths_, pauses_);
    run_.note("in 10,000 writes: %llu refused, %llu fail surely, %llu somehow, %llu told twice", odds.refused,
              odds.fails_surely, odds.fails_somehow, odds.twice);
    run_.note("in 10,000 polls: %llu overrun; closes: %llu fail; write %llu fails", odds.overrun, odds.close_fails,
              odds.nth_fails);
}

}  // namespace sim
