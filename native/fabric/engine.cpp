#include "fabric/engine.h"

#include <rdma/fi_errno.h>

#include <future>

#include "fabric/local_nic.h"

namespace pdd {
namespace {

constexpr size_t kCommandRing = 4096;
constexpr size_t kEventRing = 4096;
constexpr auto kSendPatience = std::chrono::seconds(5);
constexpr auto kCallDeadline = std::chrono::seconds(60);  // registering hundreds of GiB takes its time
constexpr auto kCloseDeadline = std::chrono::seconds(5);

const Error kClosed{"the fabric is closed", FI_ESHUTDOWN};

}  // namespace

Engine::Shared::Shared(bool spin)
    : commands(kCommandRing),
      events(kEventRing),
      watcher(
          [this](uint64_t id, uint32_t from, uint32_t to) {
              // The worker never waits for the watcher, so waiting here can not be a circle.
              while (!commands.push(command::Fire{id, from, to}, kSendPatience) && !commands.closed()) {
              }
          },
          spin) {}

Result<std::unique_ptr<Engine>> Engine::open(const EngineConfig& config) {
    if (config.provider == "local") {  // alone: no library is needed
        return open(config, []() -> Result<Nics> {
            Nics nics;
            nics.push_back(std::make_unique<LocalNic>());
            return nics;
        });
    }
    auto choice = choose_library(config.library, config.search);
    if (!choice) return choice.error();
    return open(config, [config, library = choice->library] { return pdd::open_nics(library, config); });
}

Result<std::unique_ptr<Engine>> Engine::open(const EngineConfig& config, std::function<Result<Nics>()> open_nics) {
    const auto idle = IdlePolicy::named(config.idle);
    if (!idle) return Error{"idle policy '" + config.idle + "' is none of auto, spin, block", FI_EINVAL};
    if (config.window_ops == 0 || config.window_bytes == 0)
        return Error{"window_ops and window_bytes must not be 0", FI_EINVAL};
    if (!config.device.empty() && (config.local || config.provider == "local"))
        return Error{"memory of GPU " + config.device + " does not go to local peers: they share files", FI_EINVAL};

    std::unique_ptr<Engine> engine(new Engine);
    engine->shared_ = std::make_shared<Shared>(!idle->blocks());
    if (engine->fileno() < 0 || engine->shared_->commands.fd() < 0)
        return Error{"eventfd: no file descriptor is left", FI_EMFILE};
    std::promise<Result<std::vector<ProviderCaps>>> opened;
    auto answer = opened.get_future();
    // NICs are opened on the thread that will use them, after it is pinned: their memory lands on its NUMA node.
    engine->thread_ = std::thread([config, idle = *idle, open_nics = std::move(open_nics), shared = engine->shared_,
                                   opened = std::move(opened)]() mutable {
        pin_thread(config.cpus);
        auto nics = open_nics();
        if (nics) {
            std::vector<ProviderCaps> caps;
            for (const auto& nic : *nics) caps.push_back(nic->caps());
            if (config.local) nics->push_back(std::make_unique<LocalNic>());
            Worker worker({{config.window_ops, config.window_bytes}, idle, config.local}, std::move(*nics),
                          shared->commands, shared->watcher, shared->imms, shared->events, shared->stats);
            shared->worker = &worker;
            opened.set_value(std::move(caps));
            worker.run();
        } else {
            opened.set_value(nics.error());
        }
        const std::lock_guard lock(shared->ended_mutex);
        shared->ended = true;
        shared->ended_changed.notify_all();
    });
    auto caps = answer.get();
    if (!caps) {
        engine->thread_.join();
        return caps.error();
    }
    engine->caps_ = std::move(*caps);
    return engine;
}

Engine::~Engine() {
    [[maybe_unused]] const Status closed = close();
}

Status Engine::close() {
    const std::lock_guard lock(close_mutex_);
    if (!thread_.joinable()) return {};
    shared_->commands.close();
    std::unique_lock ended(shared_->ended_mutex);
    // By the system's clock, because GCC 12's thread sanitizer does not know the other kind of wait.
    const bool done = shared_->ended_changed.wait_until(ended, std::chrono::system_clock::now() + kCloseDeadline,
                                                        [this] { return shared_->ended; });
    ended.unlock();
    shared_->watcher.stop();
    if (done) {
        thread_.join();
        return {};
    }
    thread_.detach();
    return Error{"close: the provider did not return within 5 s", FI_ETIMEDOUT};
}

Status Engine::send(Command command) {
    if (shared_->commands.push(std::move(command), kSendPatience)) return {};
    if (shared_->commands.closed()) return kClosed;
    return Error{"the worker took no command for 5 s", FI_ETIMEDOUT};
}

template <class R>
R Engine::call(std::function<R(Worker&)> work) {
    auto promise = std::make_shared<std::promise<R>>();
    auto answer = promise->get_future();
    const Status sent = send(command::Call{
        [promise, work = std::move(work), shared = shared_.get()] { promise->set_value(work(*shared->worker)); }});
    if (!sent) return sent.error();
    promise.reset();
    // A worker that ends first leaves the command in the ring: look at `closed` now and then.
    const auto deadline = std::chrono::steady_clock::now() + kCallDeadline;
    while (answer.wait_for(std::chrono::milliseconds(100)) != std::future_status::ready) {
        const std::lock_guard lock(shared_->ended_mutex);
        if (shared_->ended) return kClosed;
        if (std::chrono::steady_clock::now() > deadline)
            return Error{"the worker gave no answer for 60 s", FI_ETIMEDOUT};
    }
    return answer.get();
}

// -- memory and endpoints ---------------------------------------------------------------------------------------------
Result<uint32_t> Engine::add_region(uint8_t* base, uint64_t length, int fd) {
    return call<Result<uint32_t>>([=](Worker& worker) { return worker.add_region(base, length, fd); });
}

Status Engine::remove_region(uint32_t id) {
    return call<Status>([=](Worker& worker) { return worker.remove_region(id); });
}

Result<uint32_t> Engine::open_endpoint(bool local) {
    uint32_t id = 0;
    {
        const std::lock_guard lock(registry_mutex_);
        id = ++last_endpoint_;
    }
    const Status opened = call<Status>([=](Worker& worker) { return worker.open_endpoint(id, local); });
    if (!opened) return opened.error();
    const std::lock_guard lock(registry_mutex_);
    open_endpoints_.insert(id);
    return id;
}

Result<std::string> Engine::describe(uint32_t endpoint, std::vector<uint32_t> regions) {
    return call<Result<std::string>>(
        [endpoint, regions = std::move(regions)](Worker& worker) { return worker.describe(endpoint, regions); });
}

Status Engine::connect(uint32_t endpoint, std::string descriptor) {
    return call<Status>([endpoint, descriptor = std::move(descriptor)](Worker& worker) {
        return worker.connect(endpoint, descriptor);
    });
}

Status Engine::close_endpoint(uint32_t endpoint) {
    {
        const std::lock_guard lock(registry_mutex_);
        if (endpoint == 0 || endpoint > last_endpoint_)
            return Error{"close_endpoint: no endpoint " + std::to_string(endpoint), FI_EINVAL};
        if (open_endpoints_.erase(endpoint) == 0) return {};  // closing twice is one closing
    }
    return send(command::CloseEndpoint{endpoint});
}

// -- receiving --------------------------------------------------------------------------------------------------------
Result<uint32_t> Engine::imm_allocate(uint32_t endpoint) {
    {
        const std::lock_guard lock(registry_mutex_);
        if (!open_endpoints_.contains(endpoint))
            return Error{"imm_allocate: endpoint " + std::to_string(endpoint) + " is not open", FI_EINVAL};
    }
    const auto key = shared_->imms.allocate(endpoint);
    if (!key) return Error{"imm_allocate: all " + std::to_string(ImmTable::kSlots) + " keys are in use", FI_ENOSPC};
    return *key;
}

Status Engine::imm_arm(uint32_t key, uint32_t expected) {
    if (expected == 0) return Error{"imm_arm of key " + std::to_string(key) + ": nothing is expected", FI_EINVAL};
    const auto arrival = shared_->imms.arm(key, expected);
    if (arrival.outcome == ImmTable::Outcome::Stale)
        return Error{"imm_arm: key " + std::to_string(key) + " is not in use, or armed already", FI_EINVAL};
    Event event;
    if (imm_event(key, arrival, event)) return send(command::Tell{std::move(event)});
    return {};
}

Result<uint32_t> Engine::imm_arrived(uint32_t key) const {
    const auto arrived = shared_->imms.arrived(key);
    if (!arrived) return Error{"imm_arrived: key " + std::to_string(key) + " is not in use", FI_EINVAL};
    return *arrived;
}

Result<uint32_t> Engine::imm_retire(uint32_t key) {
    const auto arrived = shared_->imms.retire(key);
    if (!arrived) return Error{"imm_retire: key " + std::to_string(key) + " is not in use", FI_EINVAL};
    return *arrived;
}

// -- sending ----------------------------------------------------------------------------------------------------------
Result<uint64_t> Engine::open_transfer(uint32_t endpoint, uint32_t key) {
    if (key >> kKeyBits != 0)
        return Error{"open_transfer: key " + std::to_string(key) + " has more than 24 bits", FI_EINVAL};
    uint64_t id = 0;
    {
        const std::lock_guard lock(registry_mutex_);
        if (endpoint == 0 || endpoint > last_endpoint_)
            return Error{"open_transfer: no endpoint " + std::to_string(endpoint), FI_EINVAL};
        id = transfer_id(endpoint, ++last_transfer_);
    }
    const Status sent = send(command::OpenTransfer{id, key});
    if (!sent) return sent.error();
    return id;
}

Result<uint32_t> Engine::watch(std::shared_ptr<const Counter> counter) {
    const std::lock_guard lock(registry_mutex_);
    watches_.emplace(++last_watch_, std::move(counter));
    return last_watch_;
}

Status Engine::unwatch(uint32_t watch) {
    const std::lock_guard lock(registry_mutex_);
    if (watches_.erase(watch) == 0) return Error{"unwatch: no watch " + std::to_string(watch), FI_EINVAL};
    return {};
}

Status Engine::check_transfer(uint64_t transfer) const {
    const std::lock_guard lock(registry_mutex_);
    const uint32_t endpoint = transfer_endpoint(transfer);
    const auto number = static_cast<uint32_t>(transfer);
    if (endpoint == 0 || endpoint > last_endpoint_ || number == 0 || number > last_transfer_)
        return Error{"no transfer " + std::to_string(transfer), FI_EINVAL};
    return {};
}

Status Engine::arm(uint64_t transfer, uint32_t watch, uint64_t first_value, std::shared_ptr<const WritePlan> plan,
                   uint32_t begin, uint32_t end) {
    if (begin > end || end > plan->size())
        return Error{"arm: entries [" + std::to_string(begin) + ", " + std::to_string(end) + ") of a plan of " +
                         std::to_string(plan->size()),
                     FI_EINVAL};
    if (Status known = check_transfer(transfer); !known) return known;
    std::shared_ptr<const Counter> counter;
    {
        const std::lock_guard lock(registry_mutex_);
        const auto found = watches_.find(watch);
        if (found == watches_.end()) return Error{"arm: no watch " + std::to_string(watch), FI_EINVAL};
        counter = found->second;
    }
    return send(command::Arm{transfer, std::move(counter), first_value, std::move(plan), begin, end});
}

Status Engine::write(uint64_t transfer, std::shared_ptr<const WritePlan> plan) {
    if (Status known = check_transfer(transfer); !known) return known;
    return send(command::Write{transfer, std::move(plan)});
}

Status Engine::finish(uint64_t transfer) {
    if (Status known = check_transfer(transfer); !known) return known;
    return send(command::Finish{transfer});
}

Status Engine::cancel(uint64_t transfer) {
    if (Status known = check_transfer(transfer); !known) return known;
    return send(command::Cancel{transfer});
}

Status Engine::inject_fault(const std::string& kind, uint64_t after, uint64_t count, int nic) {
    const auto fault = fault_named(kind);
    if (!fault) return Error{"fault '" + kind + "' is none of error, lost, hold, again", FI_EINVAL};
    return send(command::InjectFault{*fault, after, count, nic});
}

}  // namespace pdd
