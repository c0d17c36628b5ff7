#include "fabric/library_choice.h"

#include <rdma/fi_errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "fabric/provider.h"

namespace pdd {
namespace {

constexpr const char* kSoname = "libfabric.so.1";

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
    bool hardware = false;  // it offers an RDMA NIC of this machine
};

bool machine_has_rdma() {
    std::error_code error;
    const std::filesystem::directory_iterator devices("/sys/class/infiniband", error);
    return !error && devices != std::filesystem::directory_iterator();
}

// Asking starts the library's providers, which do not survive being unloaded: it stays.
bool offers_hardware(const std::shared_ptr<const Library>& library) {
    library->keep_loaded();
    return find_nics(library, "efa", "") || find_nics(library, "verbs;ofi_rxm", "");
}

}  // namespace

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
    if (loaded.size() > 1 && machine_has_rdma())
        for (auto& one : loaded) one.hardware = offers_hardware(one.library);
    const auto best = std::max_element(loaded.begin(), loaded.end(), [](const Loaded& a, const Loaded& b) {
        return std::pair(a.hardware, a.library->version) < std::pair(b.hardware, b.library->version);
    });
    for (const auto& other : loaded) {
        if (other.candidate == best->candidate) continue;
        choice.candidates[other.candidate].why_not = best->hardware && !other.hardware
                                                         ? "does not drive this machine's RDMA device"
                                                         : "not newer than " + best->library->version_text();
    }
    choice.library = best->library;
    choice.library->keep_loaded();
    return choice;
}

}  // namespace pdd
