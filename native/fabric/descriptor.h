// Descriptor: what a peer must know to write here, as bytes that come from another machine.
//
// Little endian: "PDDF", u16 version, u8 n + wire name, u8 NICs, each {u32 address format, u32 writes
// that may be in flight to it, u16 n + address}, u16
// regions, each {u64 length, per NIC {u64 key, u64 base}}. A write to offset o of a region goes to base + o: base is 0
// where the provider counts from the region's start. parse() checks every length and that no base + length wraps.
//
// A node of several rail groups says version 3: each NIC and each region begins with u8 rail group, NICs stand in the
// order of groups, and a region has keys of its group's NICs only.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fabric/caps.h"
#include "util/result.h"

namespace pdd {

struct RemoteNic {
    uint32_t address_format = 0;
    std::vector<uint8_t> address;
    uint32_t max_ops = 1;  // writes that may be in flight to it: what its completion queue holds
    uint8_t group = 0;     // rail group
};

struct RemoteKey {
    uint64_t key = 0;
    uint64_t base = 0;
};

struct RemoteRegion {
    uint64_t length = 0;
    std::vector<RemoteKey> keys;  // one per NIC of its group
    uint8_t group = 0;            // rail group

    bool holds(uint64_t offset, uint64_t nbytes) const { return offset <= length && nbytes <= length - offset; }
};

struct Descriptor {
    static constexpr uint16_t kVersion = 2;
    static constexpr uint16_t kGroupedVersion = 3;
    static constexpr size_t kMaxRegions = 4096;
    static constexpr size_t kMaxAddress = 512;
    static constexpr size_t kMaxWire = 64;

    std::string wire;  // ProviderCaps::wire of the owner
    std::vector<RemoteNic> nics;
    std::vector<RemoteRegion> regions;

    size_t num_groups() const { return nics.empty() ? 0 : size_t{nics.back().group} + 1; }
    // Positions of a group's NICs, which stand together: [first, last).
    std::pair<size_t, size_t> nics_of(size_t group) const;

    std::string encode() const;
    static Result<Descriptor> parse(std::span<const uint8_t> bytes);
};

}  // namespace pdd
