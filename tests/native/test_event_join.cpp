// EventJoin: parts become one event when the last is in, and what other groups must be told is ordered.
#include "check.h"
#include "fabric/event_join.h"

using namespace pdd;

namespace {

Event done(uint64_t id, uint64_t ok, uint64_t failed, std::string text) {
    return {.kind = EventKind::TransferDone, .id = id, .ok = ok, .failed = failed, .text = std::move(text)};
}

void transfers_add_up() {
    EventJoin join(3);
    std::vector<Command> orders;
    CHECK(!join.add(done(7, 5, 0, ""), orders));
    CHECK(!join.add(done(8, 1, 0, ""), orders));
    CHECK(!join.add(done(7, 0, 2, ""), orders));
    CHECK(orders.empty());
    const auto sum = join.add(done(7, 1, 1, ""), orders);
    CHECK(sum && sum->id == 7 && sum->ok == 6 && sum->failed == 3 && sum->text.empty());
}

void a_part_that_fails_cancels_the_others() {
    EventJoin join(2);
    std::vector<Command> orders;
    CHECK(!join.add(done(7, 0, 4, "broken"), orders));
    CHECK(orders.size() == 1 && std::get<command::Cancel>(orders[0]).transfer == 7);
    const auto sum = join.add(done(7, 3, 1, "cancelled"), orders);
    CHECK(sum && sum->text == "broken" && sum->failed == 5);
}

void an_endpoint_fails_once_for_all_groups_and_closes_with_the_last() {
    EventJoin join(2);
    std::vector<Command> orders;
    const Event failed{.kind = EventKind::EndpointFailed, .id = 3, .text = "reset"};
    CHECK(join.add(failed, orders));
    CHECK(orders.size() == 1 && std::get<command::FailEndpoint>(orders[0]).endpoint == 3);
    CHECK(!join.add(failed, orders) && orders.size() == 1);
    const Event closed{.kind = EventKind::EndpointClosed, .id = 3};
    CHECK(!join.add(closed, orders));
    const auto last = join.add(closed, orders);
    CHECK(last && last->kind == EventKind::EndpointClosed);
}

void one_fence_that_does_not_stand_is_none() {
    EventJoin join(2);
    std::vector<Command> orders;
    CHECK(!join.add({.kind = EventKind::EndpointFailed, .id = 3, .text = "no fence", .last = true}, orders));
    const auto last = join.add({.kind = EventKind::EndpointClosed, .id = 3}, orders);
    CHECK(last && last->kind == EventKind::EndpointFailed && last->text == "no fence" && orders.empty());
}

void immediates_pass() {
    EventJoin join(2);
    std::vector<Command> orders;
    CHECK(join.add({.kind = EventKind::ImmReached, .id = 9, .ok = 4}, orders));
}

}  // namespace

int main() {
    transfers_add_up();
    a_part_that_fails_cancels_the_others();
    an_endpoint_fails_once_for_all_groups_and_closes_with_the_last();
    one_fence_that_does_not_stand_is_none();
    immediates_pass();
}
