// MappedMemory: a shared mapping of a memfd that another process made (a rank's KV memory).
#pragma once

#include <cstddef>
#include <cstdint>

#include "util/result.h"

namespace pdd {

class MappedMemory {
  public:
    // Maps the first `nbytes` of `fd`; the caller keeps and closes the fd. `populate` faults all pages in now.
    static Result<MappedMemory> map(int fd, size_t nbytes, bool populate);

    MappedMemory(MappedMemory&& other) noexcept;
    MappedMemory& operator=(MappedMemory&& other) noexcept;
    ~MappedMemory();

    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

  private:
    MappedMemory(uint8_t* data, size_t size) : data_(data), size_(size) {}
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace pdd
