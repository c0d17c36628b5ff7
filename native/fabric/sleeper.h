// Sleeper: blocks the worker until a command, a completion or a timeout. Waits on the queues' own descriptors where the
// provider has them, and in short naps where it has none (shm).
//
// net of 1.17 never takes back a queue's signal in fi_trywait, so its descriptor stays readable after the first
// completion and an idle node would spin. A blocking read of nothing does take it back: one is done, at most 1 ms long,
// on each queue that ended the last sleep.
#pragma once

#include <cstdint>
#include <vector>

#include "fabric/command_queue.h"
#include "fabric/endpoint.h"

namespace pdd {

class Sleeper {
  public:
    Sleeper(const Nics& nics, CommandQueue& commands);

    void add(Endpoint& endpoint);
    void remove(Endpoint& endpoint);  // before it closes
    // At most `timeout_ms`. Returns at once when something is there already.
    void sleep(int timeout_ms);

  private:
    void take_back_signals();

    CommandQueue& commands_;
    UniqueFd epoll_;
    std::vector<NicPort*> ports_;
    std::vector<NicPort*> signalled_;  // sticky ports that ended the last sleep
    bool can_wait_ = true;
};

}  // namespace pdd
