// RegionTable: local memory that is registered on every NIC. Owner: the worker's thread.
//
// A region is a source of writes everywhere. What peers may write to is exposed per endpoint where we choose the keys
// (tcp: registering costs nothing), so that a key dies with its endpoint; hardware registers once, for both.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "fabric/nic.h"
#include "util/result.h"

namespace pdd {

struct LocalRegion {
    uint8_t* base = nullptr;
    uint64_t length = 0;
    std::vector<std::unique_ptr<NicMemory>> keys;  // one per NIC

    bool holds(uint64_t offset, uint64_t nbytes) const { return offset <= length && nbytes <= length - offset; }
};

class RegionTable {
  public:
    // Ids are first, first + step, first + 2 * step, ...: tables of one step have none in common.
    RegionTable(const Nics& nics, uint32_t first, uint32_t step) : nics_(nics), next_id_(first), step_(step) {}

    // The new id, never given twice. `fd`: the memfd whose first bytes it is, or -1.
    Result<uint32_t> add(uint8_t* base, uint64_t length, int fd);
    Status remove(uint32_t id);
    const LocalRegion* find(uint32_t id) const;
    size_t size() const { return regions_.size(); }

  private:
    const Nics& nics_;
    std::unordered_map<uint32_t, LocalRegion> regions_;
    uint32_t next_id_;
    uint32_t step_;
};

}  // namespace pdd
