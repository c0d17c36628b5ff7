// Which libfabric to use, of all that this machine has.
//
// A configured path is used or refused, never replaced. Without one the newest wins (the earlier of equals), except
// that on a machine with an RDMA device a library that offers it wins over a newer one that does not: the wheel's
// libfabric has software providers only, and would quietly put an EFA node on TCP.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fabric/loader.h"
#include "util/result.h"

namespace pdd {

struct SearchDir {
    std::string path;
    std::string source;
};

struct LibraryCandidate {
    std::string path;
    std::string version;  // empty when it could not be loaded
    std::string source;
    std::string why_not;  // empty for the chosen one
};

struct LibraryChoice {
    std::shared_ptr<const Library> library;
    std::vector<LibraryCandidate> candidates;
};

// `configured` is a file or a directory, or "". Looked through otherwise: the system's, the EFA installer's, then
// `extra`.
Result<LibraryChoice> choose_library(const std::string& configured, const std::vector<SearchDir>& extra);

}  // namespace pdd
