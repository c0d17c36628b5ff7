// Libraries and providers: what there is to choose from, and what was chosen.
#include <nanobind/stl/pair.h>

#include "bind/binding.h"
#include "fabric/caps.h"
#include "fabric/library_choice.h"
#include "fabric/provider.h"

namespace pdd {
namespace {

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

}  // namespace

std::vector<SearchDir> python_search_dirs() {
    std::vector<SearchDir> dirs;
    const nb::object found = nb::module_::import_("pdd.fabric.library").attr("search_dirs")();
    for (const auto& [path, source] : nb::cast<std::vector<std::pair<std::string, std::string>>>(found))
        dirs.push_back({path, source});
    return dirs;
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

void bind_libraries(nb::module_& m) {
    m.def("library", &library_dict, "path"_a = "");
    m.def("probe", &probe_list, "library"_a = "", "provider"_a = "auto");
}

}  // namespace pdd
