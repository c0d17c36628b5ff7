#include "fabric/fabric_port.h"

#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace pdd {
namespace {

constexpr uint64_t kArrival = FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA;
constexpr uint32_t kPollBatch = 64;

}  // namespace

Result<uint64_t> FabricPort::resolve(std::span<const uint8_t> address) {
    fi_addr_t peer = FI_ADDR_UNSPEC;
    const int rc = ::fi_av_insert(rail_.av.get(), address.data(), 1, &peer, 0, nullptr);
    if (rc != 1) return domain_.error("fi_av_insert", rc < 0 ? rc : -FI_EINVAL);
    return static_cast<uint64_t>(peer);
}

PostResult FabricPort::post(const NicWrite& write, Op* op) {
    std::array<iovec, kMaxWriteSegments> from;
    std::array<fi_rma_iov, kMaxWriteSegments> to;
    std::array<void*, kMaxWriteSegments> descriptors;
    for (uint32_t i = 0; i < write.num_pieces; ++i) {
        const auto& piece = write.pieces[i];
        from[i] = {piece.from, piece.nbytes};
        to[i] = {piece.to, piece.nbytes, write.key};
        descriptors[i] = write.descriptor;
    }
    fi_msg_rma message{};
    message.msg_iov = from.data();
    message.desc = descriptors.data();
    message.iov_count = write.num_pieces;
    message.addr = write.peer;
    message.rma_iov = to.data();
    message.rma_iov_count = write.num_pieces;
    message.context = &op->context;
    message.data = write.imm;
    const auto rc = ::fi_writemsg(rail_.ep.get(), &message, FI_REMOTE_CQ_DATA | FI_COMPLETION);
    if (rc == 0) return {PostOutcome::Posted};
    if (rc == -FI_EAGAIN) return {PostOutcome::Again};
    return {PostOutcome::Refused, static_cast<int>(-rc)};
}

uint32_t FabricPort::poll(CompletionSink& sink, uint32_t budget) {
    std::array<fi_cq_data_entry, kPollBatch> entries;
    uint32_t found = 0;
    while (found < budget && !broken_) {
        const auto count = ::fi_cq_read(rail_.cq.get(), entries.data(), std::min(budget - found, kPollBatch));
        if (count == -FI_EAGAIN || count == 0) break;
        if (count == -FI_EAVAIL) {
            read_errors(sink);
            found += 1;
            continue;
        }
        if (count < 0) {  // the queue itself is broken, an overrun for one
            broken_ = true;
            sink.on_error(domain_.error("fi_cq_read", static_cast<int>(count)).message);
            break;
        }
        for (ssize_t i = 0; i < count; ++i) {
            const auto& entry = entries[i];
            if (entry.op_context != nullptr)
                sink.on_write(static_cast<Op*>(entry.op_context), 0);
            else if ((entry.flags & kArrival) != 0)  // 1.17 gives neither FI_RMA nor a length
                sink.on_immediate(static_cast<uint32_t>(entry.data));
        }
        found += static_cast<uint32_t>(count);
    }
    return found;
}

void FabricPort::read_errors(CompletionSink& sink) {
    fid_cq* cq = rail_.cq.get();
    // Newer libraries know a longer entry than the headers do.
    struct {
        fi_cq_err_entry entry;
        unsigned char newer[64];
    } error;
    for (uint32_t i = 0; i < kPollBatch; ++i) {
        std::memset(&error, 0, sizeof error);
        if (::fi_cq_readerr(cq, &error.entry, 0) <= 0) return;
        if (error.entry.op_context != nullptr) {
            sink.on_write(static_cast<Op*>(error.entry.op_context), error.entry.err != 0 ? error.entry.err : FI_EIO);
        } else {
            char text[128] = {};
            const char* detail = ::fi_cq_strerror(cq, error.entry.prov_errno, error.entry.err_data, text, sizeof text);
            std::string message = "incoming write (NIC " + domain_.name() + "): " + domain_.error_text(error.entry.err);
            if (detail != nullptr && detail[0] != '\0') message += " (" + std::string(detail) + ")";
            sink.on_error(message);
        }
    }
}

Status FabricPort::close() {
    const int rc = rail_.ep.close();
    broken_ = true;  // 1.17 crashes in a read after this
    if (rc != 0) return domain_.error("fi_close of an endpoint", rc);
    return {};
}

bool FabricPort::may_wait() {
    fid* queue = &rail_.cq->fid;
    return ::fi_trywait(domain_.fabric(), &queue, 1) == 0;
}

}  // namespace pdd
