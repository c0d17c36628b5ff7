// Write plans, from arrays of one length.
#include <nanobind/ndarray.h>

#include "bind/binding.h"

namespace pdd {
namespace {

using Column = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::shared_ptr<const WritePlan> make_plan(uint32_t src_region, uint32_t dst_region, Column src_offset,
                                           Column dst_offset, Column nbytes, Column units, uint64_t src_layer_stride,
                                           uint64_t dst_layer_stride, uint32_t num_layers) {
    const size_t count = src_offset.shape(0);
    if (dst_offset.shape(0) != count || nbytes.shape(0) != count || units.shape(0) != count)
        throw FabricError(Error{"a write plan's arrays must have one length"});
    std::vector<PlanEntry> entries(count);
    for (size_t i = 0; i < count; ++i) {
        if ((src_offset(i) | dst_offset(i) | nbytes(i) | units(i)) < 0 || units(i) > UINT32_MAX)
            throw FabricError(Error{"entry " + std::to_string(i) + " of a write plan: out of range"});
        entries[i] = {static_cast<uint64_t>(src_offset(i)), static_cast<uint64_t>(dst_offset(i)),
                      static_cast<uint64_t>(nbytes(i)), static_cast<uint32_t>(units(i))};
    }
    return unwrap(WritePlan::make({src_region, dst_region, src_layer_stride, dst_layer_stride, num_layers}, entries));
}

}  // namespace

void bind_plan(nb::module_& m) {
    nb::class_<PlanHandle>(m, "WritePlan")
        .def(
            "__init__",
            [](PlanHandle* self, uint32_t src_region, uint32_t dst_region, Column src_offset, Column dst_offset,
               Column nbytes, Column units, uint64_t src_layer_stride, uint64_t dst_layer_stride, uint32_t num_layers) {
                new (self) PlanHandle{make_plan(src_region, dst_region, src_offset, dst_offset, nbytes, units,
                                                src_layer_stride, dst_layer_stride, num_layers)};
            },
            nb::kw_only(), "src_region"_a, "dst_region"_a, "src_offset"_a, "dst_offset"_a, "nbytes"_a, "units"_a,
            "src_layer_stride"_a, "dst_layer_stride"_a, "num_layers"_a)
        .def("__len__", [](const PlanHandle& self) { return self.plan->size(); });
}

}  // namespace pdd
