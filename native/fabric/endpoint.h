// Endpoint: the NIC side of one peer, on every NIC: addresses, keys, posting, polling, and the fence.
//
// Closing it is the fence: nothing of that peer lands afterwards (providers whose caps say so), and its completion
// queues are never read again. Owner: the worker's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "fabric/descriptor.h"
#include "fabric/region.h"
#include "fabric/sender.h"

namespace pdd {

class Endpoint final : public WritePort {
  public:
    static Result<std::unique_ptr<Endpoint>> open(uint32_t id, const Nics& nics, const RegionTable& regions,
                                                  Stats& stats);

    // What a peer needs to write into `regions` here.
    Result<std::string> describe(std::span<const uint32_t> regions);
    void unexpose(uint32_t region) { exposed_.erase(region); }
    // Takes the peer's descriptor; an endpoint has one peer for its life.
    Status connect(std::span<const uint8_t> descriptor);
    bool connected() const { return remote_.has_value(); }

    // -- WritePort
    size_t max_segments() const override;
    Status check(const WritePlan& plan) const override;
    PostResult post(const WritePlan& plan, const WriteBatch& batch, uint32_t imm, Op* op) override;
    std::string name() const override;
    std::string error_text(int code) const override;

    // Reads up to `budget` completions of each NIC; returns how many there were.
    uint32_t poll(CompletionSink& sink, uint32_t budget);

    // Status of closing the endpoints proper: an error means that the fence does not stand.
    Status close();

    NicPort& port(size_t nic) { return *rails_[nic].port; }

  private:
    struct Rail {
        std::unique_ptr<NicPort> port;
        uint64_t peer = 0;      // as the port calls it
        size_t remote_nic = 0;  // which of the peer's NICs this rail writes to
    };

    Endpoint(uint32_t id, const Nics& nics, const RegionTable& regions, Stats& stats)
        : id_(id), nics_(nics), regions_(regions), stats_(stats) {}
    Status check_remote(const Descriptor& remote) const;

    uint32_t id_;
    const Nics& nics_;
    const RegionTable& regions_;
    Stats& stats_;
    std::unordered_map<uint32_t, std::vector<std::unique_ptr<NicMemory>>> exposed_;  // closed after the rails
    std::vector<Rail> rails_;                                                        // one per NIC
    std::optional<Descriptor> remote_;
    size_t next_rail_ = 0;
};

}  // namespace pdd
