#include "gpu/staged_nic.h"

#include <rdma/fabric.h>
#include <rdma/fi_errno.h>

#include <algorithm>

#include "gpu/staged_port.h"
#include "util/random.h"

namespace pdd {
namespace {

// A write that the wire did not take at once is tried again when the worker looks.
constexpr int kMaxSleepMs = 5;

}  // namespace

class StagedNic::Registration final : public NicMemory {
  public:
    Registration(StagedNic& nic, uint64_t number) : nic_(nic) { key = number; }
    ~Registration() override { nic_.memory_.erase(key); }
    int close() override {
        nic_.memory_.erase(key);
        return 0;
    }

  private:
    StagedNic& nic_;
};

Result<std::unique_ptr<StagedNic>> StagedNic::open(std::unique_ptr<Nic> inner, std::shared_ptr<const GpuDevice> device,
                                                   const std::string& why) {
    if (inner->address_format() == FI_ADDR_STR)
        return Error{"provider " + inner->caps().provider + ": no staged copies over addresses of variable length",
                     FI_EOPNOTSUPP};
    auto out = CopyStream::make(device);
    if (!out) return out.error();
    auto in = CopyStream::make(device);
    if (!in) return in.error();
    std::unique_ptr<StagedNic> nic(new StagedNic(std::move(inner), std::move(device), std::move(*out), std::move(*in)));
    nic->caps_.gpu_path_why = why;
    return nic;
}

StagedNic::StagedNic(std::unique_ptr<Nic> inner, std::shared_ptr<const GpuDevice> device, CopyStream out, CopyStream in)
    : inner_(std::move(inner)),
      device_(std::move(device)),
      caps_(inner_->caps()),
      out_(std::move(out)),
      in_(std::move(in)),
      pool_(device_, kStagedBlockBytes) {
    caps_.wire += "+staged1";
    caps_.gpu_path = "staged";
    caps_.virtual_addressing = false;
    caps_.app_keys = false;
    caps_.local_mr = false;
    caps_.write_segments = kMaxWriteSegments;
    caps_.max_message = kMaxMergedBytes;
    caps_.max_sleep_ms = std::min(caps_.max_sleep_ms, kMaxSleepMs);
}

Result<std::unique_ptr<NicMemory>> StagedNic::register_memory(uint8_t* base, uint64_t nbytes, Access) {
    const auto address = reinterpret_cast<uintptr_t>(base);
    if (!device_->is_device_memory(address))
        return Error{"registering " + std::to_string(nbytes) + " bytes: not memory of GPU " + device_->pci_address(),
                     FI_EINVAL};
    const uint64_t key = random_u64();  // nobody guesses a region that was not described to them
    memory_.emplace(key, Memory{address, nbytes});
    return std::unique_ptr<NicMemory>(new Registration(*this, key));
}

Result<std::unique_ptr<NicPort>> StagedNic::open_port(uint32_t) {
    auto port = StagedPort::open(*this);
    if (!port) return port.error();
    return std::unique_ptr<NicPort>(std::move(*port));
}

const StagedNic::Memory* StagedNic::find(uint64_t key) const {
    const auto found = memory_.find(key);
    return found != memory_.end() ? &found->second : nullptr;
}

}  // namespace pdd
