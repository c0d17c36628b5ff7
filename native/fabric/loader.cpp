#include "fabric/loader.h"

#include <dlfcn.h>
#include <link.h>
#include <rdma/fi_errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>

namespace pdd {
namespace {

constexpr const char* kSoname = "libfabric.so.1";

template <class F>
bool bind_symbol(void* handle, const char* name, const char* version, F& out, std::string& missing) {
    out = reinterpret_cast<F>(::dlvsym(handle, name, version));
    if (out == nullptr && missing.empty()) missing = std::string(name) + "@" + version;
    return out != nullptr;
}

std::string in_directory(const std::string& path) {
    struct stat info {};
    if (::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) return path + "/" + kSoname;
    return path;
}

std::string real_path(const std::string& path) {
    char* resolved = ::realpath(path.c_str(), nullptr);
    if (resolved == nullptr) return path;
    std::string out = resolved;
    std::free(resolved);
    return out;
}

// The system's library by path. Asked for by its bare name, the linker would answer with any libfabric that this
// process has loaded already, so the bare name is only the last resort.
std::string system_library() {
    std::vector<std::string> dirs;
    if (const char* list = std::getenv("LD_LIBRARY_PATH")) {
        std::stringstream parts(list);
        for (std::string dir; std::getline(parts, dir, ':');)
            if (!dir.empty()) dirs.push_back(dir);
    }
    for (const char* dir : {"/usr/local/lib", "/usr/local/lib64", "/usr/lib/x86_64-linux-gnu",
                            "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"})
        dirs.push_back(dir);
    for (const auto& dir : dirs) {
        const std::string path = dir + "/" + kSoname;
        if (::access(path.c_str(), R_OK) == 0) return path;
    }
    return kSoname;
}

struct Loaded {
    std::shared_ptr<const Library> library;
    size_t candidate;
};

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

Result<LibraryChoice> choose_library(const std::string& configured, const std::vector<SearchDir>& extra) {
    std::vector<SearchDir> places;
    if (!configured.empty()) {
        places.push_back({in_directory(configured), "configured"});
    } else {
        places.push_back({system_library(), "system"});
        for (const char* dir : {"/opt/amazon/efa/lib", "/opt/amazon/efa/lib64"})
            places.push_back({std::string(dir) + "/" + kSoname, "efa-installer"});
        for (const auto& dir : extra) places.push_back({in_directory(dir.path), dir.source});
    }

    LibraryChoice choice;
    std::vector<Loaded> loaded;
    for (const auto& place : places) {
        const size_t index = choice.candidates.size();
        auto library = Library::load(place.path, place.source);
        if (!library) {
            choice.candidates.push_back({place.path, "", place.source, library.error().message});
            continue;
        }
        const std::string path = real_path((*library)->path);
        const bool known = std::any_of(loaded.begin(), loaded.end(),
                                       [&](const Loaded& other) { return real_path(other.library->path) == path; });
        if (known) continue;  // two names of one file
        choice.candidates.push_back({(*library)->path, (*library)->version_text(), place.source, ""});
        loaded.push_back({std::move(*library), index});
    }
    if (loaded.empty()) {
        std::string tried;
        for (const auto& c : choice.candidates) tried += "\n  " + c.path + " (" + c.source + "): " + c.why_not;
        return Error{"no usable libfabric (1.17 or newer); tried:" + tried, FI_ENODATA};
    }
    auto best = std::max_element(loaded.begin(), loaded.end(), [](const Loaded& a, const Loaded& b) {
        return a.library->version < b.library->version;
    });
    for (const auto& other : loaded) {
        if (other.candidate == best->candidate) continue;
        choice.candidates[other.candidate].why_not = "not newer than " + best->library->version_text();
    }
    choice.library = best->library;
    choice.library->keep_loaded();
    return choice;
}

}  // namespace pdd
