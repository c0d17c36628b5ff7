#include "fabric/loader.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdlib>

namespace pdd {
namespace {

template <class F>
bool bind_symbol(void* handle, const char* name, const char* version, F& out, std::string& missing) {
    out = reinterpret_cast<F>(::dlvsym(handle, name, version));
    if (out == nullptr && missing.empty()) missing = std::string(name) + "@" + version;
    return out != nullptr;
}

}  // namespace

Result<std::shared_ptr<const Library>> Library::load(const std::string& path, const std::string& source) {
    std::shared_ptr<Library> library(new Library);
    library->handle_ = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library->handle_ == nullptr) {
        const char* text = ::dlerror();
        return Error{text != nullptr ? text : "dlopen failed"};
    }
    void* handle = library->handle_;
    std::string missing;
    uint32_t (*version)() = nullptr;
    bind_symbol(handle, "fi_version", "FABRIC_1.0", version, missing);
    bind_symbol(handle, "fi_strerror", "FABRIC_1.0", library->strerror, missing);
    bind_symbol(handle, "fi_fabric", "FABRIC_1.1", library->fabric, missing);
    bind_symbol(handle, "fi_getinfo", "FABRIC_1.3", library->getinfo, missing);
    bind_symbol(handle, "fi_freeinfo", "FABRIC_1.3", library->freeinfo, missing);
    bind_symbol(handle, "fi_dupinfo", "FABRIC_1.3", library->dupinfo, missing);
    if (!missing.empty()) return Error{"it has no " + missing};
    library->version = version();
    if (!library->at_least(1, 17)) return Error{"version " + library->version_text() + " is older than 1.17"};
    link_map* map = nullptr;
    library->path = ::dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map->l_name[0] != '\0' ? map->l_name : path;
    library->source = source;
    return std::shared_ptr<const Library>(std::move(library));
}

Library::~Library() {
    if (handle_ != nullptr && !keep_) ::dlclose(handle_);
}

std::string Library::error_text(int code) const {
    return strerror(std::abs(code));
}

std::string Library::version_text() const {
    return std::to_string(FI_MAJOR(version)) + "." + std::to_string(FI_MINOR(version));
}

uint32_t Library::api_version() const {
    constexpr uint32_t headers = FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION);
    constexpr uint32_t least = FI_VERSION(1, 18);
    constexpr uint32_t most = FI_VERSION(1, 22);
    return std::min(version, std::clamp(headers, least, most));
}

}  // namespace pdd
