#include "fabric/engine.h"

#include <rdma/fi_errno.h>
#include <sys/epoll.h>

#include <algorithm>
#include <future>

#include "fabric/descriptor.h"
#include "fabric/local_nic.h"

namespace pdd {
namespace {

constexpr size_t kCommandRing = 4096;
constexpr size_t kEventRing = 4096;
constexpr auto kSendPatience = std::chrono::seconds(5);
constexpr auto kCallDeadline = std::chrono::seconds(60);  // registering hundreds of GiB takes its time
constexpr auto kCloseDeadline = std::chrono::seconds(5);

constexpr uint32_t kAlarmBits = 56;  // of a worker's own number of an alarm; the group's number stands above
constexpr uint64_t kAlarmMask = (uint64_t{1} << kAlarmBits) - 1;

const Error kClosed{"the fabric is closed", FI_ESHUTDOWN};

}  // namespace

Engine::Group::Group(uint32_t number, LayerWatcher* watcher)
    : number(number), commands(kCommandRing), events(kEventRing), watcher_(watcher) {}

void Engine::Group::set(Alarm alarm) {
    if (watcher_ == nullptr) return live_.set(std::move(alarm));
    alarm.id |= static_cast<uint64_t>(number) << kAlarmBits;
    watcher_->set(std::move(alarm));
}

void Engine::Group::clear(std::vector<uint64_t> ids) {
    if (watcher_ == nullptr) return live_.clear(ids);
    for (auto& id : ids) id |= static_cast<uint64_t>(number) << kAlarmBits;
    watcher_->clear(std::move(ids));
}

Engine::Shared::Shared(size_t num_groups, bool watched) {
    const auto fire_on = [this](uint64_t id, uint32_t from, uint32_t to) { fire(id, from, to); };
    if (watched) watcher = std::make_unique<LayerWatcher>(fire_on);
    for (size_t group = 0; group < num_groups; ++group)
        groups.push_back(std::make_unique<Group>(static_cast<uint32_t>(group), watcher.get()));
}

// A worker never waits for the watcher, so waiting here can not be a circle.
void Engine::Shared::fire(uint64_t id, uint32_t from, uint32_t to) {
    CommandQueue& commands = groups[id >> kAlarmBits]->commands;
    while (!commands.push(command::Fire{id & kAlarmMask, from, to}, kSendPatience) && !commands.closed()) {
    }
}

Result<std::unique_ptr<Engine>> Engine::open(const EngineConfig& config) {
    if (config.provider == "local") {  // alone: no library is needed
        return open(config, [](const RailGroupConfig&) -> Result<Nics> {
            Nics nics;
            nics.push_back(std::make_unique<LocalNic>());
            return nics;
        });
    }
    auto choice = choose_library(config.library, config.search);
    if (!choice) return choice.error();
    return open(config, [config, library = choice->library](const RailGroupConfig& group) {
        return pdd::open_nics(library, config, group);
    });
}

Result<std::unique_ptr<Engine>> Engine::open(const EngineConfig& config, NicOpener open_nics) {
    const auto idle = IdlePolicy::named(config.idle);
    if (!idle) return Error{"idle policy '" + config.idle + "' is none of auto, spin, block", FI_EINVAL};
    if (config.window_ops == 0 || config.window_bytes == 0)
        return Error{"window_ops and window_bytes must not be 0", FI_EINVAL};
    if (!config.device.empty() && (config.local || config.provider == "local"))
        return Error{"memory of GPU " + config.device + " does not go to local peers: they share files", FI_EINVAL};
    const size_t num_groups = config.groups.size();
    if (num_groups == 0 || num_groups > kMaxNics)
        return Error{std::to_string(num_groups) + " rail groups; 1 to " + std::to_string(kMaxNics) + " are possible",
                     FI_EINVAL};

    std::unique_ptr<Engine> engine(new Engine);
    engine->shared_ = std::make_shared<Shared>(num_groups, idle->blocks());
    for (const auto& group : engine->shared_->groups)
        if (group->events.fileno() < 0 || group->commands.fd() < 0)
            return Error{"eventfd: no file descriptor is left", FI_EMFILE};
    if (num_groups > 1) {
        engine->join_.emplace(static_cast<uint32_t>(num_groups));
        engine->any_events_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
        for (const auto& group : engine->shared_->groups) {
            epoll_event event{};
            event.events = EPOLLIN;
            if (::epoll_ctl(engine->any_events_.get(), EPOLL_CTL_ADD, group->events.fileno(), &event) != 0)
                return Error{"epoll: no file descriptor is left", FI_EMFILE};
        }
    }
    size_t num_nics = 0;
    for (size_t group = 0; group < num_groups; ++group) {
        // The destructor closes those that were opened.
        if (Status started = engine->start(group, config, *idle, open_nics); !started) return started.error();
        num_nics += engine->caps(group).size();
        const auto &first = engine->caps(0).front(), &caps = engine->caps(group).front();
        if (caps.wire != first.wire)
            return Error{"rail groups on different providers: " + first.provider + " and " + caps.provider, FI_EINVAL};
    }
    if (num_nics > kMaxNics)
        return Error{"at most " + std::to_string(kMaxNics) + " NICs, not " + std::to_string(num_nics), FI_EINVAL};
    return engine;
}

// NICs are opened on the thread that will use them, after it is pinned: their memory lands on its NUMA node.
Status Engine::start(size_t number, const EngineConfig& config, const IdlePolicy& idle, const NicOpener& open_nics) {
    std::promise<Status> opened;
    auto answer = opened.get_future();
    threads_.emplace_back([number, config, idle, open_nics, shared = shared_, opened = std::move(opened)]() mutable {
        Group& group = *shared->groups[number];
        group.warning = pin_thread(config.groups[number].cpus);
        auto nics = open_nics(config.groups[number]);
        if (nics) {
            for (const auto& nic : *nics) group.caps.push_back(nic->caps());
            if (config.local) nics->push_back(std::make_unique<LocalNic>());
            const WorkerConfig worker_config{.window = {config.window_ops, config.window_bytes},
                                             .idle = idle,
                                             .has_local = config.local,
                                             .group = group.number,
                                             .num_groups = static_cast<uint32_t>(shared->groups.size()),
                                             .flight_bytes = config.flight_bytes / shared->groups.size()};
            Worker worker(worker_config, std::move(*nics), group.commands, group, shared->imms, group.events,
                          group.stats);
            group.worker = &worker;
            opened.set_value({});
            worker.run();
        } else {
            opened.set_value(nics.error());
        }
        const std::lock_guard lock(shared->ended_mutex);
        group.ended = true;
        shared->ended_changed.notify_all();
    });
    return answer.get();
}

Engine::~Engine() {
    [[maybe_unused]] const Status closed = close();
}

Status Engine::close() {
    const std::lock_guard lock(close_mutex_);
    if (threads_.empty()) return {};
    for (const auto& group : shared_->groups) group->commands.close();
    const auto deadline = std::chrono::system_clock::now() + kCloseDeadline;
    bool all = true;
    for (size_t number = 0; number < threads_.size(); ++number) {
        const Group& group = *shared_->groups[number];
        std::unique_lock ended(shared_->ended_mutex);
        // By the system's clock, because GCC 12's thread sanitizer does not know the other kind of wait.
        const bool done = shared_->ended_changed.wait_until(ended, deadline, [&group] { return group.ended; });
        ended.unlock();
        if (done)
            threads_[number].join();
        else
            threads_[number].detach();
        all = all && done;
    }
    threads_.clear();
    if (shared_->watcher) shared_->watcher->stop();
    if (all) return {};
    return Error{"close: the provider did not return within 5 s", FI_ETIMEDOUT};
}

Status Engine::send(Group& group, Command command) {
    if (group.commands.push(std::move(command), kSendPatience)) return {};
    if (group.commands.closed()) return kClosed;
    return Error{"the worker took no command for 5 s", FI_ETIMEDOUT};
}

Status Engine::send_all(const Command& command) {
    Status status;
    for (const auto& group : shared_->groups)
        if (Status sent = send(*group, command); !sent && status) status = std::move(sent);
    return status;
}

template <class R>
R Engine::call(Group& group, std::function<R(Worker&)> work) {
    auto promise = std::make_shared<std::promise<R>>();
    auto answer = promise->get_future();
    const Status sent = send(
        group, command::Call{[promise, work = std::move(work), &group] { promise->set_value(work(*group.worker)); }});
    if (!sent) return sent.error();
    promise.reset();
    // A worker that ends first leaves the command in the ring: look at `closed` now and then.
    const auto deadline = std::chrono::steady_clock::now() + kCallDeadline;
    while (answer.wait_for(std::chrono::milliseconds(100)) != std::future_status::ready) {
        const std::lock_guard lock(shared_->ended_mutex);
        if (group.ended) return kClosed;
        if (std::chrono::steady_clock::now() > deadline)
            return Error{"the worker gave no answer for 60 s", FI_ETIMEDOUT};
    }
    return answer.get();
}

// -- events -----------------------------------------------------------------------------------------------------------
std::vector<std::string> Engine::warnings() const {
    std::vector<std::string> found;
    for (const auto& group : shared_->groups)
        if (!group->warning.empty()) found.push_back(group->warning);
    return found;
}

int Engine::fileno() const {
    return join_ ? any_events_.get() : shared_->groups[0]->events.fileno();
}

std::vector<Event> Engine::drain(size_t max_events) {
    if (!join_) return shared_->groups[0]->events.drain(max_events);
    const std::lock_guard lock(join_mutex_);
    std::vector<Event> out;
    std::vector<Command> orders;
    for (const auto& group : shared_->groups)
        for (auto& event : group->events.drain(max_events - out.size()))
            if (auto joined = join_->add(std::move(event), orders)) out.push_back(std::move(*joined));
    // A worker that takes no commands has ended, or hangs and is told so by whatever is asked of it next.
    for (const auto& order : orders) {
        [[maybe_unused]] const Status sent = send_all(order);
    }
    return out;
}

// -- memory and endpoints ---------------------------------------------------------------------------------------------
Result<uint32_t> Engine::add_region(uint8_t* base, uint64_t length, int fd, uint32_t group) {
    if (group >= num_groups()) return Error{"register: no rail group " + std::to_string(group), FI_EINVAL};
    return call<Result<uint32_t>>(*shared_->groups[group],
                                  [=](Worker& worker) { return worker.add_region(base, length, fd); });
}

Status Engine::remove_region(uint32_t id) {
    return call<Status>(group_of_region(id), [=](Worker& worker) { return worker.remove_region(id); });
}

Result<uint32_t> Engine::open_endpoint(bool local) {
    uint32_t id = 0;
    {
        const std::lock_guard lock(registry_mutex_);
        id = ++last_endpoint_;
    }
    for (const auto& group : shared_->groups) {
        const Status opened = call<Status>(*group, [=](Worker& worker) { return worker.open_endpoint(id, local); });
        if (!opened) {
            [[maybe_unused]] const Status sent = send_all(command::CloseEndpoint{id});  // the parts that did open
            return opened.error();
        }
    }
    const std::lock_guard lock(registry_mutex_);
    open_endpoints_.insert(id);
    return id;
}

Result<std::string> Engine::describe(uint32_t endpoint, std::vector<uint32_t> regions) {
    const size_t num_groups = this->num_groups();
    Descriptor all;
    all.regions.resize(regions.size());
    for (size_t number = 0; number < num_groups; ++number) {
        std::vector<uint32_t> mine;
        std::vector<size_t> places;
        for (size_t place = 0; place < regions.size(); ++place)
            if (regions[place] % num_groups == number) {
                mine.push_back(regions[place]);
                places.push_back(place);
            }
        auto text = call<Result<std::string>>(*shared_->groups[number],
                                              [=](Worker& worker) { return worker.describe(endpoint, mine); });
        if (!text || num_groups == 1) return text;
        auto part = Descriptor::parse({reinterpret_cast<const uint8_t*>(text->data()), text->size()});
        if (!part) return part.error();
        all.wire = part->wire;
        for (auto& nic : part->nics) {
            nic.group = static_cast<uint8_t>(number);
            all.nics.push_back(std::move(nic));
        }
        for (size_t i = 0; i < places.size(); ++i) {
            all.regions[places[i]] = std::move(part->regions[i]);
            all.regions[places[i]].group = static_cast<uint8_t>(number);
        }
    }
    return all.encode();
}

Status Engine::connect(uint32_t endpoint, std::string descriptor) {
    for (const auto& group : shared_->groups) {
        Status connected = call<Status>(
            *group, [endpoint, descriptor](Worker& worker) { return worker.connect(endpoint, descriptor); });
        if (!connected) return connected;
    }
    return {};
}

Status Engine::close_endpoint(uint32_t endpoint) {
    {
        const std::lock_guard lock(registry_mutex_);
        if (endpoint == 0 || endpoint > last_endpoint_)
            return Error{"close_endpoint: no endpoint " + std::to_string(endpoint), FI_EINVAL};
        if (open_endpoints_.erase(endpoint) == 0) return {};  // closing twice is one closing
    }
    return send_all(command::CloseEndpoint{endpoint});
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
    if (imm_event(key, arrival, event)) return send(*shared_->groups[0], command::Tell{std::move(event)});
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
    const Status sent = send_all(command::OpenTransfer{id, key});
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
    Group& group = group_of_region(plan->geometry().src_region);
    return send(group, command::Arm{transfer, std::move(counter), first_value, std::move(plan), begin, end});
}

Status Engine::write(uint64_t transfer, std::shared_ptr<const WritePlan> plan) {
    if (Status known = check_transfer(transfer); !known) return known;
    Group& group = group_of_region(plan->geometry().src_region);
    return send(group, command::Write{transfer, std::move(plan)});
}

Status Engine::finish(uint64_t transfer) {
    if (Status known = check_transfer(transfer); !known) return known;
    return send_all(command::Finish{transfer});
}

Status Engine::cancel(uint64_t transfer) {
    if (Status known = check_transfer(transfer); !known) return known;
    return send_all(command::Cancel{transfer});
}

Result<Engine::Flight> Engine::flight(uint64_t transfer, size_t most) {
    Flight all;
    uint32_t first_nic = 0;
    for (const auto& group : shared_->groups) {
        auto report = call<Result<FlightReport>>(
            *group, [=](Worker& worker) -> Result<FlightReport> { return worker.flight(transfer, most); });
        if (!report) return report.error();
        all.groups.push_back(std::move(*report));
        all.first_nics.push_back(first_nic);
        first_nic += static_cast<uint32_t>(group->caps.size());
    }
    return all;
}

Result<ImmTable::Arrivals> Engine::imm_arrivals(uint32_t key) const {
    const auto found = shared_->imms.arrivals(key);
    if (!found) return Error{"imm_arrivals: nothing is kept of key " + std::to_string(key), FI_EINVAL};
    return *found;
}

Status Engine::inject_fault(const std::string& kind, uint64_t after, uint64_t count, int nic) {
    const auto fault = fault_named(kind);
    if (!fault) return Error{"fault '" + kind + "' is none of error, lost, hold, again", FI_EINVAL};
    if (nic < 0) return send_all(command::InjectFault{*fault, after, count, nic});
    for (const auto& group : shared_->groups) {  // NICs are numbered through, group by group
        const auto count_here = static_cast<int>(group->caps.size());
        if (nic < count_here) return send(*group, command::InjectFault{*fault, after, count, nic});
        nic -= count_here;
    }
    return Error{"inject_fault: there are fewer NICs", FI_EINVAL};
}

}  // namespace pdd
