// Network: the NICs of all nodes and the writes between them, as unkind as the contract of nic.h allows.
//
// A write is cut into fragments. Each is read from the source at some moment, and lands at some later one, in any order
// among all writes of the network. Its completion may come before it has landed, once its source was read. It may fail
// with a code that proves that nothing lands, or with one that proves nothing, after which what was read may still land
// for as long as the target's port is open. An immediate comes after all of its own write and says nothing of others.
//
// The close of the port that is written to is the only fence: closing the source's port, closing memory or the death
// of the source stops nothing that has left.
//
// A completion may be told twice, at once or later. Not while its context serves another write of the same endpoint,
// from whose own completion it could not be told; and an immediate never is, which no count would survive.
//
// Asked wrongly, it says so: a window that is not kept, a post on a closed port, or after a write of unknown fate.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "fabric/nic.h"
#include "fabric/window.h"
#include "ledger.h"
#include "run.h"

namespace sim {

// How the NICs of one run behave where providers differ.
struct Traits {
    bool early_completion;    // once the source was read, as tcp; else once the write has landed
    bool lands_when_polled;   // as software providers do
    bool holds_back;          // arrivals wait while the target's queue is full, as tcp; else the queue overruns
    bool virtual_addressing;  // as verbs and efa; else offsets
    bool app_keys;
    size_t segments;
    uint32_t most_fragments;  // of one piece
};

// How often things go wrong, in ten thousand.
struct Odds {
    uint32_t again = 0;
    uint32_t refused = 0;
    uint32_t fails_surely = 0;   // a completion that proves that nothing landed
    uint32_t fails_somehow = 0;  // a completion that proves nothing
    uint32_t twice = 0;          // a completion is told twice, at once or later
    uint32_t overrun = 0;        // a queue breaks, per poll
    uint32_t close_fails = 0;    // the fence does not stand
    uint32_t late = 0;           // a write is held back for long
    uint64_t nth_fails = 0;      // the n-th write of the run, 0: none
};

struct Totals {  // of one life
    uint64_t posted = 0;
    uint64_t inflight = 0;  // posted and not told, on open ports
    uint64_t inflight_bytes = 0;
    uint64_t units_told = 0;                            // of immediates
    std::unordered_map<uint64_t, uint64_t> units_good;  // of writes that were told to be done, by transfer
};

struct EndpointRecord {
    bool barred = false;                          // a write of unknown fate, or worse, was told
    std::unordered_map<uint32_t, uint64_t> told;  // units by key, of immediates
};

struct Port;
struct Entry;
struct Untold;
struct Carried;  // a write on its way

class Network {
  public:
    Network(Run& run, Ledger& ledger, Traits traits);
    ~Network();

    const Traits& traits() const { return traits_; }
    Odds odds;

    // `host` names addresses: a node that comes back has those of its former life.
    std::unique_ptr<pdd::Nic> make_nic(uint32_t life, uint32_t host, uint32_t index, pdd::WindowSize window);
    // The endpoint whose ports are about to be opened.
    EndpointRecord& opening(uint32_t life, uint32_t endpoint);
    EndpointRecord& record(uint32_t life, uint32_t endpoint) { return records_[{life, endpoint}]; }
    Totals& totals(uint32_t life) { return totals_[life]; }

    // Something happens to some write; false: nothing could.
    bool step();
    void die(uint32_t life);
    bool empty() const { return writes_.empty(); }
    // Of a transfer that was told to be over: false while a completion of it is still to come.
    bool all_told(uint32_t life, uint64_t transfer) const;
    size_t open_ports() const;
    size_t open_memories() const { return memories_; }

  private:
    friend class SimNic;
    friend class SimPort;
    friend class SimMemory;
    using Writes = std::vector<std::unique_ptr<Carried>>;

    pdd::PostResult post(Port& source, const pdd::NicWrite& write, pdd::Op* op);
    uint32_t poll(Port& port, pdd::CompletionSink& sink, uint32_t budget);
    pdd::Status close(Port& port);
    void check_windows(const Port& source, uint64_t route, uint64_t nbytes);
    Port* connect(Port& source, uint64_t route);
    bool advance(Carried& write, const Port* polled);
    bool land(Carried& write);
    bool arrive(Carried& write);
    void complete(Carried& write);
    void lose_target(Carried& write);
    void forget_source(Carried& write);
    void settle(Port& source, const Untold& one);
    void tell_again(Port& port, const Entry& entry, pdd::CompletionSink& sink);
    void sweep();

    Run& run_;
    Ledger& ledger_;
    Traits traits_;
    std::vector<std::shared_ptr<Port>> ports_;
    std::map<std::string, Port*> by_address_;  // the open ones
    Writes writes_;
    std::map<std::pair<uint32_t, uint32_t>, EndpointRecord> records_;
    std::unordered_map<uint32_t, Totals> totals_;
    uint32_t opening_ = 0;
    uint64_t num_writes_ = 0;
    uint64_t next_key_ = 100;
    uint64_t now_ = 0;  // steps
    size_t memories_ = 0;
};

}  // namespace sim
