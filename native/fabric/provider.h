// Finding NICs: which providers to ask in which order, which to refuse, and what each fi_info is worth.
//
// Order: efa, verbs, native tcp (called net before 1.18). shm only by name. Refused always: sockets (starves its own
// thread), udp (unreliable completion), lnx (no RMA), tcp;ofi_rxm (crashes: with 1.17 in fi_close of an endpoint that
// is being written to, which is exactly the fence; with 2.x in the survivor of a killed peer).
#pragma once

#include <rdma/fabric.h>

#include <memory>
#include <string>
#include <vector>

#include "fabric/caps.h"
#include "fabric/loader.h"
#include "util/result.h"

namespace pdd {

// One NIC as one provider offers it. `info` lives in a list that all offers of one query share.
struct NicOffer {
    std::shared_ptr<fi_info> info;
    ProviderCaps caps;
};

// The provider names to try for `wanted` (a name, or "auto"), best first.
// The operator's word for a provider: verbs for verbs;ofi_rxm, tcp for 1.17's net.
std::string provider_kind(const std::string& provider);

Result<std::vector<std::string>> provider_order(const Library& library, const std::string& wanted);

// All NICs that `provider` offers at `bind`: a numeric local address, a domain name, or "" for any, best first. Never
// empty. `gpu`: offers for memory of GPUs alone.
Result<std::vector<NicOffer>> find_nics(const std::shared_ptr<const Library>& library, const std::string& provider,
                                        const std::string& bind, bool gpu = false);

}  // namespace pdd
