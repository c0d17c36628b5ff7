// What a failed system call left in errno, as an Error.
#pragma once

#include <cerrno>
#include <cstring>
#include <string>

#include "util/result.h"

namespace pdd {

// `what`: the operation and its object.
inline Error system_error(const std::string& what) {
    const int code = errno;
    return Error{what + ": " + std::strerror(code), code};
}

}  // namespace pdd
