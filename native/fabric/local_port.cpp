#include "fabric/local_port.h"

#include <rdma/fi_errno.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "util/random.h"
#include "util/system_error.h"

namespace pdd {
namespace {

constexpr uint32_t kLookEvery = 256;  // polls: a busy worker's, some tens of microseconds
constexpr size_t kMostCallers = 8;

}  // namespace

Result<std::unique_ptr<LocalPort>> LocalPort::open(LocalNic& nic, uint32_t queue) {
    std::unique_ptr<LocalPort> port(new LocalPort(nic, queue));
    port->name_ = random_bytes<LocalName>();
    port->secret_ = random_bytes<LocalSecret>();
    port->address_.insert(port->address_.end(), port->name_.begin(), port->name_.end());
    port->address_.insert(port->address_.end(), port->secret_.begin(), port->secret_.end());
    auto listener = local_listen(port->name_);
    if (!listener) return listener.error();
    port->listener_ = std::move(*listener);
    port->epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
    if (Status watched = port->watch(port->listener_.get()); !watched) return watched.error();
    return port;
}

Status LocalPort::watch(int fd) {
    epoll_event event{};
    event.events = EPOLLIN;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0) return {};
    return system_error("epoll_ctl for a local peer");
}

Result<uint64_t> LocalPort::resolve(std::span<const uint8_t> address) {
    if (address.size() != address_.size()) return nic_.error("a local address of a wrong length", FI_EINVAL);
    std::copy_n(address.begin(), peer_name_.size(), peer_name_.begin());
    std::copy_n(address.begin() + peer_name_.size(), peer_secret_.size(), peer_secret_.begin());
    if (Status taken = take_callers(); !taken) return taken.error();
    if (!refusal_) return refusal_.error();  // seen before, when a wake had this port looked at
    return 0;
}

Status LocalPort::reach(uint64_t) {
    auto writer = LocalWriter::open(peer_name_, peer_secret_, nic_.sources(), queue_);
    if (!writer) return writer.error();
    if (Status watched = watch((*writer)->fd()); !watched) return watched;
    writer_ = std::move(*writer);
    return {};
}

PostResult LocalPort::post(const NicWrite& write, Op* op) {
    if (writer_ == nullptr) return {PostOutcome::Refused, FI_ENOTCONN};
    const auto* memory = static_cast<const LocalMemory*>(write.descriptor);
    return writer_->post(memory->source().id, memory->base(), write, op);
}

uint32_t LocalPort::poll(CompletionSink& sink, uint32_t budget) {
    if (slept_) {
        slept_ = false;
        if (reader_ != nullptr) reader_->awake();
        if (writer_ != nullptr) writer_->awake();
        until_look_ = 0;
    }
    uint32_t found = 0;
    if (writer_ != nullptr) found += writer_->poll(sink);
    if (reader_ != nullptr) found += reader_->poll(sink, nic_, budget);
    if (until_look_-- == 0) {
        until_look_ = kLookEvery;
        look(sink);
    }
    return found;
}

void LocalPort::look(CompletionSink& sink) {
    if (listener_.get() >= 0)
        if (Status taken = take_callers(); !taken) sink.on_error(taken.error().message);
    if (writer_ != nullptr && !writer_->look(sink)) writer_.reset();
    if (reader_ != nullptr && !reader_->look(sink)) reader_.reset();
}

Status LocalPort::take_callers() {
    while (listener_.get() >= 0) {
        UniqueFd caller = local_accept(listener_.get());
        if (caller.get() < 0) break;
        if (!watch(caller.get())) break;
        if (callers_.size() == kMostCallers) callers_.erase(callers_.begin());
        callers_.push_back(std::move(caller));
    }
    for (size_t i = 0; i < callers_.size();) {
        auto message = local_receive(callers_[i].get());
        if (message && message->bytes.empty()) {
            ++i;
            continue;
        }
        UniqueFd caller = std::move(callers_[i]);
        callers_.erase(callers_.begin() + static_cast<ptrdiff_t>(i));
        if (!message) {
            if (message.error().code == EMSGSIZE) refusal_ = message.error();  // this process is short of descriptors
            continue;
        }
        auto reader = LocalReader::open(std::move(caller), std::move(*message), secret_);
        if (!reader && reader.error().code == LocalReader::kStranger) continue;
        callers_.clear();
        listener_.reset();
        refusal_ = reader ? Status{} : Status{reader.error()};
        if (!reader) return refusal_;
        reader_ = std::move(*reader);
        return {};
    }
    return {};
}

Status LocalPort::close() {
    // Nothing is copied any more, in or out: this thread was the one that did, and a writer's close is seen before
    // the next unit is counted.
    writer_.reset();
    reader_.reset();
    callers_.clear();
    listener_.reset();
    return {};
}

bool LocalPort::may_wait() {
    slept_ = true;
    const bool writer = writer_ == nullptr || writer_->may_wait();
    const bool reader = reader_ == nullptr || reader_->may_wait();
    return writer && reader;
}

}  // namespace pdd
