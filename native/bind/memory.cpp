// Memory that ranks and daemon share, and what is counted in it.
#include <nanobind/ndarray.h>

#include <chrono>

#include "bind/binding.h"
#include "memory/mapped_memory.h"
#include "watch/barrier.h"

namespace pdd {

void bind_memory(nb::module_& m) {
    nb::class_<CounterHandle>(m, "Counter")
        .def(
            "__init__",
            [](CounterHandle* self, int fd, uint64_t offset) {
                new (self) CounterHandle{unwrap(Counter::map(fd, offset))};
            },
            "fd"_a, "offset"_a = 0)
        .def_static("create",
                    [] {
                        auto [counter, fd] = unwrap(Counter::create());
                        return nb::make_tuple(CounterHandle{std::move(counter)}, fd.release());
                    })
        .def("bump", [](CounterHandle& self) { return self.counter->bump(); })
        .def_prop_ro("value", [](const CounterHandle& self) { return self.counter->value(); });

    nb::class_<Barrier>(m, "Barrier")
        .def(
            "__init__",
            [](Barrier* self, int fd, uint32_t rank, uint32_t world, double spin) {
                new (self) Barrier(
                    unwrap(Barrier::map(fd, rank, world, std::chrono::microseconds(static_cast<int64_t>(spin * 1e6)))));
            },
            "fd"_a, "rank"_a, "world"_a, nb::kw_only(), "spin"_a = 0.0)
        .def("wait", &Barrier::wait, nb::call_guard<nb::gil_scoped_release>());

    nb::class_<MappedMemory>(m, "MappedMemory")
        .def(
            "__init__",
            [](MappedMemory* self, int fd, size_t nbytes, bool populate) {
                auto mapped = [&] {
                    const nb::gil_scoped_release unlocked;
                    return MappedMemory::map(fd, nbytes, populate);
                }();
                new (self) MappedMemory(unwrap(std::move(mapped)));
            },
            "fd"_a, "nbytes"_a, nb::kw_only(), "populate"_a = false)
        .def_prop_ro("address", [](const MappedMemory& self) { return reinterpret_cast<uintptr_t>(self.data()); })
        .def_prop_ro("nbytes", &MappedMemory::size)
        .def(
            "view",
            [](MappedMemory& self) {
                return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(self.data(), {self.size()}, nb::find(self));
            },
            nb::rv_policy::reference_internal);
}

}  // namespace pdd
