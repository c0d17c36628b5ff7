// LocalSocket: an abstract AF_UNIX socket by which two nodes of one host find each other and hand over descriptors.
//
// Nothing of it lies in a file system, so nothing is left behind by a killed node; its name is random; any user of the
// network namespace can list it, so it is no secret: the secret goes over the authenticated peer link. Whoever connects
// from another user is hung up on. Reaching it proves the same kernel and network namespace: a container with one of
// its own finds nothing there. After the one message with descriptors it carries single bytes, each of which wakes the
// other end, and its end of stream says that the other process is gone.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "util/result.h"
#include "util/unique_fd.h"

namespace pdd {

using LocalName = std::array<uint8_t, 16>;

// A listening socket of that name. Never blocks.
Result<UniqueFd> local_listen(const LocalName& name);
// A connection to it, or why there is none. Never blocks.
Result<UniqueFd> local_connect(const LocalName& name);
// The next caller of this user; those of others are hung up on. Empty when nobody calls.
UniqueFd local_accept(int listener);

// One message with descriptors. The kernel keeps copies of these until it is read.
Status local_send(int fd, std::span<const uint8_t> bytes, std::span<const int> descriptors);

struct LocalMessage {
    std::vector<uint8_t> bytes;
    std::vector<UniqueFd> descriptors;
};
// The message that waits: empty bytes when none has come yet, an Error when none can come any more.
Result<LocalMessage> local_receive(int fd);

// A byte to the other end. One that cannot be taken is not needed: others wait there unread.
void local_wake(int fd);
// Takes all wakes; false: the other end is gone.
bool local_drain(int fd);

}  // namespace pdd
