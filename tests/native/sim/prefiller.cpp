#include "prefiller.h"

#include <algorithm>
#include <cstring>

namespace sim {

using pdd::EventKind;

namespace {

constexpr uint8_t kReused = 0xee;  // what becomes of a source page once it is free
constexpr size_t kMostJobs = 7;    // of one link

Message ended(uint64_t attempt, uint64_t ok = 0, uint64_t failed = 0, uint64_t unknown = 0) {
    return {.kind = Message::Kind::Ended, .attempt = attempt, .ok = ok, .failed = failed, .unknown = unknown};
}

}  // namespace

Prefiller::Prefiller(Run& run, Witness& witness, Node& node, Units units)
    : run_(run), witness_(witness), node_(node), units_(units) {
    for (uint32_t page = 0; page < node.config.shape.pages; ++page) free_.push_back(page);
}

uint32_t Prefiller::whole_pages(const Job& job) const {
    return static_cast<uint32_t>(job.request.pages.size()) - (units_.context ? 1 : 0);
}

// -- messages ---------------------------------------------------------------------------------------------------------
void Prefiller::hear(Link& link) {
    Side& side = link.prefiller;
    Message message = std::move(side.inbox.front());
    side.inbox.pop_front();
    View& view = views_[&link];
    switch (message.kind) {
        case Message::Kind::End:
            return fence(link, "the stream ended");
        case Message::Kind::Request:
            return take(link, view, std::move(message));
        case Message::Kind::Cancel: {
            for (Job& job : jobs_)
                if (job.link == &link && job.request.attempt == message.attempt) {
                    stop(job);
                    return end_if_over(job);
                }
            const auto answered = view.answered.find(message.attempt);
            if (answered != view.answered.end()) return answer(link, answered->second);
            view.tombstones.insert(message.attempt);
            run_.tally.tombstones += 1;
            run_.note("life %llu keeps a tombstone of attempt %llu", node_.life(), message.attempt);
            return answer(link, ended(message.attempt));
        }
        case Message::Kind::Ended:
            return;
    }
}

void Prefiller::take(Link& link, View& view, Message request) {
    if (view.tombstones.contains(request.attempt)) return answer(link, ended(request.attempt));
    size_t in_hand = 0;
    bool key_in_use = false;
    bool twice = view.answered.contains(request.attempt);
    for (const Job& job : jobs_) {
        if (job.link != &link) continue;
        in_hand += 1;
        twice |= job.request.attempt == request.attempt;
        key_in_use |= job.request.key == request.key && job.computed < whole_pages(job);
    }
    if (twice) return fence(link, "an attempt came twice");
    if (request.epoch != view.epoch || in_hand >= kMostJobs || key_in_use) {
        view.answered[request.attempt] = ended(request.attempt);
        view.answered[request.attempt].refused = true;
        return answer(link, view.answered[request.attempt]);
    }
    jobs_.push_back({.request = std::move(request), .link = &link});
}

void Prefiller::answer(Link& link, const Message& message) {
    if (link.prefiller.up()) link.decoder.deliver(message);
}

// -- events -----------------------------------------------------------------------------------------------------------
bool Prefiller::hear_events(size_t most) {
    const auto events = node_.events.drain(most);
    for (const auto& event : events) {
        const auto on_link = [&](auto&& work) {
            for (auto& [link, view] : views_)
                if (link->prefiller.endpoint == event.id) return work(*link);
        };
        switch (event.kind) {
            case EventKind::TransferDone: {
                if (!over_.insert(event.id).second) run_.violate("the end of a transfer was told twice");
                if (!witness_.all_told(node_.life(), event.id))
                    run_.violate("a transfer is over though a write of it is not terminal");
                if (event.ok != witness_.totals(node_.life()).units_good[event.id])
                    run_.violate("a transfer ends with " + std::to_string(event.ok) +
                                 " units ok where the network saw " +
                                 std::to_string(witness_.totals(node_.life()).units_good[event.id]));
                const auto found = by_transfer_.find(event.id);
                if (found == by_transfer_.end()) {
                    run_.violate("the end of an unknown transfer was told");
                    break;
                }
                Job& job = *found->second;
                by_transfer_.erase(found);
                job.end = event;
                run_.note("life %llu: a transfer is over, ok %llu, failed %llu, unknown %llu", node_.life(), event.ok,
                          event.failed, event.unknown);
                if (event.failed + event.unknown > 0) stop(job);
                end_if_over(job);
                break;
            }
            case EventKind::EndpointFailed:
                on_link([&](Link& link) {
                    if (!link.prefiller.failed(event)) run_.violate("the failure of an endpoint was told twice");
                    fence(link, "the endpoint failed");
                });
                break;
            case EventKind::EndpointClosed:
                on_link([&](Link& link) {
                    if (link.prefiller.state != Side::State::Closing)
                        run_.violate("an endpoint is closed that nobody closed, or twice");
                    link.prefiller.state = Side::State::Closed;
                });
                break;
            case EventKind::ImmReached:
            case EventKind::ImmOverrun:
                run_.violate("a prefiller hears of a key");
        }
    }
    return !events.empty();
}

void Prefiller::fence(Link& link, const char* why) {
    if (!link.prefiller.up()) return;
    run_.note("life %llu ends the link with endpoint %llu", node_.life(), link.prefiller.endpoint);
    run_.note(why);
    Link::end(link.prefiller, link.decoder);
    for (auto job = jobs_.begin(); job != jobs_.end();) {
        Job& one = *job++;
        if (one.link != &link) continue;
        stop(one);
        end_if_over(one);
    }
}

void Prefiller::stop(Job& job) {
    if (job.state == State::Cancelling) return;
    job.state = State::Cancelling;
    if (job.transfer != 0 && !job.end) node_.send(pdd::command::Cancel{job.transfer});
    if (!job.running) job.let_go = true;
}

void Prefiller::end_if_over(Job& job) {
    if (!job.let_go || (job.transfer != 0 && !job.end)) return;
    const pdd::Event end = job.end.value_or(pdd::Event{});
    const uint64_t sum = end.ok + end.failed + end.unknown;
    const bool took_all = end.text.empty() || end.text == "cancelled";  // else it ended before it took the rest
    if (job.end && (took_all ? sum != job.taken_units : sum > job.taken_units))
        run_.violate("a transfer of " + std::to_string(job.taken_units) + " units ends with " + std::to_string(end.ok) +
                     " + " + std::to_string(end.failed) + " + " + std::to_string(end.unknown));
    for (const uint32_t page : job.source)
        for (uint32_t layer = 0; layer < node_.config.shape.layers; ++layer)
            std::memset(node_.page(layer, page), kReused, node_.config.shape.page_bytes);
    free_.insert(free_.end(), job.source.begin(), job.source.end());
    const bool whole = job.state == State::Sending && end.failed + end.unknown == 0;
    const auto view = views_.find(job.link);
    if (view != views_.end() && job.link->prefiller.up()) {
        const Message message = ended(job.request.attempt, end.ok, end.failed, end.unknown);
        view->second.answered[job.request.attempt] = message;
        if (!whole) answer(*job.link, message);
    }
    jobs_.remove_if([&](const Job& one) { return &one == &job; });
}

// -- the engine -------------------------------------------------------------------------------------------------------
bool Prefiller::compute() {
    if (!step_.empty()) {
        end_layer();
        return true;
    }
    for (Job& job : jobs_)
        if (job.state == State::Queued && open(job)) return true;
    return begin_step();
}

void Prefiller::check() const {
    size_t held = free_.size();
    for (const Job& job : jobs_) held += job.source.size();
    if (held != node_.config.shape.pages) run_.violate("life " + std::to_string(node_.life()) + " has lost a page");
}

bool Prefiller::open(Job& job) {
    const size_t num_pages = job.request.pages.size();
    if (free_.size() < num_pages) return false;
    if (run_.rng.chance(5000)) std::sort(free_.begin(), free_.end(), std::greater<>());
    job.source.assign(free_.rbegin(), free_.rbegin() + static_cast<long>(num_pages));
    free_.resize(free_.size() - num_pages);
    job.state = State::Pushing;
    job.plan = plan_of(job);
    const auto& shape = node_.config.shape;
    if (units_.context) {
        const pdd::PlanEntry entry{uint64_t{job.source.back()} * shape.page_bytes,
                                   uint64_t{job.request.pages.back()} * shape.page_bytes, shape.page_bytes,
                                   units_.units_per_entry};
        job.context = *pdd::WritePlan::make({.src_region = node_.region}, {entry});
    }
    job.transfer = node_.open_transfer(job.link->prefiller.endpoint, job.request.key);
    by_transfer_[job.transfer] = &job;
    run_.note("life %llu opens a transfer for attempt %llu", node_.life(), job.request.attempt);
    return true;
}

std::shared_ptr<const pdd::WritePlan> Prefiller::plan_of(const Job& job) {
    const auto& shape = node_.config.shape;
    const uint32_t parts = units_.entries_per_page;
    const uint64_t size = shape.page_bytes / parts;
    std::vector<pdd::PlanEntry> entries;
    for (uint32_t i = 0; i < whole_pages(job); ++i)
        for (uint32_t part = 0; part < parts; ++part)
            entries.push_back({uint64_t{job.source[i]} * shape.page_bytes + part * size,
                               uint64_t{job.request.pages[i]} * shape.page_bytes + part * size, size,
                               units_.units_per_entry});
    auto plan = pdd::WritePlan::make(
        {node_.region, 0, shape.layer_stride(), views_[job.link].shape.layer_stride(), shape.layers}, entries);
    if (!plan) run_.violate(plan.error().message);
    return *plan;
}

// A step computes some pages of some prompts; their writes are armed before it runs.
bool Prefiller::begin_step() {
    for (Job& job : jobs_) {
        if (job.state != State::Pushing || step_.size() >= 3 || run_.rng.chance(3000)) continue;
        const uint32_t left = whole_pages(job) - job.computed;
        const auto count = static_cast<uint32_t>(run_.rng.between(1, left));
        const Chunk chunk{&job, job.computed, job.computed + count};
        const uint32_t parts = units_.entries_per_page;
        node_.send(pdd::command::Arm{job.transfer, node_.counter, num_steps_ * node_.config.shape.layers + 1, job.plan,
                                     chunk.begin * parts, chunk.end * parts});
        job.taken_units += uint64_t{count} * parts * units_.units_per_entry * node_.config.shape.layers;
        job.computed = chunk.end;
        job.running = true;
        step_.push_back(chunk);
    }
    layer_ = 0;
    return !step_.empty();
}

void Prefiller::end_layer() {
    const auto& shape = node_.config.shape;
    for (const Chunk& chunk : step_)
        for (uint32_t i = chunk.begin; i < chunk.end; ++i) {
            uint8_t* page = node_.page(layer_, chunk.job->source[i]);
            for (uint32_t b = 0; b < shape.page_bytes; ++b) page[b] = content(chunk.job->request.prompt, layer_, i, b);
        }
    node_.counter->bump();
    if (++layer_ < shape.layers) return;
    num_steps_ += 1;
    std::vector<Chunk> step;
    step.swap(step_);
    for (const Chunk& chunk : step) {
        Job& job = *chunk.job;
        job.running = false;
        if (job.state == State::Cancelling) {
            job.let_go = true;
        } else if (job.computed == whole_pages(job)) {
            if (units_.context) {
                uint8_t* page = node_.page(0, job.source.back());
                for (uint32_t b = 0; b < shape.page_bytes; ++b)
                    page[b] = content(job.request.prompt, 0, whole_pages(job), b);
                node_.send(pdd::command::Write{job.transfer, job.context});
                job.taken_units += units_.units_per_entry;
            }
            node_.send(pdd::command::Finish{job.transfer});
            job.state = State::Sending;
            job.let_go = true;
        }
        end_if_over(job);
    }
}

}  // namespace sim
