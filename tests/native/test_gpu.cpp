// The parts of native/gpu that a peer or a device can surprise, over a fake inner NIC and a fake driver: what a staged
// port believes of what lies in its slots, and what is flushed when.
#include <dlfcn.h>
#include <rdma/fi_errno.h>

#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "gpu/device_memory.h"
#include "gpu/flushing_nic.h"
#include "gpu/staged_nic.h"

using namespace pdd;

namespace {

// Hands out what the test puts in; remembers what it is given.
struct Wire {
    std::vector<uint32_t> immediates;
    std::vector<std::pair<Op*, int>> completions;
    std::vector<std::pair<NicWrite, Op*>> posted;
    std::vector<uint8_t*> registered;
    bool full = false;
    bool closed = false;
};

class FakeMemory final : public NicMemory {
  public:
    int close() override { return 0; }
};

class FakePort final : public NicPort {
  public:
    explicit FakePort(Wire& wire) : wire_(wire) {}
    const std::vector<uint8_t>& address() const override { return address_; }
    Result<uint64_t> resolve(std::span<const uint8_t>) override { return uint64_t{7}; }
    PostResult post(const NicWrite& write, Op* op) override {
        if (wire_.full) return {PostOutcome::Again};
        wire_.posted.push_back({write, op});
        return {PostOutcome::Posted};
    }
    uint32_t poll(CompletionSink& sink, uint32_t) override {
        for (const auto& [op, error] : std::exchange(wire_.completions, {})) sink.on_write(op, error);
        for (const uint32_t imm : std::exchange(wire_.immediates, {})) sink.on_immediate(imm);
        return 0;
    }
    Status close() override {
        wire_.closed = true;
        return {};
    }

  private:
    Wire& wire_;
    std::vector<uint8_t> address_{1, 2, 3, 4};
};

class FakeNic final : public Nic {
  public:
    explicit FakeNic(Wire& wire) : wire_(wire) { caps_.provider = "fake"; }
    const ProviderCaps& caps() const override { return caps_; }
    uint32_t address_format() const override { return 0; }
    Result<std::unique_ptr<NicMemory>> register_memory(uint8_t* base, uint64_t, Access) override {
        wire_.registered.push_back(base);
        return std::unique_ptr<NicMemory>(new FakeMemory);
    }
    Result<std::unique_ptr<NicPort>> open_port(uint32_t) override {
        return std::unique_ptr<NicPort>(new FakePort(wire_));
    }
    std::string error_text(int code) const override { return std::to_string(code); }

  private:
    Wire& wire_;
    ProviderCaps caps_;
};

struct Sink final : CompletionSink {
    void on_write(Op* op, int error) override { writes.push_back({op, error}); }
    void on_immediate(uint32_t imm) override { immediates.push_back(imm); }
    void on_error(const std::string& message) override { errors.push_back(message); }
    std::vector<std::pair<Op*, int>> writes;
    std::vector<uint32_t> immediates;
    std::vector<std::string> errors;
};

template <class F>
F control(const char* name) {
    void* driver = ::dlopen("libcuda.so.1", RTLD_NOW);
    auto* found = reinterpret_cast<F>(::dlsym(driver, name));
    CHECK(found != nullptr);
    return found;
}

// As staged_port.cpp lays it out.
struct Header {
    uint32_t magic = 0x53444450;
    uint32_t imm = 77;
    uint64_t key = 0;  // place() puts the region's in
    uint64_t num_pieces = 1;
    uint64_t pieces[kMaxWriteSegments][2] = {{0, 4096}};
};

// A port with a connected peer, and a region of 64 KiB.
struct Bench {
    explicit Bench(const std::shared_ptr<const GpuDevice>& device) {
        auto allocated = DeviceMemory::allocate(device, 65536);
        CHECK(allocated);
        memory = std::make_unique<DeviceMemory>(std::move(*allocated));
        auto opened = StagedNic::open(std::make_unique<FakeNic>(wire), device, "a test");
        CHECK(opened);
        nic = std::move(*opened);
        auto registered = nic->register_memory(reinterpret_cast<uint8_t*>(memory->address()), 65536, Access::Both);
        CHECK(registered);
        region = std::move(*registered);
        auto port_opened = nic->open_port(64);
        CHECK(port_opened);
        port = std::move(*port_opened);
        landing = wire.registered.at(0);
        CHECK(port->resolve(port->address()));
    }
    void place(uint32_t slot, Header header) {
        header.key ^= region->key;
        uint8_t* at = landing + kStagedHeaderBytes + slot * kStagedSlotBytes;
        std::memcpy(at, &header, sizeof header);
        std::memset(at + kStagedHeaderBytes, 0x5a, 4096);
    }
    void arrive(uint32_t imm) {
        wire.immediates.push_back(imm);
        turn();
    }
    void turn() {
        for (int i = 0; i < 50; ++i) {
            port->poll(sink, 64);
            std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
    }

    Wire wire;
    Sink sink;
    std::unique_ptr<DeviceMemory> memory;
    std::unique_ptr<StagedNic> nic;
    std::unique_ptr<NicMemory> region;
    std::unique_ptr<NicPort> port;
    uint8_t* landing = nullptr;
};

using Device = std::shared_ptr<const GpuDevice>;

void test_a_good_write_is_copied_counted_and_its_slot_given_back(const Device& device) {
    Bench bench(device);
    Header header;
    header.pieces[0][0] = 8192;
    bench.place(3, header);
    bench.arrive(3);
    CHECK(bench.sink.errors.empty());
    CHECK(bench.sink.immediates == std::vector<uint32_t>{77});
    CHECK(bench.wire.posted.size() == 1);
    CHECK(bench.wire.posted[0].first.imm == (1u << 31 | 3) && bench.wire.posted[0].first.pieces[0].nbytes == 8);
    // The same slot again, before the credit has completed here: the peer may have it by then.
    header.imm = 78;
    bench.place(3, header);
    bench.arrive(3);
    CHECK(bench.sink.immediates.size() == 2 && bench.wire.posted.size() == 1);
    bench.wire.completions.push_back({bench.wire.posted[0].second, 0});
    bench.turn();
    CHECK(bench.wire.posted.size() == 2 && bench.sink.errors.empty());
    CHECK(bench.port->close() && bench.wire.closed);
}

// Each is told once, and nothing of it reaches the device or a count.
void test_what_a_peer_must_not_write(const Device& device) {
    std::vector<std::pair<uint32_t, Header>> bad;
    const auto with = [&](uint32_t imm, auto change) {
        Header header;
        change(header);
        bad.emplace_back(imm, header);
    };
    with(0, [](Header& h) { h.magic = 0; });
    with(0, [](Header& h) { h.key = 1; });
    with(0, [](Header& h) { h.num_pieces = kMaxWriteSegments + 1; });
    with(0, [](Header& h) { h.num_pieces = UINT64_MAX; });
    with(0, [](Header& h) { h.pieces[0][0] = 65536; });
    with(0, [](Header& h) { h.pieces[0][0] = 65536 - 4095; });
    with(0, [](Header& h) { h.pieces[0][0] = UINT64_MAX; });
    with(0, [](Header& h) { h.pieces[0][1] = UINT64_MAX; });
    with(0, [](Header& h) { h.pieces[0][1] = kMaxMergedBytes + 1; });
    with(kStagedSlots, [](Header&) {});
    with(1u << 31, [](Header&) {});  // a slot that we never sent
    with(1u << 31 | 4711, [](Header&) {});
    for (const auto& [imm, header] : bad) {
        Bench bench(device);
        bench.place(0, header);
        bench.arrive(imm);
        CHECK(bench.sink.errors.size() == 1);
        CHECK(bench.sink.immediates.empty() && bench.wire.posted.empty());
        Header good;
        bench.place(1, good);
        bench.arrive(1);  // nothing is taken from it any more
        CHECK(bench.sink.errors.size() == 1 && bench.sink.immediates.empty());
        CHECK(bench.port->close());
    }
}

void test_a_slot_is_written_once_until_it_is_given_back(const Device& device) {
    Bench bench(device);
    const auto hold = control<void (*)(int)>("fake_cuda_hold");
    hold(1);
    bench.place(0, Header{});
    bench.arrive(0);
    bench.arrive(0);
    CHECK(bench.sink.errors.size() == 1 && bench.sink.immediates.empty());
    hold(0);
    CHECK(bench.port->close());
}

void test_a_write_is_done_when_both_ends_are_done_with_its_slot(const Device& device) {
    for (const bool credit_first : {false, true}) {
        Bench bench(device);
        NicWrite write;
        write.pieces[0] = {reinterpret_cast<uint8_t*>(bench.memory->address()), 0, 4096};
        write.num_pieces = 1;
        write.key = bench.region->key;
        std::vector<Op> ops(kStagedSlots + 1);
        for (uint32_t i = 0; i < kStagedSlots; ++i)
            CHECK(bench.port->post(write, &ops[i]).outcome == PostOutcome::Posted);
        CHECK(bench.port->post(write, &ops.back()).outcome == PostOutcome::Again);
        bench.turn();
        CHECK(bench.wire.posted.size() == kStagedSlots && bench.sink.writes.empty());
        const auto complete = [&] {
            bench.wire.completions.push_back({bench.wire.posted[2].second, 0});
            bench.turn();
        };
        const auto credit = [&] { bench.arrive(1u << 31 | 2); };
        credit_first ? credit() : complete();
        CHECK(bench.sink.writes.empty());
        credit_first ? complete() : credit();
        CHECK(bench.sink.writes.size() == 1 && bench.sink.writes[0].first == &ops[2]);
        CHECK(bench.port->post(write, &ops.back()).outcome == PostOutcome::Posted);
        bench.turn();
        CHECK(bench.wire.posted.back().first.imm == 2);
        CHECK(bench.port->close());
    }
}

void test_a_full_wire_is_asked_again(const Device& device) {
    Bench bench(device);
    bench.wire.full = true;
    bench.place(0, Header{});
    bench.arrive(0);
    NicWrite write;
    write.pieces[0] = {reinterpret_cast<uint8_t*>(bench.memory->address()), 0, 64};
    write.num_pieces = 1;
    Op op;
    CHECK(bench.port->post(write, &op).outcome == PostOutcome::Posted);
    bench.turn();
    CHECK(bench.wire.posted.empty() && bench.sink.immediates.size() == 1);
    bench.wire.full = false;
    bench.turn();
    CHECK(bench.wire.posted.size() == 2 && bench.sink.errors.empty());
    CHECK(bench.port->close());
}

void test_a_port_has_one_peer(const Device& device) {
    Bench bench(device);
    auto second = bench.port->resolve(bench.port->address());
    CHECK(!second && second.error().message.find("as many NICs") != std::string::npos);
    CHECK(bench.port->close());
}

void test_arrivals_are_flushed_before_they_are_told(const Device& device) {
    const auto flushes = control<uint64_t (*)()>("fake_cuda_flushes");
    Wire wire;
    struct Watching final : CompletionSink {
        void on_write(Op*, int) override {}
        void on_immediate(uint32_t) override { CHECK(count() == before + 1); }
        void on_error(const std::string&) override { CHECK(false); }
        uint64_t (*count)();
        uint64_t before;
    } sink;
    sink.count = flushes;
    FlushingNic nic(std::make_unique<FakeNic>(wire), device);
    auto port = nic.open_port(8);
    CHECK(port);
    sink.before = flushes();
    (*port)->poll(sink, 64);
    CHECK(flushes() == sink.before);  // nothing came
    wire.immediates = {1, 2, 3};
    (*port)->poll(sink, 64);
    CHECK(flushes() == sink.before + 1);
    CHECK((*port)->close());
    CHECK(flushes() == sink.before + 2 && wire.closed);  // what landed before the fence is there, too
}

void test_only_devices_without_order_need_a_flush(const Device& device) {
    const auto ordering = control<void (*)(int)>("fake_cuda_ordering");
    for (const auto& [value, needed] : {std::pair{0, true}, {100, false}, {200, false}}) {
        ordering(value);
        CHECK(device->needs_flush() == needed);
    }
}

}  // namespace

int main() {
    auto device = GpuDevice::open("0000:fa:ce.0");
    CHECK(device && (*device)->model() == "fake GPU");
    CHECK((*device)->bind());
    CHECK(!GpuDevice::open("cuda:1") && !GpuDevice::open("cudax") && !GpuDevice::open("cuda:") &&
          !GpuDevice::open("x"));
    CHECK(GpuDevice::open("cuda") && GpuDevice::open("cuda:0"));
    test_a_good_write_is_copied_counted_and_its_slot_given_back(*device);
    test_what_a_peer_must_not_write(*device);
    test_a_slot_is_written_once_until_it_is_given_back(*device);
    test_a_write_is_done_when_both_ends_are_done_with_its_slot(*device);
    test_a_full_wire_is_asked_again(*device);
    test_a_port_has_one_peer(*device);
    test_arrivals_are_flushed_before_they_are_told(*device);
    test_only_devices_without_order_need_a_flush(*device);
    return 0;
}
