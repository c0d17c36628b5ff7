// Endpoint: the libfabric side of one peer, on every NIC: addresses, keys, posting, polling, and the fence.
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
    static Result<std::unique_ptr<Endpoint>> open(uint32_t id, const Domains& domains, const RegionTable& regions,
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

    // Receives what poll() finds.
    class Sink {
      public:
        virtual ~Sink() = default;
        virtual void on_write(Op* op, int error) = 0;
        virtual void on_immediate(uint32_t imm) = 0;
        virtual void on_error(const std::string& message) = 0;  // not tied to a write of ours
    };
    // Reads up to `budget` completions of each rail; returns how many there were.
    uint32_t poll(Sink& sink, uint32_t budget);

    // Status of closing the endpoints proper: an error means that the fence does not stand.
    Status close();

    std::span<Rail> rails() { return rails_; }

  private:
    Endpoint(uint32_t id, const Domains& domains, const RegionTable& regions, Stats& stats)
        : id_(id), domains_(domains), regions_(regions), stats_(stats) {}
    Status check_remote(const Descriptor& remote) const;
    uint32_t poll_rail(size_t nic, Sink& sink, uint32_t budget);
    void read_errors(size_t nic, Sink& sink);

    uint32_t id_;
    const Domains& domains_;
    const RegionTable& regions_;
    Stats& stats_;
    std::unordered_map<uint32_t, std::vector<Fid<fid_mr>>> exposed_;  // closed after the rails
    std::vector<Rail> rails_;                                         // one per NIC, in the order of domains_
    std::vector<bool> broken_;                                        // rails whose queue must not be read any more
    std::optional<Descriptor> remote_;
    size_t next_rail_ = 0;
};

}  // namespace pdd
