#include "fabric/local_socket.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>

#include "util/system_error.h"

namespace pdd {
namespace {

constexpr size_t kMaxMessage = 4096;
constexpr size_t kMaxDescriptors = 128;
constexpr int kBacklog = 16;
constexpr int kMostWakes = 64;  // taken at a time
constexpr int kKind = SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK;

struct Address {
    sockaddr_un un{};
    socklen_t length = 0;
};

// "\0pdd-" and the name in hex.
Address address_of(const LocalName& name) {
    static constexpr char kDigits[] = "0123456789abcdef";
    Address out;
    out.un.sun_family = AF_UNIX;
    std::string text("\0pdd-", 5);
    for (const uint8_t byte : name) {
        text.push_back(kDigits[byte >> 4]);
        text.push_back(kDigits[byte & 15]);
    }
    std::memcpy(out.un.sun_path, text.data(), text.size());
    out.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + text.size());
    return out;
}

// Of whom the kernel says that it holds the other end.
bool same_user(int fd) {
    ucred peer{};
    socklen_t length = sizeof peer;
    return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == ::geteuid();
}

}  // namespace

Result<UniqueFd> local_listen(const LocalName& name) {
    UniqueFd fd(::socket(AF_UNIX, kKind, 0));
    const Address address = address_of(name);
    if (fd.get() < 0 || ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address.un), address.length) != 0 ||
        ::listen(fd.get(), kBacklog) != 0)
        return system_error("a local socket");
    return fd;
}

Result<UniqueFd> local_connect(const LocalName& name) {
    UniqueFd fd(::socket(AF_UNIX, kKind, 0));
    const Address address = address_of(name);
    if (fd.get() < 0) return system_error("a local socket");
    if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address.un), address.length) != 0)
        return system_error(
            "its local socket cannot be reached from here (a network namespace of its own, or it has a peer)");
    if (!same_user(fd.get())) return Error{"its local socket belongs to another user", EPERM};
    return fd;
}

UniqueFd local_accept(int listener) {
    for (;;) {
        UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (fd.get() < 0 || same_user(fd.get())) return fd;
    }
}

Status local_send(int fd, std::span<const uint8_t> bytes, std::span<const int> descriptors) {
    if (bytes.size() > kMaxMessage || descriptors.size() > kMaxDescriptors)
        return Error{"a local message of " + std::to_string(descriptors.size()) + " descriptors is too long", EMSGSIZE};
    iovec content{const_cast<uint8_t*>(bytes.data()), bytes.size()};
    std::vector<char> control(CMSG_SPACE(descriptors.size_bytes()));
    msghdr message{};
    message.msg_iov = &content;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size_bytes());
    if (::sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) return system_error("a local message cannot be sent");
    return {};
}

Result<LocalMessage> local_receive(int fd) {
    LocalMessage out;
    out.bytes.resize(kMaxMessage);
    iovec content{out.bytes.data(), out.bytes.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))];
    msghdr message{};
    message.msg_iov = &content;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t count = ::recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
        out.bytes.clear();
        return out;
    }
    if (count < 0) return system_error("reading a local message");
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
        const size_t num = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < num; ++i) {
            int received = -1;
            std::memcpy(&received, CMSG_DATA(header) + i * sizeof(int), sizeof received);
            out.descriptors.emplace_back(received);
        }
    }
    if (count == 0) return Error{"the other end hung up", ECONNRESET};
    if ((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) return Error{"a local message came cut off", EMSGSIZE};
    out.bytes.resize(static_cast<size_t>(count));
    return out;
}

void local_wake(int fd) {
    [[maybe_unused]] const auto n = ::send(fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

bool local_drain(int fd) {
    char byte;
    for (int i = 0; i < kMostWakes; ++i) {
        // recv, not recvmsg: the kernel closes descriptors that come along.
        const ssize_t count = ::recv(fd, &byte, 1, MSG_DONTWAIT);
        if (count <= 0) return count < 0 && (errno == EAGAIN || errno == EINTR);
    }
    return true;
}

}  // namespace pdd
