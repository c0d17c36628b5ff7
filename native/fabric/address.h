// Addresses as text: for logs, caps and errors. The wire carries the provider's own bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pdd {

// A numeric address with its port when there is one, "" for formats that have no text.
std::string address_text(uint32_t format, const void* address, size_t length);

bool is_numeric_address(const std::string& text);

// 3 routable, 2 link-local, 1 loopback, 0 not an IP address: which interface a peer on another host can reach.
int address_reach(uint32_t format, const void* address, size_t length);

}  // namespace pdd
