#include "fabric/endpoint.h"

#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "fabric/address.h"

namespace pdd {
namespace {

constexpr uint64_t kArrival = FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA;
constexpr uint32_t kPollBatch = 64;

}  // namespace

Result<std::unique_ptr<Endpoint>> Endpoint::open(uint32_t id, const Domains& domains, const RegionTable& regions,
                                                 Stats& stats) {
    std::unique_ptr<Endpoint> endpoint(new Endpoint(id, domains, regions, stats));
    for (const auto& domain : domains) {
        auto rail = domain->open_rail();
        if (!rail) return rail.error();
        endpoint->rails_.push_back(std::move(*rail));
    }
    endpoint->broken_.resize(domains.size(), false);
    return endpoint;
}

std::string Endpoint::name() const {
    std::string text = "provider " + domains_[0]->caps().provider + ", endpoint " + std::to_string(id_);
    if (remote_) {
        const RemoteNic& nic = remote_->nics[0];
        const std::string address = address_text(nic.address_format, nic.address.data(), nic.address.size());
        if (!address.empty()) text += " to " + address;
    }
    return text;
}

std::string Endpoint::error_text(int code) const {
    return domains_[0]->library().error_text(code);
}

Result<std::string> Endpoint::describe(std::span<const uint32_t> regions) {
    Descriptor out;
    out.wire = domains_[0]->caps().wire;
    for (size_t nic = 0; nic < rails_.size(); ++nic)
        out.nics.push_back({domains_[nic]->address_format(), rails_[nic].address});
    if (regions.size() > Descriptor::kMaxRegions) return Error{"describe: too many regions", FI_EINVAL};
    for (const uint32_t id : regions) {
        const LocalRegion* region = regions_.find(id);
        if (region == nullptr) return Error{"describe: no region " + std::to_string(id), FI_EINVAL};
        auto [exposed, fresh] = exposed_.try_emplace(id);
        RemoteRegion remote{region->length, {}};
        for (size_t nic = 0; nic < rails_.size(); ++nic) {
            const auto& caps = domains_[nic]->caps();
            if (caps.app_keys && fresh) {
                auto mr = domains_[nic]->register_memory(region->base, region->length, Domain::Access::Remote);
                if (!mr) {
                    exposed_.erase(exposed);
                    return mr.error();
                }
                exposed->second.push_back(std::move(*mr));
            }
            fid_mr* mr = caps.app_keys ? exposed->second[nic].get() : region->keys[nic].get();
            const auto base = caps.virtual_addressing ? reinterpret_cast<uintptr_t>(region->base) : 0;
            remote.keys.push_back({::fi_mr_key(mr), base});
        }
        out.regions.push_back(std::move(remote));
    }
    return out.encode();
}

Status Endpoint::check_remote(const Descriptor& remote) const {
    const std::string& wire = domains_[0]->caps().wire;
    if (remote.wire != wire) return Error{"connect: the peer speaks " + remote.wire + ", this node " + wire, FI_EINVAL};
    for (const auto& nic : remote.nics) {
        const uint32_t format = domains_[0]->address_format();
        if (nic.address_format != format)
            return Error{"connect: the peer's address format is " + std::to_string(nic.address_format) +
                             ", this node's " + std::to_string(format) + " (IPv4 against IPv6?)",
                         FI_EINVAL};
        // fi_av_insert reads as many bytes as the format has: fewer would be read past.
        const bool text = format == FI_ADDR_STR;
        if (text ? nic.address.back() != 0 : nic.address.size() != rails_[0].address.size())
            return Error{"malformed fabric descriptor: address of " + std::to_string(nic.address.size()) + " bytes",
                         FI_EINVAL};
    }
    return {};
}

Status Endpoint::connect(std::span<const uint8_t> descriptor) {
    if (connected()) return Error{"connect (" + name() + "): it has a peer already", FI_EISCONN};
    auto remote = Descriptor::parse(descriptor);
    if (!remote) return remote.error();
    if (Status fits = check_remote(*remote); !fits) return fits;
    for (size_t nic = 0; nic < rails_.size(); ++nic) {
        Rail& rail = rails_[nic];
        rail.remote_nic = nic % remote->nics.size();
        const int rc =
            ::fi_av_insert(rail.av.get(), remote->nics[rail.remote_nic].address.data(), 1, &rail.peer, 0, nullptr);
        if (rc != 1) return domains_[nic]->error("fi_av_insert", rc < 0 ? rc : -FI_EINVAL);
    }
    remote_ = std::move(*remote);
    return {};
}

size_t Endpoint::max_segments() const {
    size_t segments = kMaxWriteSegments;
    for (const auto& domain : domains_) segments = std::min(segments, domain->caps().write_segments);
    return segments;
}

Status Endpoint::check(const WritePlan& plan) const {
    const auto& geometry = plan.geometry();
    if (!remote_) return Error{"write (" + name() + "): the endpoint is not connected", FI_ENOTCONN};
    const LocalRegion* source = regions_.find(geometry.src_region);
    if (source == nullptr)
        return Error{"write (" + name() + "): no local region " + std::to_string(geometry.src_region), FI_EINVAL};
    if (geometry.dst_region >= remote_->regions.size())
        return Error{"write (" + name() + "): the peer described no region " + std::to_string(geometry.dst_region),
                     FI_EINVAL};
    const auto outside = [&](const char* side, uint32_t region, uint64_t end, uint64_t length) {
        return Error{"write (" + name() + "): byte " + std::to_string(end) + " is outside " + side + " region " +
                         std::to_string(region) + " of " + std::to_string(length) + " bytes",
                     FI_EINVAL};
    };
    const auto& target = remote_->regions[geometry.dst_region];
    if (!source->holds(0, plan.src_end())) return outside("local", geometry.src_region, plan.src_end(), source->length);
    if (!target.holds(0, plan.dst_end())) return outside("remote", geometry.dst_region, plan.dst_end(), target.length);
    const size_t max_message = domains_[0]->caps().max_message;
    if (plan.largest() > max_message)
        return Error{"write (" + name() + "): " + std::to_string(plan.largest()) + " bytes, the provider takes " +
                         std::to_string(max_message),
                     FI_EMSGSIZE};
    return {};
}

PostResult Endpoint::post(const WritePlan& plan, const WriteBatch& batch, uint32_t imm, Op* op) {
    const size_t nic = next_rail_;
    const Rail& rail = rails_[nic];
    const LocalRegion* source = regions_.find(plan.geometry().src_region);
    if (source == nullptr) return {PostOutcome::Refused, FI_EINVAL};  // unregistered since it was checked
    const RemoteKey& target = remote_->regions[plan.geometry().dst_region].keys[rail.remote_nic];

    std::array<iovec, kMaxWriteSegments> from;
    std::array<fi_rma_iov, kMaxWriteSegments> to;
    std::array<void*, kMaxWriteSegments> descriptors;
    void* descriptor = ::fi_mr_desc(source->keys[nic].get());
    for (uint32_t i = 0; i < batch.num_segments; ++i) {
        const auto& segment = batch.segments[i];
        from[i] = {source->base + segment.src_offset, segment.nbytes};
        to[i] = {target.base + segment.dst_offset, segment.nbytes, target.key};
        descriptors[i] = descriptor;
    }
    fi_msg_rma message{};
    message.msg_iov = from.data();
    message.desc = descriptors.data();
    message.iov_count = batch.num_segments;
    message.addr = rail.peer;
    message.rma_iov = to.data();
    message.rma_iov_count = batch.num_segments;
    message.context = &op->context;
    message.data = imm;
    const auto rc = ::fi_writemsg(rail.ep.get(), &message, FI_REMOTE_CQ_DATA | FI_COMPLETION);
    if (rc == -FI_EAGAIN) return {PostOutcome::Again};
    if (rc != 0) return {PostOutcome::Refused, static_cast<int>(-rc)};
    stat_add(stats_.nic_writes[nic]);
    next_rail_ = (nic + 1) % rails_.size();
    return {PostOutcome::Posted};
}

uint32_t Endpoint::poll(Sink& sink, uint32_t budget) {
    uint32_t found = 0;
    for (size_t nic = 0; nic < rails_.size(); ++nic) found += poll_rail(nic, sink, budget);
    return found;
}

uint32_t Endpoint::poll_rail(size_t nic, Sink& sink, uint32_t budget) {
    std::array<fi_cq_data_entry, kPollBatch> entries;
    uint32_t found = 0;
    while (found < budget && !broken_[nic]) {
        const auto count = ::fi_cq_read(rails_[nic].cq.get(), entries.data(), std::min(budget - found, kPollBatch));
        if (count == -FI_EAGAIN || count == 0) break;
        if (count == -FI_EAVAIL) {
            read_errors(nic, sink);
            found += 1;
            continue;
        }
        if (count < 0) {  // the queue itself is broken, an overrun for one
            broken_[nic] = true;
            sink.on_error(domains_[nic]->error("fi_cq_read", static_cast<int>(count)).message);
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

void Endpoint::read_errors(size_t nic, Sink& sink) {
    fid_cq* cq = rails_[nic].cq.get();
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
            std::string message = "incoming write: " + error_text(error.entry.err);
            if (detail != nullptr && detail[0] != '\0') message += " (" + std::string(detail) + ")";
            sink.on_error(message);
        }
    }
}

Status Endpoint::close() {
    Status status;
    for (size_t nic = 0; nic < rails_.size(); ++nic) {
        const int rc = rails_[nic].ep.close();
        if (rc != 0 && status) status = domains_[nic]->error("fi_close of endpoint " + std::to_string(id_), rc);
    }
    rails_.clear();
    exposed_.clear();
    return status;
}

}  // namespace pdd
