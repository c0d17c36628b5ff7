// The faces of nic.h: everything they are asked goes to the network.
#include "network.h"
#include "port.h"

namespace sim {

namespace {

constexpr size_t kAddressBytes = 48;

}  // namespace

class SimMemory final : public pdd::NicMemory {
  public:
    SimMemory(Network& network, std::shared_ptr<NicState> nic, uint64_t number) : network_(network), nic_(nic) {
        key = number;
        descriptor = this;
        network_.memories_.insert(this);
    }
    ~SimMemory() override { close(); }
    int close() override {
        if (nic_ == nullptr) return 0;
        nic_->memories.erase(key);
        nic_ = nullptr;
        network_.memories_.erase(this);
        return 0;
    }

  private:
    Network& network_;
    std::shared_ptr<NicState> nic_;
};

Network::~Network() {
    while (!memories_.empty()) delete *memories_.begin();
}

class SimPort final : public pdd::NicPort {
  public:
    SimPort(Network& network, std::shared_ptr<Port> port) : network_(network), port_(std::move(port)) {}
    ~SimPort() override {
        if (port_->state == Port::State::Open) network_.run_.violate("a port was dropped and not closed");
    }

    const std::vector<uint8_t>& address() const override { return port_->address; }
    pdd::Result<uint64_t> resolve(std::span<const uint8_t> address) override {
        port_->routes.push_back({std::string(address.begin(), address.end())});
        return port_->routes.size() - 1;
    }
    pdd::PostResult post(const pdd::NicWrite& write, pdd::Op* op) override { return network_.post(*port_, write, op); }
    uint32_t poll(pdd::CompletionSink& sink, uint32_t budget) override { return network_.poll(*port_, sink, budget); }
    pdd::Status close() override { return network_.close(*port_); }

  private:
    Network& network_;
    std::shared_ptr<Port> port_;
};

class SimNic final : public pdd::Nic {
  public:
    SimNic(Network& network, std::shared_ptr<NicState> state) : network_(network), state_(std::move(state)) {
        caps_.provider = caps_.kind = caps_.wire = "sim";
        caps_.domain = "sim" + std::to_string(state_->index);
        caps_.imm_bytes = 4;
        caps_.virtual_addressing = network.traits().virtual_addressing;
        caps_.app_keys = network.traits().app_keys;
        caps_.local_mr = true;
        caps_.write_segments = network.traits().segments;
        caps_.max_message = 1 << 30;
        caps_.fence = "endpoint";
    }

    const pdd::ProviderCaps& caps() const override { return caps_; }
    uint32_t address_format() const override { return network_.traits().named ? FI_ADDR_STR : FI_ADDR_EFA; }
    pdd::Result<std::unique_ptr<pdd::NicMemory>> register_memory(uint8_t* base, uint64_t nbytes,
                                                                 pdd::Access access) override {
        const uint64_t key = caps_.app_keys ? network_.run_.rng.next() : network_.next_key_++;
        state_->memories[key] = {base, nbytes, access != pdd::Access::Local};
        return std::unique_ptr<pdd::NicMemory>(new SimMemory(network_, state_, key));
    }
    pdd::Result<std::unique_ptr<pdd::NicPort>> open_port(uint32_t queue) override {
        auto port = std::make_shared<Port>();
        port->nic = state_;
        port->endpoint = network_.opening_;
        port->queue = queue;
        std::string name = "fi_sim://" + std::to_string(state_->host) + "." + std::to_string(port->endpoint) + "." +
                           std::to_string(state_->index);
        name.resize(kAddressBytes, '\0');
        port->address.assign(name.begin(), name.end());
        network_.ports_.push_back(port);
        network_.by_address_[name] = port.get();
        return std::unique_ptr<pdd::NicPort>(new SimPort(network_, port));
    }
    std::string error_text(int code) const override { return "error " + std::to_string(code); }

  private:
    Network& network_;
    std::shared_ptr<NicState> state_;
    pdd::ProviderCaps caps_;
};

std::unique_ptr<pdd::Nic> Network::make_nic(uint32_t life, uint32_t host, uint32_t index) {
    auto state = std::make_shared<NicState>();
    state->life = life;
    state->host = host;
    state->index = index;
    return std::make_unique<SimNic>(*this, std::move(state));
}

}  // namespace sim
