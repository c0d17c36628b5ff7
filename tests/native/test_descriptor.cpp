// Descriptor: round trip, every truncation and thousands of seeded mutations. Garbage may parse, but never crashes, and
// what parses is inside the limits.
#include <random>

#include "check.h"
#include "fabric/descriptor.h"

using namespace pdd;

namespace {

std::span<const uint8_t> bytes(const std::string& text) {
    return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

Descriptor sample() {
    Descriptor d;
    d.wire = "tcp";
    d.nics = {{1, {1, 2, 3}, 256, 0}, {2, {9}, 5, 0}};
    d.regions = {{100, {{1, 0}, {2, 5}}, 0}, {UINT64_MAX, {{3, 0}, {4, 0}}, 0}};
    return d;
}

// Three NICs in two rail groups; a region of each.
Descriptor grouped() {
    Descriptor d = sample();
    d.nics.push_back({1, {7}, 9, 1});
    d.regions.push_back({50, {{6, 0}}, 1});
    return d;
}

void round_trip() {
    const auto parsed = Descriptor::parse(bytes(sample().encode()));
    CHECK(parsed);
    CHECK(parsed->encode() == sample().encode());
    CHECK(parsed->wire == "tcp" && parsed->nics[1].address_format == 2 && parsed->nics[1].max_ops == 5 &&
          parsed->regions[0].keys[1].base == 5);
    const auto& region = parsed->regions[0];
    CHECK(region.holds(0, 100) && region.holds(100, 0) && !region.holds(1, 100) && !region.holds(UINT64_MAX, 2));
    const auto groups = Descriptor::parse(bytes(grouped().encode()));
    CHECK(groups && groups->encode() == grouped().encode());
    CHECK(groups->num_groups() == 2 && groups->regions[2].group == 1 && groups->regions[2].keys.size() == 1);
    const std::pair<size_t, size_t> first{0, 2}, second{2, 3};
    CHECK(groups->nics_of(0) == first && groups->nics_of(1) == second);
    // One group speaks as nodes did that knew no groups.
    CHECK(sample().encode()[4] == Descriptor::kVersion && grouped().encode()[4] == Descriptor::kGroupedVersion);
    Descriptor none = sample();
    none.regions.clear();
    CHECK(Descriptor::parse(bytes(none.encode())));
}

void refuses_what_does_not_fit() {
    const std::string good = sample().encode();
    for (size_t cut = 0; cut < good.size(); ++cut) CHECK(!Descriptor::parse(bytes(good.substr(0, cut))));
    const std::string of_groups = grouped().encode();
    for (size_t cut = 0; cut < of_groups.size(); ++cut) CHECK(!Descriptor::parse(bytes(of_groups.substr(0, cut))));
    Descriptor apart = grouped();
    apart.nics[1].group = 1;  // 0 1 1: a region of group 0 now has a key too many
    CHECK(!Descriptor::parse(bytes(apart.encode())));
    apart.nics[0].group = 1;  // begins with group 1
    CHECK(!Descriptor::parse(bytes(apart.encode())));
    Descriptor homeless = grouped();
    homeless.regions[2].group = 2;
    CHECK(!Descriptor::parse(bytes(homeless.encode())));
    CHECK(!Descriptor::parse(bytes(good + "x")));
    Descriptor wrapping = sample();
    wrapping.regions[1].keys[0].base = 1;
    CHECK(!Descriptor::parse(bytes(wrapping.encode())));
    Descriptor closed = sample();
    closed.nics[0].max_ops = 0;
    CHECK(!Descriptor::parse(bytes(closed.encode())));
    Descriptor nameless = sample();
    nameless.wire = "";
    CHECK(!Descriptor::parse(bytes(nameless.encode())));
    nameless.wire = "a\nb";
    CHECK(!Descriptor::parse(bytes(nameless.encode())));
    Descriptor no_nic = sample();
    no_nic.nics.clear();
    no_nic.regions.clear();
    CHECK(!Descriptor::parse(bytes(no_nic.encode())));
}

void mutations_never_crash() {
    std::mt19937_64 random(11);
    const std::string good = sample().encode();
    uint32_t parsed_count = 0;
    for (int round = 0; round < 200000; ++round) {
        std::string text = good;
        if (random() % 8 == 0) {
            text.resize(random() % 200);
            for (auto& c : text) c = static_cast<char>(random());
            if (random() % 2 == 0) text.replace(0, std::min<size_t>(6, text.size()), good.substr(0, 6));
        }
        for (uint64_t i = random() % 5; i > 0 && !text.empty(); --i)
            text[random() % text.size()] = static_cast<char>(random());
        if (random() % 4 == 0) text.resize(random() % (text.size() + 8));
        const auto parsed = Descriptor::parse(bytes(text));
        if (!parsed) {
            CHECK(!parsed.error().message.empty());
            continue;
        }
        ++parsed_count;
        CHECK(parsed->encode() == text);
        CHECK(!parsed->nics.empty() && parsed->nics.size() <= kMaxNics);
        for (const auto& region : parsed->regions) CHECK(region.keys.size() == parsed->nics.size());
    }
    CHECK(parsed_count > 1000);  // the mutations do reach the inner parts
}

}  // namespace

int main() {
    round_trip();
    refuses_what_does_not_fit();
    mutations_never_crash();
}
