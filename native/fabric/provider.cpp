#include "fabric/provider.h"

#include <rdma/fi_errno.h>

#include <algorithm>
#include <cstring>

#include "fabric/address.h"

namespace pdd {
namespace {

constexpr uint64_t kCaps = FI_MSG | FI_RMA | FI_WRITE | FI_REMOTE_WRITE | FI_SEND | FI_RECV;
constexpr uint32_t kImmBytes = 4;  // efa (from 1.18) and verbs carry no more
constexpr size_t kMaxSegments = 4;

using InfoPtr = std::unique_ptr<fi_info, decltype(&::fi_freeinfo)>;

// Why this provider is not used at all, or "".
std::string refusal(const std::string& provider) {
    if (provider == "sockets") return "sockets starves its own progress thread and is deprecated";
    if (provider == "lnx") return "lnx has no remote writes";
    if (provider.rfind("udp", 0) == 0) return "udp reports errors that it can not name";
    if (provider == "tcp;ofi_rxm")
        return "it crashes: 1.17 when an endpoint closes under incoming writes, 2.x in the survivor of a killed peer";
    return "";
}

std::string wire_of(const Library& library, const std::string& provider) {
    if (provider == "net") return "tcp";
    // The layout of shm's shared segments changes between versions; two of them hang instead of refusing each other.
    return provider == "shm" ? "shm/" + library.version_text() : provider;
}

bool is_tcp(const std::string& provider) {
    return provider == "tcp" || provider == "net";
}

ProviderCaps read_caps(const Library& library, const fi_info& info) {
    ProviderCaps caps;
    caps.provider = info.fabric_attr->prov_name;
    caps.kind = provider_kind(caps.provider);
    caps.wire = wire_of(library, caps.provider);
    caps.fabric = info.fabric_attr->name != nullptr ? info.fabric_attr->name : "";
    caps.domain = info.domain_attr->name != nullptr ? info.domain_attr->name : "";
    // shm's address is this process' id: no help to anyone.
    if (caps.provider != "shm") caps.address = address_text(info.addr_format, info.src_addr, info.src_addrlen);
    caps.library_version = library.version_text();
    caps.library_path = library.path;
    caps.imm_bytes = static_cast<uint32_t>(info.domain_attr->cq_data_size);
    caps.virtual_addressing = (info.domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0;
    caps.app_keys = (info.domain_attr->mr_mode & FI_MR_PROV_KEY) == 0;
    caps.local_mr = (info.domain_attr->mr_mode & FI_MR_LOCAL) != 0;
    caps.progress = info.domain_attr->data_progress == FI_PROGRESS_AUTO ? "auto" : "manual";
    caps.tx_size = info.tx_attr->size;
    caps.inject = info.tx_attr->inject_size;
    caps.iov_limit = info.tx_attr->iov_limit;
    caps.rma_iov_limit = info.tx_attr->rma_iov_limit;
    caps.max_message = info.ep_attr->max_msg_size;
    // On efa an immediate is native only with one source and one target; elsewhere several were never measured.
    if (is_tcp(caps.provider))
        caps.write_segments = std::max<size_t>(1, std::min({caps.iov_limit, caps.rma_iov_limit, kMaxSegments}));
    // rxm's descriptor covers no connection requests: a peer's first write waits for a look.
    if (caps.provider.find("ofi_rxm") != std::string::npos) caps.max_sleep_ms = 5;
    // net's fi_trywait is empty: nobody takes back the signal that a completion left.
    caps.sticky_wait = caps.provider == "net";
    // shm tells success for a bad key and for a dead peer: closing its endpoint proves nothing.
    caps.fence = caps.provider == "shm" ? "none" : "endpoint";
    return caps;
}

InfoPtr make_hints(const Library& library, const std::string& provider, const std::string& domain, uint64_t caps) {
    InfoPtr hints(library.allocinfo(), library.freeinfo);
    hints->caps = caps;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->av_type = FI_AV_TABLE;
    hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
    hints->domain_attr->cq_data_size = kImmBytes;
    hints->fabric_attr->prov_name = ::strdup(provider.c_str());
    if (!domain.empty()) hints->domain_attr->name = ::strdup(domain.c_str());
    return hints;
}

fi_info* query(const Library& library, const std::string& bind, fi_info* hints, int& rc) {
    fi_info* list = nullptr;
    const bool address = is_numeric_address(bind);
    rc = library.getinfo(library.api_version(), address ? bind.c_str() : nullptr, nullptr, address ? FI_SOURCE : 0,
                         hints, &list);
    return rc == 0 ? list : nullptr;
}

}  // namespace

std::string provider_kind(const std::string& provider) {
    if (provider == "net") return "tcp";
    return provider.substr(0, provider.find(';'));
}

Result<std::vector<std::string>> provider_order(const Library& library, const std::string& wanted) {
    const std::string tcp = library.at_least(1, 18) ? "tcp" : "net";  // 1.18 renamed it
    if (wanted == "auto") return std::vector<std::string>{"efa", "verbs;ofi_rxm", tcp};
    if (wanted == "tcp" || wanted == "net") return std::vector<std::string>{tcp};
    if (wanted == "verbs") return std::vector<std::string>{"verbs;ofi_rxm"};
    const std::string reason = refusal(wanted);
    if (!reason.empty()) return Error{"provider " + wanted + " is refused: " + reason, FI_EOPNOTSUPP};
    return std::vector<std::string>{wanted};
}

Result<std::vector<NicOffer>> find_nics(const std::shared_ptr<const Library>& library, const std::string& provider,
                                        const std::string& bind, bool gpu) {
    const std::string domain = is_numeric_address(bind) ? "" : bind;
    int rc = 0;
    auto hints = make_hints(*library, provider, domain, kCaps);
    auto gpu_hints = make_hints(*library, provider, domain, kCaps | FI_HMEM);
    gpu_hints->domain_attr->mr_mode |= FI_MR_HMEM;
    fi_info* found = query(*library, bind, gpu ? gpu_hints.get() : hints.get(), rc);
    if (found == nullptr) {
        std::string text = "fi_getinfo (" + provider + ", libfabric " + library->version_text() + ")";
        if (!bind.empty()) text += " at " + bind;
        if (gpu) text += " for GPU memory";
        return Error{text + ": " + library->error_text(rc), -rc};
    }
    auto list = std::shared_ptr<fi_info>(found, [library](fi_info* head) { library->freeinfo(head); });
    fi_info* other = gpu ? nullptr : query(*library, bind, gpu_hints.get(), rc);
    const bool hmem = gpu || other != nullptr;
    if (other != nullptr) library->freeinfo(other);

    std::vector<NicOffer> offers;
    for (fi_info* info = list.get(); info != nullptr; info = info->next) {
        // A layered provider may answer for a plain name; it is then asked for by its own.
        if (provider != info->fabric_attr->prov_name || info->ep_attr->type != FI_EP_RDM) continue;
        // efa-direct lands a write only after the target has inserted the writer: a hand-shake that pdd does not have.
        if (info->fabric_attr->name != nullptr && std::strcmp(info->fabric_attr->name, "efa-direct") == 0) continue;
        if (info->domain_attr->cq_data_size < kImmBytes || info->domain_attr->mr_key_size > sizeof(uint64_t)) continue;
        NicOffer offer{std::shared_ptr<fi_info>(list, info), read_caps(*library, *info)};
        offer.caps.hmem = hmem;
        offer.caps.dmabuf = hmem && library->at_least(1, 20) && !is_tcp(provider) && provider != "shm";
        offers.push_back(std::move(offer));
    }
    if (offers.empty())
        return Error{"provider " + provider + ": nothing with writes and 32-bit immediates", FI_ENODATA};
    std::stable_sort(offers.begin(), offers.end(), [](const NicOffer& a, const NicOffer& b) {
        const auto reach = [](const fi_info& i) { return address_reach(i.addr_format, i.src_addr, i.src_addrlen); };
        return reach(*a.info) > reach(*b.info);
    });
    return offers;
}

}  // namespace pdd
