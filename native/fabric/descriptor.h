// Descriptor: what a peer must know to write here, as bytes that come from another machine.
//
// Little endian: "PDDF", u16 version, u8 n + wire name, u8 NICs, each {u32 address format, u32 writes
// that may be in flight to it, u16 n + address}, u16
// regions, each {u64 length, per NIC {u64 key, u64 base}}. A write to offset o of a region goes to base + o: base is 0
// where the provider counts from the region's start. parse() checks every length and that no base + length wraps.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fabric/caps.h"
#include "util/result.h"

namespace pdd {

struct RemoteNic {
    uint32_t address_format = 0;
    std::vector<uint8_t> address;
    uint32_t max_ops = 1;  // writes that may be in flight to it: what its completion queue holds
};

struct RemoteKey {
    uint64_t key = 0;
    uint64_t base = 0;
};

struct RemoteRegion {
    uint64_t length = 0;
    std::vector<RemoteKey> keys;  // one per NIC

    bool holds(uint64_t offset, uint64_t nbytes) const { return offset <= length && nbytes <= length - offset; }
};

struct Descriptor {
    static constexpr uint16_t kVersion = 2;
    static constexpr size_t kMaxRegions = 4096;
    static constexpr size_t kMaxAddress = 512;
    static constexpr size_t kMaxWire = 64;

    std::string wire;  // ProviderCaps::wire of the owner
    std::vector<RemoteNic> nics;
    std::vector<RemoteRegion> regions;

    std::string encode() const;
    static Result<Descriptor> parse(std::span<const uint8_t> bytes);
};

}  // namespace pdd
