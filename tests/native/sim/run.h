// Run: what all parts of one simulated run share: its seed's random numbers, its history, and the first thing that was
// not as it must be.
//
// Nothing else is random, and nothing reads a clock: the same seed gives the same history.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace sim {

// splitmix64: small, and the same everywhere, which the distributions of <random> are not.
class Rng {
  public:
    explicit Rng(uint64_t seed) : state_(seed) {}
    uint64_t next() {
        uint64_t z = (state_ += 0x9e3779b97f4a7c15);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }
    // 0 to n - 1; n is not 0.
    uint64_t below(uint64_t n) { return next() % n; }
    uint64_t between(uint64_t least, uint64_t most) { return least + below(most - least + 1); }
    // `odds` in ten thousand.
    bool chance(uint32_t odds) { return odds != 0 && below(10000) < odds; }

  private:
    uint64_t state_;
};

// What happened, as formats with up to four numbers: printed only when a run fails.
class History {
  public:
    void note(const char* format, uint64_t a = 0, uint64_t b = 0, uint64_t c = 0, uint64_t d = 0) {
        notes_.push_back({format, {a, b, c, d}});
    }
    size_t size() const { return notes_.size(); }
    // Of all that would be printed: differs when any word or number does.
    uint64_t hash() const {
        uint64_t hash = 0xcbf29ce484222325;
        const auto add = [&hash](uint64_t value) { hash = (hash ^ value) * 0x100000001b3; };
        for (const auto& [format, values] : notes_) {
            for (const char* c = format; *c != '\0'; ++c) add(static_cast<unsigned char>(*c));
            for (const uint64_t value : values) add(value);
        }
        return hash;
    }
    // The setting, and the `last` lines.
    void print(size_t last) const {
        const size_t first = notes_.size() > last + kSetting ? notes_.size() - last : kSetting;
        for (size_t i = 0; i < notes_.size(); ++i) {
            if (i == kSetting && first > kSetting)
                std::printf("  ... %zu lines, --history shows more\n", first - kSetting);
            if (i >= kSetting && i < first) continue;
            const auto& [format, v] = notes_[i];
            char line[256];
            std::snprintf(line, sizeof line, format, static_cast<unsigned long long>(v[0]),
                          static_cast<unsigned long long>(v[1]), static_cast<unsigned long long>(v[2]),
                          static_cast<unsigned long long>(v[3]));
            std::printf("  %s\n", line);
        }
    }

  private:
    static constexpr size_t kSetting = 6;  // lines
    struct Note {
        const char* format;
        uint64_t values[4];
    };
    std::vector<Note> notes_;
};

// How often what happened, over all runs: a simulation in which nothing goes wrong proves nothing.
struct Tally {
    uint64_t asked = 0;
    uint64_t whole = 0;
    uint64_t released = 0;
    uint64_t fenced = 0;
    uint64_t writes = 0;
    uint64_t failed = 0;      // completions and posts
    uint64_t twice = 0;       // at once
    uint64_t late_twice = 0;  // later
    uint64_t misleading = 0;  // of these, when the context served another endpoint
    uint64_t overruns = 0;
    uint64_t unfenced = 0;  // ports
    uint64_t cuts = 0;
    uint64_t pauses = 0;
    uint64_t deaths = 0;
    uint64_t stale = 0;  // requests of a former life
    uint64_t tombstones = 0;
    uint64_t copies = 0;  // parts of them, by GPUs
    uint64_t broken_gpus = 0;
    uint64_t local = 0;  // links
    uint64_t meanwhile = 0;  // copies between processes during which the other one went on

    // What it is called, and how often it was.
    std::vector<std::pair<const char*, uint64_t>> counts() const {
        return {{"prompts asked for", asked},
                {"whole", whole},
                {"released", released},
                {"links fenced", fenced},
                {"links cut", cuts},
                {"writes posted", writes},
                {"writes refused or failed", failed},
                {"completions told twice at once", twice},
                {"completions told twice, late", late_twice},
                {"of these, of a context in use", misleading},
                {"queues overrun", overruns},
                {"ports whose close failed", unfenced},
                {"nodes paused", pauses},
                {"nodes killed", deaths},
                {"requests of a former life", stale},
                {"cancels before their request", tombstones},
                {"parts of copies by GPUs", copies},
                {"GPUs that broke", broken_gpus},
                {"links over shared memory", local},
                {"of their copies, overtaken", meanwhile}};
    }
};

struct Run {
    Run(uint64_t seed, Tally& tally) : rng(seed), tally(tally) {}

    void violate(std::string what) {
        if (violation.empty()) violation = std::move(what);
    }
    bool good() const { return violation.empty(); }
    template <class... Values>
    void note(const char* format, Values... values) {
        history.note(format, static_cast<uint64_t>(values)...);
    }

    Rng rng;
    Tally& tally;
    History history;
    std::string violation;  // the first
    bool faults = false;    // whether anything was made to go wrong so far
};

}  // namespace sim
