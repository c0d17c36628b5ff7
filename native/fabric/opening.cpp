// Choosing and opening NICs; declared in engine.h.
#include <rdma/fi_errno.h>

#include <algorithm>

#include "fabric/domain.h"
#include "fabric/engine.h"
#include "gpu/paths.h"

namespace pdd {
namespace {

// `device`: that they are to reach themselves; null: host memory.
Result<Nics> open_each(const std::shared_ptr<const Library>& library, const std::string& provider,
                       const std::vector<std::string>& bind, const std::shared_ptr<const GpuDevice>& device) {
    if (bind.size() > kMaxNics) return Error{"bind: at most " + std::to_string(kMaxNics) + " NICs", FI_EINVAL};
    Nics nics;
    for (const auto& one : bind.empty() ? std::vector<std::string>{""} : bind) {
        auto offers = find_nics(library, provider, one, device != nullptr);
        if (!offers) return offers.error();
        auto domain = Domain::open(library, std::move(offers->front()));
        if (!domain) return domain.error();
        if (device != nullptr)
            if (Status reached = (*domain)->reach(device); !reached) return reached.error();
        nics.push_back(std::move(*domain));
    }
    return nics;
}

// NICs that reach the device's memory themselves, or else all of them by copies through host memory.
Result<Nics> open_all(const std::shared_ptr<const Library>& library, const std::string& provider,
                      const std::vector<std::string>& bind, const std::shared_ptr<const GpuDevice>& device) {
    if (device == nullptr) return open_each(library, provider, bind, nullptr);
    if (auto direct = open_each(library, provider, bind, device); direct) {
        return flush_after_arrivals(std::move(*direct), device);
    } else {
        auto nics = open_each(library, provider, bind, nullptr);
        if (!nics) return nics.error();
        return stage(std::move(*nics), device, direct.error().message);
    }
}

}  // namespace

Result<Nics> open_nics(const std::shared_ptr<const Library>& library, const EngineConfig& config,
                       const RailGroupConfig& group) {
    auto order = provider_order(*library, config.provider);
    if (!order) return order.error();
    std::shared_ptr<const GpuDevice> device;
    if (!config.device.empty()) {
        auto opened = GpuDevice::open(config.device);
        if (!opened) return opened.error();
        device = std::move(*opened);
        if (Status bound = device->bind(); !bound) return bound.error();
    }
    std::string tried;
    for (const auto& name : *order) {
        const std::string kind = provider_kind(name);
        if (!config.require.empty() && config.require != kind && config.require != name) {
            tried += "\n  " + name + ": not the required " + config.require;
            continue;
        }
        // A tcp NIC is named by its address: without one libfabric picks an interface that peers may not reach.
        const bool addressed = group.bind.empty() && kind == "tcp" && !config.source.empty();
        auto nics = open_all(library, name, addressed ? std::vector<std::string>{config.source} : group.bind, device);
        if (nics) return nics;
        tried += "\n  " + nics.error().message;
    }
    return Error{"no usable provider for '" + config.provider + "' in libfabric " + library->version_text() + " (" +
                     library->path + "); tried:" + tried,
                 FI_ENODATA};
}

Result<std::vector<ProviderCaps>> probe(const LibraryChoice& choice, const std::string& provider) {
    auto order = provider_order(*choice.library, provider);
    if (!order) return order.error();
    std::vector<ProviderCaps> usable;
    std::string tried;
    for (const auto& name : *order) {
        auto offers = find_nics(choice.library, name, "");
        if (!offers) {
            tried += "\n  " + offers.error().message;
            continue;
        }
        for (auto& offer : *offers) {
            // A provider may list one NIC once per variant (address formats, GPU memory): the first is the best.
            const bool known = std::any_of(usable.begin(), usable.end(), [&](const ProviderCaps& caps) {
                return caps.provider == offer.caps.provider && caps.domain == offer.caps.domain &&
                       caps.address == offer.caps.address;
            });
            if (known) continue;
            auto domain = Domain::open(choice.library, std::move(offer));
            if (domain)
                usable.push_back((*domain)->caps());
            else
                tried += "\n  " + domain.error().message;
        }
    }
    if (usable.empty()) return Error{"no usable provider for '" + provider + "'; tried:" + tried, FI_ENODATA};
    return usable;
}

}  // namespace pdd
