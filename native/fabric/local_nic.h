// LocalNic: the Nic that needs no network: peers on the same host, over LocalChannels.
//
// It lends the regions that have a memfd behind them (NicMemory::lend) to whoever it writes to, and gives those that
// peers write to a random key each, as the tcp provider does. One per node; opened beside a node's fabric, or alone as
// provider "local". Owner: the worker's thread.
#pragma once

#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "fabric/local_channel.h"
#include "fabric/nic.h"

namespace pdd {

class LocalMemory;

class LocalNic : public Nic, public LocalTargets {
  public:
    LocalNic();

    // -- Nic
    const ProviderCaps& caps() const override { return caps_; }
    uint32_t address_format() const override { return 0; }  // none of libfabric's
    Result<std::unique_ptr<NicMemory>> register_memory(uint8_t* base, uint64_t nbytes, Access access) override;
    Result<std::unique_ptr<NicPort>> open_port(uint32_t queue) override;
    std::string error_text(int code) const override;

    // -- for its ports
    const LocalTarget* find_target(uint64_t key) const override;
    std::vector<LocalSource> sources() const;

  private:
    friend LocalMemory;
    ProviderCaps caps_;
    std::map<uint64_t, LocalMemory*> sources_;  // by id
    std::unordered_map<uint64_t, LocalTarget> targets_;
    uint64_t next_source_ = 1;
};

// A region of this node: the source of its writes, or under its key the target of a peer's.
class LocalMemory final : public NicMemory {
  public:
    LocalMemory(LocalNic& nic, uint8_t* base, uint64_t nbytes, Access access);
    ~LocalMemory() override { close(); }
    int close() override;
    void lend(int fd) override;

    const uint8_t* base() const { return base_; }
    const LocalSource& source() const { return source_; }

  private:
    LocalNic& nic_;
    uint8_t* base_;
    UniqueFd lent_;
    LocalSource source_;
    bool open_ = true;
};

}  // namespace pdd
