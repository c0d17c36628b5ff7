// The yardsticks of tests/bench/bench_local.py: pages from one memfd to another on one host.
//
//   copy_loop memcpy                  by one thread of one process, which is all that memory can do; prints when each round
//                                     ended, then when it began
//   copy_loop writev-recv             prints where to write, then when each round was in
//   copy_loop writev-send PID BASE FD   by process_vm_writev, as the peers' "cma" does; prints when each round began
//
// followed by PAGES PAGE_BYTES scattered|adjacent WINDOW. A page is one call and one count in shared memory.
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/uio.h>

#include <atomic>
#include <cstring>
#include <iostream>

#include "bench_job.h"
#include "util/pause.h"

namespace {

using Count = std::atomic<uint64_t>;

Count* map_count(int fd) {
    void* at = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(at != MAP_FAILED);
    return static_cast<Count*>(at);
}

void copy(const Job& job) {
    const uint8_t* from = memory(job);
    uint8_t* to = memory(job);
    const auto work = chunks(job);
    for (std::string line; std::getline(std::cin, line);) {
        const auto began = now_ns();
        for (const Chunk& chunk : work) std::memcpy(to + chunk.to, from + chunk.from, chunk.nbytes);
        std::cout << now_ns() << "\n" << began << std::endl;
    }
}

void receive(const Job& job) {
    const int fd = ::memfd_create("count", 0);
    CHECK(fd >= 0 && ::ftruncate(fd, 4096) == 0);
    Count* count = map_count(fd);
    ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);  // where Yama asks
    std::cout << ::getpid() << " " << reinterpret_cast<uintptr_t>(memory(job)) << " " << fd << std::endl;
    uint64_t expected = 0;
    for (std::string line; std::getline(std::cin, line);) {
        expected += chunks(job).size();
        while (count->load(std::memory_order_acquire) < expected) pdd::cpu_pause();
        std::cout << now_ns() << std::endl;
    }
}

void send(pid_t pid, uintptr_t base, const std::string& fd, const Job& job) {
    const int shared = ::open(("/proc/" + std::to_string(pid) + "/fd/" + fd).c_str(), O_RDWR);
    CHECK(shared >= 0);
    Count* count = map_count(shared);
    uint8_t* from = memory(job);
    const auto work = chunks(job);
    for (std::string line; std::getline(std::cin, line);) {
        const auto began = now_ns();
        for (const Chunk& chunk : work) {
            const iovec here{from + chunk.from, chunk.nbytes};
            const iovec there{reinterpret_cast<void*>(base + chunk.to), chunk.nbytes};
            CHECK(::process_vm_writev(pid, &here, 1, &there, 1, 0) == static_cast<ssize_t>(chunk.nbytes));
            count->fetch_add(1, std::memory_order_release);
        }
        std::cout << began << std::endl;
    }
}

}  // namespace

int main(int argc, char** argv) {
    CHECK(argc >= 6);
    const Job job = job_of(argc, argv);
    const std::string role = argv[1];
    if (role == "memcpy") copy(job);
    if (role == "writev-recv") receive(job);
    if (role == "writev-send") send(std::stoi(argv[2]), std::stoull(argv[3]), argv[4], job);
}
