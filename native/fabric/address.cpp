#include "fabric/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <rdma/fabric.h>

#include <cstring>

namespace pdd {

std::string address_text(uint32_t format, const void* address, size_t length) {
    char text[INET6_ADDRSTRLEN] = {};
    if (address == nullptr) return "";
    if (format == FI_SOCKADDR_IN && length >= sizeof(sockaddr_in)) {
        sockaddr_in in{};
        std::memcpy(&in, address, sizeof in);
        ::inet_ntop(AF_INET, &in.sin_addr, text, sizeof text);
        return in.sin_port == 0 ? text : std::string(text) + ":" + std::to_string(ntohs(in.sin_port));
    }
    if (format == FI_SOCKADDR_IN6 && length >= sizeof(sockaddr_in6)) {
        sockaddr_in6 in{};
        std::memcpy(&in, address, sizeof in);
        ::inet_ntop(AF_INET6, &in.sin6_addr, text, sizeof text);
        return in.sin6_port == 0 ? text : "[" + std::string(text) + "]:" + std::to_string(ntohs(in.sin6_port));
    }
    if (format == FI_ADDR_STR) {
        const auto* chars = static_cast<const char*>(address);
        return std::string(chars, ::strnlen(chars, length));
    }
    return "";
}

bool is_numeric_address(const std::string& text) {
    unsigned char bytes[sizeof(in6_addr)];
    return ::inet_pton(AF_INET, text.c_str(), bytes) == 1 || ::inet_pton(AF_INET6, text.c_str(), bytes) == 1;
}

int address_reach(uint32_t format, const void* address, size_t length) {
    if (address != nullptr && format == FI_SOCKADDR_IN && length >= sizeof(sockaddr_in)) {
        sockaddr_in in{};
        std::memcpy(&in, address, sizeof in);
        const uint32_t host = ntohl(in.sin_addr.s_addr);
        if (host >> 24 == 127) return 1;
        return host >> 16 == 0xa9fe ? 2 : 3;  // 169.254/16
    }
    if (address != nullptr && format == FI_SOCKADDR_IN6 && length >= sizeof(sockaddr_in6)) {
        sockaddr_in6 in{};
        std::memcpy(&in, address, sizeof in);
        if (IN6_IS_ADDR_LOOPBACK(&in.sin6_addr)) return 1;
        return IN6_IS_ADDR_LINKLOCAL(&in.sin6_addr) ? 2 : 3;
    }
    return 0;
}

}  // namespace pdd
