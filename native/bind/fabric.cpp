// Engine, as the class Fabric.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/unique_ptr.h>

#include "bind/binding.h"

namespace pdd {
namespace {

using PyGroups = std::vector<std::pair<std::vector<std::string>, std::vector<int>>>;

}  // namespace

void bind_fabric(nb::module_& m) {
    using Unlocked = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<Engine>(m, "Fabric")
        .def(nb::new_([](const std::string& provider, const std::string& library, const std::vector<std::string>& bind,
                         const std::string& source, const std::string& require, uint32_t window_ops,
                         uint64_t window_bytes, const std::string& idle, const PyGroups& groups, bool local,
                         uint64_t flight_bytes, const std::string& device) {
                 std::vector<RailGroupConfig> rails;
                 for (const auto& [nics, cpus] : groups) rails.push_back({nics, cpus});
                 if (rails.empty()) rails.push_back({bind, {}});
                 const EngineConfig config{provider, library, python_search_dirs(), rails,
                                           source,   require, window_ops,           window_bytes,
                                           idle,     local,   flight_bytes,         device};
                 const nb::gil_scoped_release unlocked;
                 return unwrap(Engine::open(config));
             }),
             nb::kw_only(), "provider"_a = "auto", "library"_a = "", "bind"_a = std::vector<std::string>{},
             "source"_a = "", "require"_a = "", "window_ops"_a = 64, "window_bytes"_a = 8 << 20, "idle"_a = "auto",
             "groups"_a = PyGroups{}, "local"_a = false, "flight_bytes"_a = 16 << 20, "device"_a = "")
        .def_prop_ro("caps", &engine_caps)
        .def_prop_ro("warnings", &Engine::warnings)
        .def("fileno", &Engine::fileno)
        .def(
            "drain",
            [](Engine& self, size_t max_events) {
                const auto events = [&] {
                    const nb::gil_scoped_release unlocked;
                    return self.drain(max_events);
                }();
                nb::list out;
                for (const auto& event : events) out.append(event_tuple(event));
                return out;
            },
            "max_events"_a = 1024)
        .def(
            "close", [](Engine& self) { unwrap(self.close()); }, Unlocked())
        .def(
            "register",
            [](Engine& self, uintptr_t address, uint64_t nbytes, int fd, uint32_t group) {
                return unwrap(self.add_region(reinterpret_cast<uint8_t*>(address), nbytes, fd, group));
            },
            "address"_a, "nbytes"_a, "fd"_a = -1, "group"_a = 0, Unlocked())
        .def(
            "unregister", [](Engine& self, uint32_t region) { unwrap(self.remove_region(region)); }, "region"_a,
            Unlocked())
        .def(
            "open_endpoint", [](Engine& self, bool local) { return unwrap(self.open_endpoint(local)); },
            "local"_a = false, Unlocked())
        .def(
            "describe",
            [](Engine& self, uint32_t endpoint, const std::vector<uint32_t>& regions) {
                auto bytes = [&] {
                    const nb::gil_scoped_release unlocked;
                    return self.describe(endpoint, regions);
                }();
                const std::string text = unwrap(std::move(bytes));
                return nb::bytes(text.data(), text.size());
            },
            "endpoint"_a, "regions"_a)
        .def(
            "connect",
            [](Engine& self, uint32_t endpoint, const nb::bytes& descriptor) {
                std::string copy(descriptor.c_str(), descriptor.size());
                const nb::gil_scoped_release unlocked;
                unwrap(self.connect(endpoint, std::move(copy)));
            },
            "endpoint"_a, "descriptor"_a)
        .def(
            "close_endpoint", [](Engine& self, uint32_t endpoint) { unwrap(self.close_endpoint(endpoint)); },
            "endpoint"_a, Unlocked())
        .def(
            "imm_allocate", [](Engine& self, uint32_t endpoint) { return unwrap(self.imm_allocate(endpoint)); },
            "endpoint"_a)
        .def(
            "imm_arm", [](Engine& self, uint32_t key, uint32_t expected) { unwrap(self.imm_arm(key, expected)); },
            "key"_a, "expected"_a, Unlocked())
        .def(
            "imm_arrived", [](Engine& self, uint32_t key) { return unwrap(self.imm_arrived(key)); }, "key"_a)
        .def(
            "imm_retire", [](Engine& self, uint32_t key) { return unwrap(self.imm_retire(key)); }, "key"_a)
        .def(
            "open_transfer",
            [](Engine& self, uint32_t endpoint, uint32_t key) { return unwrap(self.open_transfer(endpoint, key)); },
            "endpoint"_a, "key"_a, Unlocked())
        .def(
            "watch", [](Engine& self, const CounterHandle& counter) { return unwrap(self.watch(counter.counter)); },
            "counter"_a)
        .def(
            "unwatch", [](Engine& self, uint32_t watch) { unwrap(self.unwatch(watch)); }, "watch"_a)
        .def(
            "arm",
            [](Engine& self, uint64_t transfer, uint32_t watch, uint64_t first_value, const PlanHandle& plan,
               uint32_t begin, uint32_t end) { unwrap(self.arm(transfer, watch, first_value, plan.plan, begin, end)); },
            "transfer"_a, "watch"_a, "first_value"_a, "plan"_a, "begin"_a, "end"_a, Unlocked())
        .def(
            "write",
            [](Engine& self, uint64_t transfer, uint32_t src_region, uint64_t src_offset, uint32_t dst_region,
               uint64_t dst_offset, uint64_t nbytes, uint32_t units) {
                const WritePlan::Geometry geometry{.src_region = src_region, .dst_region = dst_region};
                unwrap(
                    self.write(transfer, unwrap(WritePlan::make(geometry, {{src_offset, dst_offset, nbytes, units}}))));
            },
            "transfer"_a, "src_region"_a, "src_offset"_a, "dst_region"_a, "dst_offset"_a, "nbytes"_a, "units"_a,
            Unlocked())
        .def(
            "finish", [](Engine& self, uint64_t transfer) { unwrap(self.finish(transfer)); }, "transfer"_a, Unlocked())
        .def(
            "cancel", [](Engine& self, uint64_t transfer) { unwrap(self.cancel(transfer)); }, "transfer"_a, Unlocked())
        .def("stats", &stats_dict)
        .def(
            "flight",
            [](Engine& self, uint64_t transfer, size_t most) {
                auto found = [&] {
                    const nb::gil_scoped_release unlocked;
                    return self.flight(transfer, most);
                }();
                return flight_list(unwrap(std::move(found)), self);
            },
            "transfer"_a, "most"_a)
        .def(
            "imm_arrivals",
            [](Engine& self, uint32_t key) {
                const auto found = unwrap(self.imm_arrivals(key));
                nb::list marks;
                for (const int64_t at : found.marks) marks.append(seconds(at));
                return nb::make_tuple(found.expected, 1u << found.shift, seconds(found.first), seconds(found.last),
                                      marks);
            },
            "key"_a)
        .def(
            "inject_fault",
            [](Engine& self, const std::string& kind, uint64_t after, uint64_t count, int nic) {
                unwrap(self.inject_fault(kind, after, count, nic));
            },
            "kind"_a, "after"_a, "count"_a = 1, "nic"_a = -1, Unlocked());
}

}  // namespace pdd
