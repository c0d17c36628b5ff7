// A GPU, its shareable memory and the kernel that counts layers.
#include <nanobind/stl/unique_ptr.h>

#include "bind/binding.h"
#include "gpu/device_memory.h"
#include "gpu/layer_kernel.h"

namespace pdd {
namespace {

nb::dict gpu_dict(const std::string& name) {
    auto opened = [&] {
        const nb::gil_scoped_release unlocked;
        return GpuDevice::open(name);
    }();
    const auto device = unwrap(std::move(opened));
    nb::dict out;
    out["pci_address"] = device->pci_address();
    out["ordinal"] = device->ordinal();
    out["model"] = device->model();
    out["driver"] = device->cu().version_text();
    out["dmabuf"] = device->attribute(cuda::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) != 0;
    out["rdma"] = device->attribute(cuda::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED) != 0;
    out["rdma_of_shared_memory"] =
        device->attribute(cuda::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) != 0;
    out["rdma_needs_flush"] = device->needs_flush();
    return out;
}

}  // namespace

void bind_gpu(nb::module_& m) {
    using Unlocked = nb::call_guard<nb::gil_scoped_release>;
    m.def("gpu", &gpu_dict, "device"_a = "cuda");

    nb::class_<DeviceMemory>(m, "DeviceMemory")
        .def_static(
            "allocate",
            [](const std::string& device, uint64_t nbytes) {
                return unwrap(DeviceMemory::allocate(unwrap(GpuDevice::open(device)), nbytes));
            },
            "device"_a, "nbytes"_a, Unlocked())
        .def_static(
            "import_fd",
            [](const std::string& device, int fd, uint64_t nbytes) {
                return unwrap(DeviceMemory::import(unwrap(GpuDevice::open(device)), fd, nbytes));
            },
            "device"_a, "fd"_a, "nbytes"_a, Unlocked())
        .def("export_fd", [](const DeviceMemory& self) { return unwrap(self.export_fd()).release(); })
        .def_prop_ro("device", [](const DeviceMemory& self) { return self.device().pci_address(); })
        .def_prop_ro("address", &DeviceMemory::address)
        .def_prop_ro("nbytes", &DeviceMemory::nbytes)
        .def_prop_ro("__cuda_array_interface__", [](const DeviceMemory& self) {
            nb::dict out;
            out["shape"] = nb::make_tuple(self.nbytes());
            out["typestr"] = "|u1";
            out["data"] = nb::make_tuple(self.address(), false);
            out["version"] = 3;
            return out;
        });

    nb::class_<LayerKernel>(m, "LayerKernel")
        .def(nb::new_([](const std::string& device, int fd) {
                 const nb::gil_scoped_release unlocked;
                 return unwrap(LayerKernel::make(unwrap(GpuDevice::open(device)), fd));
             }),
             "device"_a, "fd"_a)
        .def(
            "bump", [](LayerKernel& self, uint64_t stream) { unwrap(self.bump(stream)); }, "stream"_a);
}

}  // namespace pdd
