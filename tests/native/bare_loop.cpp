// The yardsticks of tests/bench/bench_fabric.py: pages by a bare libfabric write loop, or by a raw TCP socket.
//
//   bare_loop fabric-recv LIBRARY PROVIDER BIND | tcp-recv BIND     prints where to write, then when each round was in
//   bare_loop fabric-send LIBRARY PROVIDER BIND ADDRESS KEY BASE | tcp-send BIND PORT     prints when each round began
//
// A round begins with a line on stdin; times are CLOCK_MONOTONIC in ns. The words are followed by PAGES PAGE_BYTES scattered|adjacent WINDOW. A round writes all pages once, one write and one immediate
// per page (adjacent pages: up to 1 MiB per write). No pdd threads, rings, events or accounting: what the library alone
// can do.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <rdma/fi_rma.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#include "bench_job.h"
#include "check.h"
#include "fabric/domain.h"
#include "fabric/library_choice.h"

using namespace pdd;

namespace {

std::string hex(const std::vector<uint8_t>& bytes) {
    std::string out;
    for (const uint8_t b : bytes) {
        out += "0123456789abcdef"[b >> 4];
        out += "0123456789abcdef"[b & 15];
    }
    return out;
}

std::vector<uint8_t> unhex(const std::string& text) {
    std::vector<uint8_t> out;
    for (size_t i = 0; i + 1 < text.size(); i += 2)
        out.push_back(static_cast<uint8_t>(std::stoul(text.substr(i, 2), nullptr, 16)));
    return out;
}

std::unique_ptr<Domain> open_domain(char** args) {
    auto choice = choose_library(args[0], {});
    CHECK(choice);
    auto offers = find_nics(choice->library, args[1], args[2]);
    CHECK(offers);
    auto domain = Domain::open(choice->library, std::move(offers->front()));
    CHECK(domain);
    return std::move(*domain);
}

void fabric_receive(char** args, const Job& job) {
    auto domain = open_domain(args);
    auto rail = domain->open_rail(4096);
    CHECK(rail);
    uint8_t* base = memory(job);
    auto mr = domain->register_memory(base, job.nbytes(), Access::Both);
    CHECK(mr);
    const uint64_t at = domain->caps().virtual_addressing ? reinterpret_cast<uint64_t>(base) : 0;
    std::cout << hex(rail->address) << " " << (*mr)->key << " " << at << std::endl;
    const uint64_t expected = chunks(job).size();
    for (std::string line; std::getline(std::cin, line);) {
        fi_cq_data_entry entries[64];
        for (uint64_t arrived = 0; arrived < expected;) {
            const auto count = ::fi_cq_read(rail->cq.get(), entries, 64);
            CHECK(count > 0 || count == -FI_EAGAIN);
            if (count > 0) arrived += static_cast<uint64_t>(count);
        }
        std::cout << now_ns() << std::endl;
    }
}

void fabric_send(char** args, const std::string& address, uint64_t key, uint64_t at, const Job& job) {
    auto domain = open_domain(args);
    auto rail = domain->open_rail(4096);
    CHECK(rail);
    uint8_t* base = memory(job);
    auto mr = domain->register_memory(base, job.nbytes(), Access::Local);
    CHECK(mr);
    fi_addr_t peer = FI_ADDR_UNSPEC;
    CHECK(::fi_av_insert(rail->av.get(), unhex(address).data(), 1, &peer, 0, nullptr) == 1);
    const auto work = chunks(job);
    std::vector<fi_context2> contexts(work.size());
    for (std::string line; std::getline(std::cin, line);) {
        const auto began = now_ns();
        size_t posted = 0;
        size_t completed = 0;
        while (completed < work.size()) {
            while (posted < work.size() && posted - completed < job.window) {
                const Chunk& chunk = work[posted];
                const auto rc = ::fi_writedata(rail->ep.get(), base + chunk.from, chunk.nbytes, (*mr)->descriptor,
                                               posted, peer, at + chunk.to, key, &contexts[posted]);
                if (rc == -FI_EAGAIN) break;
                CHECK(rc == 0);
                ++posted;
            }
            fi_cq_data_entry entries[64];
            const auto count = ::fi_cq_read(rail->cq.get(), entries, 64);
            CHECK(count > 0 || count == -FI_EAGAIN);
            if (count > 0) completed += static_cast<size_t>(count);
        }
        std::cout << began << std::endl;
    }
}

sockaddr_in ip(const char* text, uint16_t port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    CHECK(::inet_pton(AF_INET, text, &address.sin_addr) == 1);
    return address;
}

void receive_exactly(int fd, void* to, size_t nbytes) {
    for (size_t got = 0; got < nbytes;) {
        const auto n = ::recv(fd, static_cast<char*>(to) + got, nbytes - got, 0);
        CHECK(n > 0);
        got += static_cast<size_t>(n);
    }
}

void tcp_receive(const char* bind_to, const Job& job) {
    const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = ip(bind_to, 0);
    socklen_t length = sizeof address;
    CHECK(::bind(listener, reinterpret_cast<sockaddr*>(&address), length) == 0 && ::listen(listener, 1) == 0);
    CHECK(::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) == 0);
    uint8_t* base = memory(job);
    std::cout << ntohs(address.sin_port) << std::endl;
    const int fd = ::accept(listener, nullptr, nullptr);
    for (std::string line; std::getline(std::cin, line);) {
        for (uint64_t got = 0; got < job.nbytes();) {
            Chunk chunk{};
            receive_exactly(fd, &chunk, sizeof chunk);
            receive_exactly(fd, base + chunk.to, chunk.nbytes);
            got += chunk.nbytes;
        }
        std::cout << now_ns() << std::endl;
    }
}

void tcp_send(const char* to, uint16_t port, const Job& job) {
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    const int one = 1;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    const sockaddr_in address = ip(to, port);
    CHECK(::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
    uint8_t* base = memory(job);
    auto work = chunks(job);
    for (std::string line; std::getline(std::cin, line);) {
        const auto began = now_ns();
        for (Chunk& chunk : work) {
            iovec parts[2] = {{&chunk, sizeof chunk}, {base + chunk.from, chunk.nbytes}};
            for (size_t left = sizeof chunk + chunk.nbytes; left > 0;) {
                const auto n = ::writev(fd, parts[0].iov_len > 0 ? parts : parts + 1, parts[0].iov_len > 0 ? 2 : 1);
                CHECK(n > 0);
                left -= static_cast<size_t>(n);
                const size_t head = std::min(parts[0].iov_len, static_cast<size_t>(n));
                parts[0].iov_base = static_cast<char*>(parts[0].iov_base) + head;
                parts[0].iov_len -= head;
                parts[1].iov_base = static_cast<char*>(parts[1].iov_base) + (n - head);
                parts[1].iov_len -= n - head;
            }
        }
        std::cout << began << std::endl;
    }
}

}  // namespace

int main(int argc, char** argv) {
    CHECK(argc >= 7);
    const Job job = job_of(argc, argv);
    const std::string role = argv[1];
    if (role == "fabric-recv") fabric_receive(argv + 2, job);
    if (role == "fabric-send") fabric_send(argv + 2, argv[5], std::stoull(argv[6]), std::stoull(argv[7]), job);
    if (role == "tcp-recv") tcp_receive(argv[2], job);
    if (role == "tcp-send") tcp_send(argv[2], static_cast<uint16_t>(std::stoul(argv[3])), job);
}
