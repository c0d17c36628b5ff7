#include "fabric/sleeper.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>

namespace pdd {
namespace {

constexpr auto kNap = std::chrono::microseconds(500);  // without descriptors: the latency of an idle node

}  // namespace

Sleeper::Sleeper(const Nics& nics, CommandQueue& commands)
    : commands_(commands), epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
    for (const auto& nic : nics) can_wait_ = can_wait_ && nic->caps().wait_fd;
    epoll_event event{};
    event.events = EPOLLIN;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, commands_.fd(), &event);
}

void Sleeper::add(Endpoint& endpoint) {
    for (size_t i = 0; i < endpoint.num_ports(); ++i) {
        NicPort& port = endpoint.port(i);
        ports_.push_back(&port);
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.ptr = endpoint.caps(i).sticky_wait ? &port : nullptr;
        if (can_wait_) ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, port.wait_fd(), &event);
    }
}

void Sleeper::remove(Endpoint& endpoint) {
    for (size_t i = 0; i < endpoint.num_ports(); ++i) {
        NicPort& port = endpoint.port(i);
        std::erase(ports_, &port);
        std::erase(signalled_, &port);
        if (can_wait_) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, port.wait_fd(), nullptr);
    }
}

void Sleeper::take_back_signals() {
    for (NicPort* port : signalled_) port->take_back_signal();
    signalled_.clear();
}

void Sleeper::sleep(int timeout_ms) {
    take_back_signals();
    if (!commands_.about_to_sleep()) return;
    // A provider may have read ahead: then its descriptor stays silent and only the queue itself tells.
    const bool silent =
        !can_wait_ || std::all_of(ports_.begin(), ports_.end(), [](NicPort* p) { return p->may_wait(); });
    if (silent && !ports_.empty() && !can_wait_) {
        std::this_thread::sleep_for(kNap);
    } else if (silent) {
        std::array<epoll_event, 16> events;
        const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout_ms);
        for (int i = 0; i < count; ++i)
            if (events[i].data.ptr != nullptr) signalled_.push_back(static_cast<NicPort*>(events[i].data.ptr));
    }
    commands_.awake();
}

}  // namespace pdd
