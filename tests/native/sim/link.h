// Link: the connection of one life of a decoder with one life of a prefiller, as pdd/messenger/link.py has it: messages
// in order both ways, an endpoint on each side, and both ends end on their own when the connection does.
#pragma once

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "node.h"

namespace sim {

struct Message {
    enum class Kind { Request, Cancel, Ended, End };
    Kind kind = Kind::End;
    uint64_t attempt = 0;
    // Request
    uint64_t prompt = 0;
    uint64_t epoch = 0;
    uint32_t key = 0;
    std::vector<uint32_t> pages{};
    // Ended
    uint64_t ok = 0;
    uint64_t failed = 0;
    uint64_t unknown = 0;
    bool refused = false;
};

struct Side {
    enum class State { Up, Closing, Closed, Unfenced, Gone };

    Node* node = nullptr;  // null: its life is over
    uint32_t endpoint = 0;
    State state = State::Up;
    bool failure_told = false;
    std::deque<Message> inbox;

    bool up() const { return state == State::Up; }
    void deliver(Message message) {
        if (up()) inbox.push_back(std::move(message));
    }
    // ENDPOINT_FAILED came: the fence does not stand, or something failed before. False: that was told already.
    bool failed(const pdd::Event& event) {
        if (!event.last) return !std::exchange(failure_told, true);
        return std::exchange(state, State::Unfenced) == State::Closing;
    }
};

struct Link {
    Side decoder;
    Side prefiller;

    // Ends one side: the fence is on its way, and the other side will read the end of the stream.
    static void end(Side& side, Side& other) {
        if (!side.up()) return;
        side.state = Side::State::Closing;
        side.inbox.clear();
        side.node->send(pdd::command::CloseEndpoint{side.endpoint});
        other.deliver({});
    }
};

// What both roles share of a plan's shape: entries of a page, and units of an entry.
struct Units {
    uint32_t entries_per_page = 1;
    uint32_t units_per_entry = 1;
    bool context = false;  // one write more, of its own, once all is computed

    uint64_t expected(uint32_t layers, uint64_t num_pages) const {
        const uint64_t whole = num_pages - (context ? 1 : 0);
        return layers * whole * entries_per_page * units_per_entry + (context ? units_per_entry : 0);
    }
};

}  // namespace sim
