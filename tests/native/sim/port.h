// What the network keeps of each NIC, of each port, and of each write on its way.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "fabric/nic.h"
#include "network.h"

namespace sim {

struct NicState {
    uint32_t life;
    uint32_t host;
    uint32_t index;
    struct Memory {
        uint8_t* base;
        uint64_t nbytes;
        bool remote;
    };
    std::unordered_map<uint64_t, Memory> memories;  // by key
};

struct Entry {
    pdd::Op* op = nullptr;  // null: an immediate
    int error = 0;
    uint32_t imm = 0;
    uint64_t write = 0;  // its number
    bool again = false;  // it was told before
};

// A write that was posted here and whose completion was not told.
struct Untold {
    uint64_t write;
    const pdd::Op* op;
};

struct Port {
    enum class State { Open, Closed, Unfenced, Dead };

    // Writes to it can land.
    bool lands() const { return state == State::Open || state == State::Unfenced; }

    std::shared_ptr<NicState> nic;
    uint32_t endpoint;
    uint32_t queue;
    std::vector<uint8_t> address;
    State state = State::Open;
    std::vector<Entry> entries;
    bool overrun = false;
    bool broken = false;
    bool barred = false;  // a write of unknown fate, or worse, was told
    std::vector<Untold> untold;
    struct Route {
        std::string address;
        Port* peer = nullptr;  // once connected
        uint64_t ready_at = 0;
    };
    std::vector<Route> routes;
};

struct Fragment {
    const uint8_t* from;
    uint8_t* to;
    uint32_t nbytes;
    uint32_t at;  // in the write's buffer
    bool read = false;
    bool landed = false;
};

enum class Fate { Good, FailsSurely, FailsSomehow };

struct Carried {
    uint64_t number;
    Port* source;  // null: closed or dead
    uint32_t source_life;
    Port* target;  // null: nothing of it lands any more
    uint64_t key;  // of the target's memory
    pdd::Op* op;
    uint32_t imm;
    Fate fate = Fate::Good;
    int code = 0;
    std::vector<Fragment> fragments;
    std::vector<uint8_t> bytes;
    uint32_t unread = 0;
    uint32_t unlanded = 0;
    uint64_t not_before = 0;
    bool completed = false;  // its entry is queued, or nobody waits for one
    bool arrived = false;    // its immediate is queued, or will never be
};

}  // namespace sim
