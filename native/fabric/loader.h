// Library: one libfabric loaded at run time. Built on the headers of 1.17, run on 1.17 to 2.x.
//
// The ABI that the headers describe is bound by symbol version (FABRIC_1.3 for fi_info, 1.0/1.1 for the rest): the
// default fi_getinfo of 2.x is another one. Everything else of libfabric is inline calls through the objects' own
// tables. A chosen library stays loaded for the life of the process: its providers keep threads and exit handlers.
#pragma once

#include <rdma/fabric.h>

#include <memory>
#include <string>

#include "util/result.h"

namespace pdd {

class Library {
  public:
    static Result<std::shared_ptr<const Library>> load(const std::string& path, const std::string& source);
    ~Library();
    Library(const Library&) = delete;
    Library& operator=(const Library&) = delete;

    fi_info* allocinfo() const { return dupinfo(nullptr); }
    std::string error_text(int code) const;  // of a positive or negative errno
    std::string version_text() const;        // "2.5"
    bool at_least(uint32_t major, uint32_t minor) const { return FI_VERSION_GE(version, FI_VERSION(major, minor)); }
    // The API version to ask for: what the headers know, but 1.18 where the library has it, because efa writes by
    // device RDMA only for callers of 1.18 and no structure changed between 1.17 and 1.18.
    uint32_t api_version() const;

    decltype(&::fi_getinfo) getinfo = nullptr;
    decltype(&::fi_freeinfo) freeinfo = nullptr;
    decltype(&::fi_dupinfo) dupinfo = nullptr;
    decltype(&::fi_fabric) fabric = nullptr;
    decltype(&::fi_strerror) strerror = nullptr;
    uint32_t version = 0;
    std::string path;    // as the dynamic linker resolved it
    std::string source;  // "configured", "efa-installer", "system", or the name that came with a search directory
    void keep_loaded() const { keep_ = true; }

  private:
    Library() = default;
    void* handle_ = nullptr;
    mutable bool keep_ = false;
};

}  // namespace pdd
