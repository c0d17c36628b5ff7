// LocalPort: a NicPort to a peer on the same host. Its address is the name of a socket and a secret.
//
// The socket takes the one writer that knows the secret; resolve() and reach() make this side the writer of another
// port. Each direction is a channel of its own. Completions and arrivals are found in shared memory, without a system
// call; the sockets are looked at after a sleep and now and then, for callers and for the death of a peer. The
// descriptor to wait for is an epoll of these sockets. Closing it is the fence: see LocalChannel.
#pragma once

#include <memory>
#include <vector>

#include "fabric/local_channel.h"
#include "fabric/local_nic.h"

namespace pdd {

class LocalPort final : public NicPort {
  public:
    static Result<std::unique_ptr<LocalPort>> open(LocalNic& nic, uint32_t queue);

    const std::vector<uint8_t>& address() const override { return address_; }
    // Takes a writer who waits already, so that what is wrong with it is told here.
    Result<uint64_t> resolve(std::span<const uint8_t> address) override;
    Status reach(uint64_t peer) override;
    PostResult post(const NicWrite& write, Op* op) override;
    uint32_t poll(CompletionSink& sink, uint32_t budget) override;
    Status close() override;
    int wait_fd() const override { return epoll_.get(); }
    bool may_wait() override;

  private:
    LocalPort(LocalNic& nic, uint32_t queue) : nic_(nic), queue_(queue) {}
    Status watch(int fd);
    void look(CompletionSink& sink);
    // Callers that know the secret become the reader's writer; an Error when one did and could not.
    Status take_callers();

    LocalNic& nic_;
    uint32_t queue_;
    LocalName name_{};
    LocalSecret secret_{};
    std::vector<uint8_t> address_;
    LocalName peer_name_{};
    LocalSecret peer_secret_{};
    UniqueFd epoll_;
    UniqueFd listener_;              // until the writer has come
    std::vector<UniqueFd> callers_;  // that have not said who they are
    std::unique_ptr<LocalWriter> writer_;
    std::unique_ptr<LocalReader> reader_;
    Status refusal_;  // why the last caller that knew the secret, or could not say it, is not the writer
    uint32_t until_look_ = 0;  // polls
    bool slept_ = false;
};

}  // namespace pdd
