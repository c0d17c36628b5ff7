#include "gpu/paths.h"

#include "gpu/flushing_nic.h"
#include "gpu/staged_nic.h"

namespace pdd {

Nics flush_after_arrivals(Nics nics, const std::shared_ptr<const GpuDevice>& device) {
    if (!device->needs_flush()) return nics;
    for (auto& nic : nics) nic = std::make_unique<FlushingNic>(std::move(nic), device);
    return nics;
}

Result<Nics> stage(Nics nics, const std::shared_ptr<const GpuDevice>& device, const std::string& why) {
    for (auto& nic : nics) {
        auto staged = StagedNic::open(std::move(nic), device, why);
        if (!staged) return staged.error();
        nic = std::move(*staged);
    }
    return nics;
}

}  // namespace pdd
