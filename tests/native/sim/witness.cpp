#include "witness.h"

#include <sys/socket.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

#include "fabric/imm_table.h"
#include "fabric/transfer.h"
#include "network.h"

namespace sim {

using pdd::PostOutcome;
using pdd::PostResult;

namespace {

constexpr uint32_t kInboundWindows = 4;  // what Endpoint tells peers, in windows of its own
constexpr uint32_t kNicWindows = 4;      // what Worker lets all peers of a NIC have in flight

struct NicLoad {
    uint64_t inflight = 0;
    uint64_t inflight_bytes = 0;
};

struct PortLoad {
    pdd::WindowSize window;
    uint64_t inbound = 0;  // posted to it and not told at the source
};

// The sockets that an epoll watches hang up.
void cut_sockets(int epoll) {
    std::ifstream info("/proc/self/fdinfo/" + std::to_string(epoll));
    for (std::string line; std::getline(info, line);) {
        std::istringstream words(line);
        std::string label;
        int fd = -1;
        if (words >> label >> fd && label == "tfd:") ::shutdown(fd, SHUT_RDWR);
    }
}

}  // namespace

class WitnessPort final : public pdd::NicPort, private pdd::CompletionSink {
  public:
    WitnessPort(Witness& witness, const Watched& watched, std::shared_ptr<NicLoad> nic,
                std::unique_ptr<pdd::NicPort> inner)
        : witness_(witness),
          watched_(watched),
          endpoint_(witness.opening_),
          nic_(std::move(nic)),
          load_(std::make_shared<PortLoad>(PortLoad{watched.window})),
          inner_(std::move(inner)) {
        witness_.ports_.push_back(this);
    }
    ~WitnessPort() override {
        if (open_) witness_.run_.violate("a port was dropped and not closed");
        leave();
    }

    const std::vector<uint8_t>& address() const override { return inner_->address(); }
    pdd::Result<uint64_t> resolve(std::span<const uint8_t> address) override;
    pdd::Status reach(uint64_t peer) override { return inner_->reach(peer); }
    PostResult post(const pdd::NicWrite& write, pdd::Op* op) override;
    uint32_t poll(pdd::CompletionSink& sink, uint32_t budget) override;
    pdd::Status close() override;
    int wait_fd() const override { return inner_->wait_fd(); }

    uint32_t life() const { return watched_.life; }
    bool has_untold(uint64_t transfer) const {
        return std::any_of(untold_.begin(), untold_.end(),
                           [transfer](const Untold& one) { return one.transfer == transfer; });
    }
    void die() {
        leave();
        if (wait_fd() >= 0) cut_sockets(wait_fd());
    }

  private:
    struct Route {
        uint64_t peer;
        std::shared_ptr<PortLoad> target;  // null: nobody has the address
        uint64_t inflight = 0;
        uint64_t inflight_bytes = 0;
    };
    struct Untold {
        const pdd::Op* op;
        uint64_t transfer;
        size_t route;
        uint64_t nbytes;
        uint32_t units;
    };

    void on_write(pdd::Op* op, int error) override;
    void on_immediate(uint32_t imm) override;
    void on_error(const std::string& message) override;

    EndpointRecord& record() { return witness_.record(watched_.life, endpoint_); }
    void check_windows(const Route& route, uint64_t nbytes) const;
    void settle(const Untold& one);
    // Nothing of it counts as in flight any more.
    void leave();

    Witness& witness_;
    const Watched& watched_;
    uint32_t endpoint_;
    std::shared_ptr<NicLoad> nic_;
    std::shared_ptr<PortLoad> load_;
    std::unique_ptr<pdd::NicPort> inner_;
    std::vector<Route> routes_;
    std::vector<Untold> untold_;
    pdd::CompletionSink* sink_ = nullptr;  // of the poll that runs
    bool open_ = true;
};

namespace {

class WitnessNic final : public pdd::Nic {
  public:
    WitnessNic(Witness& witness, std::unique_ptr<pdd::Nic> inner, Watched watched)
        : witness_(witness), inner_(std::move(inner)), watched_(std::move(watched)) {}

    const pdd::ProviderCaps& caps() const override { return inner_->caps(); }
    uint32_t address_format() const override { return inner_->address_format(); }
    pdd::Result<std::unique_ptr<pdd::NicMemory>> register_memory(uint8_t* base, uint64_t nbytes,
                                                                 pdd::Access access) override {
        return inner_->register_memory(base, nbytes, access);
    }
    pdd::Result<std::unique_ptr<pdd::NicPort>> open_port(uint32_t queue) override {
        auto port = inner_->open_port(queue);
        if (!port) return port.error();
        return std::unique_ptr<pdd::NicPort>(new WitnessPort(witness_, watched_, load_, std::move(*port)));
    }
    std::string error_text(int code) const override { return inner_->error_text(code); }

  private:
    Witness& witness_;
    std::unique_ptr<pdd::Nic> inner_;
    const Watched watched_;
    std::shared_ptr<NicLoad> load_ = std::make_shared<NicLoad>();
};

}  // namespace

std::unique_ptr<pdd::Nic> Witness::watch(std::unique_ptr<pdd::Nic> inner, Watched watched) {
    return std::make_unique<WitnessNic>(*this, std::move(inner), std::move(watched));
}

bool Witness::all_told(uint32_t life, uint64_t transfer) const {
    return std::none_of(ports_.begin(), ports_.end(), [&](const WitnessPort* port) {
        return port->life() == life && port->has_untold(transfer);
    });
}

void Witness::die(uint32_t life) {
    for (WitnessPort* port : std::vector(ports_))
        if (port->life() == life) port->die();
}

// -- a port -----------------------------------------------------------------------------------------------------------
pdd::Result<uint64_t> WitnessPort::resolve(std::span<const uint8_t> address) {
    auto peer = inner_->resolve(address);
    if (!peer) return peer;
    const auto target = std::find_if(witness_.ports_.begin(), witness_.ports_.end(), [&](const WitnessPort* port) {
        return std::equal(address.begin(), address.end(), port->address().begin(), port->address().end());
    });
    routes_.push_back({*peer, target != witness_.ports_.end() ? (*target)->load_ : nullptr});
    return peer;
}

void WitnessPort::check_windows(const Route& route, uint64_t nbytes) const {
    Run& run = witness_.run_;
    const auto& window = watched_.window;
    const auto count = [](uint64_t n) { return std::to_string(n); };
    uint64_t ops = 0;
    for (const auto& one : routes_) ops += one.inflight;
    if (ops >= std::max<uint64_t>(window.ops, routes_.size()))
        run.violate("a port with a window of " + count(window.ops) + " writes was given one more");
    if (route.inflight > 0 && route.inflight_bytes + nbytes > window.bytes / routes_.size())
        run.violate("a port with a window of " + count(window.bytes) + " bytes was given " + count(nbytes) +
                    " more than " + count(route.inflight_bytes));
    if (route.inflight > 0 && (nic_->inflight >= uint64_t{kNicWindows} * window.ops ||
                               nic_->inflight_bytes + nbytes > kNicWindows * window.bytes))
        run.violate("a NIC was given more than its window of writes");
    if (route.target != nullptr && route.target->inbound >= uint64_t{kInboundWindows} * route.target->window.ops)
        run.violate("a peer's port was sent more writes than it takes");
}

PostResult WitnessPort::post(const pdd::NicWrite& write, pdd::Op* op) {
    if (!open_) witness_.run_.violate("a write was posted on a closed port");
    if (record().barred) witness_.run_.violate("a write was posted on an endpoint that had failed");
    if (!witness_.run_.good()) return {PostOutcome::Refused, FI_EINVAL};
    const PostResult result = inner_->post(write, op);
    if (result.outcome == PostOutcome::Refused && !is_sure(result.code)) record().barred = true;
    if (result.outcome != PostOutcome::Posted) return result;
    uint64_t nbytes = 0;
    for (uint32_t i = 0; i < write.num_pieces; ++i) nbytes += write.pieces[i].nbytes;
    const auto route = std::find_if(routes_.begin(), routes_.end(),
                                    [&](const Route& one) { return one.peer == write.peer; });
    check_windows(*route, nbytes);
    untold_.push_back({op, op->transfer->id(), static_cast<size_t>(route - routes_.begin()), nbytes,
                       pdd::imm_units(write.imm)});
    route->inflight += 1;
    route->inflight_bytes += nbytes;
    nic_->inflight += 1;
    nic_->inflight_bytes += nbytes;
    if (route->target != nullptr) route->target->inbound += 1;
    auto& totals = witness_.totals(watched_.life);
    totals.posted += 1;
    totals.inflight += 1;
    totals.inflight_bytes += nbytes;
    return result;
}

uint32_t WitnessPort::poll(pdd::CompletionSink& sink, uint32_t budget) {
    if (!open_) witness_.run_.violate("a closed port was polled");
    if (!witness_.run_.good()) return 0;
    sink_ = &sink;
    const uint32_t found = inner_->poll(*this, budget);
    sink_ = nullptr;
    watched_.polled();
    return found;
}

void WitnessPort::on_write(pdd::Op* op, int error) {
    const auto told = std::find_if(untold_.begin(), untold_.end(), [op](const Untold& one) { return one.op == op; });
    if (told == untold_.end()) {
        if (!watched_.repeats) witness_.run_.violate("a completion was told twice");
        record().barred = true;
    } else {
        const Untold one = *told;
        untold_.erase(told);
        settle(one);
        if (error == 0) witness_.totals(watched_.life).units_good[one.transfer] += one.units;
        if (error != 0 && !is_sure(error)) record().barred = true;
    }
    sink_->on_write(op, error);
}

void WitnessPort::on_immediate(uint32_t imm) {
    const uint32_t units = pdd::imm_units(imm);
    witness_.totals(watched_.life).units_told += units;
    record().told[pdd::imm_key(imm)] += units;
    witness_.run_.note("life %llu counts %llu units, key %06llx", watched_.life, units, pdd::imm_key(imm));
    sink_->on_immediate(imm);
}

void WitnessPort::on_error(const std::string& message) {
    record().barred = true;
    witness_.run_.note("life %llu: endpoint %llu fails", watched_.life, endpoint_);
    sink_->on_error(message);
}

pdd::Status WitnessPort::close() {
    leave();
    pdd::Status closed = inner_->close();
    if (!closed) witness_.unfenced_ += 1;
    return closed;
}

void WitnessPort::settle(const Untold& one) {
    auto& route = routes_[one.route];
    auto& totals = witness_.totals(watched_.life);
    route.inflight -= 1;
    route.inflight_bytes -= one.nbytes;
    nic_->inflight -= 1;
    nic_->inflight_bytes -= one.nbytes;
    totals.inflight -= 1;
    totals.inflight_bytes -= one.nbytes;
    if (route.target != nullptr) route.target->inbound -= 1;
}

void WitnessPort::leave() {
    open_ = false;
    for (const Untold& one : untold_) settle(one);
    untold_.clear();
    std::erase(witness_.ports_, this);
}

}  // namespace sim
