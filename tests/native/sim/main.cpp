// fabric_sim: workers over a simulated NIC, seed by seed.
//
//   fabric_sim [--seeds N] [--first S] [--history LINES]
//
// A seed that fails is played again, which must give the same history, and that history is printed. Exit 0: all seeds
// are good; 1: one was not; 2: wrong usage.
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "world.h"

namespace {

struct Result {
    std::string violation;
    uint64_t hash;
};

volatile uint64_t playing = 0;

// A run that crashes names its seed, too.
void crashed(int signal) {
    std::printf("seed %llu: crashed with signal %d\n", static_cast<unsigned long long>(playing), signal);
    std::fflush(stdout);
    std::_Exit(1);
}

Result play(uint64_t seed, sim::Tally& tally, size_t print) {
    playing = seed;
    sim::Run run(seed, tally);
    {
        sim::World world(run);
        world.play();
    }
    if (print > 0) run.history.print(print);
    return {run.violation, run.history.hash()};
}

int usage() {
    std::fprintf(stderr, "usage: fabric_sim [--seeds N] [--first S] [--history LINES]\n");
    return 2;
}

}  // namespace

int main(int argc, char** argv) {
    uint64_t seeds = 500;
    uint64_t first = 1;
    size_t history = 200;
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 >= argc) return usage();
        char* end = nullptr;
        const uint64_t value = std::strtoull(argv[i + 1], &end, 10);
        if (*argv[i + 1] == '\0' || *end != '\0') return usage();
        if (std::strcmp(argv[i], "--seeds") == 0)
            seeds = value;
        else if (std::strcmp(argv[i], "--first") == 0)
            first = value;
        else if (std::strcmp(argv[i], "--history") == 0)
            history = static_cast<size_t>(value);
        else
            return usage();
    }
    for (const int signal : {SIGSEGV, SIGABRT, SIGFPE, SIGBUS}) std::signal(signal, crashed);
    sim::Tally tally;
    const auto begin = std::chrono::steady_clock::now();
    for (uint64_t seed = first; seed < first + seeds; ++seed) {
        const Result result = play(seed, tally, 0);
        if (result.violation.empty()) continue;
        const Result again = play(seed, tally, history);
        std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), result.violation.c_str());
        if (again.hash != result.hash || again.violation != result.violation)
            std::printf("seed %llu DID NOT REPLAY: %s\n", static_cast<unsigned long long>(seed),
                        again.violation.c_str());
        std::printf("replay: fabric_sim --first %llu --seeds 1\n", static_cast<unsigned long long>(seed));
        return 1;
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    tally.print();
    std::printf("%llu seeds are good (%.1f s)\n", static_cast<unsigned long long>(seeds), took.count());
    return 0;
}
