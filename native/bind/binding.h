// What the parts of the Python module pdd.fabric._native share: errors, handles, and one bind_* a part. The parts
// convert and do nothing else; whatever may wait lets the GIL go first.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "fabric/engine.h"
#include "fabric/write_plan.h"
#include "util/result.h"
#include "watch/counter.h"

namespace pdd {

namespace nb = nanobind;
using namespace nanobind::literals;

// What crosses into Python as FabricError.
struct FabricError : std::runtime_error {
    explicit FabricError(const Error& error) : std::runtime_error(error.message) {}
};

template <class T>
T unwrap(Result<T> result) {
    if (!result) throw FabricError(result.error());
    return std::move(*result);
}
inline void unwrap(const Status& status) {
    if (!status) throw FabricError(status.error());
}

// Python keeps a WritePlan, the worker another reference to the same data.
struct PlanHandle {
    std::shared_ptr<const WritePlan> plan;
};

struct CounterHandle {
    std::shared_ptr<Counter> counter;
};

// -- libraries.cpp
// Where the Python environment keeps a libfabric of its own; asked for on every use, so that nothing is global here.
std::vector<SearchDir> python_search_dirs();
nb::dict engine_caps(const Engine& engine);

// -- readings.cpp: what an engine tells, as Python's own types. A time is in seconds, None for what has not happened.
nb::object seconds(int64_t ns);
nb::tuple event_tuple(const Event& event);
nb::dict stats_dict(const Engine& engine);
nb::list flight_list(const Engine::Flight& flight, const Engine& engine);

void bind_libraries(nb::module_& m);
void bind_memory(nb::module_& m);
void bind_gpu(nb::module_& m);
void bind_plan(nb::module_& m);
void bind_fabric(nb::module_& m);

}  // namespace pdd
