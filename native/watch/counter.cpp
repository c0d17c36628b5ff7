#include "watch/counter.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <climits>
#include <cstring>
#include <string>

namespace pdd {
namespace {

// A futex is 32 bits: the half of the value that moves.
uint32_t* low_half(uint64_t* line) {
    return reinterpret_cast<uint32_t*>(line) + (std::endian::native == std::endian::little ? 0 : 1);
}

}  // namespace

Result<std::shared_ptr<Counter>> Counter::map(int fd, uint64_t offset) {
    const std::string what = "mapping a counter at offset " + std::to_string(offset) + " of fd " + std::to_string(fd);
    if (offset % kBytes != 0) return Error{what + ": not a multiple of 64", EINVAL};
    struct stat info {};
    if (::fstat(fd, &info) != 0) return Error{what + ": " + std::strerror(errno), errno};
    if (offset > INT64_MAX - kBytes || static_cast<uint64_t>(info.st_size) < offset + kBytes)
        return Error{what + ": the file has " + std::to_string(info.st_size) + " bytes", EINVAL};
    const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
    const uint64_t start = offset / page * page;  // a line never straddles a page
    void* mapping = ::mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(start));
    if (mapping == MAP_FAILED) return Error{what + ": " + std::strerror(errno), errno};
    auto* line = reinterpret_cast<uint64_t*>(static_cast<char*>(mapping) + (offset - start));
    return std::shared_ptr<Counter>(new Counter(mapping, page, line));
}

Result<std::pair<std::shared_ptr<Counter>, UniqueFd>> Counter::create() {
    UniqueFd fd(::memfd_create("pdd-counter", MFD_CLOEXEC));
    if (fd.get() < 0) return Error{std::string("memfd_create: ") + std::strerror(errno), errno};
    if (::ftruncate(fd.get(), ::sysconf(_SC_PAGESIZE)) != 0)
        return Error{std::string("ftruncate of a counter: ") + std::strerror(errno), errno};
    auto counter = map(fd.get(), 0);
    if (!counter) return counter.error();
    return std::pair(std::move(*counter), std::move(fd));
}

void Counter::wait(uint64_t seen, std::chrono::microseconds timeout) const {
    word(kSleepers).fetch_add(1, std::memory_order_seq_cst);
    if (cell().load(std::memory_order_seq_cst) == seen) {
        const timespec limit{.tv_sec = timeout.count() / 1000000, .tv_nsec = timeout.count() % 1000000 * 1000};
        // Shared, not private: the bump comes from another process. Any reason to return is as good as another.
        ::syscall(SYS_futex, low_half(line_), FUTEX_WAIT, static_cast<uint32_t>(seen), &limit, nullptr, 0);
    }
    word(kSleepers).fetch_sub(1, std::memory_order_relaxed);
}

void Counter::wake() const {
    ::syscall(SYS_futex, low_half(line_), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

Counter::~Counter() {
    ::munmap(mapping_, length_);
}

}  // namespace pdd
