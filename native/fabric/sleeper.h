// Sleeper: blocks the worker until a command, a completion or a timeout. Waits on the queues' own descriptors where the
// provider has them, and in short naps where it has none (shm).
#pragma once

#include <cstdint>
#include <vector>

#include "fabric/command_queue.h"
#include "fabric/endpoint.h"

namespace pdd {

class Sleeper {
  public:
    Sleeper(const Domains& domains, CommandQueue& commands);

    void add(Endpoint& endpoint);
    void remove(Endpoint& endpoint);  // before it closes
    // At most `timeout_ms`. Returns at once when something is there already.
    void sleep(int timeout_ms);

  private:
    const Domains& domains_;
    CommandQueue& commands_;
    UniqueFd epoll_;
    std::vector<std::vector<fid*>> queues_;  // per domain
    bool can_wait_ = true;
};

}  // namespace pdd
