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

Sleeper::Sleeper(const Domains& domains, CommandQueue& commands)
    : domains_(domains), commands_(commands), epoll_(::epoll_create1(EPOLL_CLOEXEC)), queues_(domains.size()) {
    for (const auto& domain : domains_) can_wait_ = can_wait_ && domain->caps().wait_fd;
    epoll_event event{};
    event.events = EPOLLIN;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, commands_.fd(), &event);
}

void Sleeper::add(Endpoint& endpoint) {
    for (size_t nic = 0; nic < queues_.size(); ++nic) {
        Rail& rail = endpoint.rails()[nic];
        queues_[nic].push_back(&rail.cq->fid);
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.ptr = domains_[nic]->caps().sticky_wait ? rail.cq.get() : nullptr;
        if (can_wait_) ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, rail.wait_fd, &event);
    }
}

void Sleeper::remove(Endpoint& endpoint) {
    for (size_t nic = 0; nic < queues_.size(); ++nic) {
        Rail& rail = endpoint.rails()[nic];
        std::erase(queues_[nic], &rail.cq->fid);
        std::erase(signalled_, rail.cq.get());
        if (can_wait_) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, rail.wait_fd, nullptr);
    }
}

void Sleeper::take_back_signals() {
    for (fid_cq* cq : signalled_) ::fi_cq_sread(cq, nullptr, 0, nullptr, 1);
    signalled_.clear();
}

void Sleeper::sleep(int timeout_ms) {
    take_back_signals();
    if (!commands_.about_to_sleep()) return;
    bool any_queue = false;
    for (size_t nic = 0; nic < queues_.size(); ++nic) {
        auto& queues = queues_[nic];
        if (queues.empty()) continue;
        any_queue = true;
        // A provider may have read ahead: then its descriptor stays silent and only the queue itself tells.
        if (can_wait_ && ::fi_trywait(domains_[nic]->fabric(), queues.data(), static_cast<int>(queues.size())) != 0) {
            commands_.awake();
            return;
        }
    }
    if (any_queue && !can_wait_) {
        std::this_thread::sleep_for(kNap);
    } else {
        std::array<epoll_event, 16> events;
        const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout_ms);
        for (int i = 0; i < count; ++i)
            if (events[i].data.ptr != nullptr) signalled_.push_back(static_cast<fid_cq*>(events[i].data.ptr));
    }
    commands_.awake();
}

}  // namespace pdd
