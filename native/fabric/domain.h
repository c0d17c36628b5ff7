// Domain: a Nic over libfabric. Owns fabric and domain; registers memory; opens ports. Owner: the worker's thread.
#pragma once

#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>

#include <memory>
#include <string>
#include <vector>

#include "fabric/fid.h"
#include "fabric/loader.h"
#include "fabric/nic.h"
#include "fabric/provider.h"
#include "gpu/device.h"
#include "util/result.h"

namespace pdd {

// The libfabric objects of one peer on one NIC. Members close last to first: the endpoint before what it is bound to.
struct Rail {
    Fid<fid_av> av;
    Fid<fid_cq> cq;
    Fid<fid_ep> ep;
    int wait_fd = -1;  // of the completion queue, owned by it
    std::vector<uint8_t> address;
};

class Domain final : public Nic {
  public:
    static Result<std::unique_ptr<Domain>> open(std::shared_ptr<const Library> library, NicOffer offer);

    // -- Nic
    const ProviderCaps& caps() const override { return caps_; }
    uint32_t address_format() const override { return info_->addr_format; }
    // Keys that we choose are random: a write that strays to a reused address must not find a valid one there.
    Result<std::unique_ptr<NicMemory>> register_memory(uint8_t* base, uint64_t nbytes, Access access) override;
    Result<std::unique_ptr<NicPort>> open_port(uint32_t queue) override;
    std::string error_text(int code) const override { return library_->error_text(code); }

    // Proves, with a little memory of the device, that this NIC reads and writes it, by dma-buf or else by the driver's
    // peer memory; caps().gpu_path says which. From then on memory of the device may be registered, too. Its offer must
    // be one for GPU memory.
    Status reach(std::shared_ptr<const GpuDevice> device);

    Result<Rail> open_rail(uint32_t queue);
    fid_fabric* fabric() const { return fabric_.get(); }

  private:
    Domain(std::shared_ptr<const Library> library, NicOffer offer);
    int register_device(uint8_t* base, uint64_t nbytes, uint64_t access, uint64_t key, fid_mr** mr);

    std::shared_ptr<const Library> library_;
    std::shared_ptr<fi_info> info_;
    ProviderCaps caps_;
    Fid<fid_fabric> fabric_;
    Fid<fid_domain> domain_;
    std::shared_ptr<const GpuDevice> device_;  // that it reaches; null: host memory only
};

}  // namespace pdd
