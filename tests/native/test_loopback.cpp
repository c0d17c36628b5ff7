// Two engines of one process over the real libfabric, and through shared memory: pages, counts, cancel, close under
// load. For the sanitizers.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>

#include <cstring>
#include <numeric>
#include <vector>

#include "check.h"
#include "fabric/engine.h"
#include "memory/mapped_memory.h"

using namespace pdd;

namespace {

constexpr uint64_t kPage = 4096;
constexpr uint32_t kPages = 512;

Event await(Engine& engine, EventKind kind, uint64_t id) {
    for (int round = 0; round < 3000; ++round) {
        pollfd fd{engine.fileno(), POLLIN, 0};
        ::poll(&fd, 1, 10);
        for (auto& event : engine.drain(SIZE_MAX))
            if (event.kind == kind && event.id == id) return event;
    }
    CHECK(!"the event came");
    return {};
}

template <class T>
T value(Result<T> result) {
    if (!result) std::fprintf(stderr, "%s\n", result.error().message.c_str());
    CHECK(result);
    return std::move(*result);
}
void ok(const Status& status) {
    if (!status) std::fprintf(stderr, "%s\n", status.error().message.c_str());
    CHECK(status);
}

// Memory as a rank makes it.
UniqueFd sealed(size_t nbytes) {
    UniqueFd fd(::memfd_create("arena", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    CHECK(::ftruncate(fd.get(), static_cast<off_t>(nbytes)) == 0);
    CHECK(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    return fd;
}

struct Arena {
    explicit Arena(size_t nbytes) : fd(sealed(nbytes)), memory(value(MappedMemory::map(fd.get(), nbytes, false))) {}
    UniqueFd fd;
    MappedMemory memory;
};

std::shared_ptr<const WritePlan> reversed(uint32_t region, uint32_t layers) {
    std::vector<PlanEntry> entries;
    for (uint64_t i = 0; i < kPages / layers; ++i)
        entries.push_back({i * kPage, (kPages / layers - 1 - i) * kPage, kPage, 1});
    return value(WritePlan::make({region, 0, kPages / layers * kPage, kPages / layers * kPage, layers}, entries));
}

void run(const EngineConfig& config) {
    auto writer = value(Engine::open(config));
    auto reader = value(Engine::open(config));
    const Arena source_arena(kPages * kPage);
    const Arena target_arena(kPages * kPage);
    uint8_t* from = source_arena.memory.data();
    uint8_t* to = target_arena.memory.data();
    std::iota(from, from + kPages * kPage, 1);
    for (uint32_t i = 0; i < kPages; ++i) std::memcpy(&from[i * kPage], &i, sizeof i);
    // Of several rail groups the last one writes into the first one's memory.
    const uint32_t source = value(writer->add_region(from, kPages * kPage, source_arena.fd.get(),
                                                     static_cast<uint32_t>(config.groups.size() - 1)));
    const uint32_t target = value(reader->add_region(to, kPages * kPage));

    for (int life = 0; life < 3; ++life) {
        // Local peers meet in a ring that each has mapped at an address of its own, so the sanitizer does not see that
        // they do: before what is read or written here is written by the reader's thread, that thread is called.
        std::fill(to, to + kPages * kPage, 0);
        const uint32_t ours = value(writer->open_endpoint());
        const uint32_t theirs = value(reader->open_endpoint());
        ok(writer->connect(ours, value(reader->describe(theirs, {target}))));
        ok(reader->connect(theirs, value(writer->describe(ours, {}))));
        auto [counter, fd] = value(Counter::create());
        const uint32_t watch = value(writer->watch(counter));

        constexpr uint32_t kLayers = 4;
        const uint32_t key = value(reader->imm_allocate(theirs));
        ok(reader->imm_arm(key, kPages));
        uint64_t transfer = value(writer->open_transfer(ours, key));
        const auto plan = reversed(source, kLayers);
        ok(writer->arm(transfer, watch, 1, plan, 0, 100));
        ok(writer->arm(transfer, watch, 1, plan, 100, kPages / kLayers));
        ok(writer->finish(transfer));
        for (uint32_t layer = 0; layer < kLayers; ++layer) counter->bump();
        await(*reader, EventKind::ImmReached, key);
        for (uint32_t layer = 0; layer < kLayers; ++layer)
            for (uint32_t i = 0; i < kPages / kLayers; ++i) {
                const uint64_t base = layer * (kPages / kLayers);
                CHECK(std::memcmp(&from[(base + i) * kPage], &to[(base + kPages / kLayers - 1 - i) * kPage], kPage) ==
                      0);
            }
        CHECK(await(*writer, EventKind::TransferDone, transfer).ok == kPages);
        CHECK(value(reader->imm_retire(key)) == kPages);

        value(reader->describe(theirs, {target}));
        const uint32_t key2 = value(reader->imm_allocate(theirs));
        transfer = value(writer->open_transfer(ours, key2));
        for (int i = 0; i < 8; ++i) ok(writer->arm(transfer, watch, 1, plan, 0, kPages / kLayers));
        if (life == 0) {
            ok(writer->cancel(transfer));
            const Event done = await(*writer, EventKind::TransferDone, transfer);
            CHECK(done.ok + done.failed == 8 * kPages && done.unknown == 0);
        } else if (life == 1) {
            ok(reader->close_endpoint(theirs));
            await(*reader, EventKind::EndpointClosed, theirs);
        }
        if (life < 2) {
            ok(writer->close_endpoint(ours));
            await(*writer, EventKind::EndpointClosed, ours);
        }
        if (life == 0) {  // what was under way when its writer closed may still land: before the next life
            ok(reader->close_endpoint(theirs));
            await(*reader, EventKind::EndpointClosed, theirs);
        }
    }
    ok(writer->close());
    ok(reader->close());
}

}  // namespace

// The library of the first argument, or the one that would be chosen.
int main(int argc, char** argv) {
    EngineConfig config;
    config.provider = "local";
    run(config);
    config.idle = "block";
    config.window_ops = 5;
    run(config);
    config = {};
    config.groups = {{{"127.0.0.1"}, {}}};
    if (argc > 1) config.library = argv[1];
    if (!choose_library(config.library, {})) return 77;
    run(config);
    config.groups = {{{"127.0.0.1", "127.0.0.2"}, {}}};
    config.window_ops = 5;
    config.idle = "block";
    run(config);
    config.groups = {{{"127.0.0.1"}, {}}, {{"127.0.0.2"}, {}}};
    run(config);
}
