#include "gpu/flushing_nic.h"

namespace pdd {
namespace {

class FlushingPort final : public NicPort, private CompletionSink {
  public:
    FlushingPort(std::unique_ptr<NicPort> inner, std::shared_ptr<const GpuDevice> device)
        : inner_(std::move(inner)), device_(std::move(device)) {}

    const std::vector<uint8_t>& address() const override { return inner_->address(); }
    Result<uint64_t> resolve(std::span<const uint8_t> address) override { return inner_->resolve(address); }
    Status reach(uint64_t peer) override { return inner_->reach(peer); }
    PostResult post(const NicWrite& write, Op* op) override { return inner_->post(write, op); }
    uint32_t poll(CompletionSink& sink, uint32_t budget) override;
    Status close() override;
    int wait_fd() const override { return inner_->wait_fd(); }
    bool may_wait() override { return inner_->may_wait(); }
    void take_back_signal() override { inner_->take_back_signal(); }

  private:
    void on_write(Op* op, int error) override { outer_->on_write(op, error); }
    void on_immediate(uint32_t imm) override { arrived_.push_back(imm); }
    void on_error(const std::string& message) override { outer_->on_error(message); }

    std::unique_ptr<NicPort> inner_;
    std::shared_ptr<const GpuDevice> device_;
    CompletionSink* outer_ = nullptr;  // of the poll that runs
    std::vector<uint32_t> arrived_;    // in it
};

uint32_t FlushingPort::poll(CompletionSink& sink, uint32_t budget) {
    outer_ = &sink;
    const uint32_t found = inner_->poll(*this, budget);
    outer_ = nullptr;
    if (arrived_.empty()) return found;
    if (const Status flushed = device_->flush(); flushed)
        for (const uint32_t imm : arrived_) sink.on_immediate(imm);
    else
        sink.on_error(flushed.error().message);  // what did not become visible is not counted
    arrived_.clear();
    return found;
}

Status FlushingPort::close() {
    Status closed = inner_->close();
    Status flushed = device_->flush();
    return closed ? flushed : closed;
}

}  // namespace

Result<std::unique_ptr<NicPort>> FlushingNic::open_port(uint32_t queue) {
    auto port = inner_->open_port(queue);
    if (!port) return port.error();
    return std::unique_ptr<NicPort>(new FlushingPort(std::move(*port), device_));
}

}  // namespace pdd
