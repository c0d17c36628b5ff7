// FabricPort: a NicPort over libfabric. Closes its endpoint before what that is bound to.
#pragma once

#include "fabric/domain.h"

namespace pdd {

class FabricPort final : public NicPort {
  public:
    FabricPort(const Domain& domain, Rail rail) : domain_(domain), rail_(std::move(rail)) {}

    const std::vector<uint8_t>& address() const override { return rail_.address; }
    Result<uint64_t> resolve(std::span<const uint8_t> address) override;
    PostResult post(const NicWrite& write, Op* op) override;
    uint32_t poll(CompletionSink& sink, uint32_t budget) override;
    Status close() override;
    int wait_fd() const override { return rail_.wait_fd; }
    bool may_wait() override;
    void take_back_signal() override { ::fi_cq_sread(rail_.cq.get(), nullptr, 0, nullptr, 1); }

  private:
    void read_errors(CompletionSink& sink);

    const Domain& domain_;
    Rail rail_;
    bool broken_ = false;  // the queue must not be read any more
};

}  // namespace pdd
