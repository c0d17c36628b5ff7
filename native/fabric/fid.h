// Fid<T>: the owner of one libfabric object. Closed in the reverse order of its owner's members, or by close().
#pragma once

#include <rdma/fabric.h>

#include <utility>

namespace pdd {

template <class T>
class Fid {
  public:
    Fid() = default;
    Fid(Fid&& other) noexcept : fid_(std::exchange(other.fid_, nullptr)) {}
    Fid& operator=(Fid&& other) noexcept {
        if (this != &other) {
            close();
            fid_ = std::exchange(other.fid_, nullptr);
        }
        return *this;
    }
    ~Fid() { close(); }

    T* get() const { return fid_; }
    T* operator->() const { return fid_; }
    explicit operator bool() const { return fid_ != nullptr; }
    // For libfabric's constructors, which write the new object here. Only on an empty owner.
    T** out() { return &fid_; }
    // 0, or libfabric's negative errno, in which case the object is still open but given up.
    int close() {
        T* fid = std::exchange(fid_, nullptr);
        return fid != nullptr ? ::fi_close(&fid->fid) : 0;
    }

  private:
    T* fid_ = nullptr;
};

}  // namespace pdd
