// Nic and NicPort: the seam between pdd's workers and whatever carries their writes.
//
// A Nic registers memory and opens ports; a port is one peer's endpoint on it: it learns where the peer's ports are,
// takes writes, hands out completions, and its close is the fence. Domain and FabricPort are those over libfabric,
// LocalNic and LocalPort those between processes of one host; a simulation brings its own and drives Worker::turn.
// Everything above this file is provider-free.
//
// Calls per write: one post, and one Sink call when it completes; none of them allocates. Owner: the worker's thread.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fabric/caps.h"
#include "fabric/op_pool.h"
#include "fabric/write_plan.h"
#include "util/result.h"

namespace pdd {

enum class PostOutcome {
    Posted,   // its completion will come, on this port, unless the port closes first
    Again,    // not taken, nothing happened: ask later
    Refused,  // not taken, and will not be
};

struct PostResult {
    PostOutcome outcome;
    int code = 0;  // positive errno when refused
};

// Local use only, or the target of a peer's writes, or both.
enum class Access { Local, Remote, Both };

// Memory that a NIC may use; not a fence when it closes.
class NicMemory {
  public:
    virtual ~NicMemory() = default;
    // 0 or a negative errno. Once; the destructor closes what was not.
    virtual int close() = 0;
    // The memfd whose first bytes it is; for a NIC that hands memory itself to its peers. The caller keeps the fd.
    virtual void lend(int) {}

    uint64_t key = 0;            // by which a peer's write names it
    void* descriptor = nullptr;  // by which a local write names it
};

// One write with its immediate, every address resolved.
struct NicWrite {
    struct Piece {
        uint8_t* from;
        uint64_t to;  // the peer's virtual address, or the offset in its region: caps().virtual_addressing
        uint64_t nbytes;
    };
    std::array<Piece, kMaxWriteSegments> pieces;
    uint32_t num_pieces = 0;  // at most caps().write_segments
    uint32_t imm = 0;
    void* descriptor = nullptr;  // of the local memory
    uint64_t key = 0;            // of the peer's
    uint64_t peer = 0;           // what resolve() gave
};

// Receives what poll() finds.
class CompletionSink {
  public:
    virtual ~CompletionSink() = default;
    virtual void on_write(Op* op, int error) = 0;           // one of ours is terminal; error: 0 or a positive errno
    virtual void on_immediate(uint32_t imm) = 0;            // a peer's write has landed
    virtual void on_error(const std::string& message) = 0;  // not tied to a write of ours
};

class NicPort {
  public:
    virtual ~NicPort() = default;

    // Where peers reach this port; as many bytes as every address of this Nic's format has.
    virtual const std::vector<uint8_t>& address() const = 0;
    // Makes a peer's port known. Nothing is sent yet.
    virtual Result<uint64_t> resolve(std::span<const uint8_t> address) = 0;
    // Proves that the peer can be written to, where that can be told before the first write. After resolve().
    virtual Status reach(uint64_t) { return {}; }
    // `op` comes back by CompletionSink::on_write exactly once when posted, never otherwise.
    virtual PostResult post(const NicWrite& write, Op* op) = 0;
    // Hands out up to `budget` completions; returns how many there were. Providers land nothing unless they are polled.
    virtual uint32_t poll(CompletionSink& sink, uint32_t budget) = 0;
    // The fence: once it is good, nothing lands through this port and no completion comes. Called once, last.
    virtual Status close() = 0;

    // -- for a thread that sleeps. Without a descriptor (-1) it naps instead.
    virtual int wait_fd() const { return -1; }
    // False: something is there that the descriptor will not tell.
    virtual bool may_wait() { return true; }
    // After the descriptor ended a sleep, where caps().sticky_wait.
    virtual void take_back_signal() {}
};

class Nic {
  public:
    virtual ~Nic() = default;

    virtual const ProviderCaps& caps() const = 0;
    virtual uint32_t address_format() const = 0;  // as libfabric numbers them
    virtual Result<std::unique_ptr<NicMemory>> register_memory(uint8_t* base, uint64_t nbytes, Access access) = 0;
    // `queue`: completions and arrivals that may wait unread.
    virtual Result<std::unique_ptr<NicPort>> open_port(uint32_t queue) = 0;
    virtual std::string error_text(int code) const = 0;

    // "127.0.0.2", or the name where the NIC has no address to show.
    const std::string& name() const { return caps().address.empty() ? caps().domain : caps().address; }
    // An Error that names the operation, the provider and the NIC.
    Error error(const std::string& operation, int code) const;
};

using Nics = std::vector<std::unique_ptr<Nic>>;

}  // namespace pdd
