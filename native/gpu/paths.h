// How NICs come by the memory of a GPU: what is put around those that reach it themselves, and around those that do
// not. The owner of both is the thread that has bound the device.
#pragma once

#include <memory>
#include <string>

#include "fabric/nic.h"
#include "gpu/device.h"

namespace pdd {

// For NICs that write into the device: nothing, where its memory is ordered, else a flush before each arrival counts.
Nics flush_after_arrivals(Nics nics, const std::shared_ptr<const GpuDevice>& device);

// For NICs that reach host memory only. `why` nothing better is possible goes into their caps.
Result<Nics> stage(Nics nics, const std::shared_ptr<const GpuDevice>& device, const std::string& why);

}  // namespace pdd
