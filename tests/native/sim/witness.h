// Witness: stands between a worker and its NICs, and judges what passes: the windows that are kept, no write after one
// of unknown fate, no completion twice, sums that agree. What carries the writes underneath is not its business: the
// simulated wire, copies through pinned memory over it, or the memory that two processes share.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fabric/nic.h"
#include "fabric/window.h"
#include "run.h"

namespace sim {

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

struct Watched {
    uint32_t life;
    pdd::WindowSize window;
    bool repeats = false;                 // what carries it may tell a completion twice
    std::function<void()> polled = [] {};  // after each poll
};

class WitnessPort;

class Witness {
  public:
    explicit Witness(Run& run) : run_(run) {}

    std::unique_ptr<pdd::Nic> watch(std::unique_ptr<pdd::Nic> inner, Watched watched);
    // The endpoint whose ports are about to be opened.
    void opening(uint32_t endpoint) { opening_ = endpoint; }
    EndpointRecord& record(uint32_t life, uint32_t endpoint) { return records_[{life, endpoint}]; }
    Totals& totals(uint32_t life) { return totals_[life]; }
    // Of a transfer that was told to be over: false while a completion of it is still to come.
    bool all_told(uint32_t life, uint64_t transfer) const;
    size_t open_ports() const { return ports_.size(); }
    size_t fences_that_do_not_stand() const { return unfenced_; }
    // Its ports tell nothing any more; sockets of theirs are cut off, as the kernel does when a process dies.
    void die(uint32_t life);

  private:
    friend WitnessPort;
    Run& run_;
    std::vector<WitnessPort*> ports_;  // the open ones
    std::map<std::pair<uint32_t, uint32_t>, EndpointRecord> records_;
    std::unordered_map<uint32_t, Totals> totals_;
    uint32_t opening_ = 0;
    size_t unfenced_ = 0;
};

}  // namespace sim
