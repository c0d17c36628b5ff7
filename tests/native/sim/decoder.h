// Decoder: a model of pdd/messenger/decoder.py: reserves pages, takes a key, arms, asks; settles by count, cancels,
// fences, and frees a page only when nothing that names it can land.
//
// What it leaves out: choosing among prefillers, retries, deadlines (the scheduler decides when patience ends).
// tests/sim drives the real messenger.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <vector>

#include "link.h"

namespace sim {

class Decoder {
  public:
    Decoder(Run& run, Witness& witness, Ledger& ledger, Node& node, Units units, uint64_t epoch);

    Node& node() { return node_; }
    uint64_t epoch() const { return epoch_; }
    bool idle() const;  // but for pages that no fence frees
    size_t num_attempts() const { return attempts_.size(); }

    void connect(Link& link) { links_[link.decoder.endpoint] = &link; }
    // False: no pages, or no key.
    bool ask(Link& link, uint64_t prompt, uint32_t num_pages, bool arm_late);
    void arm_one();  // that was asked for before its count was armed
    // One that is wanted no more; the message may overtake its request.
    void cancel_one(bool overtakes);
    void lose_patience();  // with all that waits for something: a timer cancels, an unanswered cancel fences
    bool hear_events(size_t most);
    void hear(Link& link);  // one message
    void check();
    void fence(Link& link, const char* why);
    const Message* last_request() const { return last_request_.pages.empty() ? nullptr : &last_request_; }

  private:
    enum class State { Requested, Cancelling, Draining, Fencing };
    struct Attempt {
        uint64_t number;
        uint64_t prompt;
        Link* link;
        uint32_t key;
        std::vector<uint32_t> pages;
        uint64_t expected;
        State state = State::Requested;
        bool armed = false;
        bool reached_told = false;
        bool overrun_told = false;
        uint64_t ok = 0;           // as the prefiller says
        bool refused = false;      // by the prefiller
        uint64_t told_before = 0;  // units under this key on this endpoint, before it was given out
    };
    using Attempts = std::map<uint64_t, Attempt>;

    void arm(Attempt& attempt);
    void cancel(Attempt& attempt, bool overtakes);
    void compare(Attempt& attempt);
    uint64_t arrived(const Attempt& attempt) const;
    uint64_t told(const Attempt& attempt) const;
    void settle(Attempt& attempt, bool whole);
    void link_down(Link& link);
    void link_closed(Link& link);
    Attempt* by_key(uint64_t key);

    Run& run_;
    Witness& witness_;
    Ledger& ledger_;
    Node& node_;
    Units units_;
    uint64_t epoch_;
    std::vector<uint32_t> free_;
    Attempts attempts_;
    std::set<uint32_t> used_keys_;
    std::map<uint32_t, Link*> links_;  // by endpoint; ended ones too, until they are fenced
    uint64_t last_attempt_ = 0;
    Message last_request_;
};

}  // namespace sim
