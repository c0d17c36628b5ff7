// What the yardsticks of the benchmarks move: PAGES PAGE_BYTES scattered|adjacent WINDOW, the last four arguments.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <random>
#include <string>
#include <vector>

#include "check.h"

struct Job {
    uint64_t pages;
    uint64_t page_bytes;
    bool scattered;
    uint64_t window;
    uint64_t nbytes() const { return pages * page_bytes; }
};

inline int64_t now_ns() {
    timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000 + now.tv_nsec;
}

struct Chunk {
    uint64_t from;
    uint64_t to;
    uint64_t nbytes;
};

inline std::vector<Chunk> chunks(const Job& job) {
    std::vector<Chunk> out;
    if (job.scattered) {
        std::vector<uint64_t> order(job.pages);
        for (uint64_t i = 0; i < job.pages; ++i) order[i] = i;
        std::shuffle(order.begin(), order.end(), std::mt19937_64(1));
        for (uint64_t i = 0; i < job.pages; ++i)
            out.push_back({i * job.page_bytes, order[i] * job.page_bytes, job.page_bytes});
        return out;
    }
    const uint64_t step = std::max(job.page_bytes, (uint64_t{1} << 20) / job.page_bytes * job.page_bytes);
    for (uint64_t at = 0; at < job.nbytes(); at += step) out.push_back({at, at, std::min(step, job.nbytes() - at)});
    return out;
}

// A memfd, as the ranks' KV memory is.
inline uint8_t* memory(const Job& job) {
    const int fd = ::memfd_create("arena", 0);
    CHECK(fd >= 0 && ::ftruncate(fd, static_cast<off_t>(job.nbytes())) == 0);
    void* at = ::mmap(nullptr, job.nbytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    CHECK(at != MAP_FAILED);
    return static_cast<uint8_t*>(at);
}

inline Job job_of(int argc, char** argv) {
    return {std::stoull(argv[argc - 4]), std::stoull(argv[argc - 3]), std::string(argv[argc - 2]) == "scattered",
            std::stoull(argv[argc - 1])};
}
