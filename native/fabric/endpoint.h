// Endpoint: the NIC side of one peer, on every NIC: addresses, keys, posting, polling, and the fence.
//
// A lane is one NIC here and one of the peer's: NIC i goes with NIC i, and where counts differ the shorter list is gone
// through again, so that every NIC of both ends takes part.
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
    // On `nics`, the first of which is NIC `first_nic` of the worker's. `num_groups`: of this node's rail groups, each
    // of which has an endpoint of that id to the same peer.
    static Result<std::unique_ptr<Endpoint>> open(uint32_t id, std::span<const std::unique_ptr<Nic>> nics,
                                                  size_t first_nic, const RegionTable& regions, Stats& stats,
                                                  uint32_t window_ops, uint32_t num_groups);

    // What a peer needs to write into `regions` here.
    Result<std::string> describe(std::span<const uint32_t> regions);
    void unexpose(uint32_t region) { exposed_.erase(region); }
    // Takes the peer's descriptor; an endpoint has one peer for its life.
    Status connect(std::span<const uint8_t> descriptor);
    bool connected() const { return remote_.has_value(); }

    // -- WritePort
    std::span<const Lane> lanes() const override { return lanes_; }
    size_t max_segments() const override;
    uint32_t group_of(const WritePlan& plan) const override;
    Status check(const WritePlan& plan) const override;
    PostResult post(size_t lane, const WritePlan& plan, const WriteBatch& batch, uint32_t imm, Op* op) override;
    std::string name(size_t lane) const override;
    std::string name() const;
    std::string error_text(int code) const override;

    // Reads up to `budget` completions of each NIC; returns how many there were.
    uint32_t poll(CompletionSink& sink, uint32_t budget);

    // Status of closing the endpoints proper: an error means that the fence does not stand.
    Status close();

    size_t num_ports() const { return ports_.size(); }
    NicPort& port(size_t index) { return *ports_[index]; }
    const ProviderCaps& caps(size_t index) const { return nics_[index]->caps(); }

  private:
    struct Route {
        size_t remote_nic;
        size_t key;     // position of that NIC in its group, and of its keys in a region
        uint64_t peer;  // as the port calls it
    };

    Endpoint(uint32_t id, std::span<const std::unique_ptr<Nic>> nics, size_t first_nic, const RegionTable& regions,
             Stats& stats, uint32_t max_inbound, uint32_t num_groups)
        : id_(id),
          nics_(nics),
          first_nic_(first_nic),
          regions_(regions),
          stats_(stats),
          max_inbound_(max_inbound),
          num_groups_(num_groups) {}
    // Lanes to one of the peer's rail groups.
    Status open_lanes(const Descriptor& remote, uint32_t group);
    Status check_remote(const Descriptor& remote) const;

    uint32_t id_;
    std::span<const std::unique_ptr<Nic>> nics_;
    size_t first_nic_;  // lanes, keys of regions and counts go by the worker's numbers
    const RegionTable& regions_;
    Stats& stats_;
    uint32_t max_inbound_;  // writes that the peer may have in flight to each port
    uint32_t num_groups_;
    std::unordered_map<uint32_t, std::vector<std::unique_ptr<NicMemory>>> exposed_;  // closed after the ports
    std::vector<std::unique_ptr<NicPort>> ports_;                                    // one per NIC
    std::optional<Descriptor> remote_;
    std::vector<Lane> lanes_;
    std::vector<Route> routes_;  // one per lane
};

}  // namespace pdd
