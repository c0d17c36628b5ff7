#include "fabric/local_nic.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "fabric/local_port.h"
#include "util/random.h"

namespace pdd {

LocalNic::LocalNic() {
    caps_.provider = caps_.kind = caps_.fabric = "local";
    caps_.wire = "local" + std::to_string(kLocalVersion);
    caps_.domain = "host";
    caps_.imm_bytes = 4;
    caps_.app_keys = true;
    caps_.progress = "manual";
    caps_.write_segments = caps_.iov_limit = caps_.rma_iov_limit = kMaxWriteSegments;
    caps_.max_message = kMaxLocalWrite;
    caps_.wait_fd = true;
    caps_.fence = "endpoint";
}

Result<std::unique_ptr<NicMemory>> LocalNic::register_memory(uint8_t* base, uint64_t nbytes, Access access) {
    return std::unique_ptr<NicMemory>(new LocalMemory(*this, base, nbytes, access));
}

Result<std::unique_ptr<NicPort>> LocalNic::open_port(uint32_t queue) {
    auto port = LocalPort::open(*this, queue);
    if (!port) return port.error();
    return std::unique_ptr<NicPort>(std::move(*port));
}

std::string LocalNic::error_text(int code) const {
    return std::strerror(code < 0 ? -code : code);
}

const LocalTarget* LocalNic::find_target(uint64_t key) const {
    const auto found = targets_.find(key);
    return found != targets_.end() ? &found->second : nullptr;
}

std::vector<LocalSource> LocalNic::sources() const {
    std::vector<LocalSource> out;
    for (const auto& [id, memory] : sources_) out.push_back(memory->source());
    return out;
}

LocalMemory::LocalMemory(LocalNic& nic, uint8_t* base, uint64_t nbytes, Access access) : nic_(nic), base_(base) {
    descriptor = this;
    source_ = {nic_.next_source_++, nbytes, -1, "no memfd was given for it"};
    if (access != Access::Remote) nic_.sources_.emplace(source_.id, this);
    if (access == Access::Local) return;
    do key = random_u64();
    while (!nic_.targets_.try_emplace(key, LocalTarget{base, nbytes}).second);
}

int LocalMemory::close() {
    if (!open_) return 0;
    open_ = false;
    nic_.sources_.erase(source_.id);
    if (key != 0) nic_.targets_.erase(key);
    return 0;
}

// Opened anew for reading only, so that no peer can write to it by mistake.
void LocalMemory::lend(int fd) {
    struct stat info {};
    const int seals = ::fcntl(fd, F_GET_SEALS);
    lent_ = UniqueFd(::open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDONLY | O_CLOEXEC));
    if (lent_.get() < 0)
        source_.why_not = "opening its memfd: " + std::string(std::strerror(errno));
    else if (::fstat(fd, &info) != 0 || static_cast<uint64_t>(info.st_size) < source_.nbytes)
        source_.why_not = "its memfd has " + std::to_string(info.st_size) + " bytes";
    else if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
        source_.why_not = "its memfd is not sealed against shrinking";
    else
        source_.fd = lent_.get();
}

}  // namespace pdd
