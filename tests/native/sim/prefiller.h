// Prefiller: a model of pdd/messenger/prefiller.py and of an engine that computes in steps: takes requests, arms each
// step's writes before it runs, bumps the layer counter, and gives source pages back only when every write is terminal.
//
// What it leaves out: load, progress, draining. tests/sim drives the real messenger.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "link.h"

namespace sim {

class Prefiller {
  public:
    Prefiller(Run& run, Witness& witness, Node& node, Units units);

    Node& node() { return node_; }
    bool idle() const { return jobs_.empty(); }
    // What the decoder's hello said.
    void connect(Link& link, uint64_t epoch, Shape shape) { views_[&link] = {epoch, shape, {}, {}}; }
    void fence(Link& link, const char* why);
    bool hear_events(size_t most);
    void hear(Link& link);  // one message
    // The engine does its next thing: takes a prompt on, begins a step, or ends a layer. False: nothing to do.
    bool compute();
    void check() const;

  private:
    enum class State { Queued, Pushing, Sending, Cancelling };
    struct Job {
        Message request;
        Link* link;
        State state = State::Queued;
        std::vector<uint32_t> source{};  // empty: none reserved yet
        std::shared_ptr<const pdd::WritePlan> plan{};
        std::shared_ptr<const pdd::WritePlan> context{};
        uint64_t transfer = 0;
        uint32_t computed = 0;     // pages, the running step's included
        uint64_t taken_units = 0;  // armed and written
        bool running = false;
        bool let_go = false;  // by the engine
        std::optional<pdd::Event> end{};
    };
    struct View {
        uint64_t epoch = 0;
        Shape shape;
        std::set<uint64_t> tombstones;
        std::map<uint64_t, Message> answered;
    };
    struct Chunk {
        Job* job;
        uint32_t begin;
        uint32_t end;
    };

    void take(Link& link, View& view, Message request);
    void answer(Link& link, const Message& ended);
    void stop(Job& job);  // end_if_over follows
    void end_if_over(Job& job);
    bool open(Job& job);
    bool begin_step();
    void end_layer();
    uint32_t whole_pages(const Job& job) const;
    std::shared_ptr<const pdd::WritePlan> plan_of(const Job& job);

    Run& run_;
    Witness& witness_;
    Node& node_;
    Units units_;
    std::vector<uint32_t> free_;
    std::list<Job> jobs_;
    std::map<Link*, View> views_;
    std::map<uint64_t, Job*> by_transfer_;
    std::set<uint64_t> over_;  // transfers whose end was told
    std::vector<Chunk> step_;
    uint64_t num_steps_ = 0;
    uint32_t layer_ = 0;  // of the running step, that is computed next
};

}  // namespace sim
