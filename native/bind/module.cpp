// The Python module pdd.fabric._native: conversions and nothing else. Whatever may wait lets the GIL go first.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <unordered_map>

#include "fabric/engine.h"
#include "gpu/device_memory.h"
#include "gpu/layer_kernel.h"
#include "memory/mapped_memory.h"
#include "watch/barrier.h"
#include "watch/counter.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdd {
namespace {

// What crosses into Python as FabricError.
struct FabricError : std::runtime_error {
    explicit FabricError(const Error& error) : std::runtime_error(error.message) {}
};

template <class T>
T unwrap(Result<T> result) {
    if (!result) throw FabricError(result.error());
    return std::move(*result);
}
void unwrap(const Status& status) {
    if (!status) throw FabricError(status.error());
}

// Where the Python environment keeps a libfabric of its own; asked for on every use, so that nothing is global here.
std::vector<SearchDir> python_search_dirs() {
    std::vector<SearchDir> dirs;
    const nb::object found = nb::module_::import_("pdd.fabric.library").attr("search_dirs")();
    for (const auto& [path, source] : nb::cast<std::vector<std::pair<std::string, std::string>>>(found))
        dirs.push_back({path, source});
    return dirs;
}

nb::dict library_dict(const std::string& path) {
    const auto dirs = python_search_dirs();
    auto choice = [&] {
        const nb::gil_scoped_release unlocked;
        return choose_library(path, dirs);
    }();
    const LibraryChoice chosen = unwrap(std::move(choice));
    nb::list candidates;
    for (const auto& candidate : chosen.candidates) {
        nb::dict entry;
        entry["path"] = candidate.path;
        entry["version"] = candidate.version;
        entry["source"] = candidate.source;
        entry["why_not"] = candidate.why_not;
        candidates.append(entry);
    }
    nb::dict out;
    out["path"] = chosen.library->path;
    out["version"] = chosen.library->version_text();
    out["source"] = chosen.library->source;
    out["candidates"] = candidates;
    return out;
}

nb::dict caps_dict(const ProviderCaps& caps) {
    nb::dict out;
    out["provider"] = caps.provider;
    out["kind"] = caps.kind;
    out["wire"] = caps.wire;
    out["fabric"] = caps.fabric;
    out["domain"] = caps.domain;
    out["address"] = caps.address;
    out["library_version"] = caps.library_version;
    out["library_path"] = caps.library_path;
    out["imm_bytes"] = caps.imm_bytes;
    out["addressing"] = caps.virtual_addressing ? "virtual" : "offset";
    out["app_keys"] = caps.app_keys;
    out["local_mr"] = caps.local_mr;
    out["progress"] = caps.progress;
    out["tx_size"] = caps.tx_size;
    out["inject"] = caps.inject;
    out["iov_limit"] = caps.iov_limit;
    out["rma_iov_limit"] = caps.rma_iov_limit;
    out["write_segments"] = caps.write_segments;
    out["max_message"] = caps.max_message;
    out["wait_fd"] = caps.wait_fd;
    out["hmem"] = caps.hmem;
    out["dmabuf"] = caps.dmabuf;
    out["gpu_path"] = caps.gpu_path;
    out["gpu_path_why"] = caps.gpu_path_why;
    out["fence"] = caps.fence;
    return out;
}

nb::dict engine_caps(const Engine& engine) {
    nb::dict out = caps_dict(engine.caps(0).front());
    out["group"] = 0;
    nb::list nics;
    for (size_t group = 0; group < engine.num_groups(); ++group)
        for (const auto& caps : engine.caps(group)) {
            nb::dict nic = caps_dict(caps);
            nic["group"] = group;
            nics.append(nic);
        }
    out["nics"] = nics;
    return out;
}

nb::list probe_list(const std::string& library, const std::string& provider) {
    const auto dirs = python_search_dirs();
    auto found = [&]() -> Result<std::vector<ProviderCaps>> {
        const nb::gil_scoped_release unlocked;
        auto choice = choose_library(library, dirs);
        if (!choice) return choice.error();
        return probe(*choice, provider);
    }();
    nb::list out;
    for (const auto& caps : unwrap(std::move(found))) out.append(caps_dict(caps));
    return out;
}

nb::tuple event_tuple(const Event& event) {
    const int kind = static_cast<int>(event.kind);
    switch (event.kind) {
        case EventKind::ImmReached:
        case EventKind::ImmOverrun:
            return nb::make_tuple(kind, event.id, event.ok);
        case EventKind::TransferDone:
            return nb::make_tuple(kind, event.id, event.ok, event.failed, event.unknown, event.text,
                                  event.traffic.writes, event.traffic.bytes,
                                  static_cast<double>(event.traffic.busy_ns) * 1e-9,
                                  static_cast<double>(event.traffic.exposed_ns) * 1e-9);
        case EventKind::EndpointFailed:
            return nb::make_tuple(kind, event.id, event.text);
        case EventKind::EndpointClosed:
            break;
    }
    return nb::make_tuple(kind, event.id);
}

nb::dict stats_dict(const Engine& engine) {
    nb::dict out;
    const auto put = [&](const char* name, StatCell Stats::*cell) {
        uint64_t sum = 0;
        for (size_t group = 0; group < engine.num_groups(); ++group)
            sum += (engine.stats(group).*cell).load(std::memory_order_relaxed);
        out[name] = sum;
    };
    // What every group has a part of.
    const auto put_most = [&](const char* name, StatCell Stats::*cell) {
        uint64_t most = 0;
        for (size_t group = 0; group < engine.num_groups(); ++group)
            most = std::max(most, (engine.stats(group).*cell).load(std::memory_order_relaxed));
        out[name] = most;
    };
    put("writes", &Stats::writes);
    put("bytes", &Stats::bytes);
    put("units", &Stats::units);
    put("units_received", &Stats::units_received);
    put("completions", &Stats::completions);
    put("errors", &Stats::errors);
    put("stale_units", &Stats::stale_units);
    put("merged", &Stats::merged);
    put("again", &Stats::again);
    put("wakeups", &Stats::wakeups);
    put_most("active_transfers", &Stats::active_transfers);
    put("inflight_writes", &Stats::inflight_writes);
    put("inflight_bytes", &Stats::inflight_bytes);
    put_most("endpoints", &Stats::endpoints);
    put("regions", &Stats::regions);
    put("armed_plans", &Stats::armed_plans);
    out["keys"] = engine.keys_in_use();
    nb::list per_nic;
    for (size_t group = 0; group < engine.num_groups(); ++group)
        for (size_t nic = 0; nic < engine.caps(group).size(); ++nic)
            per_nic.append(engine.stats(group).nic_writes[nic].load(std::memory_order_relaxed));
    out["nic_writes"] = per_nic;
    return out;
}

// Of the flight log: None for what has not happened.
nb::object seconds(int64_t ns) {
    return ns == 0 ? nb::none() : nb::cast(static_cast<double>(ns) * 1e-9);
}

nb::list nic_list(uint32_t bits, uint32_t first, uint32_t num_nics) {
    nb::list out;
    for (uint32_t nic = 0; nic < 32; ++nic)
        if ((bits >> nic & 1) != 0) out.append(nic < num_nics ? static_cast<int>(first + nic) : -1);
    return out;
}

// One tuple a plan, as pdd/fabric/types.py reads it. The NIC of local peers is -1.
nb::list flight_list(const Engine::Flight& flight, const Engine& engine) {
    nb::list out;
    for (size_t group = 0; group < flight.groups.size(); ++group) {
        const auto& report = flight.groups[group];
        const uint32_t first = flight.first_nics[group];
        const auto num_nics = static_cast<uint32_t>(engine.caps(group).size());
        std::unordered_multimap<uint64_t, FlightWrites> by_cell;
        for (const auto& write : report.in_flight) by_cell.emplace(write.cell, write);
        for (const auto& [plan, cells] : report.plans) {
            nb::list layers;
            for (const auto& cell : cells) {
                nb::list in_flight;
                for (auto [write, end] = by_cell.equal_range(cell.number); write != end; ++write) {
                    const uint32_t nic = write->second.nic;
                    in_flight.append(
                        nb::make_tuple(nic < num_nics ? static_cast<int>(first + nic) : -1, write->second.units));
                }
                layers.append(nb::make_tuple(
                    cell.number - plan.first_cell, seconds(cell.ready), seconds(cell.first_post),
                    seconds(cell.last_post), seconds(cell.last_end), cell.posted, cell.ok, cell.failed, cell.unknown,
                    nic_list(cell.nics, first, num_nics), nic_list(cell.failed_nics, first, num_nics), in_flight));
            }
            out.append(nb::make_tuple(plan.transfer, plan.key, plan.src_region, plan.dst_region, plan.first_value,
                                      plan.num_layers, plan.units, seconds(plan.armed), layers));
        }
    }
    return out;
}

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

// Python keeps a WritePlan, the worker another reference to the same data.
struct PlanHandle {
    std::shared_ptr<const WritePlan> plan;
};

struct CounterHandle {
    std::shared_ptr<Counter> counter;
};

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

using PyGroups = std::vector<std::pair<std::vector<std::string>, std::vector<int>>>;

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

}  // namespace
}  // namespace pdd

NB_MODULE(_native, m) {
    nb::exception<pdd::FabricError>(m, "FabricError", PyExc_RuntimeError);
    m.attr("IMM_MAX_UNITS") = pdd::kImmMaxUnits;
    m.attr("KEY_BITS") = pdd::kKeyBits;
    m.attr("IMM_REACHED") = static_cast<int>(pdd::EventKind::ImmReached);
    m.attr("IMM_OVERRUN") = static_cast<int>(pdd::EventKind::ImmOverrun);
    m.attr("TRANSFER_DONE") = static_cast<int>(pdd::EventKind::TransferDone);
    m.attr("ENDPOINT_FAILED") = static_cast<int>(pdd::EventKind::EndpointFailed);
    m.attr("ENDPOINT_CLOSED") = static_cast<int>(pdd::EventKind::EndpointClosed);
    m.def("library", &pdd::library_dict, "path"_a = "");
    m.def("probe", &pdd::probe_list, "library"_a = "", "provider"_a = "auto");
    pdd::bind_memory(m);
    pdd::bind_gpu(m);
    pdd::bind_plan(m);
    pdd::bind_fabric(m);
}
