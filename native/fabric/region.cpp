#include "fabric/region.h"

#include <rdma/fi_errno.h>

#include <string>

namespace pdd {

Result<uint32_t> RegionTable::add(uint8_t* base, uint64_t length, int fd) {
    if (base == nullptr || length == 0 || reinterpret_cast<uintptr_t>(base) + length < length)
        return Error{"register: " + std::to_string(length) + " bytes at " +
                         std::to_string(reinterpret_cast<uintptr_t>(base)) + " is no memory",
                     FI_EINVAL};
    LocalRegion region{base, length, {}};
    for (const auto& nic : nics_) {
        const auto access = nic->caps().app_keys ? Access::Local : Access::Both;
        auto mr = nic->register_memory(base, length, access);
        if (!mr) return mr.error();
        if (fd >= 0) (*mr)->lend(fd);
        region.keys.push_back(std::move(*mr));
    }
    const uint32_t id = next_id_;
    regions_.emplace(id, std::move(region));
    next_id_ += step_;
    return id;
}

Status RegionTable::remove(uint32_t id) {
    const auto found = regions_.find(id);
    if (found == regions_.end()) return Error{"unregister: no region " + std::to_string(id), FI_EINVAL};
    Status status;
    for (size_t nic = 0; nic < found->second.keys.size(); ++nic) {
        const int rc = found->second.keys[nic]->close();
        if (rc != 0 && status) status = nics_[nic]->error("closing region " + std::to_string(id), rc);
    }
    regions_.erase(found);
    return status;
}

const LocalRegion* RegionTable::find(uint32_t id) const {
    const auto found = regions_.find(id);
    return found != regions_.end() ? &found->second : nullptr;
}

}  // namespace pdd
