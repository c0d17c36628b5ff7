#include "fabric/endpoint.h"

#include <rdma/fi_errno.h>

#include <algorithm>

#include "fabric/address.h"

namespace pdd {
namespace {

// A peer with a larger window than ours is held to so many of ours.
constexpr uint32_t kInboundWindows = 4;
constexpr uint32_t kMaxInbound = 65536;

}  // namespace

Result<std::unique_ptr<Endpoint>> Endpoint::open(uint32_t id, std::span<const std::unique_ptr<Nic>> nics,
                                                 size_t first_nic, const RegionTable& regions, Stats& stats,
                                                 uint32_t window_ops, uint32_t num_groups) {
    const uint32_t max_inbound = std::min(kInboundWindows * window_ops, kMaxInbound);
    std::unique_ptr<Endpoint> endpoint(new Endpoint(id, nics, first_nic, regions, stats, max_inbound, num_groups));
    for (const auto& nic : nics) {
        auto port = nic->open_port(window_ops + max_inbound);
        if (!port) return port.error();
        endpoint->ports_.push_back(std::move(*port));
    }
    return endpoint;
}

std::string Endpoint::name() const {
    return "provider " + nics_[0]->caps().provider + ", endpoint " + std::to_string(id_);
}

std::string Endpoint::name(size_t lane) const {
    const RemoteNic& remote = remote_->nics[routes_[lane].remote_nic];
    std::string text = "provider " + nics_[0]->caps().provider + ", NIC " +
                       nics_[lanes_[lane].nic - first_nic_]->name() + ", endpoint " + std::to_string(id_);
    const std::string address = address_text(remote.address_format, remote.address.data(), remote.address.size());
    return address.empty() ? text : text + " to " + address;
}

std::string Endpoint::error_text(int code) const {
    return nics_[0]->error_text(code);
}

Result<std::string> Endpoint::describe(std::span<const uint32_t> regions) {
    Descriptor out;
    out.wire = nics_[0]->caps().wire;
    for (size_t nic = 0; nic < ports_.size(); ++nic)
        out.nics.push_back({nics_[nic]->address_format(), ports_[nic]->address(), max_inbound_, 0});
    if (regions.size() > Descriptor::kMaxRegions) return Error{"describe: too many regions", FI_EINVAL};
    for (const uint32_t id : regions) {
        const LocalRegion* region = regions_.find(id);
        if (region == nullptr) return Error{"describe: no region " + std::to_string(id), FI_EINVAL};
        auto [exposed, fresh] = exposed_.try_emplace(id);
        RemoteRegion remote{region->length, {}, 0};
        for (size_t nic = 0; nic < ports_.size(); ++nic) {
            const auto& caps = nics_[nic]->caps();
            if (caps.app_keys && fresh) {
                auto mr = nics_[nic]->register_memory(region->base, region->length, Access::Remote);
                if (!mr) {
                    exposed_.erase(exposed);
                    return mr.error();
                }
                exposed->second.push_back(std::move(*mr));
            }
            const NicMemory& mr = caps.app_keys ? *exposed->second[nic] : *region->keys[first_nic_ + nic];
            const auto base = caps.virtual_addressing ? reinterpret_cast<uintptr_t>(region->base) : 0;
            remote.keys.push_back({mr.key, base});
        }
        out.regions.push_back(std::move(remote));
    }
    return out.encode();
}

Status Endpoint::check_remote(const Descriptor& remote) const {
    const std::string& wire = nics_[0]->caps().wire;
    if (remote.wire != wire) return Error{"connect: the peer speaks " + remote.wire + ", this node " + wire, FI_EINVAL};
    for (const auto& nic : remote.nics) {
        const uint32_t format = nics_[0]->address_format();
        if (nic.address_format != format)
            return Error{"connect: the peer's address format is " + std::to_string(nic.address_format) +
                             ", this node's " + std::to_string(format) + " (IPv4 against IPv6?)",
                         FI_EINVAL};
        // fi_av_insert reads as many bytes as the format has: fewer would be read past.
        const bool text = format == FI_ADDR_STR;
        if (text ? nic.address.back() != 0 : nic.address.size() != ports_[0]->address().size())
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
    for (uint32_t group = 0; group < remote->num_groups(); ++group)
        if (Status opened = open_lanes(*remote, group); !opened) {
            routes_.clear();  // it may be tried again
            lanes_.clear();
            return opened;
        }
    std::vector<uint32_t> of_nic(ports_.size(), 0);
    for (const auto& lane : lanes_) ++of_nic[lane.nic - first_nic_];
    for (auto& lane : lanes_) lane.sharing = of_nic[lane.nic - first_nic_];
    remote_ = std::move(*remote);
    return {};
}

Status Endpoint::open_lanes(const Descriptor& remote, uint32_t group) {
    const auto [first, last] = remote.nics_of(group);
    const size_t num_far = last - first;
    const size_t num_lanes = std::max(ports_.size(), num_far);
    for (size_t lane = 0; lane < num_lanes; ++lane) {
        const size_t nic = lane % ports_.size();
        const size_t far = lane % num_far;
        auto peer = ports_[nic]->resolve(remote.nics[first + far].address);
        if (!peer) return peer.error();
        if (!remote.regions.empty())
            if (Status reached = ports_[nic]->reach(*peer); !reached) return reached;
        // What the peer's NIC takes is shared by the lanes that end there, of this and of the other groups here.
        const auto ending = static_cast<uint32_t>((num_lanes - far + num_far - 1) / num_far) * num_groups_;
        routes_.push_back({first + far, far, *peer});
        lanes_.push_back(
            {static_cast<uint32_t>(first_nic_ + nic), 1, remote.nics[first + far].max_ops / ending, group});
    }
    return {};
}

uint32_t Endpoint::group_of(const WritePlan& plan) const {
    return remote_->regions[plan.geometry().dst_region].group;
}

size_t Endpoint::max_segments() const {
    size_t segments = kMaxWriteSegments;
    for (const auto& nic : nics_) segments = std::min(segments, nic->caps().write_segments);
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
    const size_t max_message = nics_[0]->caps().max_message;
    if (plan.largest() > max_message)
        return Error{"write (" + name() + "): " + std::to_string(plan.largest()) + " bytes, the provider takes " +
                         std::to_string(max_message),
                     FI_EMSGSIZE};
    return {};
}

PostResult Endpoint::post(size_t lane, const WritePlan& plan, const WriteBatch& batch, uint32_t imm, Op* op) {
    const size_t nic = lanes_[lane].nic - first_nic_;
    const Route& route = routes_[lane];
    const LocalRegion* source = regions_.find(plan.geometry().src_region);
    if (source == nullptr) return {PostOutcome::Refused, FI_EINVAL};  // unregistered since it was checked
    const RemoteKey& target = remote_->regions[plan.geometry().dst_region].keys[route.key];

    NicWrite write;
    write.num_pieces = batch.num_segments;
    for (uint32_t i = 0; i < batch.num_segments; ++i) {
        const auto& segment = batch.segments[i];
        write.pieces[i] = {source->base + segment.src_offset, target.base + segment.dst_offset, segment.nbytes};
    }
    write.imm = imm;
    write.descriptor = source->keys[first_nic_ + nic]->descriptor;
    write.key = target.key;
    write.peer = route.peer;
    const PostResult result = ports_[nic]->post(write, op);
    if (result.outcome == PostOutcome::Posted) stat_add(stats_.nic_writes[first_nic_ + nic]);
    return result;
}

uint32_t Endpoint::poll(CompletionSink& sink, uint32_t budget) {
    uint32_t found = 0;
    for (auto& port : ports_) found += port->poll(sink, budget);
    return found;
}

Status Endpoint::close() {
    Status status;
    for (auto& port : ports_) {
        Status closed = port->close();
        if (!closed && status) status = Error{"endpoint " + std::to_string(id_) + ": " + closed.error().message};
    }
    ports_.clear();
    exposed_.clear();
    return status;
}

}  // namespace pdd
