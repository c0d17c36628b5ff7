#include "fabric/descriptor.h"

#include <algorithm>
#include <concepts>

namespace pdd {
namespace {

constexpr char kMagic[] = {'P', 'D', 'D', 'F'};

template <std::unsigned_integral T>
void put(std::string& out, T value) {
    for (size_t i = 0; i < sizeof(T); ++i) out.push_back(static_cast<char>(value >> (8 * i) & 0xff));
}

// Reads forwards; a short read makes it bad for good and yields zeros.
class Reader {
  public:
    explicit Reader(std::span<const uint8_t> bytes) : rest_(bytes) {}

    std::span<const uint8_t> take(size_t count) {
        if (count > rest_.size()) {
            good_ = false;
            rest_ = {};
            return {};
        }
        const auto out = rest_.first(count);
        rest_ = rest_.subspan(count);
        return out;
    }

    template <std::unsigned_integral T>
    T get() {
        uint64_t value = 0;
        size_t shift = 0;
        for (const uint8_t byte : take(sizeof(T))) {
            value |= static_cast<uint64_t>(byte) << shift;
            shift += 8;
        }
        return static_cast<T>(value);
    }

    bool good() const { return good_; }
    size_t left() const { return rest_.size(); }

  private:
    std::span<const uint8_t> rest_;
    bool good_ = true;
};

Error malformed(const std::string& what) {
    return Error{"malformed fabric descriptor: " + what, 22};
}

}  // namespace

std::pair<size_t, size_t> Descriptor::nics_of(size_t group) const {
    const auto before = [](const RemoteNic& nic, size_t wanted) { return nic.group < wanted; };
    const auto first = std::lower_bound(nics.begin(), nics.end(), group, before);
    const auto last = std::lower_bound(first, nics.end(), group + 1, before);
    return {first - nics.begin(), last - nics.begin()};
}

std::string Descriptor::encode() const {
    const bool grouped = num_groups() > 1;
    std::string out(kMagic, sizeof kMagic);
    put<uint16_t>(out, grouped ? kGroupedVersion : kVersion);
    put<uint8_t>(out, static_cast<uint8_t>(wire.size()));
    out += wire;
    put<uint8_t>(out, static_cast<uint8_t>(nics.size()));
    for (const auto& nic : nics) {
        if (grouped) put<uint8_t>(out, nic.group);
        put<uint32_t>(out, nic.address_format);
        put<uint32_t>(out, nic.max_ops);
        put<uint16_t>(out, static_cast<uint16_t>(nic.address.size()));
        out.append(nic.address.begin(), nic.address.end());
    }
    put<uint16_t>(out, static_cast<uint16_t>(regions.size()));
    for (const auto& region : regions) {
        if (grouped) put<uint8_t>(out, region.group);
        put<uint64_t>(out, region.length);
        for (const auto& key : region.keys) {
            put<uint64_t>(out, key.key);
            put<uint64_t>(out, key.base);
        }
    }
    return out;
}

Result<Descriptor> Descriptor::parse(std::span<const uint8_t> bytes) {
    Reader in(bytes);
    const auto magic = in.take(sizeof kMagic);
    if (!in.good() || !std::equal(magic.begin(), magic.end(), kMagic)) return malformed("no magic");
    const auto version = in.get<uint16_t>();
    const bool grouped = version == kGroupedVersion;
    if (!in.good() || (version != kVersion && !grouped))
        return malformed("version " + std::to_string(version) + ", not " + std::to_string(kVersion));

    Descriptor out;
    const auto wire = in.take(in.get<uint8_t>());
    if (wire.empty() || wire.size() > kMaxWire) return malformed("wire name");
    for (const uint8_t c : wire) {
        if (c < 0x20 || c > 0x7e) return malformed("wire name");  // it goes into messages
        out.wire.push_back(static_cast<char>(c));
    }

    const size_t num_nics = in.get<uint8_t>();
    if (num_nics == 0 || num_nics > kMaxNics) return malformed(std::to_string(num_nics) + " NICs");
    for (size_t i = 0; i < num_nics; ++i) {
        RemoteNic nic;
        if (grouped) nic.group = in.get<uint8_t>();
        if (nic.group != out.num_groups() && (out.nics.empty() || nic.group != out.nics.back().group))
            return malformed("rail group of NIC " + std::to_string(i));
        nic.address_format = in.get<uint32_t>();
        nic.max_ops = in.get<uint32_t>();
        if (nic.max_ops == 0) return malformed("NIC " + std::to_string(i) + " takes no writes");
        const auto address = in.take(in.get<uint16_t>());
        if (address.empty() || address.size() > kMaxAddress) return malformed("address of NIC " + std::to_string(i));
        nic.address.assign(address.begin(), address.end());
        out.nics.push_back(std::move(nic));
    }

    const size_t num_regions = in.get<uint16_t>();
    if (!in.good() || num_regions > kMaxRegions) return malformed(std::to_string(num_regions) + " regions");
    for (size_t i = 0; i < num_regions; ++i) {
        if (!in.good()) return malformed("wrong length");
        RemoteRegion region;
        if (grouped) region.group = in.get<uint8_t>();
        if (region.group >= out.num_groups()) return malformed("rail group of region " + std::to_string(i));
        region.length = in.get<uint64_t>();
        const auto [first, last] = out.nics_of(region.group);
        for (size_t n = first; n < last; ++n) {
            RemoteKey key;
            key.key = in.get<uint64_t>();
            key.base = in.get<uint64_t>();
            if (key.base + region.length < key.base) return malformed("region " + std::to_string(i) + " wraps");
            region.keys.push_back(key);
        }
        out.regions.push_back(std::move(region));
    }
    if (!in.good() || in.left() != 0) return malformed("wrong length");
    return out;
}

}  // namespace pdd
