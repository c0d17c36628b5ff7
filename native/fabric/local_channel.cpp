#include "fabric/local_channel.h"

#include <fcntl.h>
#include <rdma/fi_errno.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "util/ring.h"
#include "util/system_error.h"

namespace pdd {

// One write, as the writer posts it.
struct alignas(kCacheLine) LocalEntry {
    struct Piece {
        uint64_t from;  // offset in the writer's region
        uint64_t to;    // offset in the target's
        uint64_t nbytes;
    };
    uint64_t key;
    uint32_t imm;
    uint16_t num_pieces;
    uint16_t source;  // place in the writer's list of regions
    std::array<Piece, kMaxWriteSegments> pieces;
};
static_assert(sizeof(LocalEntry) == 2 * kCacheLine);

// Lies at the start of the segment; entries and results follow. A line belongs to one writer of it.
struct LocalRing {
    alignas(kCacheLine) std::atomic<uint64_t> posted;  // by the writer
    std::atomic<uint32_t> writer_closed;
    alignas(kCacheLine) std::atomic<uint64_t> done;  // by the target
    std::atomic<uint32_t> target_closed;
    alignas(kCacheLine) std::atomic<uint32_t> target_sleeps;  // set by who sleeps, cleared by who wakes it
    alignas(kCacheLine) std::atomic<uint32_t> writer_sleeps;

    LocalEntry* entries() { return reinterpret_cast<LocalEntry*>(this + 1); }
    // errno of each write that was refused: apart from the entries, so that reading it costs no line of theirs.
    std::atomic<uint8_t>* results(uint32_t capacity) {
        return reinterpret_cast<std::atomic<uint8_t>*>(entries() + capacity);
    }
};

namespace {

constexpr char kMagic[] = {'P', 'D', 'D', 'L'};
constexpr uint32_t kMaxCapacity = 1 << 12;
constexpr size_t kMaxSources = 64;
constexpr uint64_t kCopyQuantum = 1 << 20;  // bytes before other peers and commands are looked at

// What a writer says, all in the byte order of the host that both are on. Descriptors: the ring, then the sources.
struct Offer {
    char magic[4];
    uint16_t version;
    uint16_t num_sources;
    LocalSecret secret;  // of every version: up to here
    uint32_t capacity;
    uint32_t reserved;
    std::array<uint64_t, kMaxSources> nbytes;  // of each source
};

size_t segment_bytes(uint32_t capacity) {
    return sizeof(LocalRing) + capacity * (sizeof(LocalEntry) + 1);
}

// A memfd of at least that size that cannot become smaller: touching what is not there any more is a SIGBUS.
Status check_memory(int fd, uint64_t nbytes, const std::string& what) {
    struct stat info {};
    if (::fstat(fd, &info) != 0) return system_error(what);
    if (static_cast<uint64_t>(info.st_size) < nbytes)
        return Error{what + " has " + std::to_string(info.st_size) + " bytes, not " + std::to_string(nbytes), EINVAL};
    const int seals = ::fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
        return Error{what + " is no memfd that is sealed against shrinking", EINVAL};
    return {};
}

bool same(const LocalSecret& a, const LocalSecret& b) {  // in a time that tells nothing
    unsigned differ = 0;
    for (size_t i = 0; i < a.size(); ++i) differ |= a[i] ^ b[i];
    return differ == 0;
}

// `sleeps` was set by the other end before it looked once more; what it must see was stored before this.
void wake(std::atomic<uint32_t>& sleeps, int fd) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (sleeps.load(std::memory_order_relaxed) != 0 && sleeps.exchange(0) != 0) local_wake(fd);
}

}  // namespace

// -- segment ----------------------------------------------------------------------------------------------------------
Result<LocalSegment> LocalSegment::create(uint32_t capacity) {
    UniqueFd fd(::memfd_create("pdd-local", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (fd.get() < 0 || ::ftruncate(fd.get(), static_cast<off_t>(segment_bytes(capacity))) != 0 ||
        ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        return system_error("shared memory for a local peer");
    return map(std::move(fd), capacity);
}

Result<LocalSegment> LocalSegment::map(UniqueFd fd, uint32_t capacity) {
    if (Status good = check_memory(fd.get(), segment_bytes(capacity), "the ring"); !good) return good.error();
    void* address = ::mmap(nullptr, segment_bytes(capacity), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    if (address == MAP_FAILED) return system_error("mapping the ring");
    // Fresh memory of a memfd is all zero, which is where every counter starts.
    return LocalSegment(std::move(fd), std::launder(static_cast<LocalRing*>(address)), capacity);
}

LocalSegment::LocalSegment(LocalSegment&& other) noexcept
    : fd_(std::move(other.fd_)), ring_(std::exchange(other.ring_, nullptr)), capacity_(other.capacity_) {}

LocalSegment::~LocalSegment() {
    if (ring_ != nullptr) ::munmap(ring_, segment_bytes(capacity_));
}

// -- writer -----------------------------------------------------------------------------------------------------------
Result<std::unique_ptr<LocalWriter>> LocalWriter::open(const LocalName& name, const LocalSecret& secret,
                                                       std::span<const LocalSource> sources, uint32_t capacity) {
    capacity = std::min(std::bit_ceil(capacity), kMaxCapacity);
    if (sources.size() > kMaxSources)
        return Error{std::to_string(sources.size()) + " regions, local peers take " + std::to_string(kMaxSources),
                     EMSGSIZE};
    auto socket = local_connect(name);
    if (!socket) return socket.error();
    auto segment = LocalSegment::create(capacity);
    if (!segment) return segment.error();

    Offer offer{};
    std::copy_n(kMagic, sizeof kMagic, offer.magic);
    offer.version = kLocalVersion;
    offer.num_sources = static_cast<uint16_t>(sources.size());
    offer.secret = secret;
    offer.capacity = capacity;
    std::vector<int> descriptors{segment->fd()};
    std::vector<uint64_t> ids;
    for (const auto& source : sources) {
        if (source.fd < 0) return Error{"a region cannot be lent: " + source.why_not, EINVAL};
        offer.nbytes[ids.size()] = source.nbytes;
        ids.push_back(source.id);
        descriptors.push_back(source.fd);
    }
    const Status sent =
        local_send(socket->get(), {reinterpret_cast<const uint8_t*>(&offer), sizeof offer}, descriptors);
    if (!sent) return sent.error();
    return std::unique_ptr<LocalWriter>(new LocalWriter(std::move(*socket), std::move(*segment), std::move(ids)));
}

PostResult LocalWriter::post(uint64_t source, const uint8_t* base, const NicWrite& write, Op* op) {
    if (closed_) return {PostOutcome::Refused, FI_ENOTCONN};
    if (posted_ - done_ == segment_.capacity()) return {PostOutcome::Again};
    const auto known = std::find(sources_.begin(), sources_.end(), source);
    if (known == sources_.end()) return {PostOutcome::Refused, FI_EACCES};  // registered after the peers met
    const auto place = static_cast<uint32_t>(posted_ & (segment_.capacity() - 1));
    LocalRing& ring = segment_.ring();
    LocalEntry& entry = ring.entries()[place];
    entry.key = write.key;
    entry.imm = write.imm;
    entry.num_pieces = static_cast<uint16_t>(write.num_pieces);
    entry.source = static_cast<uint16_t>(known - sources_.begin());
    for (uint32_t i = 0; i < write.num_pieces; ++i) {
        const auto& piece = write.pieces[i];
        entry.pieces[i] = {static_cast<uint64_t>(piece.from - base), piece.to, piece.nbytes};
    }
    ops_[place] = op;
    ring.posted.store(++posted_, std::memory_order_release);
    return {PostOutcome::Posted};
}

uint32_t LocalWriter::poll(CompletionSink& sink) {
    if (closed_) return 0;
    LocalRing& ring = segment_.ring();
    if (announced_ != posted_) {  // once for all that one turn has posted
        announced_ = posted_;
        wake(ring.target_sleeps, socket_.get());
    }
    const uint64_t done = ring.done.load(std::memory_order_acquire);
    if (done - done_ > posted_ - done_) {
        fail(sink, "it says that " + std::to_string(done) + " writes of " + std::to_string(posted_) + " are done");
        return 1;
    }
    uint32_t found = 0;
    std::atomic<uint8_t>* results = ring.results(segment_.capacity());
    for (; done_ != done; ++found) {
        const auto place = static_cast<uint32_t>(done_ & (segment_.capacity() - 1));
        const int error = results[place].load(std::memory_order_relaxed);
        if (error != 0) results[place].store(0, std::memory_order_relaxed);
        ++done_;
        sink.on_write(ops_[place], error);
    }
    return found;
}

bool LocalWriter::look(CompletionSink& sink) {
    if (closed_) return false;
    if (local_drain(socket_.get())) return true;
    poll(sink);
    const bool orderly = segment_.ring().target_closed.load() != 0;
    if (!closed_) fail(sink, orderly ? "it has closed its end" : "its process is gone");
    return false;
}

bool LocalWriter::may_wait() {
    if (closed_) return true;
    LocalRing& ring = segment_.ring();
    ring.writer_sleeps.store(1);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return ring.done.load() == done_ && announced_ == posted_;
}

void LocalWriter::awake() {
    segment_.ring().writer_sleeps.store(0, std::memory_order_relaxed);
}

void LocalWriter::fail(CompletionSink& sink, const std::string& why) {
    close();
    sink.on_error("the local peer: " + why);
    // Copied or not, counted or not: nothing is known but that it will not be counted from here on.
    for (; done_ != posted_; ++done_) sink.on_write(ops_[done_ & (segment_.capacity() - 1)], FI_ECONNRESET);
}

void LocalWriter::close() {
    if (closed_) return;
    closed_ = true;
    segment_.ring().writer_closed.store(1);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // before anybody gives a source page back
    socket_.reset();
}

// -- target -----------------------------------------------------------------------------------------------------------
Result<std::unique_ptr<LocalReader>> LocalReader::open(UniqueFd socket, LocalMessage message,
                                                       const LocalSecret& secret) {
    Offer offer{};
    std::memcpy(&offer, message.bytes.data(), std::min(sizeof offer, message.bytes.size()));
    if (!std::equal(kMagic, kMagic + sizeof kMagic, offer.magic) || !same(offer.secret, secret))
        return Error{"a stranger called", kStranger};
    if (offer.version != kLocalVersion)
        return Error{"the local peer speaks version " + std::to_string(offer.version) + ", this node " +
                         std::to_string(kLocalVersion),
                     EPROTO};
    if (message.bytes.size() != sizeof offer || offer.num_sources > kMaxSources ||
        message.descriptors.size() != offer.num_sources + 1u || !std::has_single_bit(offer.capacity) ||
        offer.capacity > kMaxCapacity)
        return Error{"a local peer's first message is malformed", EPROTO};
    auto segment = LocalSegment::map(std::move(message.descriptors[0]), offer.capacity);
    if (!segment) return segment.error();
    std::unique_ptr<LocalReader> reader(new LocalReader(std::move(socket), std::move(*segment)));
    for (size_t i = 0; i < offer.num_sources; ++i) {
        const int fd = message.descriptors[i + 1].get();
        const uint64_t nbytes = offer.nbytes[i];
        const std::string what = "region " + std::to_string(i) + " of the local peer";
        if (Status good = check_memory(fd, nbytes, what); !good) return good.error();
        void* base = ::mmap(nullptr, nbytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0);
        if (base == MAP_FAILED) return system_error("mapping " + what);
        reader->sources_.push_back({static_cast<const uint8_t*>(base), nbytes});
    }
    return reader;
}

LocalReader::~LocalReader() {
    segment_.ring().target_closed.store(1);
    socket_.reset();
    for (const auto& source : sources_) ::munmap(const_cast<uint8_t*>(source.base), source.nbytes);
}

bool LocalReader::writer_closed() const {
    std::atomic_thread_fence(std::memory_order_acquire);  // after what was copied was read
    return segment_.ring().writer_closed.load(std::memory_order_acquire) != 0;
}

int LocalReader::carry_out(const LocalEntry& entry, const LocalTargets& targets, uint64_t& nbytes) const {
    if (entry.num_pieces > entry.pieces.size() || entry.source >= sources_.size()) return FI_EACCES;
    const LocalTarget* target = targets.find_target(entry.key);
    if (target == nullptr) return FI_EKEYREJECTED;
    const Source& source = sources_[entry.source];
    const auto inside = [](uint64_t offset, uint64_t length, uint64_t all) {
        return offset <= all && length <= all - offset;
    };
    uint64_t total = 0;
    for (uint16_t i = 0; i < entry.num_pieces; ++i) {
        const auto& piece = entry.pieces[i];
        if (!inside(piece.from, piece.nbytes, source.nbytes) || !inside(piece.to, piece.nbytes, target->nbytes))
            return FI_EACCES;
        if (piece.nbytes > kMaxLocalWrite - total) return FI_EMSGSIZE;
        total += piece.nbytes;
    }
    for (uint16_t i = 0; i < entry.num_pieces; ++i) {
        const auto& piece = entry.pieces[i];
        std::memcpy(target->base + piece.to, source.base + piece.from, piece.nbytes);
        nbytes += piece.nbytes;
    }
    return 0;
}

uint32_t LocalReader::poll(CompletionSink& sink, const LocalTargets& targets, uint32_t budget) {
    if (ended_) return 0;
    LocalRing& ring = segment_.ring();
    const uint32_t mask = segment_.capacity() - 1;
    const uint64_t posted = ring.posted.load(std::memory_order_acquire);
    if (posted - done_ > segment_.capacity()) {
        ended_ = true;
        sink.on_error("the local peer: it posted " + std::to_string(posted - done_) + " writes into a ring of " +
                      std::to_string(segment_.capacity()));
        return 1;
    }
    uint32_t found = 0;
    uint64_t nbytes = 0;
    while (done_ != posted && found < budget && nbytes < kCopyQuantum) {
        const auto place = static_cast<uint32_t>(done_ & mask);
        LocalEntry entry;  // a copy: the peer may change what is judged
        std::memcpy(&entry, &ring.entries()[place], sizeof entry);
        std::atomic_signal_fence(std::memory_order_acq_rel);  // and no compiler reads it there again
        const int error = carry_out(entry, targets, nbytes);
        if (writer_closed()) {
            ended_ = true;
            break;
        }
        if (error == 0)
            sink.on_immediate(entry.imm);
        else
            ring.results(segment_.capacity())[place].store(static_cast<uint8_t>(error), std::memory_order_relaxed);
        ring.done.store(++done_, std::memory_order_release);
        ++found;
    }
    if (found > 0) wake(ring.writer_sleeps, socket_.get());
    return found;
}

bool LocalReader::look(CompletionSink& sink) {
    if (local_drain(socket_.get())) return true;
    LocalRing& ring = segment_.ring();
    if (writer_closed() || ended_) return false;
    if (ring.posted.load() - done_ != 0) return true;  // killed: what it had posted is still good
    sink.on_error("the local peer: its process is gone");
    return false;
}

bool LocalReader::may_wait() {
    if (ended_) return true;
    LocalRing& ring = segment_.ring();
    ring.target_sleeps.store(1);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return ring.posted.load() == done_;
}

void LocalReader::awake() {
    segment_.ring().target_sleeps.store(0, std::memory_order_relaxed);
}

}  // namespace pdd
