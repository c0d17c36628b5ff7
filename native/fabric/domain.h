// Domain: one NIC as libfabric sees it. Owns fabric and domain; registers memory; opens rails. Owner: the worker's
// thread.
#pragma once

#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>

#include <memory>
#include <string>
#include <vector>

#include "fabric/caps.h"
#include "fabric/fid.h"
#include "fabric/loader.h"
#include "fabric/provider.h"
#include "util/result.h"

namespace pdd {

// The libfabric objects of one peer on one NIC. Members close last to first: the endpoint before what it is bound to.
struct Rail {
    Fid<fid_av> av;
    Fid<fid_cq> cq;
    Fid<fid_ep> ep;
    int wait_fd = -1;  // of the completion queue, owned by it
    std::vector<uint8_t> address;
    fi_addr_t peer = FI_ADDR_UNSPEC;
    size_t remote_nic = 0;  // which of the peer's NICs this rail writes to
};

class Domain {
  public:
    static Result<std::unique_ptr<Domain>> open(std::shared_ptr<const Library> library, NicOffer offer);

    // Local use only, or the target of a peer's writes, or both. Keys we choose are random: a write that strays to a
    // reused address must not find a valid one there.
    enum class Access { Local, Remote, Both };
    Result<Fid<fid_mr>> register_memory(void* address, size_t nbytes, Access access);

    Result<Rail> open_rail();

    const ProviderCaps& caps() const { return caps_; }
    const Library& library() const { return *library_; }
    uint32_t address_format() const { return info_->addr_format; }
    fid_fabric* fabric() const { return fabric_.get(); }
    // An Error that names the operation, the provider and the NIC.
    Error error(const std::string& operation, int code) const;

  private:
    Domain(std::shared_ptr<const Library> library, NicOffer offer);

    std::shared_ptr<const Library> library_;
    std::shared_ptr<fi_info> info_;
    ProviderCaps caps_;
    Fid<fid_fabric> fabric_;
    Fid<fid_domain> domain_;
};

}  // namespace pdd
