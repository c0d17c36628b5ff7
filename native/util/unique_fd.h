// UniqueFd: owner of a file descriptor. EventFd: a descriptor that one side makes readable and the other clears.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>
#include <utility>

namespace pdd {

class UniqueFd {
  public:
    UniqueFd() = default;
    explicit UniqueFd(int fd) : fd_(fd) {}
    UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    UniqueFd& operator=(UniqueFd&& other) noexcept {
        if (this != &other) {
            reset();
            fd_ = std::exchange(other.fd_, -1);
        }
        return *this;
    }
    ~UniqueFd() { reset(); }

    int get() const { return fd_; }
    int release() { return std::exchange(fd_, -1); }
    void reset() {
        if (fd_ >= 0) ::close(fd_);
        fd_ = -1;
    }

  private:
    int fd_ = -1;
};

class EventFd {
  public:
    EventFd() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}
    int get() const { return fd_.get(); }
    // Writing fails only when the counter is full, and then it is readable anyway; reading only when it is clear.
    void signal() const { [[maybe_unused]] const auto n = ::eventfd_write(fd_.get(), 1); }
    void clear() const {
        eventfd_t value;
        [[maybe_unused]] const auto n = ::eventfd_read(fd_.get(), &value);
    }

  private:
    UniqueFd fd_;
};

}  // namespace pdd
