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
// A write to KV memory is the ledger's to judge; any other lands in memory that must still be registered by then.
//
// Asked wrongly, it says so: a post on a closed port, or on one where a write has come to an unknown end.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "fabric/nic.h"
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
    bool named;  // addresses are text; else as long as each other
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

struct Port;
struct Entry;
struct Untold;
struct Carried;  // a write on its way
class SimMemory;

// Codes of a completion, or of a post that is refused, which prove that nothing has landed or will.
bool is_sure(int code);

class Network {
  public:
    Network(Run& run, Ledger& ledger, Traits traits);
    ~Network();

    const Traits& traits() const { return traits_; }
    Odds odds;

    // `host` names addresses: a node that comes back has those of its former life.
    std::unique_ptr<pdd::Nic> make_nic(uint32_t life, uint32_t host, uint32_t index);
    // The endpoint whose ports are about to be opened.
    void opening(uint32_t endpoint) { opening_ = endpoint; }

    // Something happens to some write; false: nothing could.
    bool step();
    void die(uint32_t life);
    bool empty() const { return writes_.empty(); }
    size_t open_memories() const { return memories_.size(); }

  private:
    friend class SimNic;
    friend class SimPort;
    friend SimMemory;
    using Writes = std::vector<std::unique_ptr<Carried>>;

    pdd::PostResult post(Port& source, const pdd::NicWrite& write, pdd::Op* op);
    uint32_t poll(Port& port, pdd::CompletionSink& sink, uint32_t budget);
    pdd::Status close(Port& port);
    Port* connect(Port& source, uint64_t route);
    bool advance(Carried& write, const Port* polled);
    bool land(Carried& write);
    bool arrive(Carried& write);
    void complete(Carried& write);
    void lose_target(Carried& write);
    void forget_source(Carried& write);
    void tell_again(Port& port, const Entry& entry, pdd::CompletionSink& sink);
    void sweep();

    Run& run_;
    Ledger& ledger_;
    Traits traits_;
    std::vector<std::shared_ptr<Port>> ports_;
    std::map<std::string, Port*> by_address_;  // the open ones
    Writes writes_;
    uint32_t opening_ = 0;
    uint64_t num_writes_ = 0;
    uint64_t next_key_ = 100;
    uint64_t now_ = 0;  // steps
    std::unordered_set<SimMemory*> memories_;  // registered; those of a fence that did not stand are never closed
};

}  // namespace sim
