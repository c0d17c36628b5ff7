#include "memory/mapped_memory.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace pdd {

Result<MappedMemory> MappedMemory::map(int fd, size_t nbytes, bool populate) {
    const std::string what = "mapping " + std::to_string(nbytes) + " bytes of fd " + std::to_string(fd) + ": ";
    struct stat info {};
    if (::fstat(fd, &info) != 0) return Error{what + std::strerror(errno), errno};
    // Touching a mapping past the end of its file is a SIGBUS: refuse here instead.
    if (nbytes == 0 || static_cast<uint64_t>(info.st_size) < nbytes)
        return Error{what + "the file has " + std::to_string(info.st_size) + " bytes", EINVAL};
    const int flags = MAP_SHARED | (populate ? MAP_POPULATE : 0);
    void* address = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (address == MAP_FAILED) return Error{what + std::strerror(errno), errno};
    return MappedMemory(static_cast<uint8_t*>(address), nbytes);
}

MappedMemory::MappedMemory(MappedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedMemory& MappedMemory::operator=(MappedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

MappedMemory::~MappedMemory() {
    if (data_ != nullptr) ::munmap(data_, size_);
}

}  // namespace pdd
