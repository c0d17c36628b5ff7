// StagedNic: a Nic for GPU memory over one that reaches host memory only (tcp everywhere, RDMA without GPUDirect).
//
// Every write goes device -> pinned host memory -> wire -> the peer's pinned host memory -> device, in bounded slots;
// staged_port.h has the protocol. A node so speaks to nodes that stage as well: its wire says "+staged1". Owner: the
// worker's thread, which has bound the device.
#pragma once

#include <memory>
#include <unordered_map>

#include "fabric/nic.h"
#include "gpu/copies.h"

namespace pdd {

// Of each direction of a port: what is between a device and the wire, and between the wire and the other device.
inline constexpr uint32_t kStagedSlots = 8;
inline constexpr uint64_t kStagedHeaderBytes = 4096;
inline constexpr uint64_t kStagedSlotBytes = kStagedHeaderBytes + kMaxMergedBytes;
inline constexpr uint64_t kStagedBlockBytes = kStagedHeaderBytes + kStagedSlots * kStagedSlotBytes;

class StagedNic final : public Nic {
  public:
    static Result<std::unique_ptr<StagedNic>> open(std::unique_ptr<Nic> inner, std::shared_ptr<const GpuDevice> device,
                                                   const std::string& why);

    // -- Nic
    const ProviderCaps& caps() const override { return caps_; }
    uint32_t address_format() const override { return inner_->address_format(); }
    // Memory of the device alone.
    Result<std::unique_ptr<NicMemory>> register_memory(uint8_t* base, uint64_t nbytes, Access access) override;
    Result<std::unique_ptr<NicPort>> open_port(uint32_t queue) override;
    std::string error_text(int code) const override { return inner_->error_text(code); }

    // -- for its ports
    struct Memory {
        uint64_t base;
        uint64_t nbytes;
    };
    const Memory* find(uint64_t key) const;
    Nic& inner() { return *inner_; }
    const std::shared_ptr<const GpuDevice>& device() const { return device_; }
    CopyStream& out() { return out_; }
    CopyStream& in() { return in_; }
    PinnedPool& pool() { return pool_; }

  private:
    class Registration;
    StagedNic(std::unique_ptr<Nic> inner, std::shared_ptr<const GpuDevice> device, CopyStream out, CopyStream in);

    std::unique_ptr<Nic> inner_;
    std::shared_ptr<const GpuDevice> device_;
    ProviderCaps caps_;
    CopyStream out_;  // device to host
    CopyStream in_;   // host to device
    PinnedPool pool_;
    std::unordered_map<uint64_t, Memory> memory_;  // by key
};

}  // namespace pdd
