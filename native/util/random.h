// Random bytes that nobody can guess.
#pragma once

#include <sys/random.h>

#include <cstdint>
#include <cstdlib>

namespace pdd {

template <class T>
T random_bytes() {
    T value;
    // Up to 256 bytes come whole; without a random generator nothing here is safe to go on with.
    static_assert(sizeof value <= 256);
    if (::getrandom(&value, sizeof value, 0) != sizeof value) std::abort();
    return value;
}

inline uint64_t random_u64() {
    return random_bytes<uint64_t>();
}

}  // namespace pdd
