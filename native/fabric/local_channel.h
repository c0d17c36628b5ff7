// LocalChannel: writes from one process to another of the same host, which the target carries out.
//
// The writer puts each write into a ring in shared memory: where it lies in the writer's region, where it goes, its key
// and immediate. The target's worker, which maps the writer's regions read-only, checks it, copies the bytes into its
// own memory, counts the immediate, and says that it is done. So nobody ever writes into memory of another process,
// and a target that stops copying is fenced, whatever the writer is doing: stopped, dying, or mad.
//
// What is left to prove is the other side: that what was copied was still the writer's page. A writer gives a page back
// when the copy is done, or when it closes the channel, which sets a word in the shared memory first. The target looks
// at that word after each copy and before it counts: a copy that began before the close and ended after it (a process
// that was stopped in the middle) counts nothing. A writer that is killed sets nothing, and need not: what stood in the
// ring is of pages that nobody gives back any more.
//
//   target:  copy; acquire fence; closed?  then count, done = n + 1 (release)
//   writer:  closed = 1; full fence; give pages back        no unit is counted whose copy saw a later byte
//
// Neither end trusts the other with more than bytes: counters are checked, an entry is copied before it is judged, and
// memory that could shrink under a reader (SIGBUS) is refused. Owner of each end: its worker's thread. Nothing blocks.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fabric/local_socket.h"
#include "fabric/nic.h"

namespace pdd {

using LocalSecret = std::array<uint8_t, 16>;

constexpr uint16_t kLocalVersion = 1;
constexpr uint64_t kMaxLocalWrite = 256 << 20;  // bytes in one copy: a close waits for the one in hand

// A region as its owner lends it to peers: the memfd that lies behind it, open for reading only.
struct LocalSource {
    uint64_t id = 0;
    uint64_t nbytes = 0;
    int fd = -1;
    std::string why_not{};  // it cannot be lent
};

// Where the target of a write lies, by its key; null for a key that is not in use.
struct LocalTarget {
    uint8_t* base = nullptr;
    uint64_t nbytes = 0;
};
class LocalTargets {
  public:
    virtual ~LocalTargets() = default;
    virtual const LocalTarget* find_target(uint64_t key) const = 0;
};

struct LocalRing;

// The shared memory of a channel, mapped here.
class LocalSegment {
  public:
    static Result<LocalSegment> create(uint32_t capacity);
    static Result<LocalSegment> map(UniqueFd fd, uint32_t capacity);
    LocalSegment(LocalSegment&& other) noexcept;
    LocalSegment& operator=(LocalSegment&&) = delete;
    ~LocalSegment();

    LocalRing& ring() const { return *ring_; }
    uint32_t capacity() const { return capacity_; }
    int fd() const { return fd_.get(); }

  private:
    LocalSegment(UniqueFd fd, LocalRing* ring, uint32_t capacity)
        : fd_(std::move(fd)), ring_(ring), capacity_(capacity) {}
    UniqueFd fd_;
    LocalRing* ring_;
    uint32_t capacity_;
};

// The writer's end.
class LocalWriter {
  public:
    // Reaches the target's socket, and hands over the ring and all `sources`. What it takes is taken later.
    static Result<std::unique_ptr<LocalWriter>> open(const LocalName& name, const LocalSecret& secret,
                                                     std::span<const LocalSource> sources, uint32_t capacity);
    ~LocalWriter() { close(); }

    int fd() const { return socket_.get(); }
    PostResult post(uint64_t source, const uint8_t* base, const NicWrite& write, Op* op);
    // Tells the sink of writes that are done.
    uint32_t poll(CompletionSink& sink);
    // Reads the socket; true while the target is there. When it is not, every write that is not done ends with an
    // error.
    bool look(CompletionSink& sink);
    // False: something is done that poll() has not told.
    bool may_wait();
    void awake();
    // Nothing that is copied from now on will be counted. Idempotent.
    void close();

  private:
    LocalWriter(UniqueFd socket, LocalSegment segment, std::vector<uint64_t> sources)
        : socket_(std::move(socket)),
          segment_(std::move(segment)),
          sources_(std::move(sources)),
          ops_(segment_.capacity(), nullptr) {}
    void fail(CompletionSink& sink, const std::string& why);

    UniqueFd socket_;
    LocalSegment segment_;
    std::vector<uint64_t> sources_;  // ids, as the target numbers them
    std::vector<Op*> ops_;           // by place in the ring
    uint64_t posted_ = 0;
    uint64_t done_ = 0;
    uint64_t announced_ = 0;  // of posted_: a target that sleeps was woken for these
    bool closed_ = false;
};

// The target's end.
class LocalReader {
  public:
    // From a writer's message. One that does not know `secret` is an Error of code kStranger.
    static constexpr int kStranger = -1;
    static Result<std::unique_ptr<LocalReader>> open(UniqueFd socket, LocalMessage message, const LocalSecret& secret);
    ~LocalReader();
    LocalReader(const LocalReader&) = delete;

    int fd() const { return socket_.get(); }
    // Carries out writes, at most `budget` and about 1 MiB of them; returns how many.
    uint32_t poll(CompletionSink& sink, const LocalTargets& targets, uint32_t budget);
    // Reads the socket; false once the writer is gone and all it had posted is done: the channel is of no more use.
    bool look(CompletionSink& sink);
    bool may_wait();
    void awake();

  private:
    struct Source {
        const uint8_t* base;
        uint64_t nbytes;
    };
    LocalReader(UniqueFd socket, LocalSegment segment) : socket_(std::move(socket)), segment_(std::move(segment)) {}
    // 0, or the errno that the write ends with.
    int carry_out(const struct LocalEntry& entry, const LocalTargets& targets, uint64_t& nbytes) const;
    bool writer_closed() const;

    UniqueFd socket_;
    LocalSegment segment_;
    std::vector<Source> sources_;
    uint64_t done_ = 0;
    bool ended_ = false;  // nothing is carried out any more
};

}  // namespace pdd
