// FlushingNic: a Nic that writes into GPU memory itself, on a device that may see those writes later than the NIC's
// word that they landed. Its ports flush before they hand an immediate on, and again after they closed, so that an
// immediate, and the fence, mean the same as everywhere: the bytes are there.
//
// A flush is one call for all immediates that a poll found. Devices whose writes are ordered need none of this.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "fabric/nic.h"
#include "gpu/device.h"

namespace pdd {

class FlushingNic final : public Nic {
  public:
    FlushingNic(std::unique_ptr<Nic> inner, std::shared_ptr<const GpuDevice> device)
        : inner_(std::move(inner)), device_(std::move(device)) {}

    // -- Nic
    const ProviderCaps& caps() const override { return inner_->caps(); }
    uint32_t address_format() const override { return inner_->address_format(); }
    Result<std::unique_ptr<NicMemory>> register_memory(uint8_t* base, uint64_t nbytes, Access access) override {
        return inner_->register_memory(base, nbytes, access);
    }
    Result<std::unique_ptr<NicPort>> open_port(uint32_t queue) override;
    std::string error_text(int code) const override { return inner_->error_text(code); }

  private:
    std::unique_ptr<Nic> inner_;
    std::shared_ptr<const GpuDevice> device_;
};

}  // namespace pdd
